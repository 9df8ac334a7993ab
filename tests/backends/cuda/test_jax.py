"""JAX's arrays on GPUs: shared both ways, read-only, ordered with JAX's own streams.

On the fake a stand-in takes JAX's place, and every use that no fence orders is a fault.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from support.exact_data import exact_data, same

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, kind_of, to_buffer
from gradreduce.backends import open_mesh
from gradreduce.device import Mesh, as_dtype

FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)
pytestmark = [] if FAKE else [pytest.mark.jax]
SEEDS = (0, 1) if FAKE else (0,)
DTYPES = ("float16", "bfloat16", "float32", "complex64", "int8", "int32")
SHAPES = ((7, 30), (), (0, 3))
SHAPE = (12, 12) if FAKE else (1 << 12, 1 << 12)  # so that it still runs at the next call
PLACED = [
    pytest.param([0, 0, 0], marks=pytest.mark.gpu, id="one GPU"),
    pytest.param([0, 1, 1], marks=pytest.mark.multi_gpu(2), id="two GPUs"),
]


@pytest.fixture(params=SEEDS)
def here(request, gpus) -> None:
    gpus(request.param, num_gpus=2)


@pytest.fixture(params=PLACED)
def mesh(request, here, monkeypatch) -> Iterator[Mesh]:
    with open_mesh(request.param, backend="cuda") as made:
        monkeypatch.setattr("gradreduce.backends._default", [made])
        yield made


@pytest.fixture
def jax(mesh, monkeypatch) -> Iterator[ModuleType]:
    if FAKE:
        from fake_cupy.foreign_jax import stand_in

        monkeypatch.setitem(sys.modules, "jax", stand_in(2))
    import jax

    yield jax
    if FAKE:
        for gpu in jax.devices("gpu"):  # pytest drops the fixture after the machine's end
            gpu.forget()


@pytest.fixture
def put(jax):
    """Copies a host array to the GPU of a logical device, like a user of JAX."""
    return lambda values, device: jax.device_put(values, jax.devices("gpu")[device.physical])


def filled(value: float, shape=SHAPE) -> np.ndarray:
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_shared_both_ways(mesh, put, dtype):
    device = mesh.devices[2]  # on two GPUs not on the current one
    for shape in SHAPES:
        values = np.asarray(exact_data(shape, as_dtype(dtype)))
        array = put(values, device)
        buffer = to_buffer(array, device)
        assert (buffer.device, buffer.dtype, buffer.array_owner) == (device, values.dtype, "jax")
        assert same(buffer.numpy(), values)
        own = device.upload(values)
        back = from_buffer(own, "jax")
        assert (kind_of(back), tuple(back.shape), back.dtype) == ("jax", shape, values.dtype)
        assert same(np.asarray(back), values)
        if values.size:
            assert buffer.address == array.unsafe_buffer_pointer()
            assert own.address == back.unsafe_buffer_pointer()


def test_an_array_is_an_input_and_never_written(mesh, put):
    device = mesh.devices[0]
    array = put(filled(3), device)
    with pytest.raises(ValueError, match="read-only"):
        device.upload(filled(4), out=to_buffer(array, device))
    with pytest.raises(TypeError, match="is immutable; it cannot be used as out"):
        gr.all_reduce([[array]], mesh=mesh[0:1], out=[[array]])
    assert same(np.asarray(array), filled(3))


def test_what_jax_still_computes_is_waited_for_and_waits(mesh, put):
    device = mesh.devices[2]
    for turn in range(5):
        first, second = (put(filled(turn + step), device) for step in range(2))
        terms = [first + second, second + second, first + first]
        total = gr.add_n(terms)
        assert kind_of(total) == "jax"
        assert total.devices() == first.devices()
        assert same(np.asarray(total + first), filled(7 * turn + 3))


def test_arrays_that_are_dropped_while_we_read_them(mesh, put):
    """JAX may reuse their memory only after our queue's last use."""
    device = mesh.devices[2]
    other, late = put(filled(-1), device), device.upload(filled(0))
    totals = []
    for turn in range(1, 4):
        terms = [put(filled(turn + step), device) for step in range(3)]
        for _ in range(5):  # behind which we read their memory
            late = gr.add_n([late, late], output_type="buffer")
        totals.append(gr.add_n([*terms, late], output_type="buffer"))
        del terms
        for _ in range(3):  # which gets that memory, if it is free
            other + other
    for turn, total in enumerate(totals, 1):
        assert same(total.numpy(), filled(3 * turn + 3))


def test_arrays_on_our_memory_that_are_dropped_while_jax_reads_them(mesh, put):
    """We may reuse the memory only after JAX's last use, not when the array is dropped."""
    device = mesh.devices[2]
    late, sums = put(filled(0), device), []
    for turn in range(1, 4):
        terms = [to_buffer(put(filled(turn), device), device) for _ in range(2)]
        total = gr.add_n(terms, output_type="jax")
        for _ in range(5):  # behind which JAX reads our memory
            late = late @ late
        sums.append(late + total)
        del total
        for _ in range(3):  # which gets that memory, if it is free
            device.zeros(SHAPE, "float32")
    for turn, array in enumerate(sums, 1):
        assert same(np.asarray(array), filled(2 * turn))


def test_sparse_rows(mesh, put):
    device = mesh.devices[2]
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = gr.IndexedSlices(put(values, device), put(np.array([2, 0, 2], np.int32), device), (4, 2))
    merged, dense = rows.coalesce(), rows.to_dense()
    assert (kind_of(merged.values), kind_of(dense)) == ("jax", "jax")
    assert merged.indices.tolist() == [0, 2]
    assert same(np.asarray(merged.values), np.array([[2, 3], [4, 6]], np.float32))
    assert same(np.asarray(dense)[2], np.array([4, 6], np.float32))


if not FAKE:  # the stand-in has no gradients

    def test_a_loss_of_jax(mesh, jax):
        variable = gr.Variable(np.arange(3, dtype=np.float32), device=mesh.devices[2])

        def loss():
            return jax.numpy.sum(variable.read("jax") ** 2)

        for step in range(3):
            gr.GradientDescentOptimizer(0.25).minimize(loss, engine="jax")
            wanted = np.arange(3, dtype=np.float32) / 2 ** (step + 1)
            assert same(variable.numpy(), wanted)
