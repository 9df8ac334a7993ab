"""Actors and workers that are killed, slow, damaged or closed, on a real cluster."""

import os
import pickle
import re
import shutil
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.libraries import ray
from support.ray_cluster import in_actor

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError, DeadlineExceededError, brief

pytestmark = pytest.mark.ray
LIMIT_S = 20.0
SPECS = {"w": ("float64", [20_000]), "b": ("float64", [3])}  # the first travels alone


def ones(value: float = 1.0) -> list[np.ndarray]:
    return [np.full(20_000, value), np.full(3, value)]


def pid_of(name: str) -> int:
    return in_actor(name, lambda _: __import__("os").getpid())


def kill(name: str) -> None:
    os.kill(pid_of(name), signal.SIGKILL)


@contextmanager
def stopped(name: str) -> Iterator[None]:
    """An actor that does not run during the block."""
    pid = pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def num_queued(name: str) -> int:
    """The number of takes that wait in an actor."""
    return in_actor(name, lambda actor: len(actor._queue))


def wait_until(condition: Callable[[], bool], *tasks: Any) -> None:
    """Asks until a condition holds; raises the error of a task that ends before."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        ended = ray.wait(list(tasks), timeout=0)[0] if tasks else []
        assert not ray.get(ended), "a task has ended"
        assert time.monotonic() < end


def check_equal(taken: dict[str, np.ndarray], value: float) -> None:
    found = {name: np.unique(each).tolist() for name, each in taken.items()}
    assert found == {"w": [value], "b": [value]}


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs a function in a thread during the block; yields its result or error in a list."""
    found: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function)
        yield found
        error = running.exception(LIMIT_S)
        found.append(running.result() if error is None else error)


@pytest.fixture(scope="module")
def idle(cluster: None) -> Iterator[Any]:
    """A set that no test kills."""
    with gr.ray.AccumulatorSet(SPECS, f"idle-{uuid.uuid4().hex[:8]}") as shared:
        yield shared


