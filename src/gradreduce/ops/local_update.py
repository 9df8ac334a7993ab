"""AGN's local update, by each rule: ``kernels/local_update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue

from .update_kernels import RuleKernel, Update, rule_kernels, run_local, update

__all__ = ["LOCAL_UPDATES", "local_update", "local_update_of"]

LOCAL_UPDATES = rule_kernels("local", run_local)


def local_update_of(kernel: RuleKernel) -> RuleKernel:
    """The local form of a rule's kernel."""
    return LOCAL_UPDATES[kernel.rule]


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
        kernel: one of ``LOCAL_UPDATES``.
        rows: variable, slots, sum and gradient; the sum is of the accumulate type. See ``Update``.
        first: 1: the gradient is written to the sum; 0: added to it.
        scalars: of the rule.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(kernel, rows, scalars, device, queue, first)
