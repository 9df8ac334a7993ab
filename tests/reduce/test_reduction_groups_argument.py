"""hierarchical_copy: which device adds, what crosses, and how many launches and copies it takes."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import make_jobs, reduce_jobs
from support.meshes import PLACEMENTS, MeshCase, launches_of

from gradreduce.reduce.hierarchical_copy import SLICE_BYTES, plan_slices

hierarchical_copy = partial(reduce_jobs, "hierarchical_copy")

SMALL = 100  # float32
LARGE = SLICE_BYTES // 4 + 5


def journal_on(placement, sizes, *, peer_access, dtype="float32", groups=None):
    with MeshCase(placement, peer_access).open() as mesh:
        jobs = make_jobs(mesh, [[np.ones(size, dtype)] * len(mesh) for size in sizes])
        with mesh.journal() as journal:
            hierarchical_copy(jobs, groups)
    assert len(journal.records) == journal.launches + journal.copies  # no sync, no upload, no fill
    if not peer_access:  # no launch touches memory of another GPU
        assert not any(record.nbytes for record in journal.of("launch"))
    return journal


def directions(journal):
    """(from, to) of every copy, in order."""
    return [(record.source, record.device) for record in journal.of("copy")]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_many_packs_are_one_launch_of_each_main_device(placement):
    sizes = [SMALL, LARGE, 1, SMALL, 3 * LARGE, 7, 8, 9, 10, 11, 12]
    mains = [placement.index(physical) for physical in sorted(set(placement))]
    slices = plan_slices([(size, 4) for size in sizes], mains)
    journal = journal_on(placement, sizes, peer_access=True)
    rows = {record.device: record.num_rows for record in journal.records}
    assert rows == Counter(part.main for part in slices)
    assert journal.launches == len(mains)
    assert journal.bytes == sum(
        2 * 4 * (part.stop - part.start) * sum(p != placement[part.main] for p in placement)
        for part in slices
    )


def test_each_dtype_is_a_launch_of_its_own():
    with MeshCase((0, 0, 1)).open() as mesh:
        packs = [[np.ones(8, dtype)] * 3 for dtype in ("float32", "float16", "float32", "int8")]
        jobs = make_jobs(mesh, packs)
        with mesh.journal() as journal:
            hierarchical_copy(jobs)
    launches = launches_of(journal, "all_sum")
    assert sorted((r.device, r.num_rows) for r in launches) == [(0, 2), (2, 1), (2, 1)]


# Islands of two physical devices, whose launches reach each other.
ISLANDS = frozenset({(0, 1), (1, 0), (2, 3), (3, 2)})
# One small pack, main device 0: every copy and launch, in order; and the elements of other GPUs'
# memory that a launch touches. The keys: the placement, peer access, and the reduction groups.
STAGED = {
    # r1 is the other group, already in the accumulate type, so it needs no launch.
    ((0, 1), False, None): ([(1, 0), (0, 1)], ["all_sum@0"]),
    ((0, 1, 2), False, None): ([(2, 1), (1, 0), (0, 1), (0, 2)], ["add_n@1", "all_sum@0"]),
    ((0, 0, 1, 1), False, None): ([(2, 0), (0, 2), (2, 3)], ["add_n@0", "add_n@2", "all_sum@0"]),
    ((0, 1, 2, 3), False, None): (
        [(1, 0), (3, 2), (2, 0), (0, 1), (0, 2), (0, 3)],
        ["add_n@0", "add_n@2", "all_sum@0"],
    ),
    ((0, 1, 1, 2, 0), False, None): (
        [(1, 0), (3, 2), (4, 2), (2, 0), (0, 1), (0, 3), (1, 2)],
        ["add_n@0", "add_n@2", "all_sum@0"],
    ),
    ((0, 1, 2, 3), False, ((0, 2), (1, 3))): (
        [(2, 0), (3, 1), (1, 0), (0, 1), (0, 2), (0, 3)],
        ["add_n@0", "add_n@1", "all_sum@0"],
    ),
    # Islands that do not follow the order of the replicas: one partial sum is copied, not inputs.
    ((0, 1, 0, 1), False, ((0, 2), (1, 3))): (
        [(1, 0), (0, 1), (1, 3)],
        ["add_n@0", "add_n@1", "all_sum@0"],
    ),
    # Replica 0 is the last of its group, replica 3 the last of the other.
    ((0, 1, 2, 3, 4), False, ((1, 0), (4, 3, 2))): (
        [(1, 0), (4, 3), (2, 3), (3, 0), (0, 1), (0, 2), (0, 3), (0, 4)],
        ["add_n@0", "add_n@3", "all_sum@0"],
    ),
    ((0, 1, 2), False, ((), (2, 1, 0))): (
        [(2, 0), (1, 0), (0, 1), (0, 2)],
        ["add_n@0", "all_sum@0"],
    ),
    # In each group one launch adds both; the sum is copied, and later the result.
    ((0, 1, 2, 3), ISLANDS, None): (
        [(2, 0), (0, 1), (0, 2), (0, 3)],
        ["add_n@0 touches 1", "add_n@2 touches 1", "all_sum@0"],
    ),
    ((0, 2, 1, 3), ISLANDS, None): (
        [(1, 0), (3, 2), (0, 1), (0, 2), (0, 3)],
        ["add_n@0", "add_n@2", "all_sum@0 touches 1"],
    ),
    # Lone replicas: one launch reads both, or one is copied.
    ((0, 1), frozenset({(0, 1)}), None): ([(0, 1)], ["all_sum@0 touches 1"]),
    ((1, 2), ISLANDS, None): ([(1, 0), (0, 1)], ["all_sum@0"]),
}


@pytest.mark.parametrize(("placement", "access", "groups"), STAGED, ids=str)
def test_groups_are_added_separately_and_only_what_is_not_accessible_is_copied(
    placement, access, groups
):
    journal = journal_on(placement, [SMALL], peer_access=access, groups=groups)
    launches = [
        f"{r.name}@{r.device}" + f" touches {r.nbytes // (4 * SMALL)}" * (r.nbytes > 0)
        for r in journal.of("launch")
    ]
    assert (directions(journal), launches) == STAGED[placement, access, groups]
    assert all(record.nbytes == 4 * SMALL for record in journal.of("copy"))


def test_partial_sums_of_half_precision_are_transferred_in_float32():
    journal = journal_on((0, 1, 2, 3), [SMALL], peer_access=False, dtype="float16")
    sizes = dict(zip(directions(journal), journal.of("copy"), strict=True))
    assert {d: record.nbytes // SMALL for d, record in sizes.items()} == {
        (1, 0): 2, (3, 2): 2, (2, 0): 4, (0, 1): 2, (0, 2): 2, (0, 3): 2,
    }  # fmt: skip


def test_a_single_replica_is_transferred_in_its_own_dtype():
    """It is copied in its own dtype; if the other group is a sum, it is cast after the copy."""
    journal = journal_on((0, 1), [SMALL], peer_access=False, dtype="float16")
    assert [record.nbytes // SMALL for record in journal.of("copy")] == [2, 2]
    assert [f"{r.name}@{r.device}" for r in journal.of("launch")] == ["all_sum@0"]
    journal = journal_on((0, 1, 1), [SMALL, SMALL], peer_access=False, dtype="float16")
    crossed = [(r.source, r.device, r.nbytes // SMALL) for r in journal.of("copy")]
    assert crossed == [(1, 0, 4), (0, 1, 2), (0, 1, 2), (1, 0, 2), (1, 2, 2)]
    assert [f"{r.name}@{r.device}" for r in journal.of("launch")] == [
        "add_n@1", "add_n@1", "add_n@0", "all_sum@0", "add_n@1", "all_sum@1",
    ]  # fmt: skip


def test_without_peers_every_physical_device_adds_its_slice():
    journal = journal_on((0, 1, 2, 3, 4), [LARGE], peer_access=False)
    assert [record.device for record in launches_of(journal, "all_sum")] == [0, 1, 2, 3, 4]
    # If the main device is the k-th of its group, the k-th of the other group, modulo its size,
    # adds that group: the groups are (0, 1) and (2, 3, 4).
    halves = [record.device for record in launches_of(journal, "add_n")]
    assert list(zip(halves[::2], halves[1::2], strict=True)) == [
        (0, 2), (1, 3), (0, 2), (1, 3), (0, 4),
    ]  # fmt: skip


def test_without_peers_small_packs_rotate_too():
    journal = journal_on((0, 1, 2), [SMALL] * 4, peer_access=False)
    assert [record.device for record in launches_of(journal, "all_sum")] == [0, 1, 2, 0]
