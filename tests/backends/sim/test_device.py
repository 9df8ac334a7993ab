"""Behavior of simulated devices only: pools, filled memory, and wrong references."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from device.contract import FLOAT, SIZE, data, simulated, uploaded
from support.exact_data import DTYPES, same
from support.threads import in_threads

from gradreduce.backends.sim import pool as sim_pool
from gradreduce.backends.sim.pool import GRANULE, START, Memory, SimPool
from gradreduce.device import Device, Mesh, as_dtype
from gradreduce.device.run.inexact import queue_download
from gradreduce.ops.add_n import ADD_N

PAIR = ("float32", "float32", 1)


@pytest.fixture(params=[True, False], ids=["strict", "lax"])
def mesh(request) -> Iterator[Mesh]:
    with simulated(2, strict=request.param) as made:
        yield made


@pytest.fixture
def device() -> Iterator[Device]:
    with simulated(1, strict=True) as made:
        yield made.devices[0]


def numbers(array: np.ndarray) -> np.ndarray:
    """Real and imaginary parts count separately."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (5, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strict_memory_is_filled_at_allocation(device, dtype, shape):
    def fresh() -> np.ndarray:
        return np.atleast_1d(device.empty(shape, dtype).numpy())

    for _ in range(2):  # the second time the memory was zeroed before
        if dtype.kind in "iu":
            assert (fresh().view(np.uint8) == 0xA5).all()
        else:
            assert np.isnan(numbers(fresh())).all()
        device.zeros(shape, dtype)


def test_without_strict_memory_is_reused_with_its_contents():
    with simulated(1, strict=False) as mesh:
        device = mesh.devices[0]
        address = uploaded(device, 1).address
        again = device.empty((SIZE,), FLOAT)
        assert again.address == address
        assert same(again.numpy(), data((SIZE,), seed=1))


def test_memory_of_a_freed_buffer_is_used_again(mesh):
    device, other = mesh.devices
    address = uploaded(device, 1).address
    assert (device._pool.grown, other._pool.grown) == (1, 0)
    assert uploaded(device, 1).address == address
    assert device.empty((SIZE - 1, 2), "float16").address == address
    held = [uploaded(device, 1) for _ in range(3)]
    assert device._pool.grown == 3
    assert len({buffer.address for buffer in held}) == 3
    assert device._pool.live_bytes == 3 * 4096
    del held
    device.synchronize()
    assert (device._pool.live_bytes, device._pool.free_bytes) == (0, 3 * 4096)


def test_trim_gives_everything_back(mesh):
    device = mesh.devices[0]
    kept = uploaded(device, 1)
    uploaded(device, 2)
    mesh.trim()
    assert (device._pool.free_bytes, device._pool.live_bytes) == (0, 4096)
    uploaded(device, 2)
    assert device._pool.grown == 3
    assert same(kept.numpy(), data((SIZE,), seed=1))


def test_pools_are_trimmed_before_an_out_of_memory_error(mesh, monkeypatch):
    """As if the host had 9 MB: one device has 6 MB free in its pool, another allocates 8 MB."""
    live = weakref.WeakSet()

    class Limited(Memory):
        __slots__ = ("__weakref__",)

        def __init__(self, nbytes):
            if sum(each.nbytes for each in live) + nbytes > 9e6:
                raise MemoryError
            super().__init__(nbytes)
            live.add(self)

    monkeypatch.setattr(sim_pool, "Memory", Limited)
    device, other = mesh.devices[:2]
    kept = device.empty((100_000,), "uint8")
    device.empty((6_000_000,), "uint8")
    device.drain()
    assert device._pool.free_bytes > 5e6
    asked = other.empty((8_000_000,), "uint8")
    assert device._pool.free_bytes == 0
    with pytest.raises(MemoryError):
        other.empty((8_000_000,), "uint8")
    del asked  # not yet returned to the pool
    device.empty((8_000_000,), "uint8")
    assert kept.block.raw in live


def test_deferred_memory_comes_back_when_the_queues_that_used_it_have_passed():
    with simulated(1, schedule_seed=0) as mesh:  # nothing runs before a host wait
        (device,) = mesh.devices
        out, source = device.empty((SIZE,), FLOAT), uploaded(device, 1)
        device.copy(out, source, queue="transfer")
        address = source.address
        del source
        early = [device.empty((SIZE,), FLOAT) for _ in range(3)]
        assert address not in {buffer.address for buffer in early}
        num_grown = device._pool.grown
        mesh.synchronize()
        assert device.empty((SIZE,), FLOAT).address == address
        assert device._pool.grown == num_grown


def test_a_queued_download_is_none_until_the_queue_has_passed_it():
    with simulated(1, schedule_seed=0) as mesh:  # nothing runs before a host wait
        read = queue_download(uploaded(mesh.devices[0], 1))
        assert read() is None
        mesh.synchronize()
        assert same(read(), data((SIZE,), seed=1))


def test_freeing_a_block_acquires_no_lock(mesh):
    """The collector may run in the thread that holds the pool's lock."""
    device = mesh.devices[0]
    held = [uploaded(device, 1)]
    with device._pool._lock, mesh.mesh_state.launch_lock, mesh.mesh_state.log._lock:
        in_threads(held.clear)
    assert len(device.freed) == 1


