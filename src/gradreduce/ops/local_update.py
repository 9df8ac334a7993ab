"""AGN's local update with each rule: launchers of ``local_update.cu``, NumPy references."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue

from .update_kernels import RuleKernel, Update, rule_kernels, run_local, update

__all__ = ["LOCAL_UPDATES", "local_update", "local_update_of"]

LOCAL_UPDATES = rule_kernels("local", run_local)


def local_update_of(kernel: RuleKernel) -> RuleKernel:
    """The local variant of a rule's kernel."""
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
    """Updates variables by a rule, and accumulates their gradients, in one pass.

    One launch for all rows of the same dtypes.

    Args:
        kernel: one of ``LOCAL_UPDATES``.
        rows: variable, slots, sum and gradient; the sum has the accumulate dtype. See ``Update``.
        first: 1: the gradient is written to the sum; 0: added to it.
        scalars: of the rule.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(kernel, rows, scalars, device, queue, first)
