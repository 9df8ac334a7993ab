"""``gradreduce check``: runs one operation of each kind, and says what works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import click
import numpy as np

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.backends import BackendName
from gradreduce.errors import counted, listed
from gradreduce.reduce.algorithms import ALGORITHMS

from .options import (
    backend_option,
    json_option,
    of_all_processes,
    open_alone,
    open_chosen,
    optional_devices_option,
    table,
    write,
)

_SECONDS = 60.0  # the longest wait for another process
_SIZE = 1003  # elements; not a multiple of any vector or block size


@click.command()
@optional_devices_option
@backend_option
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    devices: Sequence[int] | None,
    backend: BackendName | None,
    json_file: IO[str] | None,
) -> None:
    """Run one operation of each kind on these devices, and say what works.

    Opens the devices, sums, reduces, accumulates and updates, and compares every value with the
    expected one by equality. Exit status 1 if something does not work. Under torchrun, mpiexec or
    srun the reductions run over all processes, and process 0 prints what works in all of them.
    """
    with open_chosen(devices, backend, _SECONDS) as mesh, open_alone(mesh) as alone:
        outcome_of = {
            what: _outcome(mesh if each.spans else alone, each.run) for what, each in CHECKS.items()
        }
        outcomes = of_all_processes(mesh, "check", outcome_of)
        kind = "simulated devices" if mesh.mesh_state.shares_host_memory else "GPUs"
        place = f"{kind} {[device.physical for device in mesh]}"
        rank, others = mesh.process_index, mesh.num_processes - 1
    if others:
        place += f" and in {counted(others, 'other process', 'other processes')}"
    rows = [(what, *_worst([of_process[what] for of_process in outcomes])) for what in CHECKS]
    failed = [what for what, outcome, _ in rows if outcome == "FAILED"]
    verdict = f"Everything works on {place}."
    if failed:
        verdict = f"On {place} this does not work: {', '.join(failed)}."
    content = {
        "devices": place,
        "works": not failed,
        "checks": [dict(zip(("what", "outcome", "details"), row, strict=True)) for row in rows],
    }
    if rank == 0:
        head = ("what", "outcome", "details")
        write(json_file, content, table("Checks", head, rows), "", verdict)
    ctx.exit(1 if failed else 0)


def _worst(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Returns the outcome of a check in all processes: that of those that fail, if some do."""
    failed = [
        details if len(outcomes) == 1 else f"process {rank}: {details}"
        for rank, (outcome, details) in enumerate(outcomes)
        if outcome == "FAILED"
    ]
    return ("FAILED", listed(failed)) if failed else outcomes[0]


def _outcome(mesh: gr.Mesh, run: Callable[[gr.Mesh], str | None]) -> tuple[str, str]:
    """Runs a check; returns its outcome and details."""
    try:
        skipped = run(mesh)
    except Exception as error:  # any failure
        return "FAILED", f"{type(error).__name__}: {error}"
    return ("skipped", skipped) if skipped else ("works", "")


def _expect(result: Any, expected: Any) -> None:
    """Raises unless two arrays have the same shape and values."""
    result, expected = np.asarray(result), np.asarray(expected)
    if result.shape != expected.shape or not (result == expected).all():
        raise AssertionError(f"got {_brief(result)}, expected {_brief(expected)}")


def _brief(array: np.ndarray) -> str:
    return np.array2string(array, threshold=4, edgeitems=2)


def _terms(number: int) -> list[np.ndarray]:
    """Returns arrays of small integers, whose sums are exact."""
    return [np.arange(_SIZE, dtype=np.float32) % 64 + index for index in range(number)]


def _sum_of_terms(mesh: gr.Mesh) -> None:
    terms = _terms(5)
    for device in mesh:
        _expect(gr.add_n([device.upload(term) for term in terms]).numpy(), np.sum(terms, 0))


