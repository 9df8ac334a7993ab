"""AGN's push, global update and pull: ``kernels/global_update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue

from .update_kernels import RuleKernel, Update, rule_kernels, run_global, update

__all__ = ["GLOBAL_UPDATES", "global_update", "global_update_of"]

GLOBAL_UPDATES = rule_kernels("global", run_global)


def global_update_of(kernel: RuleKernel) -> RuleKernel:
    """The global form of a rule's kernel."""
    return GLOBAL_UPDATES[kernel.rule]


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
        kernel: one of ``GLOBAL_UPDATES``.
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
