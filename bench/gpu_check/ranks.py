"""Tests NCCL with several ranks on one GPU, in one process or several.

All calls go through our own ``NcclCollective``, to test its dtypes, counts and calls; only its
check that each rank has its own GPU is removed. ``apart`` starts a process for each rank; these
meet by an id that the first writes to a file. ``hanging_rank`` lets one rank reduce alone until its
deadline aborts the communicator.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure.clock import Call, host_seconds
from measure.in_processes import figures_of_each
from measure.reductions import raw_all_reduce

from gradreduce.backends import open_mesh
from gradreduce.backends.cuda.nccl import NcclCollective
from gradreduce.device import Buffer, Device, Mesh, Queue, as_dtype
from gradreduce.device.run.collective import CollectiveCall
from gradreduce.errors import CollectiveError

from .setting import hosts, python

# Sums of small whole numbers: exact in every dtype, in whatever order NCCL adds.
DTYPES = (
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "int8", "uint8", "int32", "uint32", "int64", "uint64",
)  # fmt: skip
# One element, an odd tail, more than NCCL's buffer of 4 MiB holds.
SIZES, QUICK_SIZES = (1, 1003, 1_200_007), (1, 1003, 20_011)
COST_SIZE, COST_CALLS = 256, 20  # so few that the GPU never keeps the host waiting
LOOK_SECONDS = 0.02
RANKS_SECONDS = 600.0  # the check has a shorter deadline
WAIT_SECONDS = 60.0  # for the file with the id
HANG_SECONDS = 2.0  # the deadline of an all-reduce that never ends
Figures = dict[str, Any]


def compared_in(count: int, compared: int) -> Figures:
    """Returns the number of compared results, all correct."""
    return {"ranks": count, "compared": compared, "dtypes": DTYPES}


class SharingCollective(NcclCollective):
    """``NcclCollective`` without its check that each rank has its own GPU.

    ``communicator`` is that of this process's only rank; None if it has all ranks.
    """

    def __init__(self, mesh: Mesh, communicator: Any = None) -> None:
        super().__init__(mesh.mesh_state)
        self.load()
        if communicator is not None:
            self._cliques.made[(0,)] = [communicator]

    def _check(self, name: str, buffers: Sequence[Buffer], written: Sequence[Buffer]) -> None:
        """Accepts several buffers on one GPU, one per rank."""

    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """Accepts a root rank in another process."""
        self._call(CollectiveCall("broadcast", buffers, buffers, root, queue))

    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """Accepts outputs with room for the inputs of other processes."""
        self._call(CollectiveCall("all_gather", inputs, outputs, None, queue))


def values(size: int, dtype: str, rank: int) -> np.ndarray[Any, Any]:
    """Returns the input of a rank: integers from 0 to 7, also as complex numbers."""
    row = (np.arange(size) + rank) % 8
    made = row - 1j * (row % 3) if dtype.startswith("complex") else row
    return made.astype(as_dtype(dtype))


def compare(collective: NcclCollective, ours: dict[int, Device], count: int, *, quick: bool) -> int:
    """Tests every collective, dtype and size; returns the number of compared results.

    ``ours`` has the ranks of this process, of ``count`` ranks, with their devices.
    """
    compared, devices = 0, list(ours.values())
    for dtype in DTYPES:
        for size in QUICK_SIZES if quick else SIZES:
            terms = [values(size, dtype, rank) for rank in range(count)]
            mine = [terms[rank] for rank in ours]
            one, other = _uploaded(devices, mine), _uploaded(devices, mine)
            with collective.group():  # as for two packs
                collective.all_reduce(one)
                collective.all_reduce(other)
            _equal(one + other, np.sum(terms, axis=0, dtype=terms[0].dtype), "all_reduce")
            for root, term in enumerate(terms):
                buffers = _uploaded(devices, mine)
                collective.broadcast(buffers, root)
                _equal(buffers, term, f"broadcast from {root}")
            gathered = np.concatenate(terms)
            outputs = [device.zeros(gathered.shape, gathered.dtype) for device in devices]
            collective.all_gather(outputs, _uploaded(devices, mine))
            _equal(outputs, gathered, "all_gather")
            compared += (2 + count + 1) * len(ours)
    return compared


def _uploaded(devices: Sequence[Device], arrays: Sequence[Any]) -> list[Buffer]:
    return [device.upload(array) for device, array in zip(devices, arrays, strict=True)]


def _equal(buffers: Sequence[Buffer], wanted: Any, name: str) -> None:
    for place, buffer in enumerate(buffers):
        what = f"{name} of {wanted.size} {wanted.dtype}, buffer {place}"
        np.testing.assert_array_equal(buffer.numpy(), wanted, what)


def together(quick: bool, count: int) -> Figures:
    """Runs all ranks in this process, on GPU 0."""
    with open_mesh([0] * count, backend="cuda") as mesh:
        collective = SharingCollective(mesh)
        compared = compare(collective, dict(enumerate(mesh)), count, quick=quick)
        mesh.synchronize()
        collective.close()
    return compared_in(count, compared)


def apart(quick: bool, count: int, way: str = "one_rank") -> Figures:
    """Starts a process per rank, with its own host name for NCCL; if one fails, ends the others."""
    import cupy

    with tempfile.TemporaryDirectory() as folder:
        found = figures_of_each(
            f"gpu_check.ranks:{way}",
            [(quick, count, rank, folder) for rank in range(count)],
            python(fake=getattr(cupy, "FAKE", False)),
            RANKS_SECONDS,
            hosts(count),
        )
    return compared_in(count, sum(each["compared"] for each in found))


def one_rank(quick: bool, count: int, rank: int, folder: str) -> Figures:
    """Runs one rank of several processes."""
    with open_mesh([0], backend="cuda") as mesh:
        (device,) = mesh.devices
        communicator = _communicator(device, rank, count, folder)
        collective = SharingCollective(mesh, communicator)
        compared = compare(collective, {rank: device}, count, quick=quick)
        mesh.synchronize()
        # Not aborted, as our own close() does: destroy lets what other ranks still read go out.
        communicator.destroy()
    return compared_in(count, compared)


def hanging_rank(quick: bool, count: int, rank: int, folder: str) -> Figures:
    """Runs a rank; rank 0 calls one more all-reduce than the others.

    Its deadline must pass, the abort end, the GPU come free, and the mesh work after a reset.
    """
    aborting = Path(folder) / "aborting"
    array = values(COST_SIZE, "float32", 0)
    with open_mesh([0], backend="cuda") as mesh:
        (device,) = mesh.devices
        collective = SharingCollective(mesh, _communicator(device, rank, count, folder))
        buffers = _uploaded([device], [array])
        collective.all_reduce(buffers)
        _equal(buffers, array * count, "all_reduce")
        if rank == 0:
            collective.all_reduce(buffers)
            try:
                device.synchronize(deadline=HANG_SECONDS)
            except CollectiveError as error:
                print(f"as it should be: {error}")
            else:
                raise AssertionError("an all_reduce that other ranks did not join has ended")
            aborting.touch()
        else:
            _await(aborting, "the abort of rank 0")
            collective.abort()
        if not collective.wait_for_end(WAIT_SECONDS / 2):
            raise AssertionError(f"the abort of rank {rank} has not ended")
        mesh.reset(timeout=WAIT_SECONDS / 2)
        _equal(_uploaded([device], [array]), array, "upload after the reset")
    return compared_in(count, 1)


def _communicator(device: Device, rank: int, count: int, folder: str) -> Any:
    """Makes a communicator by NCCL's unique id, which rank 0 creates and the others read."""
    from cupy.cuda import nccl

    path = Path(folder) / "id"
    if rank == 0:
        part = path.with_suffix(".part")
        part.write_bytes(bytes(nccl.get_unique_id()))
        part.replace(path)
    _await(path, "an id from rank 0")
    with device.gpu:  # type: ignore[attr-defined]  # a CudaDevice
        return nccl.NcclCommunicator(count, path.read_bytes(), rank)