def _replicas(mesh: gr.Mesh, name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the terms of this process's replicas, and the sum of those of all processes."""
    counts = of_all_processes(mesh, name, len(mesh))
    terms, first = _terms(sum(counts)), sum(counts[: mesh.process_index])
    return terms[first : first + len(mesh)], np.sum(terms, 0)


def _all_reduce(algorithm: AllReduceAlg) -> Callable[[gr.Mesh], str | None]:
    def run(mesh: gr.Mesh) -> None:
        terms, total = _replicas(mesh, algorithm)
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs=2, mesh=mesh)
        grads = [[term, term[:7]] for term in terms]
        for results in ops.all_reduce(grads, gr.ReduceOp.SUM, output_type="numpy"):
            _expect(results[0], total)
            _expect(results[1], total[:7])

    return run


def _accumulator(mesh: gr.Mesh) -> None:
    terms = _terms(len(mesh))
    value = gr.PerReplica(terms, mesh)
    accumulator = gr.ConditionalAccumulator("float32", (_SIZE,), device=mesh)
    accumulator.apply_grad(value, local_step=0)
    mean = accumulator.take_grad(len(mesh), timeout=60, output_type="numpy")
    _expect(mean.primary, np.sum(terms, 0) / np.float32(len(mesh)))
    if accumulator.apply_grad(value, local_step=0):
        raise AssertionError("gradients of an earlier step were not dropped")


def _optimizer(mesh: gr.Mesh) -> None:
    variable = gr.Variable(np.ones(_SIZE, np.float32), device=mesh)
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    gradient = np.full(_SIZE, 2, np.float32)
    for expected in (0.0, -1.5):  # 1 - 0.5 * 2, then 0 - 0.5 * (0.5 * 2 + 2)
        optimizer.apply_gradients([(gradient, variable)])
        for buffer in variable.buffers:
            _expect(buffer.numpy(), np.full(_SIZE, expected, np.float32))


def _agn(mesh: gr.Mesh) -> None:
    center = gr.AGNCenter(mesh)
    getter = gr.AGNCustomGetter(mesh[0], center=center)
    variable = gr.get_variable("w", np.zeros(3, np.float32), custom_getter=getter)
    rule = gr.GradientDescentOptimizer(0.25)
    optimizer = gr.AGNOptimizer(rule, 1, getter, communication_period=2)
    gradients = [np.full(3, each, np.float32) for each in (4.0, 8.0)]
    with optimizer.make_session_run_hook(True, 0, wait_timeout=60):
        for gradient in gradients:
            optimizer.apply_gradients([(gradient, variable)])
    _expect(center.variables()[0].numpy(), np.full(3, -1.5, np.float32))  # - 0.25 * (4 + 8) / 2
    _expect(variable.numpy(), center.variables()[0].numpy())


def _step(method: str) -> Callable[[gr.Mesh], str | None]:
    def run(mesh: gr.Mesh) -> str | None:
        if method == "capture" and not mesh.mesh_state.has_streams:
            return "CUDA graphs need a GPU"
        terms, expected = _replicas(mesh, method)
        values = [device.upload(term) for device, term in zip(mesh, terms, strict=True)]
        value = gr.PerReplica(values, mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        step = getattr(ops, method)(gr.ReduceOp.SUM, [(value, value)])
        for _ in range(2):
            (total,) = step()
            for buffer in total.values:
                _expect(buffer.numpy(), expected)
        return None

    return run


class MachineCheck(NamedTuple):
    """A check.

    Attributes:
        run: runs it; raises if something is wrong, and returns why it cannot run here.
        spans: whether it runs over the devices of all processes; else in each process alone.
    """

    run: Callable[[gr.Mesh], str | None]
    spans: bool = False


CHECKS = {
    "sum of terms (add_n)": MachineCheck(_sum_of_terms),
    **{f"all-reduce, {name}": MachineCheck(_all_reduce(name), spans=True) for name in ALGORITHMS},
    "accumulator": MachineCheck(_accumulator),
    "optimizer step": MachineCheck(_optimizer, spans=True),
    "AGN step": MachineCheck(_agn),
    "prepared step": MachineCheck(_step("prepare"), spans=True),
    "captured step (CUDA graph)": MachineCheck(_step("capture")),
}
