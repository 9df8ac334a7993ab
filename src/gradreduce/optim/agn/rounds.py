"""What a center with a rule counts: its pushes, their weights, and the pushes of a round."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gradreduce import ops
from gradreduce.accumulator.validate import as_timeout
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, by_physical, copy_to, ensure_accessible
from gradreduce.errors import brief
from gradreduce.optim.hyperparameters import as_integer
from gradreduce.optim.slots import MASTER, Slots
from gradreduce.weights import ONE

from .center_rules import CenterRule, Nesterov

PushKind = Literal["gradient_mean", "delta"]


class CenterOptions(NamedTuple):
    """How a center applies pushes; see ``AGNCenter``. Without a rule as in AGN."""

    rule: CenterRule | None = None
    push: PushKind = "gradient_mean"
    num_required: int | None = None
    grace: float = 0.0
    max_staleness: int | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the rule is a kernel."""
        return self.rule is not None and self.rule._rule is not None

    def check_num_worker(self, num_worker: int) -> None:
        """Raises ``ValueError`` if no round can be complete; warns if a rule needs larger ones."""
        num_required = self.num_required
        if num_required is not None and num_required > num_worker:
            raise ValueError(
                f"num_required={num_required} of the center is more than num_worker={num_worker}: "
                "no round would be complete"
            )
        if isinstance(self.rule, Nesterov) and (num_required or 1) != num_worker:
            warnings.warn(
                f"Nesterov diverges if pushes are old, and here rounds have {num_required or 1} of "
                f"{num_worker} pushes: pass num_required={num_worker}, or use DelayedNesterov",
                stacklevel=4,
            )


AS_AGN = CenterOptions()


def as_options(
    rule: Any, push: Any, num_required: Any, grace: Any, max_staleness: Any
) -> CenterOptions:
    """Validates the options of a center.

    Raises:
        TypeError: one has a wrong type.
        ValueError: one is out of range, or needs another one that is missing.
    """
    if rule is not None and not isinstance(rule, CenterRule):
        raise TypeError(f"center_rule={brief(rule)} is not a CenterRule of gr.center_rules")
    if push not in ("gradient_mean", "delta"):
        raise ValueError(f"push={brief(push)} must be 'gradient_mean' or 'delta'")
    least = {"num_required": 1, "max_staleness": 0}
    numbers = {"num_required": num_required, "max_staleness": max_staleness}
    for name, value in numbers.items():
        numbers[name] = None if value is None else as_integer(name, value, least=least[name])
    seconds = as_timeout(grace, "grace")
    if seconds is None:
        raise TypeError("grace=None must be a number of seconds")
    options = CenterOptions(rule, push, numbers["num_required"], seconds, numbers["max_staleness"])
    if rule is None and options != AS_AGN:
        raise ValueError("push, num_required, grace and max_staleness need a center_rule=")
    if seconds and num_required is None:
        raise ValueError(f"grace={brief(grace)} needs num_required=")
    return options


class Progress(NamedTuple):
    """What a center has applied.

    Attributes:
        num_pushes: the number of pushes.
        weight: the sum of their weights, in the units of ``weights.py``.
        num_updates: the number of updates by the rule; a round is one.
    """

    num_pushes: int = 0
    weight: int = 0
    num_updates: int = 0

    def after(self, weight: int, num_pushes: int = 1) -> Progress:
        """Returns the progress after an update."""
        return Progress(self.num_pushes + num_pushes, self.weight + weight, self.num_updates + 1)

    def relative(self, weight: int) -> float:
        """Returns a weight over the mean weight of all pushes, rounded once."""
        return weight * self.num_pushes / self.weight

    def divisor(self, weight: int, options: CenterOptions) -> float:
        """Returns what divides the sum of the last push, so that the rule gets its operand.

        A kernel gets the mean gradient or delta times its relative weight, a Python rule gets it
        as it is.

        Args:
            weight: the weight of the push, which this progress contains.
            options: options of the center.
        """
        unit = ONE if options.push == "gradient_mean" else weight  # a delta is not a sum
        if not options.is_compiled:
            return weight / unit
        return self.weight / (self.num_pushes * unit)