def test_memory_is_aligned_as_on_a_gpu(device):
    for size in (0, 1, 3, 511, 512, 513, 100_000):
        buffer = device.empty((size,), "uint8")
        assert buffer.address % START == 0
        end = buffer.block.raw.address + buffer.block.raw.bytes.nbytes
        assert buffer.block.raw.bytes.ctypes.data == buffer.block.raw.address <= buffer.address
        assert buffer.address + size <= end


def test_the_pool_returns_sizes_that_are_not_used():
    """If more than twice the peak is free, memory is returned to the system."""
    pool = SimPool()
    for size in (1, 3, 7, 15, 31):
        pool.release(pool.allocate(GRANULE * size))
    assert pool.free_bytes == GRANULE * (1 + 3 + 7 + 15 + 31)
    for _ in range(4):
        held = [pool.allocate(GRANULE) for _ in range(20)]
        for memory in held:
            pool.release(memory)
    assert pool.free_bytes == GRANULE * (1 + 3 + 7 + 15 + 31 + 19) > 2 * GRANULE * 31
    pool.allocate(GRANULE * 100)
    assert pool.free_bytes == 0


def test_falling_sizes_do_not_grow_the_pool():
    pool = SimPool()
    for turn in range(10):
        for size in (40, 24, 12):
            pool.release(pool.allocate(GRANULE * size))
        if turn == 0:
            grown = pool.grown
    assert pool.grown == grown


def test_a_pool_that_cannot_grow_is_as_before():
    pool = SimPool()
    pool.allocate(8)
    before = (pool.live_bytes, pool.free_bytes, pool.grown)
    with pytest.raises(MemoryError):
        pool.allocate(1 << 60)
    assert (pool.live_bytes, pool.free_bytes, pool.grown) == before
    assert pool.allocate(8).bytes.nbytes == GRANULE


class WatchedPool(SimPool):
    """Notes whether the lock is held at each use of ``live_bytes``."""

    def __init__(self):
        self.is_held = []
        super().__init__()

    @property
    def live_bytes(self):
        self.is_held.append(self._lock._is_owned())
        return self._live_bytes

    @live_bytes.setter
    def live_bytes(self, value):
        self._live_bytes = value


def test_calls_on_a_pool_hold_its_lock():
    """Threads free and allocate memory at the same time."""
    pool = WatchedPool()
    held = [pool.allocate(8)]
    for call in (lambda: pool.allocate(8), lambda: pool.release(held.pop())):
        pool.is_held.clear()
        call()
        assert pool.is_held
        assert all(pool.is_held)


def test_a_reference_that_writes_its_inputs_is_detected(device):
    def write_inputs(rows, num_inputs: int) -> None:
        for out, term in rows:
            out[...] = term
            term[...] = 0

    out, term = device.zeros((SIZE,), FLOAT), uploaded(device, 1)
    with pytest.raises(ValueError, match="read-only"):
        device.launch(replace(ADD_N, reference=write_inputs), PAIR, [[out, term]], (1,))
    assert same(term.numpy(), data((SIZE,), seed=1))


def test_a_reference_writes_as_many_operands_as_its_kernel_says(device):
    def both(rows, num_inputs: int) -> None:
        for first, second in rows:
            first[...] = 1
            second[...] = 2

    pair = [device.zeros((SIZE,), FLOAT), device.zeros((SIZE,), FLOAT)]
    for writes in (2, "num_inputs"):
        device.launch(replace(ADD_N, reference=both, writes=writes), PAIR, [pair], (2,))
        assert [float(buffer.numpy()[-1]) for buffer in pair] == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        device.launch(replace(ADD_N, reference=both, writes="num_inputs"), PAIR, [pair], (1,))


def test_a_reference_that_fails_is_not_recorded(mesh):
    def fail(rows, num_inputs: int) -> None:
        raise ZeroDivisionError("planted")

    device = mesh.devices[0]
    out, term = device.zeros((SIZE,), FLOAT), uploaded(device, 1)
    with mesh.journal() as journal, pytest.raises(ZeroDivisionError, match="planted"):
        device.launch(replace(ADD_N, reference=fail), PAIR, [[out, term]], (1,))
    assert journal.records == []


def test_put_returns_the_very_array_that_came_unless_its_class_is_another(device):
    for array in (data((3, 4)), data((), as_dtype("bfloat16")), data((0,))):
        assert device.release(device.put(array)) is array
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3).view(type("Own", (np.ndarray,), {}))
    buffer = device.adopt(matrix)
    assert type(device.release(buffer)) is np.ndarray
    assert same(buffer.view(2, (2,)).numpy(), np.array([2, 3], np.float32))
    assert buffer.address == matrix.ctypes.data


BUILD_ALL = """
from gradreduce.backends.sim.host_compile import host_kernel
from gradreduce.ops import KERNELS

for build in ("fast", "exact"):
    for kernel in reversed(KERNELS):  # the tests beside need the last ones last
        host_kernel(kernel, build)
"""


@pytest.mark.host
@pytest.mark.early("-c", BUILD_ALL)
def test_every_kernel_is_built_for_the_cpu(early):
    """Runs beside the other tests, which then find the builds in the cache."""
    assert (early.returncode, early.stdout, early.stderr) == (0, "", "")
