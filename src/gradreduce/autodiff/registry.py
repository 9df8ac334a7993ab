"""Registry of derivative rules. The modules ``rules_*`` fill it, and the tape reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Takes the gradient of the result of an operation; returns a term of one operand's gradient.
VJP = Callable[[Any], Any]

#: The rule of each operation. A rule takes the result and the arguments of the operation (for a
#: ufunc without keyword arguments). It returns the VJP of the first argument, or a sequence with
#: the VJP of each positional argument; for an argument that is a list of arrays, a list of VJPs.
#: Work that only one VJP needs belongs in that VJP, because not every argument is traced.
RULES: dict[Any, Callable[..., VJP | Sequence[VJP | list[VJP]]]] = {}
#: Operations whose result is constant or piecewise constant.
CONSTANT: set[Any] = set()
#: Operations that are computed by other operations, which are recorded instead.
COMPOSED: dict[Any, Callable[..., Any]] = {}
