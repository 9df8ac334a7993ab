"""Deadlines on GPUs: no waits in the driver, aborted communicators, and resets."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from fake_cupy import nccl
from fake_cupy.machine import Machine
from fake_cupy.surface import CUDARuntimeError
from support.exact_data import same
from support.hanging_devices import TEST_TIMEOUT, clock, no_thread_starts, wait_for_failure

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.backends.cuda import device as cuda
from gradreduce.backends.cuda import nccl as cuda_nccl
from gradreduce.device import Mesh
from gradreduce.errors import BackendUnavailableError, CollectiveError
from gradreduce.reduce.algorithms import ALGORITHMS

pytestmark = pytest.mark.fake_cupy
__all__ = ["clock"]


@pytest.fixture(params=[0, 1, 3])
def here(request, gpus) -> Iterator[Machine]:
    made = gpus(request.param)
    yield made
    made.settle()
    cuda._RETAINED.clear()  # memory of failed devices is kept forever


@pytest.fixture
def mesh(here):
    with open_mesh([0, 1, 1, 2], backend="cuda") as made:
        yield made
        here.resume()  # a test that failed may have left a queue stalled


def reduced(mesh: Mesh, algorithm: str = "nccl", **options) -> list:
    grads = [
        [device.upload(np.full(size, 1.0 + device.index, np.float32)) for size in (40, 70)]
        for device in mesh.devices
    ]
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
    return ops.all_reduce(grads, gr.ReduceOp.SUM, **options)


def is_kept(mesh: Mesh) -> list[bool]:
    """Of each device, whether its memory stays after it; other tests' devices do not count."""
    return [id(device._pool) in cuda._RETAINED for device in mesh.devices]


def is_right(results: list) -> bool:
    return all(
        same(buffer.numpy(), np.full(size, 10, np.float32))
        for row in results
        for size, buffer in zip((40, 70), row, strict=True)
    )


def communicators(mesh: Mesh) -> list:
    return mesh.collective._cliques.communicators()


def ends(made: list) -> set[str]:
    return {each._ended for each in made}


def hang(here: Machine, mesh: Mesh, place: int = 0, *, deadline: float = 5) -> list:
    """Stalls a GPU after a first call, which makes communicators, and calls again."""
    reduced(mesh)
    mesh.synchronize()
    here.stall(mesh.devices[place])
    return reduced(mesh, deadline=deadline)


def check_usable(here: Machine, mesh: Mesh, algorithm: str = "nccl") -> None:
    """Resets a mesh whose queues run again."""
    here.resume()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert is_right(reduced(mesh, algorithm, deadline=TEST_TIMEOUT))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stuck_gpu_is_named_and_a_reset_waits_for_it(here, mesh, clock, algorithm):
    """No thread waits in the driver, where a wait for a hanging stream never ends."""
    assert is_right(reduced(mesh, algorithm, deadline=TEST_TIMEOUT))
    before = communicators(mesh) if algorithm == "nccl" else []
    mesh.synchronize()
    here.stall(mesh.devices[3])
    results = reduced(mesh, algorithm, deadline=5)
    clock.advance(6)
    words = r"for batch_reduce passed: cuda:3 has not joined packs 1 to 2 of 2 \(tensors 0 to 1\)"
    with pytest.raises(CollectiveError, match=words):
        results[0][0].numpy()
    wait_for_failure(mesh)
    assert mesh.mesh_state.library_finished(TEST_TIMEOUT)
    with pytest.raises(CollectiveError, match=r"queues have not finished: .*cuda:3"):
        mesh.reset(timeout=0.02)
    with pytest.raises(CollectiveError, match=words):
        mesh.devices[0].synchronize()
    assert ends(before) <= {"abort"}
    check_usable(here, mesh, algorithm)
    assert here.counts.get("init", 0) == 2 * (algorithm == "nccl")


def test_a_reset_does_not_wait_for_a_full_queue(here, mesh, clock):
    """It would keep the interpreter's lock meanwhile, so that no thread of Python would run."""
    hang(here, mesh, 3)
    clock.advance(6)
    wait_for_failure(mesh)
    assert mesh.mesh_state.library_finished(TEST_TIMEOUT)  # a thread aborts the communicators
    here.queue_size = len(here.queues[mesh.devices[3]._stream("compute").ptr].waiting)
    with pytest.raises(CollectiveError, match=r"queues have not finished: .*cuda:3"):
        mesh.reset(timeout=0.02)
    here.queue_size = None
    check_usable(here, mesh)


