"""Meshes for tests, and the expected results of reductions over them.

A test module takes a fixture by assignment: ``mesh = meshes.mesh``.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from support.exact_data import same
from support.implementations import accumulate_dtype_of

import gradreduce as gr
from gradreduce.device import Buffer, Device, Journal, Mesh

# The fourth is irregular on purpose. The last is an odd number of physical devices.
PLACEMENTS: tuple[tuple[int, ...], ...] = (
    (0,),
    (0, 0),
    (0, 0, 1, 1),
    (0, 1, 1, 2, 0),
    (0,) * 8,
    tuple(range(9)),
)


@dataclass(frozen=True)
class MeshCase:
    """One simulated mesh, always strict."""

    placement: tuple[int, ...]  # the physical device of each logical one
    peer_access: bool = True  # whether a launch may touch another physical device's memory
    implementation: str = "numpy"  # ``kernels=`` of the mesh

    def open(self) -> Mesh:
        return gr.open_mesh(
            self.placement,
            backend="sim",
            peer_access=self.peer_access,
            kernels=self.implementation,
            strict=True,
        )

    def __str__(self) -> str:
        parts = ["".join(map(str, self.placement)), self.implementation]
        if not is_one_physical(self.placement):
            parts.insert(1, "peers" if self.peer_access else "copies")
        return "-".join(parts)


def is_one_physical(placement: Sequence[int]) -> bool:
    return len(set(placement)) == 1


def cases(
    placements: Sequence[Sequence[int]] = PLACEMENTS,
    implementations: Sequence[str] = ("numpy", "compiled"),
) -> list:
    """Parameters: every placement, with and without peer access, with every implementation.

    A plain run has each placement with the compiled kernels once, with or without peer access.
    """
    made = []
    cases = itertools.product(enumerate(placements), (True, False), implementations)
    for (turn, placement), peer_access, implementation in cases:
        if is_one_physical(placement) and not peer_access:
            continue  # one physical device has no peer
        case = MeshCase(tuple(placement), peer_access, implementation)
        marks = [] if implementation == "numpy" else [pytest.mark.host]
        if marks and not is_one_physical(placement) and peer_access != (turn % 2 == 0):
            marks.append(pytest.mark.exhaustive)
        made.append(pytest.param(case, id=str(case), marks=marks))
    return made


@pytest.fixture(scope="module", params=cases())
def mesh(request) -> Iterator[Mesh]:
    """Every placement, with and without peer access, with NumPy references and compiled kernels."""
    with request.param.open() as opened:
        yield opened


@pytest.fixture(scope="session", params=["numpy", pytest.param("compiled", marks=pytest.mark.host)])
def implementation(request) -> str:
    """``kernels=`` of the meshes of ``with_and_without_peers``."""
    return request.param


def with_and_without_peers(*placements: Sequence[int]) -> Callable[..., Iterator[Mesh]]:
    """A fixture: a mesh of each placement, with peer access and, if it has peers, without."""

    @pytest.fixture(
        scope="session",
        params=[
            pytest.param((tuple(each), peers), id=f"{''.join(map(str, each))}{name}")
            for each in placements
            for peers, name in ((True, ""), (False, "-no-peers"))
            if peers or not is_one_physical(each)
        ],
    )
    def mesh(request, implementation) -> Iterator[Mesh]:
        with MeshCase(*request.param, implementation).open() as opened:
            yield opened

    return mesh


@pytest.fixture(scope="module", params=cases(implementations=("numpy",)))
def numpy_mesh(request) -> Iterator[Mesh]:
    """Like ``mesh``, with NumPy references only; for tests that do not test a kernel's values."""
    with request.param.open() as opened:
        yield opened


def mesh_of(devices: int | Sequence[int], *, scope: str = "function", **options):
    @pytest.fixture(scope=scope)
    def mesh() -> Iterator[Mesh]:
        with gr.open_mesh(devices, backend="sim", **options) as opened:
            yield opened

    return mesh


def placement_of(mesh: Mesh) -> list[int]:
    return [device.physical for device in mesh.devices]


def owned(device: Device, array: np.ndarray) -> Buffer:
    return device.upload(array)


def adopted(device: Device, array: np.ndarray) -> Buffer:
    buffer = device.put(array)
    assert not buffer.block.owned
    return buffer


def per_replica(
    mesh: Mesh, make: Callable[[int], np.ndarray], place: Callable | None = None
) -> gr.PerReplica:
    """A PerReplica of ``make(replica)``: NumPy arrays, or the results of ``place``."""
    arrays = [make(replica) for replica in range(len(mesh))]
    if place is not None:
        arrays = [place(device, array) for device, array in zip(mesh, arrays, strict=True)]
    return gr.PerReplica(arrays, mesh)