def _await(path: Path, what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not path.is_file():
        if time.monotonic() > end:
            raise TimeoutError(f"no file {path.name!r} in {WAIT_SECONDS:g} s: {what}")
        time.sleep(LOOK_SECONDS)


def version(quick: bool) -> Figures:
    from cupy.cuda import nccl

    if not nccl.available:
        raise AssertionError("CuPy finds no libnccl")
    return {"version": int(nccl.get_version())}


def cost(quick: bool, count: int) -> Figures:
    """Measures the host time of a small all-reduce, ours and the same calls of NCCL."""
    with open_mesh([0] * count, backend="cuda") as mesh:
        collective = SharingCollective(mesh)
        buffers = _uploaded(mesh.devices, [np.zeros(COST_SIZE, np.float32)] * count)
        collective.all_reduce(buffers)
        raw = raw_all_reduce(collective._cliques.made[(0,) * count], buffers)
        calls: dict[str, Call] = {"ours": partial(collective.all_reduce, buffers), "raw": raw}
        seconds = host_seconds(calls, 1 if quick else COST_CALLS, quick=quick)
        mesh.synchronize()
        collective.close()
    figures = {f"{name} us": taken * 1e6 for name, taken in seconds.items()}
    return {**figures, "us over raw": figures["ours us"] - figures["raw us"]}
