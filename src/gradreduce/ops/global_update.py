"""AGN's global update with each rule: launchers of ``global_update.cu``, NumPy references."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue

from .update_kernels import RuleKernel, Update, rule_kernels, run_global, update

__all__ = ["GLOBAL_UPDATES", "global_update", "global_update_of"]

GLOBAL_UPDATES = rule_kernels("global", run_global)


def global_update_of(kernel: RuleKernel) -> RuleKernel:
    """The global variant of a rule's kernel."""
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
    """Updates variables by a rule with a mean gradient, and copies them, in one pass.

    One launch for all rows of the same dtypes.

    Args:
        kernel: one of ``GLOBAL_UPDATES``.
        rows: variable, slots, copy and sum, which has the accumulate dtype. If the variable has a
            master, the copy is followed by one too. See ``Update``.
        period: divides the sums.
        scalars: of the rule.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(kernel, rows, scalars, device, queue, period)
