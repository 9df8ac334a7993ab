"""What is known of each operation: tables that the rules fill and the tape reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["COMPOSED", "CONSTANT", "JOINS", "RULES", "VIEWS", "VJP", "Maker"]

VJP = Callable[[Any], Any]  # a gradient of the result → a term of one operand's, or None
Maker = Callable[..., VJP]  # makes one, when its operand is known to be traced

#: What an operation's rule is: given the result and the arguments, one ``Maker`` for each
#: positional argument; that of a list of arrays is asked with the place in the list.
RULES: dict[Any, Callable[..., Sequence[Maker]]] = {}
#: Operations whose result may lie in the memory of their first operand.
VIEWS: set[Any] = set()
#: Operations of a list of arrays.
JOINS: set[Any] = set()
#: Operations whose result does not change, or only in steps, with their arguments.
CONSTANT: set[Any] = set()
#: Operations that are written in terms of others.
COMPOSED: dict[Any, Callable[..., Any]] = {}
