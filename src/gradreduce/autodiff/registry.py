"""Registry of derivative rules: the rule modules fill it, and the tape reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

VJP = Callable[[Any], Any]  # gradient of the result → term of one operand's gradient

#: The rule of an operation: takes the result and the arguments; those of a ufunc without keywords.
#: Returns the VJP of the first argument, or those of all positional arguments: of a list of arrays
#: a list. A rule computes nothing itself that an argument that is not traced does not need.
RULES: dict[Any, Callable[..., VJP | Sequence[VJP | list[VJP]]]] = {}
#: Operations whose result is constant or piecewise constant.
CONSTANT: set[Any] = set()
#: Operations that are implemented by other operations.
COMPOSED: dict[Any, Callable[..., Any]] = {}
