"""AGN's push, global update and pull: ``kernels/global_update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import Device, Queue
from gradreduce.device.kernel import Arrays

from ._rules import RULES
from ._updates import RuleKernel, Update, rule_kernel, run_global, update

__all__ = [
    "GLOBAL_ADAGRAD",
    "GLOBAL_ADAM",
    "GLOBAL_MOMENTUM",
    "GLOBAL_NESTEROV",
    "GLOBAL_RMSPROP",
    "GLOBAL_RMSPROP_CENTERED",
    "GLOBAL_SGD",
    "global_update",
    "global_update_of",
]


def _kernel(rule: str) -> RuleKernel:
    return rule_kernel(f"global_{rule}", "global_update", _twin(rule), "global")


def _twin(rule: str) -> Callable[..., None]:
    def twin(table: Sequence[Arrays], num_written: int, period: int, *scalars: float) -> None:
        run_global(table, RULES[rule], period, scalars)

    return twin


GLOBAL_SGD = _kernel("sgd")
GLOBAL_MOMENTUM = _kernel("momentum")
GLOBAL_NESTEROV = _kernel("nesterov")
GLOBAL_ADAM = _kernel("adam")
GLOBAL_ADAGRAD = _kernel("adagrad")
GLOBAL_RMSPROP = _kernel("rmsprop")
GLOBAL_RMSPROP_CENTERED = _kernel("rmsprop_centered")

_OF = {
    kernel.rule: kernel
    for kernel in (
        GLOBAL_SGD,
        GLOBAL_MOMENTUM,
        GLOBAL_NESTEROV,
        GLOBAL_ADAM,
        GLOBAL_ADAGRAD,
        GLOBAL_RMSPROP,
        GLOBAL_RMSPROP_CENTERED,
    )
}


def global_update_of(kernel: RuleKernel) -> RuleKernel:
    """The global form of a rule's kernel."""
    return _OF[kernel.rule]


def global_update(
    kernel: RuleKernel,
    rows: Sequence[Update],
    *,
    period: int,
    scalars: Sequence[float],
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """Changes variables by a rule and the mean of a sum, and copies them, in one pass.

    One launch for all rows of the same dtypes.

    Args:
        kernel: one of this file.
        rows: variable, slots, copy and sum, which is of the accumulate type. A copy
            has a master if the variable has one: behind it. See ``Update``.
        period: by which sums are divided.
        scalars: of the rule.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(kernel, rows, scalars, device, queue, period)
