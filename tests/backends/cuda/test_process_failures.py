"""Processes that fail, leave or make other calls, while NCCL adds or exchanges their tensors."""

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from backends.cuda.process_meshes import LIBRARIES, here, on_devices, run_all
from fake_cupy import nccl
from fake_cupy.machine import Machine

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.errors import CollectiveError, InvalidArgumentError

__all__ = ["here"]
pytestmark = pytest.mark.fake_cupy
SUM = gr.ReduceOp.SUM


@pytest.fixture(params=["nccl", "hierarchical_copy"])
def algorithm(request) -> str:
    """A collective of NCCL, or exchanges between pairs of processes."""
    return request.param


def two_calls(mesh: Mesh, algorithm: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two reductions that each process has made once, of as many bytes."""
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    calls = []
    for sizes in ((6, 5), (5, 6)):
        values = [on_devices(mesh, [np.ones(size, np.float32)] * len(mesh)) for size in sizes]
        pairs = [(value, value) for value in values]
        ops.batch_reduce(SUM, pairs)
        calls.append(lambda pairs=pairs, **options: ops.batch_reduce(SUM, pairs, **options))
    mesh.synchronize()
    return calls[0], calls[1]


def test_processes_that_reduce_other_tensors_raise_before_a_launch(here, algorithm):
    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
        value = on_devices(mesh, [np.full(4 + replicas[0], 2.0)] * len(mesh))
        with mesh.journal() as journal, pytest.raises(InvalidArgumentError) as caught:
            ops.batch_reduce(SUM, [(value, value)])
        assert not journal.launches
        assert not [*journal.of("collective"), *journal.of("exchange")]
        return str(caught.value)

    for said in run_all("ours", [[0], [1, 2]], work):
        assert "the processes pass different tensors: tensor 0 is float64[" in said


def test_known_calls_in_another_order_are_an_error_in_both_processes(here, algorithm):
    """NCCL adds or exchanges them anyway, because they have equal numbers of bytes."""
    end = time.monotonic() + 10

    def work(mesh, replicas):
        calls = two_calls(mesh, algorithm)
        with pytest.raises(CollectiveError) as caught:
            while time.monotonic() < end:
                calls[replicas[0] > 0]()
                mesh.synchronize()
        return str(caught.value)

    for said in run_all("ours", [[0], [1, 2]], work):
        assert "the processes pass different tensors: tensor 0 is float32[" in said


def test_one_call_in_another_order_is_found_later(here, algorithm):
    """The watchdog need not check each call, because a call's history is compared."""
    posted = threading.Barrier(2)

    def work(mesh, replicas):
        calls, group, rank = two_calls(mesh, algorithm), mesh.mesh_state.processes, replicas[0]
        group.look = lambda: None
        for number in (rank, 1 - rank, 0):
            calls[number]()
        posted.wait(10)
        del group.look
        with pytest.raises(CollectiveError, match=r"before call 4 process \d made other calls"):
            assert nccl.until(lambda: mesh.mesh_state.reason)
            mesh.synchronize()

    run_all("ours", [[0], [1]], work)


def test_a_process_that_leaves_is_named_before_the_deadline(here, algorithm):
    def work(mesh, replicas):
        call, _ = two_calls(mesh, algorithm)
        if replicas[0]:
            return ""
        with pytest.raises(CollectiveError) as caught:
            call(deadline=60)
            mesh.synchronize()
        return str(caught.value)

    said, _ = run_all("ours", [[0], [1]], work)
    assert "pack 1 of 1 (tensors 0 to 1): process 1: closed its mesh after 2 calls" in said


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_process_that_does_not_come_is_named_and_the_record_shows_the_call(
    here, algorithm, library, monkeypatch, tmp_path
):
    """Our communicators are aborted; PyTorch must end its own."""
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    over, met = threading.Event(), threading.Barrier(2)

    def work(mesh, replicas):
        call, _ = two_calls(mesh, algorithm)
        if replicas[0] == 2:
            assert over.wait(10)
            return ""
        with pytest.raises(CollectiveError) as caught:
            call(deadline=0.3)
            mesh.synchronize()
        met.wait(10)
        over.set()
        return str(caught.value)

    said, _, other = run_all(library, [[0, 1], [2], [3, 3]], work, timeout=60)
    for text in (said, other):
        assert "the deadline of 0.3 s for" in text
        assert "process 1 of 3 has not come to call 2 (reduction, tensors: float32[6], " in text
        assert "end the processes and start them again" in text
    for path in (*tmp_path.glob("*.rank0.json"), *tmp_path.glob("*.rank2.json")):
        entries = json.loads(path.read_text())["entries"]
        last = [each for each in entries if each["kind"] in ("collective", "exchange")][-1]
        assert (last["done"], last["tensors"]) == (False, "pack 1 of 1 (tensors 0 to 1)")
    assert len([*tmp_path.iterdir()]) >= 2
    for each in nccl.library.made if library != "ours" else ():
        assert not each._ended
        each.abort()  # like PyTorch's watchdog
    assert nccl.until(lambda: {each._ended for each in nccl.library.made} == {"abort"})


def test_the_timeout_of_the_mesh_ends_a_call(here, algorithm):
    """Also without a deadline: the call returns, and a later one raises."""
    over = threading.Event()

    def work(mesh, replicas):
        call, _ = two_calls(mesh, algorithm)
        if replicas[0]:
            assert over.wait(20)
            return
        mesh.mesh_state.processes.timeout = 0.3
        call()
        has_failed = nccl.until(lambda: mesh.mesh_state.reason)
        over.set()
        assert has_failed
        with pytest.raises(CollectiveError, match=r"0\.3 s for pack 1 .*process 1 of 2 has"):
            call()

    run_all("ours", [[0, 1], [2]], work)


def end_silently(mesh: Mesh, machine: Machine) -> None:
    """From now on no thread of this process posts anything, and its GPU does nothing."""
    group = mesh.mesh_state.processes
    group.look = lambda: None
    group.tell_failure = group.tell_end = lambda *arguments: None
    machine.stall(mesh[0])


@pytest.mark.parametrize("prepared", [False, True])
def test_a_process_that_ends_inside_a_call_is_named_by_all(here, prepared):
    deadline, met, ended = 0.5, threading.Barrier(3), threading.Barrier(3)

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(mesh=mesh)
        value = on_devices(mesh, [np.ones(5, np.float32)] * len(mesh))
        step = ops.prepare(SUM, [(value, value)])
        call = step if prepared else partial(ops.batch_reduce, SUM, [(value, value)])
        call()
        mesh.synchronize()
        if replicas[0] == 1:
            end_silently(mesh, here)
            call()
            met.wait(10)
            ended.wait(10)
            mesh.mesh_state.fail("it has ended")
            return "", 0.0
        met.wait(10)
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            call(deadline=deadline if replicas[0] == 0 else None)  # the other one only answers
            mesh.synchronize()
        seconds = time.monotonic() - start
        ended.wait(10)
        return str(caught.value), seconds

    try:
        (one, first), _, (two, second) = run_all("ours", [[0], [1], [2]], work)
    finally:
        here.resume()
    assert max(first, second) < deadline + 2
    for said in (one, two):
        assert "process 1 of 3 has come to call " in said
        assert "but has given no sign of life since" in said
