"""The meshes that the contract tests run on."""

from collections.abc import Callable, Iterator

import pytest
from device.contract import BACKENDS, BACKENDS_APART

from gradreduce.device import Mesh


@pytest.fixture(params=BACKENDS)
def one_gpu_mesh(request) -> Iterator[Mesh]:
    """Two logical devices on one physical one."""
    with request.param([0, 0]) as mesh:
        yield mesh


@pytest.fixture(params=BACKENDS_APART)
def two_gpu_mesh(request) -> Iterator[Mesh]:
    """Devices 0 and 1 share a physical one, device 2 has its own."""
    with request.param([0, 0, 1]) as mesh:
        yield mesh


@pytest.fixture
def waits(two_gpu_mesh, monkeypatch) -> list[tuple]:
    """Records every wait between queues of ``two_gpu_mesh``: who waits, and for whom.

    A queue is a device of its GPU and a name; ``waits_of`` says what is expected.
    """
    told: list[tuple] = []
    cls = type(two_gpu_mesh.devices[0])
    original = cls._wait

    def wait(self, mark, queue) -> None:
        told.append((self.index, queue, mark.device.index, mark.queue))
        original(self, mark, queue)

    monkeypatch.setattr(cls, "_wait", wait)
    return told


@pytest.fixture(params=BACKENDS)
def reopen(request) -> Callable[..., Mesh]:
    """Opens meshes of one backend; the test closes them."""
    return request.param


@pytest.fixture(params=BACKENDS_APART)
def reopen_two_gpus(request) -> Callable[..., Mesh]:
    """The same, for meshes on several physical devices."""
    return request.param
