"""Prepared and captured steps read and write users' arrays in place, and copy nothing."""

from itertools import chain

import numpy as np
import pytest
from reduce.test_prepared import calls_of
from support.exact_data import same
from support.libraries import jnp, torch
from support.meshes import MeshCase, owned, refused

import gradreduce as gr

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [(40, 7), (), (0, 2), (1000,)]


@pytest.mark.torch
def test_tensors_are_read_and_written_in_place():
    with MeshCase((0, 1, 1)).open() as mesh:
        rows = [[torch.full(shape, float(r + 1)) for r in range(3)] for shape in SHAPES]
        rows.append([torch.full((9,), float(r + 1), dtype=torch.bfloat16) for r in range(3)])
        values = [gr.PerReplica(row, mesh) for row in rows]
        step = gr.HierarchicalCopyAllReduce().prepare(SUM, [(v, v) for v in values])
        shown = [tensor for result in step.results for tensor in result.values]
        for tensor in chain(*rows):
            tensor.mul_(2)
        found = [tensor for result in step() for tensor in result.values]
        assert all(one is other for one, other in zip(found, shown, strict=True))
        assert all(isinstance(tensor, torch.Tensor) for tensor in shown)
        assert all(bool((tensor == 12).all()) for tensor in shown)
        assert all(tensor.dtype is torch.bfloat16 for tensor in shown[-3:])


@pytest.mark.torch
def test_tensors_that_pytorch_would_copy_are_refused():
    with MeshCase((0, 1)).open() as mesh:
        for tensor in (torch.ones(6, 6)[:, ::2], torch.ones(3, dtype=torch.complex64).conj()):
            dense = torch.ones_like(tensor).resolve_conj().contiguous()
            value = gr.PerReplica([dense, tensor], mesh)
            with refused(mesh, ValueError, "value 0: replica 1 could not be shared"):
                gr.HierarchicalCopyAllReduce().prepare(SUM, [(value, value)])


@pytest.mark.jax
def test_arrays_of_jax_are_read_and_never_written():
    text = "value 0: later calls cannot overwrite results of kind 'jax'"
    with MeshCase((0, 1)).open() as mesh:
        value = gr.PerReplica([jnp.arange(5.0), jnp.ones(5)], mesh)
        ops = gr.HierarchicalCopyAllReduce()
        with refused(mesh, ValueError, text):
            ops.prepare(SUM, [(value, value)])
        step = ops.prepare(SUM, [(value, value)], output_type="numpy")
        assert same(step()[0].values[1], np.arange(1, 6, dtype=np.float32))


def test_what_would_be_a_copy_is_refused():
    with MeshCase((0, 1)).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce()
        whole, pieces = np.ones((4, 4)), np.ones((4, 8))[:, ::2]
        fine = gr.PerReplica([whole, whole], mesh)
        for second in (pieces, whole.tolist(), whole.T):
            value = gr.PerReplica([whole, second], mesh)
            with refused(mesh, ValueError, "value 1: replica 1 could not be shared"):
                ops.prepare(SUM, [(fine, fine), (value, value)])
        number = gr.PerReplica([np.float32(1), np.float32(2)], mesh)
        with refused(mesh, ValueError, "value 0: replica 0 could not be shared"):
            ops.prepare(SUM, [(number, number)])
        with refused(mesh, ValueError, "output_type='cupy'"):
            ops.prepare(SUM, [(fine, fine)], output_type="cupy")
    with gr.open_mesh(2, backend="sim", schedule_seed=3) as mesh:  # copies host arrays
        value = gr.PerReplica([np.ones(4), np.ones(4)], mesh)
        with refused(mesh, ValueError, "replica 0 could not be shared.*schedule_seed="):
            ops.prepare(SUM, [(value, value)])


