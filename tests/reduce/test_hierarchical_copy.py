"""hierarchical_copy: its order of additions, spelled out, and its rounding."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import reduce_jobs
from support.meshes import MeshCase, check_mirrored, per_replica

import gradreduce as gr
from gradreduce.device import as_dtype

hierarchical_copy = partial(reduce_jobs, "hierarchical_copy")


# A number of replicas, or reduction groups -> the sum.
SPELLED_OUT = {
    1: lambda r: r[0],
    2: lambda r: r[0] + r[1],
    3: lambda r: r[0] + (r[1] + r[2]),
    4: lambda r: (r[0] + r[1]) + (r[2] + r[3]),
    5: lambda r: (r[0] + r[1]) + ((r[2] + r[3]) + r[4]),
    6: lambda r: ((r[0] + r[1]) + r[2]) + ((r[3] + r[4]) + r[5]),
    7: lambda r: ((r[0] + r[1]) + r[2]) + (((r[3] + r[4]) + r[5]) + r[6]),
    8: lambda r: (((r[0] + r[1]) + r[2]) + r[3]) + (((r[4] + r[5]) + r[6]) + r[7]),
    9: lambda r: (((r[0] + r[1]) + r[2]) + r[3]) + ((((r[4] + r[5]) + r[6]) + r[7]) + r[8]),
    ((0, 2), (1, 3)): lambda r: (r[0] + r[2]) + (r[1] + r[3]),
    ((2, 0), (3, 1)): lambda r: (r[2] + r[0]) + (r[3] + r[1]),
    ((3,), (1, 0, 2)): lambda r: r[3] + ((r[1] + r[0]) + r[2]),
    ((3, 0), (4, 2, 1)): lambda r: (r[3] + r[0]) + ((r[4] + r[2]) + r[1]),
    ((4, 3, 1, 0), (2,)): lambda r: (((r[4] + r[3]) + r[1]) + r[0]) + r[2],
    ((), (1, 0, 2)): lambda r: (r[1] + r[0]) + r[2],
    ((2, 0, 1, 3), ()): lambda r: ((r[2] + r[0]) + r[1]) + r[3],
    ((0, 3, 5, 6), (1, 2, 4, 7)): lambda r: (
        (((r[0] + r[3]) + r[5]) + r[6]) + (((r[1] + r[2]) + r[4]) + r[7])
    ),
}


def unequal(left, right) -> bool:
    return bool((left != right).any())


@pytest.mark.parametrize("groups", SPELLED_OUT, ids=str)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("spread", [True, False], ids=["apart", "together"])
def test_the_order_of_additions_spelled_out(groups, peer_access, spread):
    by_default = isinstance(groups, int)
    num_replicas = groups if by_default else sum(map(len, groups))
    rng = np.random.default_rng(num_replicas)
    replicas = [
        (rng.standard_normal(500) * 2.0 ** rng.integers(-8, 9, 500)).astype(np.float32)
        for _ in range(num_replicas)
    ]
    wanted = SPELLED_OUT[groups](replicas)
    assert wanted.dtype == np.float32
    if num_replicas > 2:  # the data can tell
        left_to_right = sum(replicas[1:], replicas[0])
        other = left_to_right if by_default else SPELLED_OUT[num_replicas](replicas)
        assert unequal(wanted, other)
    placement = tuple(range(num_replicas)) if spread else (0,) * num_replicas
    with MeshCase(placement, peer_access).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(
            mesh=mesh, reduction_groups=None if by_default else groups
        )
        value = per_replica(mesh, replicas.__getitem__)
        check_mirrored(ops.reduce(gr.ReduceOp.SUM, value, value), wanted)


def column(*values, dtype="float32"):
    """One element for each replica."""
    return [np.array([value], as_dtype(dtype)) for value in values]


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
def test_half_precision_is_rounded_once(make_jobs, placement, peer_access):
    with MeshCase(placement, peer_access).open() as mesh:
        # In float16 both halves would round to 2048 and 1, and their sum to 2048.
        jobs = make_jobs(mesh, [column(2048, 1, 1, 0, dtype="float16")])
        hierarchical_copy(jobs)
        assert all(out.numpy() == 2050 for out in jobs[0].outs)
        # The sum is too large for float16, the mean is not.
        jobs = make_jobs(mesh, [column(*[60_000] * 4, dtype="float16")], 4)
        hierarchical_copy(jobs)
        assert all(out.numpy() == 60_000 for out in jobs[0].outs)