@pytest.mark.parametrize("wait", ["download", "synchronize"])
def test_a_host_wait_ends_by_its_own_deadline_and_its_memory_stays(here, mesh, wait):
    device = mesh.devices[0]
    buffer = device.upload(np.ones(9, np.float32))
    device.synchronize()
    here.stall(device)
    device.zeros((4,), "float32")
    # On a busy machine other GPUs may not have finished either.
    with pytest.raises(CollectiveError, match=r"passed: cuda:0.* not finished"):
        if wait == "download":
            buffer.numpy(deadline=0.01)
        else:
            device.synchronize(deadline=0.01)
    assert device._staging or wait == "synchronize"
    here.resume()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert same(buffer.numpy(), np.ones(9, np.float32))
    assert not device._staging


def test_plain_waits_stay_in_the_driver_until_the_first_deadline(here, mesh):
    buffer = mesh.devices[0].upload(np.ones(9, np.float32))
    mesh.synchronize()
    assert here.counted(buffer.numpy)["synchronize"] == 1
    mesh.synchronize(deadline=TEST_TIMEOUT)
    empty = mesh.devices[0].zeros((0, 3), "int32")
    for wait in (
        buffer.numpy,
        partial(buffer.numpy, deadline=TEST_TIMEOUT),
        empty.numpy,
        mesh.synchronize,
    ):
        assert here.counted(wait)["synchronize"] == 0


def test_an_error_of_nccl_fails_the_mesh_before_a_deadline_passes(here, mesh, clock):
    hang(here, mesh, deadline=1000)
    communicators(mesh)[0].async_result = 7  # in progress, which is not an error
    communicators(mesh)[1].async_result = 6
    said = "NCCL asynchronous error: NCCL_ERROR_REMOTE_ERROR: remote process exited or there was"
    assert wait_for_failure(mesh).startswith(said)
    check_usable(here, mesh)


def test_where_no_thread_can_start_communicators_are_aborted_all_the_same(here, mesh, clock):
    reduced(mesh, deadline=1000)
    mesh.synchronize()
    before = communicators(mesh)
    here.stall(mesh.devices[0])
    with no_thread_starts() as refused:
        refused.append(True)
        reduced(mesh, deadline=5)
        clock.advance(6)
        assert "passed: cuda:0 has not joined" in wait_for_failure(mesh)
    assert ends(before) == {"abort"}
    check_usable(here, mesh)


def test_a_hanging_abort_blocks_only_the_reset(here, mesh, clock, monkeypatch):
    let_go = threading.Event()
    abort = nccl.NcclCommunicator.abort

    def abort_later(communicator) -> None:
        assert let_go.wait(TEST_TIMEOUT)
        abort(communicator)

    monkeypatch.setattr(nccl.NcclCommunicator, "abort", abort_later)
    hang(here, mesh)
    clock.advance(6)
    wait_for_failure(mesh)
    here.resume()
    with pytest.raises(CollectiveError, match="the communicators are not aborted yet"):
        mesh.reset(timeout=0.01)
    let_go.set()
    check_usable(here, mesh)


def called(mesh: Mesh, outcomes: list[str]) -> None:
    """A call with a deadline; notes its error."""
    try:
        reduced(mesh, deadline=5)
    except CollectiveError as error:
        outcomes.append(str(error))


@contextmanager
def inside_of_nccl(mesh: Mesh, call: Callable[[], object]) -> Iterator[None]:
    """A thread calls it, and hangs at the end of its first group as long as this context lasts."""
    group_end, inside, let_go = nccl.groupEnd, threading.Event(), threading.Event()

    def slow() -> None:
        if threading.current_thread() is caller:
            inside.set()
            let_go.wait(2 * TEST_TIMEOUT)
        group_end()

    caller = threading.Thread(target=call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh.collective._nccl, "groupEnd", slow)
        caller.start()
        assert inside.wait(TEST_TIMEOUT)
        try:
            yield
        finally:
            let_go.set()
            caller.join(TEST_TIMEOUT)