@pytest.mark.parametrize("seed", range(6))
def test_results_in_host_memory_are_written_when_the_call_returns(seed):
    with gr.open_mesh([0, 1, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        buffers = [device.zeros((6,), "float32") for device in mesh]
        value = gr.PerReplica(buffers)
        step = gr.HierarchicalCopyAllReduce().prepare(SUM, [(value, value)], output_type="numpy")
        arrays = step.results[0].values
        for turn in range(1, 4):
            for buffer in buffers:
                buffer.device.upload(np.full(6, turn, np.float32), out=buffer)
            step()
            assert all((array == 3 * turn).all() for array in arrays)


@pytest.mark.parametrize("form", ["prepare", "capture", "prepare for host arrays"])
def test_a_call_does_no_work_for_each_tensor(form):
    external = "host" in form

    def counted(num_tensors):
        # With queued work a launch runs later, when the host waits.
        seed = None if external else 0
        with gr.open_mesh([0, 1], backend="sim", schedule_seed=seed) as mesh:
            arrays = [[np.ones(5, np.float32) for _ in mesh] for _ in range(num_tensors)]
            if external:
                for device in mesh:
                    device.scheduler.submit = lambda queue, work: None
            else:
                arrays = [[d.upload(a) for d, a in zip(mesh, row, strict=True)] for row in arrays]
            values = [gr.PerReplica(row, mesh) for row in arrays]
            make = getattr(gr.HierarchicalCopyAllReduce(), form.partition(" ")[0])
            step = make(SUM, [(v, v) for v in values])
            step()
            return calls_of(step)

    assert counted(2) == counted(60)


# -- out= -----------------------------------------------------------------------------------------

WAYS = ["prepare", "capture"]


@pytest.mark.parametrize("way", WAYS)
def test_results_computed_in_other_memory_are_copied_to_out(way):
    """Means of integers and sums on one device are computed in other memory first."""
    with MeshCase((0, 0, 1)).open() as mesh:
        counts = gr.PerReplica([owned(d, np.zeros(7, np.int16)) for d in mesh], mesh)
        value = gr.PerReplica([owned(d, np.zeros(5, np.float32)) for d in mesh], mesh)
        ends = [mesh.devices[2], mesh.devices[0]]
        outs = [[np.zeros(7, np.float32) for _ in mesh], [np.zeros(5, np.float32) for _ in ends]]
        make = getattr(gr.HierarchicalCopyAllReduce(1), way)
        step = make(MEAN, [(counts, counts), (value, ends)], out=outs)
        for number in (3, 6):
            for buffer in (*counts.buffers, *value.buffers):
                buffer.device.upload(np.full(buffer.shape, number, buffer.dtype), out=buffer)
            step()
            assert all((array == number).all() for row in outs for array in row)


@pytest.mark.parametrize("way", WAYS)
def test_what_no_call_could_write_is_refused(way):
    ops = getattr(gr.HierarchicalCopyAllReduce(1), way)
    fit = [np.zeros(4, np.float32) for _ in range(2)]
    with MeshCase((0, 1)).open() as mesh:
        value = gr.PerReplica([owned(device, np.ones(4, np.float32)) for device in mesh], mesh)
        for options, why in (
            ({"out": []}, "one entry for each of 1"),
            ({"out": [fit[:1]]}, "out 0: it must be .* of 2 arrays"),
            ({"out": [[fit[0], np.zeros(4)]]}, "out 0: replica 1: .*float64"),
            ({"out": [fit[:1] * 2]}, "out 0: replica 0 and out 0: replica 1 overlap"),
            ({"out": [fit], "output_type": "numpy"}, "'numpy' cannot be combined with out"),
        ):
            with refused(mesh, ValueError, why):
                ops(SUM, [(value, value)], **options)
    with gr.open_mesh([0, 1], backend="sim", schedule_seed=3) as mesh:
        value = gr.PerReplica([device.upload(np.ones(4, np.float32)) for device in mesh], mesh)
        with pytest.raises(ValueError, match="out 0: replica 0 is in host memory"):
            ops(SUM, [(value, value)], out=[fit])
    assert not fit[0].any()


@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
def test_autograd_notices_each_call(way):
    with MeshCase((0, 1)).open() as mesh:
        value = gr.PerReplica([torch.ones(4) for _ in mesh], mesh)
        outs = [torch.zeros(4) for _ in mesh]
        step = getattr(gr.HierarchicalCopyAllReduce(1), way)(SUM, [(value, value)], out=[outs])
        before = outs[0]._version
        assert before > 0
        assert step()[0].values[0] is outs[0]
        assert (outs[0]._version, outs[0].tolist()) == (before + 1, [2.0] * 4)
