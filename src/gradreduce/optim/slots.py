"""Slots: the state of an optimizer for each variable, and float32 masters.

A slot has a copy on each device of its variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradreduce import ops
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DType, as_dtype
from gradreduce.errors import brief

MASTER = "master"  # the slot with the unrounded values of a float16 or bfloat16 variable


class Slots:
    """All slots of one optimizer.

    Args:
        kind: class of the optimizer.
        owner: name of the optimizer. Slots are named ``variable/owner``, ``variable/owner_1`` …
        names: names of the slots, in the order of the rule's arguments.
        master_dtype: float32 if float16 and bfloat16 variables get float32 masters and slots, or
            None.
        power_names: names of the powers of decays that the rule keeps.

    Attributes:
        powers: the powers of decays; empty before the first update.

    Raises:
        ValueError: ``master_dtype`` is neither None nor float32.
    """

    def __init__(
        self,
        kind: type,
        owner: str,
        names: Sequence[str],
        master_dtype: Any,
        power_names: Sequence[str] = (),
    ) -> None:
        if master_dtype is not None and as_dtype(master_dtype) != as_dtype("float32"):
            raise ValueError(f"master_dtype={brief(master_dtype)} must be 'float32' or None")
        self.kind, self.owner = kind, owner
        self.names, self.power_names = tuple(names), tuple(power_names)
        self.powers: tuple[float, ...] = ()
        self.has_masters = master_dtype is not None
        # The last part of the names of slots.
        self._endings = {name: f"_{index}" if index else "" for index, name in enumerate(names)}
        self._endings[MASTER] = f"/{MASTER}"
        masters = (MASTER,) if self.has_masters else ()
        self.by_name: dict[str, dict[Variable, Variable]] = {
            name: {} for name in (*masters, *names)
        }
        self._before: dict[str, dict[Variable, Variable]] | None = None
        self.has_warned = False

    def wants_master(self, var: Variable) -> bool:
        """Whether a variable is float16 or bfloat16 and gets a float32 master."""
        return self.has_masters and var.dtype.itemsize == 2

    def state_dtype(self, var: Variable) -> DType:
        """Returns the dtype of the slots of a variable."""
        return as_dtype("float32") if self.wants_master(var) else var.dtype

    def names_for(self, var: Variable) -> tuple[str, ...]:
        """Returns the slot names of a variable, in the order of ``ops.Update``."""
        return (MASTER, *self.names) if self.wants_master(var) else self.names

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Removes slots that were created in this context if it raises before ``commit``."""
        self._before = {name: dict(slots) for name, slots in self.by_name.items()}
        try:
            yield
        except BaseException:
            if self._before is not None:
                self.by_name = self._before
            raise
        finally:
            self._before = None

    def commit(self, powers: tuple[float, ...]) -> None:
        """Marks the update as done: errors and Ctrl-C no longer remove its slots."""
        self._before, self.powers = None, powers

    def make(self, variables: Sequence[Variable], start: Callable[[str], float]) -> None:
        """Creates the missing slots of variables.

        Args:
            variables: the variables of the slots, of float dtypes.
            start: returns the initial value of a slot, by its name.
        """
        for var in variables:
            for name in self.names_for(var):
                if var not in self.by_name[name]:
                    slot = self.make_one(var, name, 0.0 if name == MASTER else start(name))
                    if name == MASTER:
                        _copy_to_master(slot, var)
                    self.by_name[name][var] = slot

    def update_master(self, var: Variable) -> None:
        """Copies a variable to its master, if it has one, after an assignment."""
        master = self.by_name[MASTER].get(var) if self.has_masters else None
        if master is not None:
            _copy_to_master(master, var)

    def make_one(self, var: Variable, name: str, value: float = 0.0) -> Variable:
        """Creates a slot of a variable, filled with ``value``, outside of ``by_name``."""
        return Variable._full_like(
            var,
            f"{var.name}/{self.owner}{self._endings[name]}",
            value,
            dtype=self.state_dtype(var),
        )

    def of(self, var: Variable) -> list[Variable]:
        """Returns the existing slots of a variable."""
        return [slots[var] for slots in self.by_name.values() if var in slots]

    def ranges(self, variables: Sequence[Variable], others: Sequence[Buffer]) -> ops.Ranges:
        """Returns the address ranges of variables, their existing slots and other buffers."""
        written = [each for var in variables for each in (var, *self.of(var))]
        return ops.Ranges([*others, *(copy for each in written for copy in each.buffers)])

    def rows(self, var: Variable) -> list[list[Buffer]]:
        """Returns, for each copy of a variable, the buffers that its update writes."""
        written = [var, *(self.by_name[name][var] for name in self.names_for(var))]
        return [list(row) for row in zip(*(each.buffers for each in written), strict=True)]

    def all(self) -> list[Variable]:
        """Returns every slot, sorted by name."""
        return sorted(
            (slot for by_variable in self.by_name.values() for slot in by_variable.values()),
            key=lambda slot: slot.name,
        )


def _copy_to_master(master: Variable, var: Variable) -> None:
    for unrounded, copy in zip(master.buffers, var.buffers, strict=True):
        ops.pack([unrounded], [copy])
