"""CuPy's arrays as arguments and results of a CUDA device, ordered with their streams."""

from collections.abc import Iterator

import numpy as np
import pytest
from device.contract import FLOAT, SIZE, add, data
from support.exact_data import same

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.device import Mesh

SEEDS = (0, 1, 2, 3)
PLACED = [
    pytest.param([0, 0, 0], marks=pytest.mark.gpu, id="one GPU"),
    pytest.param([0, 1, 1], marks=pytest.mark.multi_gpu(2), id="two GPUs"),
]


@pytest.fixture(params=SEEDS)
def here(request, gpus) -> None:
    gpus(request.param)


@pytest.fixture(params=PLACED)
def mesh(request, here) -> Iterator[Mesh]:
    with open_mesh(request.param, backend="cuda") as made:
        yield made


@pytest.fixture
def on_gpu(cupy):
    """Copies an array to a GPU like a user of CuPy."""

    def put(physical: int, values: np.ndarray):
        with cupy.cuda.Device(physical):
            return cupy.asarray(values)

    return put


def test_an_array_is_shared_or_copied_in_the_order_of_its_stream(mesh, on_gpu):
    device = mesh.devices[2]
    array = on_gpu(device.physical, data((SIZE,)))
    buffer = device.put(array)
    assert buffer.address == array.data.ptr
    assert not buffer.block.owned
    assert device.release(buffer) is array
    assert same(buffer.numpy(), data((SIZE,)))
    part = device.put(array[::2])
    add(device, part, part, part)
    assert same(part.numpy(), 2 * data((SIZE,))[::2])
    assert same(array.get(), data((SIZE,)))
    with pytest.raises(ValueError, match="contiguous"):
        device.adopt(array[::2])


def test_another_stream_is_waited_for_when_it_is_current(mesh, cupy):
    device = mesh.devices[0]
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        array = cupy.asarray(data((SIZE,)))
        buffer = device.put(array)
    assert same(buffer.numpy(), data((SIZE,)))
    out = device.empty((SIZE,), FLOAT)
    add(device, out, buffer, buffer)
    released = device.release(out, theirs.ptr)
    with theirs:
        released[3:5] = 7
        assert (released.get()[3:5] == 7).all()
        assert same(released.get()[5:], 2 * data((SIZE,))[5:])


@pytest.mark.parametrize(
    ("placement", "algorithm"),
    [
        pytest.param([0, 0, 0], "hierarchical_copy", marks=pytest.mark.gpu),
        pytest.param([0, 0, 0], "nccl", marks=pytest.mark.gpu),
        pytest.param([0, 1, 1], "hierarchical_copy", marks=pytest.mark.multi_gpu(2)),
        pytest.param([0, 1, 1], "nccl", marks=(pytest.mark.multi_gpu(2), pytest.mark.nccl)),
    ],
)
def test_cupy_arrays_are_inputs_and_results(here, cupy, on_gpu, placement, algorithm):
    with open_mesh(placement, backend="cuda") as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
        whole = [on_gpu(gpu, data((6, 8), seed=place)) for place, gpu in enumerate(placement)]
        for cut in (np.s_[:, :], np.s_[::2, 1:4]):
            reduced = ops.all_reduce([[array[cut]] for array in whole], op=gr.ReduceOp.SUM)
            wanted = sum(data((6, 8), seed=place)[cut] for place in range(3))
            hosts = [data((6, 8), seed=place)[cut] for place in range(3)]
            of_hosts = ops.all_reduce([[host] for host in hosts], op=gr.ReduceOp.SUM)
            for (array,), gpu in zip((*reduced, *of_hosts), (*placement, *placement), strict=True):
                assert isinstance(array, cupy.ndarray)
                assert array.device.id == gpu
                assert same(array.get(), wanted)
        for place, array in enumerate(whole):
            assert same(array.get(), data((6, 8), seed=place))


def test_a_variable_is_read_as_a_cupy_array_that_shares_its_memory(mesh, cupy):
    variable = gr.Variable(data((4,)), device=mesh)
    for place, device in enumerate(mesh.devices):
        with gr.replica(place):
            for kind in (None, "cupy"):
                view = variable.array(kind)
                assert isinstance(view, cupy.ndarray)
                assert view.data.ptr == variable.buffers[place].address
                assert view.device.id == device.physical
            with pytest.raises(ValueError, match=r"output_type='numpy'.*is a GPU"):
                variable.array("numpy")
    variable.assign_add(data((4,)))
    assert same(variable.array().get(), 2 * data((4,)))