class Quorum:
    """Says when a round has enough pushes.

    Attributes:
        num_pushes: the number of pushes that have arrived.
    """

    def __init__(self) -> None:
        self.num_pushes = 0
        self._since: float | None = None

    def seconds_left(self, now: float, required: int, everyone: int, grace: float) -> float | None:
        """Returns the time until the round is applied; None: pushes are missing.

        Args:
            now: the time in seconds.
            required: the number of pushes that it needs.
            everyone: the number of pushes that it can get.
            grace: see ``AGNCenter``.
        """
        if self.num_pushes < required:
            return None
        if self._since is None:
            self._since = now
        if self.num_pushes >= everyone:
            return 0.0
        return max(0.0, self._since + grace - now)


class Round(Quorum):
    """Pushes that are added, and then applied by one update.

    Attributes:
        sums: for each variable of the center the sum of the pushes, in the accumulate dtype.
        weight: the sum of their weights, in exact units.
        age: the largest age.
        is_applied: whether the rule was applied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[Variable, Buffer] = {}
        self.weight = self.age = 0
        self.is_applied = False
        self._first_weight = 0

    def add(
        self, pushed: Sequence[tuple[Variable, Buffer]], weight: int, age: int, *, is_delta: bool
    ) -> None:
        """Adds a push.

        Args:
            pushed: center variables, and the sums or deltas of a worker.
            weight: the weight of the push, above 0.
            age: the age of the push.
            is_delta: whether these are deltas, which are multiplied by their weights.
        """
        self._first_weight = self._first_weight or weight
        factor = weight / self._first_weight if is_delta else 1.0
        add_pushes(self.sums, pushed, factor)
        self.weight += weight
        self.num_pushes += 1
        self.age = max(self.age, age)

    def divisor(self, *, is_delta: bool) -> float:
        """Returns what divides the sums, so that they become weighted means."""
        return self.weight / (self._first_weight if is_delta else ONE)


def add_pushes(
    sums: dict[Variable, Buffer], pushed: Sequence[tuple[Variable, Buffer]], factor: float
) -> None:
    """Adds pushes times a factor to sums on the devices of the variables.

    Args:
        sums: the sums so far; a variable without one gets new memory.
        pushed: variables, and what is added, on any device of the mesh.
        factor: multiplies what is added, rounded once.
    """
    rows: list[tuple[Buffer, Buffer]] = []
    for variable, term in pushed:
        device = variable.devices[0]
        if variable in sums:
            rows.append((sums[variable], ensure_accessible(device, term)))
        elif factor == 1:
            sums[variable] = copy_to(device, term)
        else:
            sums[variable] = device.zeros(term.shape, term.dtype)
            rows.append((sums[variable], ensure_accessible(device, term)))
    for indices in by_physical([total.device for total, _ in rows]).values():
        here = [rows[index] for index in indices]
        add_rows(here, factor, here[0][0].device)


def add_rows(rows: Sequence[tuple[Buffer, Buffer]], factor: float, device: Device) -> None:
    """Adds the second Buffer of each row, times a factor, to the first."""
    if factor == 1:
        ops.add_to_rows(rows, device)
    else:
        totals, terms = zip(*rows, strict=True)
        ops.add_scaled(totals, terms, factor, device=device)


def write_deltas(rows: Sequence[tuple[Buffer, Buffer, Buffer]]) -> None:
    """Writes ``out = start - end``, rounded once, for each row ``(out, start, end)``.

    The outs have the accumulate dtype of the others.
    """
    for indices in by_physical([out.device for out, *_ in rows]).values():
        outs, starts, ends = zip(*[rows[index] for index in indices], strict=True)
        ops.pack(outs, starts)
        ops.add_scaled(outs, ends, -1.0, device=outs[0].device)


def rehearse_sums(
    sums: Sequence[Buffer], variables: Sequence[Variable], slots: Slots, options: CenterOptions
) -> None:
    """Launches what deltas and rounds launch, for dry-run variables with sums and slots."""
    masters = slots.by_name.get(MASTER, {})
    for total, var in zip(sums, variables, strict=True) if options.push == "delta" else ():
        end = masters.get(var, var).buffers[0]
        write_deltas([(total, end, end)])
    for total in sums if options.num_required is not None else ():
        for factor in (1.0, 2.0):
            add_rows([(total, total)], factor, total.device)
