"""out=: results are written into the caller's arrays, also in place, and nowhere else."""

import numpy as np
import pytest
from support.exact_data import same
from support.meshes import MeshCase, adopted, launches_of, per_replica, refused, unchanged

import gradreduce as gr
from gradreduce.device import Device
from gradreduce.errors import BackendUnavailableError, DeviceMismatchError
from gradreduce.reduce import pipeline

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


def test_memory_between_two_outs_is_not_written():
    """The outs are laid out like a pack, but the memory between them is not written."""
    with MeshCase((0, 1)).open() as opened:
        wholes = [device.upload(np.full(8, 9, np.float32)) for device in opened]
        outs = [
            [whole.view(start, (size,)) for whole in wholes] for start, size in ((0, 3), (4, 4))
        ]
        values = [per_replica(opened, lambda _, n=n: np.ones(n, np.float32)) for n in (3, 4)]
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        ops.batch_reduce(SUM, [(value, value) for value in values], out=outs)
        for whole in wholes:
            assert same(whole.numpy(), np.array([2, 2, 2, 9, 2, 2, 2, 2], np.float32))


def test_out_is_written_for_other_destinations_too():
    with MeshCase((0, 1, 1)).open() as opened:
        value = per_replica(opened, lambda replica: np.full(6, replica, np.float32))
        for ops in (gr.HierarchicalCopyAllReduce(mesh=opened), gr.ReductionToOneDevice()):
            out = [np.zeros(6, np.float32) for _ in "ab"]
            places = [opened.devices[2], opened.devices[0]]
            result = ops.reduce(SUM, value, places, out=out)
            assert result.devices == tuple(places)
            assert all((array == 3).all() for array in out)
        kept = gr.ReductionToOneDevice().reduce(SUM, value, opened.devices[1])
        again = gr.ReductionToOneDevice().reduce(MEAN, value, opened.devices[1], out=kept)
        assert (kept.primary == 1).all()
        assert (again.primary == 1).all()


def bad_outs(mesh):
    size = 6
    value = per_replica(mesh, lambda replica: np.full(size, replica + 1, np.float32))
    good = [np.zeros(size, np.float32) for _ in mesh]
    long = np.zeros(4 * size, np.float32)
    fixed = np.zeros(size, np.float32)
    fixed.flags.writeable = False
    rest = good[1:]
    elsewhere = mesh.devices[1].zeros((size,), "float32")
    return value, [
        (7, ValueError, "out 0: it must be a PerReplica"),
        (rest, ValueError, "out 0: it must be"),
        ([np.zeros(5, np.float32), *rest], ValueError, "out 0: replica 0"),
        ([np.zeros(size), *rest], ValueError, "out 0: replica 0"),
        ([fixed, *rest], ValueError, "replica 0: .*read-only"),
        ([long[: 2 * size : 2], *rest], ValueError, "not dense"),
        ([3.0, *rest], TypeError, "replica 0"),
        ([good[1], *rest], ValueError, "out 0: replica 0 and out 0: replica 1 overlap"),
        ([long[:size], long[3 : 3 + size], *good[2:]], ValueError, "overlap"),
        ([value.values[1][1:], *rest], ValueError, "out 0: replica 0"),
        ([elsewhere, *rest], DeviceMismatchError, "out 0: replica 0"),
    ]


def test_an_out_that_does_not_fit_is_refused_before_anything_happens():
    with MeshCase((0, 1, 1)).open() as opened:
        value, faults = bad_outs(opened)
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        for out, error, text in faults:
            given = [each for each in (out if out != 7 else []) if isinstance(each, np.ndarray)]
            with unchanged(*value.values, *given), refused(opened, error, text):
                ops.reduce(SUM, value, value, out=out)
        rows = gr.PerReplica([gr.IndexedSlices(np.ones((1, 2)), [0])] * 3, opened)
        with refused(opened, ValueError, "out 0 is not supported: its value contains Ind"):
            ops.reduce(SUM, rows, opened, out=[np.zeros((1, 2))] * 3)
        good = [array.copy() for array in value.values]
        result = ops.reduce(SUM, value, value, out=good)
        assert [id(found) for found in result.values] == [id(array) for array in good]
        result = ops.reduce(SUM, value, value, out=value.values)
        assert result.buffers == value.buffers  # one block, with its fences


