"""Many tensors are one launch, with a table that is built once; to plan them takes linear time."""

import gc

import numpy as np
import pytest
from reduce.test_prepared import calls_of

import gradreduce as gr
from gradreduce.device import no_collection
from gradreduce.device.run.table import Tables

MEAN = gr.ReduceOp.MEAN
pytestmark = pytest.mark.host

COUNT, SIZE = 300, 3  # bench_scaling.py counts the same for 100,000
MOST_CALLS = 150  # for a tensor on two devices


@pytest.fixture
def tables(monkeypatch) -> list[int]:
    """The number of rows of each table that is built in device memory, and so uploaded."""
    rows, make = [], Tables._make

    def made(self, looked, num_rows, chunk_size):
        table = make(self, looked, num_rows, chunk_size)
        rows.extend([num_rows] * (table.held is not None))
        return table

    monkeypatch.setattr(Tables, "_make", made)
    return rows


def opened(placement) -> gr.Mesh:
    """A mesh whose launches have tables, as a GPU's have."""
    return gr.open_mesh(placement, backend="sim", kernels="compiled")


def values_of(mesh: gr.Mesh, count: int = COUNT) -> list[gr.PerReplica]:
    """Values of two devices, 1 and 2; each tensor is an allocation of its own."""
    return [
        gr.PerReplica(
            [device.upload(np.full(SIZE, 1.0 + device.index, np.float32)) for device in mesh], mesh
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("form", ["prepare", "capture"])
@pytest.mark.parametrize(
    ("placement", "num_packs", "wanted"),
    [
        # Devices of one GPU share a launch; without packs all_sum reads and writes each tensor.
        ([0, 0], 0, [("all_sum", 0, 1)]),
        ([0, 0], 1, [("pack", 0, 2), ("all_sum", 0, 0)]),  # the results are views of the packs
        ([0, 1], 0, [("all_sum", 0, 0.5), ("all_sum", 1, 0.5)]),
        ([0, 1], 1, [("pack", 0, 1), ("pack", 1, 1), ("all_sum", 0, 0)]),  # one reads all
    ],
)
def test_a_step_is_one_launch_for_each_device_and_phase(placement, num_packs, wanted, form, tables):
    """``wanted``: kernel, device, and rows of its table for each tensor; 0: one row in all."""
    with opened(placement) as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=mesh)
        pairs = [(value, value) for value in values_of(mesh)]
        step = getattr(ops, form)(MEAN, pairs)
        assert tables == [rows * COUNT for _, _, rows in wanted if rows]
        launches = [(name, at, int(rows * COUNT) or 1) for name, at, rows in wanted]
        for _ in range(2):
            with mesh.journal() as journal:
                results = step()
            found = [each for each in journal.records if each.kind == "launch"]
            assert [(each.name, each.device, each.num_rows) for each in found] == launches
            assert (journal.uploads, journal.syncs) == (0, 0)
        assert len(tables) == len([1 for _, _, rows in wanted if rows])  # no new one
        for index in (0, COUNT - 1):
            assert all((each.numpy() == 1.5).all() for each in results[index].buffers)


def test_plain_calls_use_their_tables_again(tables):
    with opened([0, 0]) as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        pairs = [(value, value) for value in values_of(mesh)]
        for _ in range(4):  # several results in turn, each with its tables
            held = ops.batch_reduce(MEAN, pairs)
        tables.clear()
        for _ in range(2):
            held = ops.batch_reduce(MEAN, pairs)
        assert (tables, len(held)) == ([], COUNT)


def test_an_update_and_a_joint_apply_of_many_tensors_are_one_launch(tables):
    with opened([0]) as mesh:
        device = mesh.devices[0]
        variables = [gr.Variable(np.zeros(SIZE, np.float32), device=device) for _ in range(COUNT)]
        sums = [gr.ConditionalAccumulator("float32", (SIZE,), device=device) for _ in range(COUNT)]
        grads = [device.upload(np.ones(SIZE, np.float32)) for _ in range(COUNT)]
        optimizer = gr.MomentumOptimizer(0.5, 0.5)
        for call in (
            lambda: optimizer.apply_gradients(list(zip(grads, variables, strict=True))),
            lambda: gr.apply_grads(sums, grads, 0),
        ):
            for number in (1, 0):  # of tables: the second call has that of the first
                tables.clear()
                with mesh.journal() as journal:
                    call()
                assert (journal.launches, tables) == (1, [COUNT] * number)
        assert (variables[-1].numpy() == -1.25).all()
        with mesh.journal() as journal:
            taken = gr.take_grads(sums, 2)
        assert journal.launches == 1
        assert (taken[-1].numpy() == 1).all()


@pytest.mark.parametrize("form", ["prepare", "capture"])
def test_no_garbage_is_collected_while_a_step_is_planned(form):
    """Python would look at the new objects of all tensors again and again."""
    seen = []

    class Noted(gr.AllReduceCrossDeviceOps):
        def reduce_batch(self, *arguments, **options):
            seen.append(gc.isenabled())
            return super().reduce_batch(*arguments, **options)

    with opened([0, 0]) as mesh:
        pairs = [(value, value) for value in values_of(mesh, 1)]
        getattr(Noted(mesh=mesh), form)(MEAN, pairs)
    assert [*seen, gc.isenabled()] == [False, True]


@pytest.mark.parametrize("num_packs", [0, 1])
@pytest.mark.parametrize("form", ["prepare", "capture"])
def test_to_plan_takes_the_same_for_each_tensor(form, num_packs):
    """Counted in calls; the tables of all these numbers are in device memory."""
    with opened([0, 0]) as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=mesh)

        def calls(count):
            pairs = [(value, value) for value in values_of(mesh, count)]
            with no_collection:
                return calls_of(lambda: getattr(ops, form)(MEAN, pairs))

        calls(99)  # imports and compiles
        first, second, third = map(calls, (100, 150, 200))
        assert third - second == pytest.approx(second - first, abs=20)  # a pool may grow
        assert second - first < MOST_CALLS * 50
