"""Tests NCCL with several ranks on one GPU, in one process or several.

    python -m gpu_check.ranks version|together|apart|hang|cost NUM_RANKS REPORT [--quick]

All calls go through our own ``NcclCollective``, to test its dtypes, counts and calls; only its
check that each rank has its own GPU is removed. ``apart`` starts this program again for each rank;
these processes meet by an id that the first writes to a file. ``hang`` does so too, and lets one
rank reduce alone until its deadline aborts the communicator. ``cost`` measures the host time of a
call, and of the same calls of NCCL made directly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
from measure.clock import Call, host_seconds

from gradreduce.backends import open_mesh
from gradreduce.backends.cuda.nccl import NcclCollective
from gradreduce.device import Buffer, Device, Mesh, Queue, as_dtype
from gradreduce.device.run.collective import CollectiveCall
from gradreduce.errors import CollectiveError

from .setting import python

# Sums of small whole numbers: exact in every dtype, in whatever order NCCL adds.
DTYPES = (
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "int8", "uint8", "int32", "uint32", "int64", "uint64",
)  # fmt: skip
NOT_NCCLS = ("int16", "uint16")
# One element, an odd tail, more than NCCL's buffer of 4 MiB holds.
SIZES, QUICK_SIZES = (1, 1003, 1_200_007), (1, 1003, 20_011)
COST_SIZE, COST_CALLS = 256, 20  # so few that the GPU never keeps the host waiting
LOOK_SECONDS = 0.02
WAIT_SECONDS = 60.0  # for the file with the id
HANG_SECONDS = 2.0  # the deadline of an all-reduce that never ends
APART = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Ranks:
    """Arguments of a way to run the ranks.

    Attributes:
        count: of the ranks.
        report: a file for the figures.
        sizes: of the arrays, in elements.
    """

    count: int
    report: Path
    sizes: tuple[int, ...]

    def write(self, compared: int) -> None:
        """Writes the number of compared results, all correct, to the report."""
        _write(self.report, {"ranks": self.count, "compared": compared, "dtypes": DTYPES})


class SharingCollective(NcclCollective):
    """``NcclCollective`` without its check that each rank has its own GPU.

    Args:
        communicator: the communicator of this process's only rank; None if it has all ranks.
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


def compare(
    collective: NcclCollective, devices: Sequence[Device], ours: Sequence[int], ranks: Ranks
) -> int:
    """Tests every collective, dtype and size; returns the number of compared results.

    Args:
        collective: the tested collective.
        devices: of this process, one for each of its ranks.
        ours: the ranks of this process.
        ranks: all of them.
    """
    compared = 0
    for dtype in DTYPES:
        for size in ranks.sizes:
            terms = [values(size, dtype, rank) for rank in range(ranks.count)]
            brought = [terms[rank] for rank in ours]
            total = np.sum(terms, axis=0, dtype=terms[0].dtype)
            _all_reduce(collective, devices, brought, total)
            for root in range(ranks.count):
                _broadcast(collective, devices, brought, root, terms[root])
            _all_gather(collective, devices, brought, np.concatenate(terms))
            compared += (2 + ranks.count + 1) * len(ours)
    _refusals(collective, devices)
    return compared


def _all_reduce(
    collective: NcclCollective, devices: Sequence[Device], brought: Any, total: Any
) -> None:
    """Runs two all-reduces in one group, as for two packs."""
    first, second = (_uploaded(devices, brought) for _ in range(2))
    with collective.group():
        collective.all_reduce(first)
        collective.all_reduce(second)
    _equal(first + second, total, "all_reduce")


def _broadcast(
    collective: NcclCollective, devices: Sequence[Device], brought: Any, root: int, wanted: Any
) -> None:
    buffers = _uploaded(devices, brought)
    collective.broadcast(buffers, root)
    _equal(buffers, wanted, f"broadcast from {root}")