def test_another_tensors_input_or_part_of_its_own_cannot_be_out():
    with MeshCase((0, 0)).open() as opened:
        wholes = [device.zeros((12,), "float32") for device in opened]
        first = gr.PerReplica([whole.view(0, (6,)) for whole in wholes])
        second = gr.PerReplica([whole.view(6, (6,)) for whole in wholes])
        across = [whole.view(3, (6,)) for whole in wholes]
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        pairs = [(first, first), (second, second)]
        fresh = [[device.zeros((6,), "float32") for device in opened] for _ in "ab"]
        with pytest.raises(ValueError, match="out 0: replica 0 overlaps value"):
            ops.batch_reduce(SUM, pairs, out=[across, fresh[1]])
        with pytest.raises(
            ValueError, match="out 1: replica 0 overlaps value 0: replica 0; an out"
        ):
            ops.batch_reduce(SUM, pairs, out=[fresh[0], first])
        with pytest.raises(ValueError, match="output_type='buffer' cannot be combined with out"):
            ops.batch_reduce(SUM, pairs, out=[first, second], output_type="buffer")
        with pytest.raises(ValueError, match="one entry for each of 2"):
            ops.batch_reduce(SUM, pairs, out=[first])
        ops.batch_reduce(SUM, pairs, out=[first, second])  # exactly the same memory


@pytest.mark.parametrize("mapped", [True, False])
def test_memory_that_peers_cannot_access_needs_more_launches(mapped):
    """A device packs and unpacks its memory itself if it is not mapped for peers."""
    with MeshCase((0, 1)).open() as opened:
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        rows = [[adopted(device, np.ones(400, np.float32))] for device in opened]
        for (buffer,) in rows:
            buffer.block.peer_mapped = mapped
        with opened.journal() as journal:
            ops.all_reduce(rows, SUM, out=rows)
        assert len(launches_of(journal, "pack")) == (0 if mapped else 4)
        assert len(launches_of(journal, "all_sum")) == 1
        assert all((buffer.numpy() == 2).all() for (buffer,) in rows)


@pytest.mark.parametrize("how", ["strided", "deferred"])
def test_a_value_that_holds_copies_cannot_be_out(how):
    """A result that is written into a copy would be lost."""
    seed = 1 if how == "deferred" else None
    with gr.open_mesh([0, 1], backend="sim", schedule_seed=seed) as opened:
        arrays = [np.ones((4, 4), np.float32)[:, :: 2 if how == "strided" else 1] for _ in "ab"]
        value = gr.PerReplica(arrays, opened)
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        with opened.journal() as journal, pytest.raises(ValueError, match=r"out 0: .*copied"):
            ops.reduce(SUM, value, value, out=value)
        assert not journal.launches
        assert all((array == 1).all() for array in arrays)
        assert ops.reduce(SUM, value, value, out=ops.reduce(SUM, value, value)).kind == "native"
        row = [np.zeros(arrays[0].shape, np.float32) for _ in "ab"]
        with pytest.raises(ValueError, match="out 0: replica 0 and out 1: replica 0 overlap"):
            ops.batch_reduce(SUM, [(value, value)] * 2, out=[row, row])


def test_an_error_in_the_middle_says_that_out_is_half_written(monkeypatch):
    with MeshCase((0, 1)).open() as opened:
        floats = per_replica(opened, lambda _: np.ones(8, np.float32))
        ints = per_replica(opened, lambda _: np.ones(8, np.int32))
        outs = [[np.zeros(8, np.float32) for _ in opened], [np.zeros(8) for _ in opened]]
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        pairs = [(floats, floats), (ints, ints)]

        def fails(*_arguments, **_options):
            raise MemoryError("no more")

        monkeypatch.setattr(pipeline, "quotients", fails)
        with pytest.raises(MemoryError) as caught:
            ops.batch_reduce(MEAN, pairs, out=outs)
        assert caught.value.__notes__ == [
            "The call failed half way: the arrays of `out` may contain a part of the results."
        ]
        monkeypatch.undo()
        monkeypatch.setattr(pipeline, "lay_out", fails)
        with opened.journal() as journal, pytest.raises(MemoryError) as caught:
            ops.batch_reduce(MEAN, pairs, out=outs)
        assert not journal.launches
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("launched", ["divide", "pack", "all_sum"])
def test_what_does_not_compile_fails_before_anything_is_written(launched, monkeypatch):
    prepare = Device.compile_kernel

    def fails(device, kernel, template):
        if kernel.name == launched:
            raise BackendUnavailableError("no compiler")
        prepare(device, kernel, template)

    with MeshCase((0, 1)).open() as opened:
        ops = gr.HierarchicalCopyAllReduce(mesh=opened)
        floats = per_replica(opened, lambda _: np.ones(8, np.float64))
        ints = per_replica(opened, lambda _: np.ones(8, np.int8))
        outs = [[np.zeros(8) for _ in opened], [np.zeros(8, np.float32) for _ in opened]]
        monkeypatch.setattr(Device, "compile_kernel", fails)
        for device in opened.devices:
            device.compiles = True
        for targets, sizes in (((floats, ints), (2, 2)), ((floats, "sim:1"), (2, 1)),
                               (("sim:0", "sim:0"), (1, 1))):  # fmt: skip
            fitting = [row[:size] for row, size in zip(outs, sizes, strict=True)]
            with refused(opened, BackendUnavailableError, "no compiler"):
                ops.batch_reduce(MEAN, list(zip((floats, ints), targets, strict=True)), out=fitting)