def test_a_thread_that_hangs_inside_nccl_does_not_block_the_abort(here, mesh, clock, monkeypatch):
    """The thread holds the locks of the communicators and of the mesh; the abort needs neither."""
    monkeypatch.setattr(cuda_nccl, "INSIDE_SECONDS", 0.01)
    reduced(mesh)
    mesh.synchronize()
    before, outcomes = communicators(mesh), []
    with inside_of_nccl(mesh, partial(called, mesh, outcomes)):
        clock.advance(6)
        assert "the call itself has not submitted all" in wait_for_failure(mesh)
        assert mesh.mesh_state.library_finished(TEST_TIMEOUT)
        assert ends(before) == {"abort"}
        with pytest.raises(CollectiveError, match="a call is still submitting work to the devices"):
            mesh.reset(timeout=0.02)
    assert "mesh has failed" in outcomes[0]
    check_usable(here, mesh)


def test_an_abort_waits_for_a_thread_that_is_inside_of_nccl(here, mesh, monkeypatch):
    """Because NCCL frees an aborted communicator."""
    monkeypatch.setattr(cuda_nccl, "INSIDE_SECONDS", TEST_TIMEOUT)
    reduced(mesh)
    mesh.synchronize()
    before = communicators(mesh)
    buffers = [mesh.devices[place].zeros((9,), "float32") for place in (0, 1, 3)]
    with inside_of_nccl(mesh, lambda: mesh.collective.all_reduce(buffers)):
        mesh.mesh_state.fail("for a test")
        wait_for_failure(mesh)
        assert not mesh.mesh_state.library_finished(0.02)
        assert ends(before) == {""}
    mesh.reset(timeout=TEST_TIMEOUT)
    assert ends(before) == {"abort"}


@pytest.fixture
def hung_bootstrap() -> Iterator[threading.Event]:
    """An event; initialisations hang until it is set."""
    nccl.library.bootstrap = threading.Event()
    yield nccl.library.bootstrap
    nccl.library.bootstrap = None


def test_a_hanging_bootstrap_ends_when_the_mesh_fails(here, mesh, clock, hung_bootstrap):
    """Its caller returns; communicators that NCCL makes later are aborted."""
    outcomes = []
    (caller := threading.Thread(target=called, args=(mesh, outcomes))).start()
    assert nccl.library.begun.wait(TEST_TIMEOUT)
    clock.advance(6)
    assert "the call itself has not submitted all" in wait_for_failure(mesh)
    caller.join(TEST_TIMEOUT)
    assert "mesh has failed: the deadline of 5 s" in outcomes[0]
    with pytest.raises(CollectiveError, match="the communicators are not aborted yet"):
        mesh.reset(timeout=0.02)
    hung_bootstrap.set()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert [each._ended for each in nccl.library.made] == ["abort"] * 3
    check_usable(here, mesh)


def test_ctrl_c_ends_a_hanging_bootstrap(here, mesh, hung_bootstrap):
    """The next call begins another initialisation; one of the two results is aborted."""
    devices = [mesh.devices[place] for place in (0, 1, 3)]
    main = threading.main_thread().ident

    def interrupt() -> None:
        if nccl.library.begun.wait(TEST_TIMEOUT):
            signal.pthread_kill(main, signal.SIGINT)

    (interrupting := threading.Thread(target=interrupt, daemon=True)).start()
    with pytest.raises(KeyboardInterrupt):
        mesh.collective.connect(devices)
    interrupting.join(TEST_TIMEOUT)
    nccl.library.begun.clear()
    (again := threading.Thread(target=mesh.collective.connect, args=(devices,))).start()
    assert nccl.library.begun.wait(TEST_TIMEOUT)
    hung_bootstrap.set()
    again.join(TEST_TIMEOUT)
    assert mesh.collective.wait_for_end(TEST_TIMEOUT)
    assert sorted(each._ended for each in nccl.library.made) == [""] * 3 + ["abort"] * 3
    assert is_right(reduced(mesh))