def _all_gather(
    collective: NcclCollective, devices: Sequence[Device], brought: Any, wanted: Any
) -> None:
    outputs = [device.zeros(wanted.shape, wanted.dtype) for device in devices]
    collective.all_gather(outputs, _uploaded(devices, brought))
    _equal(outputs, wanted, "all_gather")


def _refusals(collective: NcclCollective, devices: Sequence[Device]) -> None:
    """Tests that a dtype without NCCL support raises an error with its name."""
    for dtype in NOT_NCCLS:
        buffers = _uploaded(devices, [values(4, dtype, 0)] * len(devices))
        try:
            collective.all_reduce(buffers)
        except CollectiveError as error:
            if dtype in str(error):
                continue
        raise AssertionError(f"all_reduce of {dtype} raised no error that names the dtype")


def _uploaded(devices: Sequence[Device], arrays: Sequence[Any]) -> list[Buffer]:
    return [device.upload(array) for device, array in zip(devices, arrays, strict=True)]


def _equal(buffers: Sequence[Buffer], wanted: Any, name: str) -> None:
    for place, buffer in enumerate(buffers):
        found = buffer.numpy()
        if not np.array_equal(found, wanted):
            what = f"{name} of {wanted.size} {wanted.dtype}, buffer {place}"
            raise AssertionError(f"{what}: {found[:8]} is not {wanted[:8]}")


# The ways -----------------------------------------------------------------------------------------


def together(ranks: Ranks) -> int:
    """Runs all ranks in this process, on GPU 0."""
    with open_mesh([0] * ranks.count, backend="cuda") as mesh:
        collective = SharingCollective(mesh)
        compared = compare(collective, mesh.devices, range(ranks.count), ranks)
        mesh.synchronize()
        collective.close()
    ranks.write(compared)
    return 0


def apart(ranks: Ranks, way: str = "rank") -> int:
    """Starts a process per rank; if one fails, kills the others."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{rank}.json" for rank in range(ranks.count)]
        started: list[Popen[bytes]] = []
        try:
            for rank, report in enumerate(reports):
                started.append(_started(f"{way}-{rank}", rank, replace(ranks, report=report)))
            while None in (states := [one.poll() for one in started]) and not any(states):
                time.sleep(LOOK_SECONDS)
        finally:
            for one in started:
                one.kill()
                one.wait()
        if any(one.returncode for one in started):
            print("exit statuses of the ranks:", [one.returncode for one in started])
            return 1
        ranks.write(sum(json.loads(path.read_text())["compared"] for path in reports))
    return 0


def hang(ranks: Ranks) -> int:
    """Starts the ranks of ``hanging_rank``."""
    return apart(ranks, "hanging")


def _started(way: str, rank: int, ranks: Ranks) -> Popen[bytes]:
    """Starts a process for one rank, with its own host name for NCCL."""
    import cupy

    quick = ("--quick",) if ranks.sizes == QUICK_SIZES else ()
    words = ("-m", "gpu_check.ranks", way, str(ranks.count), str(ranks.report), *quick)
    changed = {**APART, "NCCL_HOSTID": f"gradreduce-{rank}"}
    command = python(*words, fake=getattr(cupy, "FAKE", False))
    return Popen(command, env={**os.environ, **changed})


def one_rank(rank: int, ranks: Ranks) -> int:
    """Runs one rank of several processes."""
    with open_mesh([0], backend="cuda") as mesh:
        (device,) = mesh.devices
        communicator = _communicator(device, rank, ranks)
        compared = compare(SharingCollective(mesh, communicator), [device], [rank], ranks)
        mesh.synchronize()
        # Not aborted, as our own close() does: destroy lets what other ranks still read go out.
        communicator.destroy()
    ranks.write(compared)
    return 0


def hanging_rank(rank: int, ranks: Ranks) -> int:
    """Runs a rank; rank 0 calls one more all-reduce than the others.

    Its deadline must pass, the abort end, the GPU come free, and the mesh work after a reset.
    """
    aborting = ranks.report.parent / "aborting"
    array = values(COST_SIZE, "float32", 0)
    with open_mesh([0], backend="cuda") as mesh:
        (device,) = mesh.devices
        collective = SharingCollective(mesh, _communicator(device, rank, ranks))
        buffers = _uploaded([device], [array])
        collective.all_reduce(buffers)
        _equal(buffers, array * ranks.count, "all_reduce")
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
    ranks.write(1)
    return 0


def _communicator(device: Device, rank: int, ranks: Ranks) -> Any:
    from cupy.cuda import nccl

    identity = _identity(ranks.report.parent / "id", rank)
    with device.gpu:  # type: ignore[attr-defined]  # a CudaDevice
        return nccl.NcclCommunicator(ranks.count, identity, rank)


def _identity(path: Path, rank: int) -> bytes:
    """Returns NCCL's unique id, which rank 0 creates and the others read."""
    from cupy.cuda import nccl

    if rank == 0:
        part = path.with_suffix(".part")
        part.write_bytes(bytes(nccl.get_unique_id()))
        part.replace(path)
    _await(path, "an id from rank 0")
    return path.read_bytes()