@pytest.mark.parametrize("num_shards", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_what_was_acknowledged_survives_the_end_of_every_shard(unique_name, tmp_path, num_shards):
    names = [unique_name, f"{unique_name}#1"][:num_shards]
    options = {"num_shards": num_shards, "snapshots": tmp_path, "durability": "push"}
    with gr.ray.AccumulatorSet(SPECS, unique_name, "SUM", **options) as shared:
        # Powers of two, of which a sum shows the ones that are in it.
        values = [2.0**number for number in range(8)]
        with in_thread(lambda: [shared.apply_grads(ones(value)) for value in values]) as applied:
            for name in names:
                kill(name)
        assert applied == [[True] * 8]
        assert shared.num_accumulated() == 8
        with in_thread(lambda: shared.take_grads(9, timeout=LIMIT_S)) as taken:
            for name in names:
                kill(name)
            shared.apply_grads(ones(256.0))
        check_equal(taken[0], 511.0)
        assert shared.num_accumulated() == 0
    assert list(tmp_path.iterdir()) == []


def test_close_does_nothing_if_all_actors_have_ended(unique_name):
    shared = gr.ray.AccumulatorSet(SPECS, unique_name, num_shards=2)
    shared.apply_grads(ones())
    names = {f"{unique_name}#1", unique_name}
    for name in names:
        kill(name)

    def have_ended() -> bool:
        left = ray.util.list_named_actors(all_namespaces=True)
        return names.isdisjoint(each["name"] for each in left)

    wait_until(have_ended)
    for _ in range(2):
        shared.close()


def test_a_take_that_waits_for_a_minute_says_which_workers_came(unique_name, monkeypatch):
    from gradreduce.ray.client import log_warning, take_queue

    told, texts = threading.Event(), []

    def log(logger: str, message: str, *args: object) -> None:
        log_warning(logger, message, *args)
        texts.append(message % args)
        told.set()

    assert take_queue.LOG_SECONDS == 60
    monkeypatch.setattr(take_queue, "LOG_SECONDS", 0.0)
    monkeypatch.setattr("gradreduce.ray.client.log_warning", log)
    make = partial(gr.ray.ConditionalAccumulator, "float64", [1], unique_name)
    early, late = make(worker="early"), make(worker="late")
    for each in (early, late):
        each._client._poll_seconds = 0.01
        each.apply_grad([1.0], 0)
    early.take_grad(2, timeout=LIMIT_S)
    assert texts == []
    early.apply_grad([1.0], 1)
    with in_thread(lambda: early.take_grad(2, timeout=LIMIT_S)) as taken:
        assert told.wait(LIMIT_S)
        late.apply_grad([3.0], 1)
    early.close()
    assert [each.tolist() for each in taken] == [[2.0]]
    assert texts == [
        f"a take of {unique_name!r} has waited for 0 s: step 1: 1 of 2 gradients, 1 missing, 0 "
        "dropped as stale, from the workers [early]; others: [late (step 0)]"
    ]


def test_ctrl_c_leaves_no_waiting_take(unique_name):
    with gr.ray.ConditionalAccumulator("float64", [3], unique_name) as shared:

        def interrupt() -> None:
            wait_until(lambda: num_queued(unique_name) == 1)
            os.kill(os.getpid(), signal.SIGINT)

        with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
            shared.take_grad(1, timeout=LIMIT_S)
        wait_until(lambda: num_queued(unique_name) == 0)  # nobody waits for the withdrawal
        text = r"^not enough gradients within 0\.0 s; step 0: 0 of 2 gradients, 2 missing, 0"
        with pytest.raises(DeadlineExceededError, match=text):
            shared.take_grad(2, timeout=0)
        shared.apply_grad([1.0, 2.0, 3.0])
        assert shared.take_grad(1, timeout=LIMIT_S).tolist() == [1.0, 2.0, 3.0]


def test_a_take_at_the_last_step_raises_at_once(unique_name):
    """Also one that waits; the gradient of another worker is added as before."""
    specs = [("float32", [2])] * 2
    with gr.ray.AccumulatorSet(specs, unique_name, num_shards=2) as shared:
        shared.set_global_step(2**63 - 2)
        with in_thread(lambda: shared.take_grads(2, timeout=LIMIT_S)) as raised:
            wait_until(lambda: num_queued(unique_name) == 1)
            shared.set_global_step(2**63 - 1)
        assert [type(each) for each in raised] == [gr.errors.InvalidArgumentError]
        for _ in range(2):
            assert shared.apply_grads([[1.0, 2.0]] * 2, 2**63 - 1)
            with pytest.raises(gr.errors.InvalidArgumentError, match="is at step 922337203685477"):
                shared.take_grads(9, timeout=LIMIT_S)
        shared.set_global_step(5)
        assert (shared.num_accumulated(), shared.num_dropped) == (2, 0)
        assert [each.tolist() for each in shared.take_grads(2, timeout=0)] == [[1.0, 2.0]] * 2


def test_takes_of_tasks_wait_in_order_and_close_cancels_them(unique_name):
    @ray.remote(num_cpus=1)
    def take(accumulator: Any, num_required: int) -> list[float]:
        return accumulator.take_grad(num_required, timeout=LIMIT_S).tolist()

    with gr.ray.ConditionalAccumulator("float64", [1], unique_name) as shared:
        tasks = []
        for num_required in (2, 1):
            tasks.append(take.remote(shared, num_required))
            wait_until(lambda: num_queued(unique_name) == len(tasks), *tasks)
        assert shared.apply_grad([1.0], 0)
        assert shared.apply_grad([3.0], 0)
        assert not shared.apply_grad([5.0], 0)  # the take of both has set step 1
        assert shared.apply_grad([7.0], 1)
        assert ray.get(tasks, timeout=LIMIT_S) == [[2.0], [7.0]]
        assert shared.num_dropped == 1
        waiting = take.remote(shared, 1)
        wait_until(lambda: num_queued(unique_name) == 1, waiting)
        other = pickle.loads(pickle.dumps(shared))
        shared.close()
        with pytest.raises(CancelledError):
            ray.get(waiting, timeout=LIMIT_S)
        for each in (shared, other):
            with pytest.raises(CancelledError, match=f"^{unique_name!r} was closed$"):
                each.apply_grad([1.0])


def test_a_killed_worker_loses_its_own_gradient_only(unique_name):
    @ray.remote(num_cpus=1, max_retries=0)
    def work(shared: Any) -> None:
        while True:
            shared.apply_grads(ones())

    with gr.ray.AccumulatorSet(SPECS, unique_name, "SUM", num_shards=2) as shared:
        for _ in range(2):
            before = shared.num_accumulated()
            task = work.remote(shared)
            wait_until(lambda: shared.num_accumulated() >= before + 5, task)  # noqa: B023
            ray.cancel(task, force=True)
            with pytest.raises(ray.exceptions.RayError):
                ray.get(task, timeout=LIMIT_S)
        assert shared.apply_grads(ones())
        count = shared.num_accumulated()
        check_equal(shared.take_grads(count, timeout=LIMIT_S), count)
        for name in (unique_name, f"{unique_name}#1"):
            assert in_actor(name, lambda shard: len(shard._staged)) == 0


@pytest.mark.exhaustive
def test_a_damaged_snapshot_of_one_shard_makes_all_load_the_previous_one(unique_name, tmp_path):
    with gr.ray.AccumulatorSet(
        SPECS, unique_name, "SUM", num_shards=2, snapshots=tmp_path, durability=2
    ) as shared:
        for number in range(7):
            shared.apply_grads(ones(2.0**number))
        kill(f"{unique_name}#1")
        assert shared.state_dict()["accumulators"][0]["num_accumulated"] == 6
        newest = tmp_path / f"{unique_name}.6.snapshot"
        newest.write_bytes(newest.read_bytes()[:-1])
        kill(unique_name)
        assert shared.state_dict()["accumulators"][0]["num_accumulated"] == 4
        check_equal(shared.take_grads(4, timeout=LIMIT_S), 15.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_shard_without_a_whole_snapshot_does_not_start(unique_name, tmp_path, damaged):
    """It keeps its files, and starts when one of them is whole again."""
    name = [unique_name, f"{unique_name}#1"][damaged]
    make = partial(
        gr.ray.AccumulatorSet, SPECS, unique_name, "SUM",
        num_shards=2, snapshots=tmp_path, durability="push", timeout=LIMIT_S,
    )  # fmt: skip
    shared = make()
    for number in range(3):
        shared.apply_grads(ones(2.0**number))
    contents = {path: path.read_bytes() for path in sorted(tmp_path.glob(f"{name}.[23].snapshot"))}
    before = sorted(tmp_path.iterdir())
    for path in contents:
        path.write_bytes(b"damaged")
    kill(name)
    text = (
        f" {unique_name!r} could not start: ValueError: all snapshots of {name!r} are damaged, and "
        f"were kept: {', '.join(map(str, contents))}. Replace one by"
    )
    for call in (
        lambda: shared.apply_grads(ones()),
        shared.num_accumulated,
        lambda: make().num_accumulated(),
    ):
        with pytest.raises(BackendUnavailableError, match=re.escape(text)):
            call()
    assert sorted(tmp_path.iterdir()) == before
    for path, content in contents.items():
        assert path.read_bytes() == b"damaged"
        path.write_bytes(content)

    def starts() -> bool:
        with suppress(BackendUnavailableError):  # the start before, which may still fail
            make()
            return True
        return False

    wait_until(starts)
    with make() as again:
        check_equal(again.take_grads(3, timeout=LIMIT_S), 7.0)


def test_a_call_that_was_given_up_is_applied_once_and_no_second_is_sent(unique_name, monkeypatch):
    with gr.ray.AccumulatorSet(SPECS, unique_name, "SUM", num_shards=2) as patient:
        hasty = gr.ray.AccumulatorSet(SPECS, unique_name, "SUM", num_shards=2, timeout=0.2)
        assert patient.apply_grads(ones())
        with stopped(f"{unique_name}#1"):
            text = f"no answer from the actor {unique_name!r} within 0.2 s"
            for _ in range(2):
                with pytest.raises(DeadlineExceededError, match=f"^{re.escape(text)}$"):
                    hasty.apply_grads(ones(2.0))
            monkeypatch.setattr(hasty._client, "_timeout", LIMIT_S)  # on a busy machine
            assert hasty.num_accumulated() == 1  # the coordinator alone answers
        check_equal(patient.take_grads(2, timeout=LIMIT_S), 3.0)
        assert patient.num_accumulated() == 0


def test_after_a_push_was_given_up_a_start_begins_another(unique_name, monkeypatch):
    with gr.ray.AGNCenter(unique_name) as center:
        getter = gr.AGNCustomGetter(gr.default_mesh()[0], center=center)
        weights = gr.get_variable("w", np.zeros(2, np.float32), custom_getter=getter)
        rule = gr.GradientDescentOptimizer(1.0)
        optimizer = gr.AGNOptimizer(rule, 1, getter, communication_period=1)
        pairs = [(np.ones(2, np.float32), weights)]
        optimizer.apply_gradients(pairs)
        with stopped(unique_name), monkeypatch.context() as patch:
            patch.setattr(center._client, "_timeout", 0.2)  # only of this push
            with pytest.raises(DeadlineExceededError):
                optimizer.apply_gradients(pairs)
        optimizer.get_init_op(0)()  # waits for the push that was given up
        assert weights.numpy().tolist() == [-2.0, -2.0]
        optimizer.apply_gradients(pairs)
        assert weights.numpy().tolist() == [-3.0, -3.0]


def worker_of_rounds(center: Any, period: int = 1) -> tuple[Any, Any]:
    """One of two workers of a center, and a function that makes a step with this gradient."""
    getter = gr.AGNCustomGetter(gr.default_mesh()[0], center=center)
    weights = [gr.get_variable(name, np.zeros(2), custom_getter=getter) for name in "ab"]
    inner = gr.GradientDescentOptimizer(0.5)
    optimizer = gr.AGNOptimizer(inner, 2, getter, communication_period=period)
    return optimizer, lambda grad: optimizer.apply_gradients(
        [(np.full(2, grad), variable) for variable in weights]
    )


def rule_of_this_program() -> Any:
    """A rule whose class Ray sends by value, as one of ``__main__``."""

    class Counting(gr.center_rules.CenterRule):
        _slot_names = ("count",)

        def update(
            self, center: Any, slots: dict[str, Any], push: Any, age: int, weight: float
        ) -> None:
            slots["count"] += 1
            center -= push

    return Counting()


def test_every_round_counts_once_although_all_shards_are_killed(unique_name, tmp_path):
    rounds = 20

    @ray.remote(num_cpus=1)
    def work(center: Any, task: int) -> int:
        optimizer, step = worker_of_rounds(center)
        with optimizer.make_session_run_hook(False, task, wait_timeout=LIMIT_S):
            return sum(step(1.0 + 2 * task) for _ in range(rounds + 2 * task))

    make = partial(
        gr.ray.AGNCenter, unique_name,
        num_shards=2, snapshots=tmp_path, durability="push", num_required=2,
    )  # fmt: skip
    with make(center_rule=rule_of_this_program()) as center:
        tasks = [work.remote(center, task) for task in range(2)]
        for name in (f"{unique_name}#1", unique_name):
            count = center.state_dict()["progress"]["num_pushes"]
            now = lambda: center.state_dict()["progress"]["num_pushes"]  # noqa: E731
            wait_until(lambda: now() > count, *tasks)  # noqa: B023
            kill(name)
        assert ray.get(tasks, timeout=3 * LIMIT_S) == [rounds, rounds + 2]
        # Each round of both is a mean of 2; the last two are those of one worker, with 3.
        assert {name: each.tolist() for name, each in center.values().items()} == {
            name: [-2.0 * rounds - 6.0] * 2 for name in "ab"
        }
        state = center.state_dict()
        progress = {"num_pushes": 2 * rounds + 2, "num_updates": rounds + 2, "weight": [42.0]}
        assert state["progress"] == progress
        assert {
            np.unique(slot["count"]).item() for slot in state["optimizer"]["slots"].values()
        } == {rounds + 2}
        text = "center_rule \"<Counting 'Counting'>\", not \"<Mean 'Mean' learning_rate=1.0>\"; use"
        with pytest.raises(ValueError, match=re.escape(text)):
            make(center_rule=gr.center_rules.Mean())


def test_a_push_that_was_given_up_stays_in_its_round(unique_name, monkeypatch):
    rule = gr.center_rules.Mean(0.5)
    make = partial(gr.ray.AGNCenter, unique_name, center_rule=rule, num_required=2)
    with make() as center:
        hasty = make(timeout=2.0)
        (_, one), (_, two) = [worker_of_rounds(each, period=2) for each in (hasty, center)]
        one(1.0)
        text = (
            "the round of this push has 1 of 2 pushes after 2 s; the next call waits for it again"
        )
        with pytest.raises(DeadlineExceededError, match=f"^{re.escape(text)}$"):
            one(1.0)
        monkeypatch.setattr(hasty._client, "_timeout", LIMIT_S)
        two(3.0)
        with in_thread(lambda: one(5.0)):  # waits for the round first
            assert two(3.0)
        assert center.values()["a"].tolist() == [-1.0] * 2
        assert center.state_dict()["progress"]["num_pushes"] == 2


def test_another_definition_of_a_name_is_an_error_that_changes_nothing(idle, tmp_path):
    idle.apply_grads(ones(), idle.global_step)
    other, folder, rest = {**SPECS, "w": ("float32", [20_000])}, brief(str(tmp_path)), "use another"
    of_set, name = gr.ray.AccumulatorSet, idle.name
    for what, make in {
        "specs": lambda: of_set(other, name),
        "reduction_type": lambda: of_set(SPECS, name, "SUM"),
        f"sparse_mean 'per_row', not 'per_gradient'; {rest}": lambda: of_set(
            SPECS, name, sparse_mean="per_gradient"
        ),
        "names": lambda: gr.ray.ConditionalAccumulator("float64", [3], name),
        "shards": lambda: of_set(SPECS, name, num_shards=2),
        "kind": lambda: gr.ray.AGNCenter(name),
        f"snapshots None, not {folder}; {rest}": lambda: of_set(SPECS, name, snapshots=tmp_path),
        f"durability 100, not 7; {rest}": lambda: of_set(SPECS, name, durability=7),
        f"snapshots None, not {folder}, and durability 100, not 'push';": lambda: of_set(
            SPECS, name, snapshots=tmp_path, durability="push"
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^the actor {name!r} has {re.escape(what)} "):
            make()
    with pytest.raises(ValueError, match=r"^kernels='fast' is not one of \('numpy', 'compiled', "):
        of_set(SPECS, name, kernels="fast")
    check_equal(idle.take_grads(1, timeout=LIMIT_S), 1.0)


def test_a_fork_cannot_call_actors(idle):
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
        child = os.fork()
    if not child:
        found = []
        for call in (idle.num_accumulated, idle.close, lambda: gr.ray.AGNCenter("forked")):
            try:
                call()
            except BackendUnavailableError as error:
                found.append(str(error).startswith("this process is a fork of one that used Ray,"))
        os.write(writer, repr(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "[True, True, True]"
    assert os.waitpid(child, 0) == (child, 0)
    assert idle.num_accumulated() == 0
    assert ray.is_initialized()


def test_after_ray_was_shut_down_calls_raise(idle, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # else Ray ends this process
    text = "Ray was shut down in this process: call gr.ray.init, and make the object again"
    for call in (idle.close, idle.num_accumulated, lambda: idle.apply_grads(ones())):
        with pytest.raises(BackendUnavailableError, match=f"^{re.escape(text)}$"):
            call()


@pytest.mark.exhaustive
def test_a_folder_that_was_removed_is_made_again(unique_name, tmp_path):
    folder = tmp_path / "snapshots"
    options = {"snapshots": folder, "durability": "push"}
    with gr.ray.AccumulatorSet(SPECS, unique_name, "SUM", **options) as shared:
        for _ in range(2):
            assert shared.apply_grads(ones())
            shutil.rmtree(folder)
        assert shared.apply_grads(ones())
        kill(unique_name)
        check_equal(shared.take_grads(3, timeout=LIMIT_S), 3.0)
        shutil.rmtree(folder)


def listening(pid: int | str) -> set[str]:
    """The TCP sockets on which a process listens."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    links = [str(path.readlink()) for path in files if path.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and line[9] in inodes}


def test_no_port_is_opened_beside_those_of_ray(idle):
    @ray.remote(num_cpus=0)
    class Empty:
        def pid(self) -> int:
            return os.getpid()

    empty = Empty.remote()
    usual = len(listening(ray.get(empty.pid.remote(), timeout=LIMIT_S)))
    before = listening("self")
    idle.apply_grads(ones(), idle.global_step)
    idle.take_grads(1, timeout=LIMIT_S)
    assert len(listening(pid_of(idle.name))) == usual
    assert listening("self") == before


@pytest.mark.exhaustive
def test_nothing_grows_with_the_number_of_calls(unique_name):
    def held(actor: Any) -> list[int]:
        names = ("_staged", "_queue", "_calls", "_workers", "_running")
        return [len(getattr(actor, name, ())) for name in names] + [len(actor._state._taken)]

    with gr.ray.AccumulatorSet(SPECS, unique_name, num_shards=2) as shared:
        for number in range(1000):
            shared.apply_grads(ones(), number)
            shared.take_grads(1, timeout=LIMIT_S)
        wait_until(lambda: in_actor(unique_name, held) == [0, 0, 1, 1, 0, 0])
        wait_until(lambda: in_actor(f"{unique_name}#1", held) == [0] * 6)


@pytest.mark.exhaustive
def test_workers_in_other_processes_are_waited_for(unique_name):
    def start(center: Any, task_index: int, seconds: float) -> str:
        getter = gr.AGNCustomGetter(gr.default_mesh()[0], center=center)
        gr.get_variable("w", np.zeros(1, np.float32), custom_getter=getter)
        optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 2, getter)
        with optimizer.make_session_run_hook(False, task_index, wait_timeout=seconds):
            return "started"

    with gr.ray.AGNCenter(unique_name) as center:
        missing = "after 0.1 s 1 of 2 workers have started, [0]; 1 of [1] are missing"
        with pytest.raises(DeadlineExceededError, match=f"^{re.escape(missing)}$"):
            start(center, 0, 0.1)
        assert center.failed_workers == (0,)
        other = ray.remote(num_cpus=1)(start).remote(center, 1, LIMIT_S)
        assert start(center, 0, LIMIT_S) == ray.get(other, timeout=LIMIT_S) == "started"
        assert center.failed_workers == ()
