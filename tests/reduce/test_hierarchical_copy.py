"""hierarchical_copy: its order of additions, and the same bits on every placement."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import reduce_jobs
from support.exact_data import FLOATS, exact_data, random_data, same
from support.meshes import MeshCase, all_placements, hierarchical_sum

from gradreduce.device import as_dtype

hierarchical_copy = partial(reduce_jobs, "hierarchical_copy")

# Elements: a tail, and more than SLICE_BYTES of two-byte elements, no multiple of anything.
SIZES = (1, 67, 33_001)

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
}

ISLAND = frozenset({(0, 1), (1, 0), (0, 2)})  # two with access to each other, one without


def check_outs(jobs, expected):
    for job, wanted in zip(jobs, expected, strict=True):
        for replica, out in enumerate(job.outs):
            assert same(out.numpy(), wanted), f"replica {replica}: {out.numpy()} is not {wanted}"


def unequal(left, right) -> bool:
    return bool((left != right).any())


@pytest.mark.parametrize("num_replicas", SPELLED_OUT)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("spread", [True, False], ids=["apart", "together"])
def test_the_order_of_additions_spelled_out(make_jobs, num_replicas, peer_access, spread):
    rng = np.random.default_rng(num_replicas)
    replicas = [
        (rng.standard_normal(500) * 2.0 ** rng.integers(-8, 9, 500)).astype(np.float32)
        for _ in range(num_replicas)
    ]
    wanted = SPELLED_OUT[num_replicas](replicas)
    assert wanted.dtype == np.float32
    if num_replicas > 2:  # the data can tell
        assert unequal(wanted, sum(replicas[1:], replicas[0]))
        swapped = [replicas[-1], *replicas[1:-1], replicas[0]]
        assert unequal(wanted, SPELLED_OUT[num_replicas](swapped))
    placement = tuple(range(num_replicas)) if spread else (0,) * num_replicas
    with MeshCase(placement, peer_access).open() as mesh:
        jobs = make_jobs(mesh, [replicas])
        hierarchical_copy(jobs)
        check_outs(jobs, [wanted])


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("dtype", [*FLOATS, as_dtype("complex64")], ids=str)
def test_values_on_every_mesh(mesh, make_jobs, random_replicas, dtype, mean, in_place):
    packs = [random_replicas(len(mesh), size, dtype) for size in SIZES]
    divisor = len(mesh) if mean else 1
    jobs = make_jobs(mesh, packs, divisor, in_place=in_place)
    hierarchical_copy(jobs)
    check_outs(jobs, [hierarchical_sum(replicas, divisor) for replicas in packs])
    if not in_place:
        for job, replicas in zip(jobs, packs, strict=True):
            for buffer, array in zip(job.inputs, replicas, strict=True):
                assert same(buffer.numpy(), array)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_integers_wrap(mesh, make_jobs, dtype):
    replicas = [exact_data((67,), dtype, seed=seed) for seed in range(len(mesh))]
    jobs = make_jobs(mesh, [replicas])
    hierarchical_copy(jobs)
    check_outs(jobs, [hierarchical_sum(replicas)])


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_sums_in_the_accumulate_type_are_rounded_to_half_precision_once(mesh, make_jobs, half):
    half = as_dtype(half)
    packs = [[random_data((size,), "float32", seed=7 * size + r) for r in range(len(mesh))]
             for size in SIZES]  # fmt: skip
    jobs = make_jobs(mesh, packs, 3, out_dtype=half)
    hierarchical_copy(jobs)
    check_outs(jobs, [hierarchical_sum(replicas, 3, out=half) for replicas in packs])


@pytest.mark.parametrize("num_replicas", [4, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_every_placement_gives_the_same_bits(make_jobs, num_replicas):
    sizes_of = {"float32": (5, 16_390), "bfloat16": (40, 32_771)}
    packs, expected = [], []
    for dtype, sizes in sizes_of.items():
        for size in sizes:
            packs.append([random_data((size,), dtype, seed=s) for s in range(num_replicas)])
            expected.append(hierarchical_sum(packs[-1], num_replicas))
    for placement in all_placements(num_replicas, 3):
        for peer_access in (True, False, ISLAND):
            with MeshCase(placement, peer_access).open() as mesh:
                jobs = make_jobs(mesh, packs, num_replicas)
                hierarchical_copy(jobs)
                check_outs(jobs, expected)
                del jobs  # a closed mesh would keep their memory


def column(*values, dtype="float32"):
    """One element for each replica."""
    return [np.array([value], as_dtype(dtype)) for value in values]


def test_small_replicas_are_added_to_each_other_first(make_jobs):
    # TensorFlow's hierarchical copy gives 2**24 + 2 too; left to right would lose all three ones.
    for placement in ((0, 1, 2, 3), (0, 0, 0, 0)):
        with MeshCase(placement).open() as mesh:
            jobs = make_jobs(mesh, [column(2**24, 1, 1, 1)])
            hierarchical_copy(jobs)
            check_outs(jobs, [np.array([2**24 + 2], np.float32)])


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
def test_half_precision_is_rounded_once(make_jobs, placement, peer_access):
    with MeshCase(placement, peer_access).open() as mesh:
        # In float16 both halves would round to 2048 and 1, and their sum to 2048.
        jobs = make_jobs(mesh, [column(2048, 1, 1, 0, dtype="float16")])
        hierarchical_copy(jobs)
        check_outs(jobs, [np.array([2050], np.float16)])
        # The sum is too large for float16, the mean is not.
        jobs = make_jobs(mesh, [column(*[60_000] * 4, dtype="float16")], 4)
        hierarchical_copy(jobs)
        check_outs(jobs, [np.array([60_000], np.float16)])


def test_the_mean_is_a_true_division(make_jobs):
    values = np.arange(1, 100, dtype=np.float32)
    wanted = values / np.float32(3)
    assert unequal(wanted, values * (np.float32(1) / np.float32(3)))  # the data can tell
    for peer_access in (True, False):
        with MeshCase((0, 1, 2), peer_access).open() as mesh:
            jobs = make_jobs(mesh, [[values, np.zeros_like(values), np.zeros_like(values)]], 3)
            hierarchical_copy(jobs)
            check_outs(jobs, [wanted])


def test_the_sign_of_zero_stays(mesh, make_jobs):
    jobs = make_jobs(mesh, [[np.full(3, -0.0, np.float32)] * len(mesh)])
    hierarchical_copy(jobs)
    check_outs(jobs, [np.full(3, -0.0, np.float32)])
