"""Real PyTorch tensors on a real GPU: shared both ways, and ordered with PyTorch's own streams.

``tests/backends/cuda/test_convert_gpu.py`` tests the same on the fake CuPy, with every wait.
"""

import numpy as np
import pytest
from support.exact_data import exact_data, same
from support.libraries import torch

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int8", "int64")
LARGE = 1 << 24  # elements, so that the work is still running at the next call


@pytest.fixture(scope="module")
def mesh():
    with gr.open_mesh([0, 0, 0, 0], backend="cuda") as opened:
        yield opened


def host(tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(as_dtype("bfloat16"))
    return tensor.cpu().numpy()


def tensor_of(array: np.ndarray):
    if array.dtype == as_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def data_of(dtype: str) -> np.ndarray:
    return exact_data((33, 5), dtype, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_shared_without_a_copy_in_both_directions(mesh, dtype):
    array = data_of(dtype)
    tensor = tensor_of(array)
    buffer = to_buffer(tensor, mesh.devices[2])
    assert buffer.device is mesh.devices[2]
    assert buffer.address == tensor.data_ptr()
    assert same(buffer.numpy(), array)
    back = from_buffer(buffer, "torch")
    assert (back.data_ptr(), back.dtype, back.device) == (
        tensor.data_ptr(), tensor.dtype, tensor.device,
    )  # fmt: skip
    assert same(host(back), array)


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_calls_are_ordered_with_the_current_stream(mesh, own):
    stream = torch.cuda.Stream() if own else torch.cuda.current_stream()
    for turn in range(20):
        with torch.cuda.stream(stream):
            terms = [torch.full((LARGE,), float(turn), device="cuda") for _ in range(3)]
            for term in terms:
                term.mul_(2).add_(1)  # still running when the sum is launched
            total = gr.add_n(
                [to_buffer(term, mesh.devices[0]) for term in terms], output_type="torch"
            )
            total = total * 2  # on PyTorch's stream, after our sum
            assert bool((total == 3 * (2 * turn + 1) * 2).all())


@pytest.mark.multi_gpu(2)
def test_tensors_of_a_gpu_that_is_not_current():
    assert torch.cuda.current_device() == 0
    with (
        gr.open_mesh([0, 1], backend="cuda") as mesh,
        torch.cuda.stream(torch.cuda.Stream(device=1)),
    ):
        torch.cuda.set_device(0)  # the stream stays that of GPU 1
        for turn in range(5):
            terms = [torch.full((LARGE,), float(turn), device="cuda:1") for _ in range(3)]
            for term in terms:
                term.mul_(2).add_(1)
            buffers = [to_buffer(term, mesh.devices[0]) for term in terms]
            assert {buffer.device for buffer in buffers} == {mesh.devices[1]}
            total = gr.add_n(buffers, output_type="torch")
            assert total.device == torch.device("cuda", 1)
            assert bool((total * 2 == 3 * (2 * turn + 1) * 2).all())
            shared = from_buffer(mesh.devices[1].upload(data_of("bfloat16")), "torch")
            assert same(host(shared), data_of("bfloat16"))


def test_gradients_that_are_freed_at_the_end_of_a_step(mesh):
    """PyTorch may reuse their memory only after our queue's last use."""
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        totals = []
        with torch.cuda.stream(stream):
            for turn in range(10):
                grads = [[torch.full((LARGE,), float(turn), device="cuda")] for _ in range(4)]
                totals.append(ops.all_reduce(grads, gr.ReduceOp.SUM, output_type="buffer")[0][0])
                del grads
                for _ in range(4):  # which gets that memory, if it is free
                    torch.full((LARGE,), -1.0, device="cuda")
        for turn, total in enumerate(totals):
            assert bool((from_buffer(total, "torch") == 4 * turn).all())


def test_results_that_are_dropped_while_pytorch_reads_them(mesh):
    """We may reuse their memory only after the last use by PyTorch's stream."""
    device = mesh.devices[0]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        sums = []
        with torch.cuda.stream(stream):
            late = torch.zeros((1 << 12, 1 << 12), device="cuda")
            for turn in range(1, 6):
                terms = [device.upload(np.full(late.shape, turn, np.float32)) for _ in range(2)]
                total = gr.add_n(terms, output_type="torch")
                for _ in range(5):  # after this PyTorch reads our memory
                    late = late @ late
                sums.append(late + total)
                del total
                for _ in range(3):  # which gets that memory, if it is free
                    device.zeros(late.shape, "float32")
            for turn, each in enumerate(sums, 1):
                assert bool((each == 2 * turn).all())


def test_strided_conjugated_and_differentiable_tensors(mesh):
    tensor = torch.arange(60, device="cuda", dtype=torch.float32).reshape(6, 10)
    assert same(to_buffer(tensor[:, ::2], mesh.devices[0]).numpy(), host(tensor)[:, ::2].copy())
    lazy = torch.tensor([1 + 2j, 3 - 1j], device="cuda").conj()
    assert same(to_buffer(lazy, mesh.devices[0]).numpy(), np.array([1 - 2j, 3 + 1j], np.complex64))
    with pytest.raises(ValueError, match=r"pass tensor\.detach\(\)"):
        to_buffer(torch.ones(3, device="cuda", requires_grad=True), mesh.devices[0])


def test_simulated_devices_take_no_tensor_of_a_gpu(mesh):
    with (
        gr.open_mesh(1, backend="sim") as sim,
        pytest.raises(DeviceMismatchError, match="on a GPU"),
    ):
        to_buffer(tensor_of(np.zeros(3, np.float32)), sim.devices[0])