def _await(path: Path, what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not path.is_file():
        if time.monotonic() > end:
            raise TimeoutError(f"no file {path.name!r} in {WAIT_SECONDS:g} s: {what}")
        time.sleep(LOOK_SECONDS)


def version(ranks: Ranks) -> int:
    """Returns the NCCL version that CuPy found."""
    from cupy.cuda import nccl

    if not nccl.available:
        print("CuPy finds no libnccl")
        return 1
    _write(ranks.report, {"version": int(nccl.get_version())})
    return 0


def cost(ranks: Ranks) -> int:
    """Measures the host time of a small all-reduce, ours and NCCL's."""
    from cupy.cuda import nccl

    quick = ranks.sizes == QUICK_SIZES
    with open_mesh([0] * ranks.count, backend="cuda") as mesh:
        collective = SharingCollective(mesh)
        buffers = _uploaded(mesh.devices, [np.zeros(COST_SIZE, np.float32)] * ranks.count)
        collective.all_reduce(buffers)
        communicators = collective._cliques.made[(0,) * ranks.count]
        given = [
            (each.address, each.address, each.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM,
             each.device._stream("compute").ptr)  # type: ignore[attr-defined]  # a CudaDevice
            for each in buffers
        ]  # fmt: skip

        def raw() -> None:
            nccl.groupStart()
            for communicator, arguments in zip(communicators, given, strict=True):
                communicator.allReduce(*arguments)
            nccl.groupEnd()

        calls: dict[str, Call] = {"ours": partial(collective.all_reduce, buffers), "raw": raw}
        seconds = host_seconds(calls, 1 if quick else COST_CALLS, quick=quick)
        mesh.synchronize()
        collective.close()
    figures = {f"{name} us": taken * 1e6 for name, taken in seconds.items()}
    _write(ranks.report, {**figures, "us over raw": figures["ours us"] - figures["raw us"]})
    return 0


def _write(report: Path, figures: dict[str, Any]) -> None:
    report.write_text(json.dumps(figures), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the ways; returns 1 if a rank failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", help="version, together, apart, hang or cost")
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("report", type=Path, help="the file for the figures")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    options = parser.parse_args(arguments)
    sizes = QUICK_SIZES if options.quick else SIZES
    ranks = Ranks(options.num_ranks, options.report, sizes)
    way, _, rank = options.way.partition("-")
    if rank:
        return {"rank": one_rank, "hanging": hanging_rank}[way](int(rank), ranks)
    ways = {"version": version, "together": together, "apart": apart, "hang": hang, "cost": cost}
    return ways[way](ranks)


if __name__ == "__main__":
    sys.exit(main())
