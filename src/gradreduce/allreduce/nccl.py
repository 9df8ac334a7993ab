"""All-reduce by a collective library: one rank for each physical device.

Replicas that share a physical device are folded into one buffer first, in mesh order, rounded to
the tensor's dtype so that the link carries no more bytes than the tensor has; the library adds
those; then the sum is divided and fanned out in one pass. With one physical device the library
is not called. It promises no order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce import ops
from gradreduce.device import Buffer, by_physical, gather, scatter

from .job import Job

__all__ = ["SHARED_GROUP_BYTES", "nccl", "plan_groups"]

# Packs of less than this, in the bytes of one rank's buffer, share a group call: a call costs a
# launch on every GPU and a round of messages, whatever it carries, and with packs as short as this
# that is most of what they cost. A larger one fills the links by itself and gains nothing by
# company. From the design, to be measured on links.
SHARED_GROUP_BYTES = 1024 * 1024


def plan_groups(nbytes: Sequence[int]) -> list[list[int]]:
    """Which packs share a group call.

    Args:
        nbytes: of each pack, one rank's buffer.

    Returns:
        The places of the packs of each group: each large one alone, in order; all small ones
        together, where the first of them stands.
    """
    groups: list[list[int]] = []
    small: list[int] = []
    for job, size in enumerate(nbytes):
        if size >= SHARED_GROUP_BYTES:
            groups.append([job])
            continue
        if not small:
            groups.append(small)
        small.append(job)
    return groups


def nccl(jobs: Sequence[Job]) -> None:
    """Reduces every job through the mesh's collective; ``plan_groups`` says in which calls."""
    if not jobs:
        return
    devices = [buffer.device for buffer in jobs[0].inputs]
    sharing = list(by_physical(devices).values())
    with devices[0].fabric.launch_lock:
        if len(sharing) == 1:
            _finish([(job, job.inputs) for job in jobs], sharing[0])
            return
        folded = [_fold(jobs, places) for places in sharing]
        collective = devices[0].mesh.collective
        for group in plan_groups([total.nbytes for total in folded[0]]):
            with collective.group():
                for place in group:
                    collective.all_reduce([totals[place] for totals in folded])
        for places, sums in zip(sharing, folded, strict=True):
            finished = [(job, (total,)) for job, total in zip(jobs, sums, strict=True)]
            _finish(finished, places)


def _fold(jobs: Sequence[Job], places: Sequence[int]) -> list[Buffer]:
    """One buffer for each job on the device of ``places[0]``: what the library may overwrite."""
    leader = jobs[0].inputs[places[0]].device
    sharing = [jobs[0].inputs[place].device for place in places]
    folded, outs, inputs = [], [], []
    for job in jobs:
        first, out = job.inputs[places[0]], job.outs[places[0]]
        total = out if out.dtype == first.dtype else leader.empty(first.shape, first.dtype)
        if len(places) > 1 or total.address != first.address:
            outs.append([total])
            inputs.append([job.inputs[place] for place in places])
        folded.append(total)
    gather(leader, sharing)
    ops.all_sum(outs, inputs, device=leader)
    return folded


def _finish(finished: Sequence[tuple[Job, tuple[Buffer, ...]]], places: Sequence[int]) -> None:
    """Adds what is left, divides, and writes every out on the devices of ``places``."""
    devices = [finished[0][0].outs[place].device for place in places]
    leader = devices[0]
    gather(leader, devices)
    by_divisor: dict[float, list[tuple[list[Buffer], tuple[Buffer, ...]]]] = {}
    for job, inputs in finished:
        outs = [job.outs[place] for place in places]
        alone = len(outs) == len(inputs) == 1
        if alone and outs[0].address == inputs[0].address and job.divisor == 1:
            continue  # the library wrote it in place
        by_divisor.setdefault(job.divisor, []).append((outs, inputs))
    for divisor, rows in by_divisor.items():
        ops.all_sum(
            [outs for outs, _ in rows], [inputs for _, inputs in rows],
            divisor=divisor, device=leader,
        )  # fmt: skip
    scatter(leader, devices)
