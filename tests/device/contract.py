"""The backends that the contract tests run on, and helpers for these tests."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from support.exact_data import exact_data

from gradreduce.backends import open_mesh
from gradreduce.device import ELEMENT_OF, Buffer, Device, Mesh, as_dtype
from gradreduce.errors import BackendUnavailableError, CollectiveError
from gradreduce.ops.add_n import ADD_N

QUEUES = ("compute", "transfer")
SIZE = 1003  # vectors and a tail
FLOAT = as_dtype("float32")

simulated = partial(open_mesh, backend="sim")
# All backends and their variants. Add a line for a new backend, marked with what it needs.
BACKENDS = [
    pytest.param(partial(simulated, strict=True), id="sim"),
    pytest.param(partial(simulated, strict=False, peer_access=False), id="sim-no_peers"),
    pytest.param(
        partial(simulated, strict=True, kernels="compiled"),
        id="sim-compiled",
        marks=pytest.mark.host,
    ),
    # Queued work runs as late as possible, as early as possible, or in random valid orders.
    *(
        pytest.param(
            partial(simulated, strict=True, schedule_seed=seed),
            id=f"sim-queued_{seed}",
            marks=pytest.mark.exhaustive if seed == 3 else (),
        )
        for seed in range(4)
    ),
]
on_gpus = partial(open_mesh, backend="cuda")
# The same for tests that need several physical devices with a collective library.
BACKENDS_APART = [
    *BACKENDS,
    pytest.param(on_gpus, id="cuda", marks=(pytest.mark.multi_gpu(3), pytest.mark.nccl)),
]
BACKENDS = [*BACKENDS, pytest.param(on_gpus, id="cuda", marks=pytest.mark.gpu)]


def data(shape, dtype=FLOAT, seed=0) -> np.ndarray:
    return exact_data((math.prod(shape),), dtype, seed=seed).reshape(shape)


def uploaded(device: Device, seed: int, shape=(SIZE,), dtype=FLOAT) -> Buffer:
    return device.upload(data(shape, dtype, seed))


@contextmanager
def in_order(device: Device) -> Iterator[None]:
    """Inside, operations on arrays of the backend run on the device's compute queue."""
    if device.mesh_state.backend == "sim":
        yield
        return
    with device.gpu, device._stream("compute"):
        yield
    device.mesh_state.order.add_work(device.compute)


def waits_of(mesh: Mesh, waits: Iterable[tuple]) -> list[tuple]:
    """The waits that a backend queues, if this is what the order needs.

    A backend whose operations are complete when they were submitted queues none.
    """
    return sorted(waits) if mesh.mesh_state.order.is_needed else []


def adopted(device: Device, values: np.ndarray) -> Buffer:
    """A Buffer on memory that the pool does not own."""
    buffer = device.adopt(device.release(device.upload(values)))
    assert not buffer.block.owned
    return buffer


def unmapped(buffer: Buffer) -> Buffer:
    """Marks memory as not accessible by peers, like memory of cudaMallocAsync."""
    buffer.block.peer_mapped = False
    return buffer


def add(device: Device, out: Buffer, *terms: Buffer, **options) -> None:
    """``out = terms[0] + terms[1] + …`` as one launch, without the checks of ``ops``."""
    name = ELEMENT_OF[out.dtype].name
    device.launch(ADD_N, (name, name, 0), [(out, *terms)], (len(terms),), **options)


def every_call(mesh: Mesh, buffer: Buffer) -> dict:
    """Every public call on a device or mesh that uses its devices."""
    device, other = mesh.devices[0], mesh.devices[1]
    row, template = [[buffer, buffer]], ("float32", "float32", 1)
    nothing = [[buffer.view(0, (0,)), buffer.view(0, (0,))]]
    mark = device.queue_mark()
    values, theirs = data((SIZE,)), device.release(buffer)
    return {
        "empty": lambda: device.empty((3,), FLOAT),
        "empty of nothing": lambda: device.empty((0,), FLOAT),
        "zeros": lambda: device.zeros((3,), FLOAT),
        "put": lambda: device.put(values),
        "put in pieces": lambda: device.put(values[::2]),
        "adopt": lambda: device.adopt(theirs),
        "release": lambda: device.release(buffer),
        "upload": lambda: device.upload(values),
        "upload into": lambda: device.upload(values, out=buffer),
        "download": lambda: device.download(buffer),
        "numpy": buffer.numpy,
        "copy": lambda: device.copy(buffer, buffer),
        "launch": lambda: device.launch(ADD_N, template, row, (1,)),
        "launch of nothing": lambda: device.launch(ADD_N, template, nothing, (1,)),
        "compile_kernel": lambda: device.compile_kernel(ADD_N, template),
        "fill_zero": lambda: device.fill_zero(buffer),
        "queue_mark": device.queue_mark,
        "queue_wait": lambda: device.queue_wait(mark),
        "queue_wait for another": lambda: other.queue_wait(mark, queue="transfer"),
        "block_stream": lambda: device.block_stream(None),
        "device.synchronize": device.synchronize,
        "device.trim": device.trim,
        "mesh.synchronize": mesh.synchronize,
        "mesh.trim": mesh.trim,
        "flat_buffer": lambda: mesh.flat_buffer([(3,)], FLOAT),
        "all_reduce": lambda: mesh.collective.all_reduce([buffer]),
        "broadcast": lambda: mesh.collective.broadcast([buffer], 0),
        "all_gather": lambda: mesh.collective.all_gather([buffer], [buffer]),
        "part": lambda: mesh[1:].devices[0].empty((3,), FLOAT),
    }


def calls_that_succeed(calls: dict, said: str) -> list[str]:
    """The calls that do not raise a ``BackendUnavailableError`` with these words."""
    found = []
    for name, call in calls.items():
        try:
            call()
        except (BackendUnavailableError, CollectiveError) as error:
            if isinstance(error, BackendUnavailableError) and said in str(error):
                continue
            name = f"{name}: {error}"
        found.append(name)
    return found