def num_grown(mesh: Mesh) -> int:
    """How many times the pools of all devices have requested memory from the system."""
    return sum(device._pool.grown for device in mesh.devices)


@contextmanager
def unchanged(*arrays: np.ndarray) -> Iterator[None]:
    """Asserts that no byte of ``arrays`` is written in this context."""
    before = [array.tobytes() for array in arrays]
    yield
    for place, (array, content) in enumerate(zip(arrays, before, strict=True)):
        assert array.tobytes() == content, f"array {place} was written"


@contextmanager
def refused(mesh: Mesh, error: type[Exception], match: str) -> Iterator[None]:
    """Asserts that the block raises, and that no device operation happened before."""
    with mesh.journal() as journal, pytest.raises(error, match=match):
        yield
    assert journal.records == []


def launches_of(journal: Journal, name: str) -> list:
    return [record for record in journal.of("launch") if record.name == name]


def hierarchical_sum(
    replicas: Sequence[np.ndarray],
    divisor: float = 1,
    out: np.dtype | None = None,
    reduction_groups: Sequence[Sequence[int]] | None = None,
) -> np.ndarray:
    """The expected result of hierarchical_copy, computed independently.

    Adds the replicas of each group left to right, then the two sums, and divides. All steps are in
    the accumulate type; the result is rounded once, to ``out`` (default: the replicas' dtype).
    """
    split = len(replicas) // 2
    parts = [replicas[:split], replicas[split:]]
    if reduction_groups is not None:
        parts = [[replicas[number] for number in group] for group in reduction_groups]
    with np.errstate(all="ignore"):
        sums = [_left_to_right(part) for part in parts if len(part)]
        return _finished(sum(sums[1:], sums[0]), divisor, replicas[0], out)


def one_device_sum(
    replicas: Sequence[np.ndarray], divisor: float = 1, out: np.dtype | None = None
) -> np.ndarray:
    """The expected result of reduction to one device: added left to right, divided, rounded."""
    with np.errstate(all="ignore"):
        return _finished(_left_to_right(replicas), divisor, replicas[0], out)


def collective_sum(
    replicas: Sequence[np.ndarray], placement: Sequence[int], divisor: float = 1
) -> np.ndarray:
    """The expected result of nccl over the simulated collective, computed independently.

    Adds and rounds the replicas of each physical device, adds and rounds these sums, and divides.
    With one physical device it adds all, divides, and rounds once.
    """
    first = replicas[0]
    groups: dict[int, list[np.ndarray]] = {}
    for replica, physical in zip(replicas, placement, strict=True):
        groups.setdefault(physical, []).append(replica)
    with np.errstate(all="ignore"):
        if len(groups) == 1:
            return _finished(_left_to_right(replicas), divisor, first)
        folds = [_finished(_left_to_right(group), 1, first) for group in groups.values()]
        total = _finished(_left_to_right(folds), 1, first)
        return _finished(_numbers(total).astype(_accumulate_dtype(first)), divisor, first)


# Algorithm -> the function that computes its expected result.
_SUMS = {
    "nccl": collective_sum,
    "hierarchical_copy": lambda replicas, _, divisor: hierarchical_sum(replicas, divisor),
}


def expected_of(
    algorithm: str, replicas: Sequence[np.ndarray], placement: Sequence[int], divisor: float = 1
) -> np.ndarray:
    """The expected result of an algorithm for replicas on these physical devices."""
    return _SUMS[algorithm](replicas, placement, divisor)


def _left_to_right(terms: Sequence[np.ndarray]) -> np.ndarray:
    total = _numbers(terms[0]).astype(_accumulate_dtype(terms[0]))
    for term in terms[1:]:
        total = total + _numbers(term).astype(total.dtype)
    return total


def _finished(
    total: np.ndarray, divisor: float, like: np.ndarray, out: np.dtype | None = None
) -> np.ndarray:
    if divisor != 1:
        total = total / total.dtype.type(divisor)
    out = like.dtype if out is None else out
    return total.astype(_numbers(np.empty(0, out)).dtype).view(out).reshape(like.shape)


def _numbers(array: np.ndarray) -> np.ndarray:
    """All numbers of the array in one dimension; a complex number becomes two."""
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _accumulate_dtype(array: np.ndarray) -> np.dtype:
    return accumulate_dtype_of(_numbers(array).dtype)


def check_mirrored(result: gr.Mirrored, expected: np.ndarray) -> None:
    """Asserts that every device holds ``expected``, bit by bit."""
    for buffer in result.buffers:
        assert same(buffer.numpy(), expected), f"{buffer}: {buffer.numpy()} is not {expected}"
