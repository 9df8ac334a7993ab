"""Registry of derivative rules: the rule modules fill it, and the tape reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

VJP = Callable[[Any], Any]  # gradient of the result → term of one operand's gradient
Maker = Callable[..., VJP]  # creates a VJP; called only if its operand is traced

#: The rule of an operation: takes the result and the arguments; those of a ufunc without keywords.
#: Returns the VJP of the first argument, or one ``Maker`` for each positional argument; that of a
#: list of arrays is called with the index in the list.
RULES: dict[Any, Callable[..., VJP | Sequence[Maker]]] = {}
#: Operations of a list of arrays.
JOINS: set[Any] = set()
#: Operations whose result is constant or piecewise constant.
CONSTANT: set[Any] = set()
#: Operations that are implemented by other operations.
COMPOSED: dict[Any, Callable[..., Any]] = {}