@pytest.mark.parametrize("version", [22105, 22203])
def test_cliques_that_hang_on_one_gpu_are_aborted_at_once(here, mesh, version):
    """If NCCL can: an abort waits for its GPU, and so for other communicators on it."""
    nccl.library.version = version
    groups = [(0, 1, 3), (0, 1)] if version == 22203 else [(0, 1, 3)]
    for places in groups:
        mesh.collective.connect([mesh.devices[place] for place in places])
    before = communicators(mesh)
    mesh.synchronize()
    here.stall(mesh.devices[0])
    for places in groups:
        buffers = [mesh.devices[place].zeros((9,), "float32") for place in places]
        mesh.collective.all_reduce(buffers)
    mesh.mesh_state.fail("for a test")
    wait_for_failure(mesh)
    assert mesh.mesh_state.library_finished(TEST_TIMEOUT)
    assert ends(before) == {"abort"}
    check_usable(here, mesh)


def test_a_group_that_waited_for_the_lock_uses_no_aborted_communicator(here, mesh):
    reduced(mesh)
    collective = mesh.collective
    old = collective._cliques
    collective.abort()
    with pytest.raises(CollectiveError, match="communicators were aborted"):
        old.check()
    assert collective.wait_for_end(TEST_TIMEOUT)
    assert collective.error() is None
    assert is_right(reduced(mesh))
    assert collective._cliques is not old


def test_a_gpu_that_fails_during_a_call_is_named(here, mesh, clock):
    reduced(mesh)
    mesh.synchronize()
    here.stall(mesh.devices[3])
    reduced(mesh, deadline=1000)
    here.freed[2] = CUDARuntimeError("cudaErrorIllegalAddress: it went away", 700)
    assert "cuda:3 failed (cudaError700" in wait_for_failure(mesh)
    here.resume()
    mesh.reset(timeout=TEST_TIMEOUT)
    with pytest.raises(BackendUnavailableError, match="cuda:3 failed"):
        mesh.devices[3].synchronize()
    assert mesh.devices[0].zeros((2,), "float32").numpy().sum() == 0
    here.freed.clear()


def test_a_wait_for_a_gpu_that_fails_ends(here, mesh):
    buffer = mesh.devices[3].upload(np.ones(9, np.float32))
    mesh.devices[3].synchronize(deadline=TEST_TIMEOUT)
    here.stall(mesh.devices[3])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.numpy)
        here.freed[2] = CUDARuntimeError("cudaErrorIllegalAddress: it went away", 700)
        with pytest.raises(BackendUnavailableError, match="cuda:3 failed"):
            waiting.result(TEST_TIMEOUT)
    here.freed.clear()
    here.resume()


def test_a_failed_mesh_is_closed_without_a_wait_and_frees_nothing_that_is_used(here, clock):
    """By close or by garbage collection: CUDA waits for a queue before it frees its memory."""
    for ends in (Mesh.close, lambda mesh: None):
        mesh = open_mesh([0, 1], backend="cuda")
        here.stall(mesh.devices[1])
        reduced(mesh, "hierarchical_copy", deadline=5)
        clock.advance(6)
        wait_for_failure(mesh)
        pools = {id(device._pool) for device in mesh.devices}
        ends(mesh)
        del mesh
        gc.collect()
        assert pools <= cuda._RETAINED.keys()
        here.settle()  # the queues continue, and none of their memory was freed
        cuda._RETAINED.clear()


def test_closing_a_failed_mesh_waits_until_its_memory_is_kept(here):
    """Another thread keeps it alive; freeing it earlier would wait for the hanging queue."""
    mesh = open_mesh(1, backend="cuda")
    here.stall(mesh.devices[0])
    mesh.devices[0].zeros((4,), "float32")
    mesh.mesh_state.on_failure.insert(0, lambda: threading.Event().wait(0.05))
    mesh.mesh_state.fail("a test")
    mesh.close()
    assert is_kept(mesh) == [True]
    here.resume()


def test_a_failed_mesh_whose_queues_have_ended_is_freed(here):
    with open_mesh([0, 1], backend="cuda") as mesh:
        mesh.mesh_state.fail("for a test")
        wait_for_failure(mesh)
        assert is_kept(mesh) == [True, True]
    assert is_kept(mesh) == [False, False]
