"""AGN's local update, by each rule: ``kernels/local_update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import Device, Queue
from gradreduce.device.kernel import Arrays

from ._rules import RULES
from ._updates import RuleKernel, Update, rule_kernel, run_local, update

__all__ = [
    "LOCAL_ADAGRAD",
    "LOCAL_ADAM",
    "LOCAL_MOMENTUM",
    "LOCAL_NESTEROV",
    "LOCAL_RMSPROP",
    "LOCAL_RMSPROP_CENTERED",
    "LOCAL_SGD",
    "local_update",
    "local_update_of",
]


def _kernel(rule: str) -> RuleKernel:
    return rule_kernel(f"local_{rule}", "local_update", _twin(rule), "local")


def _twin(rule: str) -> Callable[..., None]:
    def twin(table: Sequence[Arrays], num_written: int, first: int, *scalars: float) -> None:
        run_local(table, RULES[rule], first, scalars)

    return twin


LOCAL_SGD = _kernel("sgd")
LOCAL_MOMENTUM = _kernel("momentum")
LOCAL_NESTEROV = _kernel("nesterov")
LOCAL_ADAM = _kernel("adam")
LOCAL_ADAGRAD = _kernel("adagrad")
LOCAL_RMSPROP = _kernel("rmsprop")
LOCAL_RMSPROP_CENTERED = _kernel("rmsprop_centered")

_OF = {
    kernel.rule: kernel
    for kernel in (
        LOCAL_SGD,
        LOCAL_MOMENTUM,
        LOCAL_NESTEROV,
        LOCAL_ADAM,
        LOCAL_ADAGRAD,
        LOCAL_RMSPROP,
        LOCAL_RMSPROP_CENTERED,
    )
}


def local_update_of(kernel: RuleKernel) -> RuleKernel:
    """The local form of a rule's kernel."""
    return _OF[kernel.rule]


def local_update(
    kernel: RuleKernel,
    rows: Sequence[Update],
    *,
    first: int,
    scalars: Sequence[float],
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """Changes variables by a rule, and adds their gradients up, in one pass.

    One launch for all rows of the same dtypes.

    Args:
        kernel: one of this file.
        rows: variable, slots, sum and gradient; the sum is of the accumulate type. See ``Update``.
        first: 1: the gradient is written to the sum; 0: added to it.
        scalars: of the rule.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(kernel, rows, scalars, device, queue, first)
