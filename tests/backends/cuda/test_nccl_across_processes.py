"""NCCL's own collectives over processes, which are threads in these tests."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import distributed, nccl
from fake_cupy.machine import Machine
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.backends.cuda import device as cuda
from gradreduce.comm.process_group import ProcessGroup
from gradreduce.device import Mesh

pytestmark = pytest.mark.fake_cupy
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "uint8", "int32", "int64")
# The GPU of each replica, by process: 2 to 4 processes, 1 to 3 GPUs of each, uneven replicas.
PLACES = {
    "one GPU each": [[0], [1]],
    "replicas share a GPU": [[0, 0], [1], [2, 2, 2]],
    "two GPUs each": [[0, 1], [2, 3]],
    "uneven": [[0, 1, 0], [2], [3, 4, 5]],
    "four processes": [[0], [1, 2], [3, 3], [4, 5, 6, 4]],
}
LIBRARIES = ("ours", "PyTorch's")
Work = Callable[[Mesh, range], Any]


@pytest.fixture
def here(request, gpus) -> Iterator[Machine]:
    made = gpus(getattr(request, "param", 3), num_gpus=8)
    nccl.library.patience = 10.0
    yield made
    made.settle()
    cuda._RETAINED.clear()  # memory of devices with an unfinished exchange


def run_all(library: str, places: list[list[int]], work: Work, **options: Any) -> list[Any]:
    """Runs ``work(mesh, replicas)`` in each process; returns the results by process."""
    size, store = len(places), distributed.Store()
    firsts = [sum(map(len, places[:rank])) for rank in range(size + 1)]

    def run(group: ProcessGroup) -> Any:
        rank = group.rank
        if library != "ours":
            ranks = [5 + 2 * each for each in range(size)]  # of a larger group
            group = distributed.ProcessGroup("cpu:gloo,cuda:nccl", store, rank, ranks)
        mesh = gr.open_mesh(places[rank], backend="cuda", process_group=group, **options)
        found = work(mesh, range(firsts[rank], firsts[rank + 1]))
        mesh.close()
        return found

    if library == "ours":
        return run_processes(size, run, gpu_library="nccl")
    with distributed.installed():
        return run_processes(size, run)


def number_of(places: list[list[int]]) -> int:
    return sum(map(len, places))


def terms_of(places: list[list[int]], shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """One array for each replica, whose sums and means are exact in every dtype."""
    random, count = np.random.default_rng(len(shape)), number_of(places)
    terms = random.integers(0, 4, (count, *shape)) * count
    if dtype.startswith("complex"):
        terms = terms - 1j * terms[::-1]
    return [*terms.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)]


def sum_of(terms: list[np.ndarray], op: gr.ReduceOp) -> np.ndarray:
    total = np.sum(terms, axis=0, dtype=complex if terms[0].dtype.kind == "c" else np.float64)
    return total / (len(terms) if op is MEAN else 1)


def on_devices(mesh: Mesh, arrays: list[np.ndarray]) -> gr.PerReplica:
    return gr.PerReplica([d.upload(a) for d, a in zip(mesh, arrays, strict=True)], mesh)


@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_sums_and_means_of_all_dtypes_are_numpys(here, places, library):
    shapes = [(7,), (3, 5), (0,), (2_011,)]
    terms = {(dtype, shape): terms_of(places, shape, dtype) for dtype in DTYPES for shape in shapes}

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(2, mesh=mesh)
        values = [on_devices(mesh, [each[r] for r in replicas]) for each in terms.values()]
        pairs = [(value, value) for value in values]
        with mesh.journal() as journal:
            step = ops.prepare(SUM, pairs)
            plays = [step(), step(), ops.batch_reduce(MEAN, pairs)]
        kinds = {record.kind for record in journal.records}
        assert not kinds & {"exchange", "upload", "download", "sync"}
        assert {record.name for record in journal.of("collective")} == {"all_reduce"}
        return [[[b.numpy() for b in total.buffers] for total in play] for play in plays]

    for *sums, means in run_all(library, places, work):
        for op, totals in ((SUM, sums[0]), (SUM, sums[1]), (MEAN, means)):
            for (dtype, _), replicas, of_all in zip(terms, totals, terms.values(), strict=True):
                wanted = sum_of(of_all, op)
                for array in replicas:
                    assert op is MEAN or array.dtype == of_all[0].dtype
                    assert (array.astype(wanted.dtype) == wanted).all(), dtype
    assert here.counts.get("init") == 1
