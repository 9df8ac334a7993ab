"""nccl on the simulated collective: a rank per physical device, small packs in a group."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import make_jobs, reduce_jobs
from support.exact_data import exact_data, same
from support.meshes import MeshCase, launches_of

import gradreduce as gr
from gradreduce.device import Collective, Device, as_dtype

nccl = partial(reduce_jobs, "nccl")

GATHERED = ("int16", "uint16")  # NCCL adds none of these
SHARED = ("float32", "bfloat16", "int16")


class Spy(Collective):
    """Forwards every call, and records for each group the inputs of its calls."""

    def __init__(self, collective):
        super().__init__(collective._mesh_state)
        self.collective = collective
        self.groups = []
        self.open = False

    def _call(self, call):
        assert self.open, "a call outside of any group"
        is_gathered = call.inputs[0].dtype in GATHERED
        assert call.name == ("all_gather" if is_gathered else "all_reduce"), "NCCL has no such type"
        self.groups[-1].append(list(call.inputs))
        self.collective._call(call)

    @contextmanager
    def group(self):
        assert not self.open, "groups do not nest"
        self.groups.append([])
        self.open = True
        yield
        self.open = False


def run(mesh, jobs):
    """The journal, and the groups of collective calls."""
    spy = Spy(mesh.collective)
    with pytest.MonkeyPatch.context() as patch, mesh.journal() as journal:
        patch.setattr(mesh, "_make_collective", lambda: spy)
        nccl(jobs)
    return journal, spy.groups


def check_outs(jobs, expected):
    for job, wanted in zip(jobs, expected, strict=True):
        for replica, out in enumerate(job.outs):
            assert same(out.numpy(), wanted), f"replica {replica}: {out.numpy()} is not {wanted}"


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_sums_in_the_accumulate_type_are_transferred_in_it(mesh, half):
    half = as_dtype(half)
    replicas = [exact_data((67,), half, num_terms=9, seed=s).astype("float32") for s in
                range(len(mesh))]  # fmt: skip
    jobs = make_jobs(mesh, [replicas], 2, out_dtype=half)
    _, groups = run(mesh, jobs)
    check_outs(jobs, [(sum(replicas[1:], replicas[0]) / np.float32(2)).astype(half)])
    assert all(b.dtype == "float32" for group in groups for call in group for b in call)


@pytest.mark.parametrize("num_packs", [0, 1, 3, 7])
def test_the_packs_of_a_batch_share_their_group(numpy_mesh, num_packs):
    """All packs of all dtypes share one group, with a rank for each physical device.

    Also those that are gathered, because NCCL cannot add them.
    """
    ops = gr.NcclAllReduce(num_packs, mesh=numpy_mesh)
    grads = [
        [np.ones(size, dtype) for dtype in SHARED for size in (300, 5, 40)] for _ in numpy_mesh
    ]
    spy = Spy(numpy_mesh.collective)
    with pytest.MonkeyPatch.context() as patch, numpy_mesh.journal() as journal:
        patch.setattr(numpy_mesh.devices[0].mesh, "_make_collective", lambda: spy)
        reduced = ops.all_reduce(grads, gr.ReduceOp.SUM)
    assert all((array == len(numpy_mesh)).all() for row in reduced for array in row)
    ranks = [places[0] for places in numpy_mesh.by_physical.values()]
    calls = {0: 9}.get(num_packs, 3 * num_packs) * (len(ranks) > 1)
    assert [[b.device.index for b in call] for group in spy.groups for call in group] == (
        [ranks] * calls
    )
    assert len(spy.groups) == (len(ranks) > 1)
    assert journal.copies == 0
    assert all(record.nbytes == 0 for record in journal.of("launch"))
    if num_packs == 0 and calls:  # the link carries no more bytes than the tensor has
        sent = [record.nbytes for record in journal.of("collective")]
        assert sent == [nbytes for nbytes in (1200, 20, 160, *[600, 10, 80] * 2) for _ in ranks]


@pytest.mark.parametrize(
    ("placement", "in_place", "divisor", "launches"),
    [
        ((0, 1), True, 1, 0),  # the library adds in place
        ((0, 1), True, 2, 2),  # plus a pass that divides
        ((0, 1), False, 1, 0),  # read from one memory, written into another
        ((0, 1), False, 2, 2),
        ((0, 0, 1, 1), True, 1, 4),  # fold, and fan out
        ((0, 0, 1, 1), False, 4, 4),  # the division is in the pass that fans out
        ((0, 0, 1), True, 1, 2),  # device 2 is alone
        ((0, 0, 1), True, 3, 3),
    ],
    ids=str,
)
def test_colocated_replicas_are_summed_in_one_launch(placement, in_place, divisor, launches):
    with MeshCase(placement).open() as mesh:
        packs = [[np.ones(40, np.float32)] * len(mesh)] * 3
        journal, groups = run(mesh, make_jobs(mesh, packs, divisor, in_place=in_place))
    assert [len(group) for group in groups] == [3]
    assert len(launches_of(journal, "all_sum")) == journal.launches == launches
    assert all(record.num_rows == 3 for record in journal.of("launch"))


# -- 16-bit integers -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize(
    ("placement", "launches"),
    [
        ((0,), 0),
        ((0,) * 8, 1),
        ((0, 1), 2),  # nothing is folded: gathered inputs are added on each GPU
        ((0, 0, 1, 1), 4),
        ((0, 0, 1), 3),  # device 2 is alone
        ((0, 1, 1, 2, 0), 5),
        (tuple(range(9)), 9),
    ],
    ids=str,
)
def test_the_memory_and_collectives_of_gathering(monkeypatch, placement, launches, in_place):
    sizes, gathered = [40, 1, 1003], []
    empty = Device.allocate

    def noted(device, shape, dtype):
        gathered.append((device.index, shape))
        return empty(device, shape, dtype)

    with MeshCase(placement).open() as mesh:
        packs = [[np.ones(size, "uint16")] * len(mesh) for size in sizes]
        jobs = make_jobs(mesh, packs, in_place=in_place)
        monkeypatch.setattr(Device, "allocate", noted)
        journal, groups = run(mesh, jobs)
    ranks = [placement.index(physical) for physical in sorted(set(placement))]
    crossing = sizes if len(ranks) > 1 else []
    assert gathered == [(rank, (len(ranks), size)) for size in crossing for rank in ranks]
    assert [(r.name, r.device, r.nbytes) for r in journal.of("collective")] == [
        ("all_gather", rank, 2 * size) for size in crossing for rank in ranks
    ]
    assert journal.bytes == 2 * sum(crossing) * len(ranks)
    assert journal.launches == launches or (placement == (0,) and not in_place)
    assert {record.num_rows for record in journal.of("launch")} <= {3}
    assert len(journal.records) == journal.launches + len(journal.of("collective"))
    assert len(groups) == (len(ranks) > 1)
