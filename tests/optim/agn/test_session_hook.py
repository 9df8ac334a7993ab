"""Workers begin, wait for each other, copy the center, and fail."""

import logging
import threading

import numpy as np
import pytest
from optim.agn.team import pair

import gradreduce as gr
from gradreduce.errors import DeadlineExceededError

LIMIT_S = 30.0


def ended(*threads):
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "deadlock: a worker did not end"


def test_the_distance_is_counted_from_the_start(mesh):
    first, second = pair(mesh, 1, distance_scale=0.5)
    second.step({"v": np.ones(3, "float32")})
    for _ in range(2):
        first.step({"v": np.ones(3, "float32")})
    second.optimizer.get_init_op(1)()
    before = second.center["v"]
    second.step({"v": np.ones(3, "float32")})
    assert (second.center["v"] == before - np.float32(0.5)).all()


def test_two_workers_in_turn_in_one_thread(mesh):
    """As in TensorFlow's example: no worker waits for a chief."""
    first, second = pair(mesh, 1)
    with (
        first.optimizer.make_session_run_hook(True, 0),
        second.optimizer.make_session_run_hook(False, 1),
    ):
        for turn in range(4):
            (first, second)[turn % 2].step({"v": np.ones(3, "float32")})
    hook = first.optimizer.make_session_run_hook(False, 0)
    hook.begin()
    hook.after_create_session(None, None)
    assert (first.local["v"] == -2).all()
    assert first.getter.center.failed_workers == ()


def test_a_hook_with_a_timeout_waits_for_all(mesh):
    workers = pair(mesh, 1, num=4)
    hooks = [worker.optimizer.make_session_run_hook(place == 0, place, wait_timeout=LIMIT_S)
             for place, worker in enumerate(workers)]  # fmt: skip
    begun, seen = [], []

    def work(place):
        begun.append(place)
        with hooks[place]:
            seen.append(len(begun))

    threads = [workers[0].getter.center.start_worker(place, lambda place=place: work(place))
               for place in range(3)]  # fmt: skip
    assert [thread.name for thread in threads] == [f"agn-worker-{place}" for place in range(3)]
    for thread in threads:
        thread.join(0.01)
        assert thread.is_alive()
    hooks[0].begin()  # once more: the same worker
    work(3)
    ended(*threads)
    assert seen == [4] * 4


def test_a_hook_names_who_is_missing(mesh):
    workers = pair(mesh, 1, num=4)
    workers[2].optimizer.make_session_run_hook(False, 2).begin()
    hook = workers[0].optimizer.make_session_run_hook(True, 0, wait_timeout=0)
    text = r"after 0.0 s 2 of 4 workers have started, \[0, 2\]; 2 of \[1, 3\] are missing"
    with pytest.raises(DeadlineExceededError, match=text), hook:
        raise AssertionError
    assert workers[0].getter.center.failed_workers == (0,)
    hook.begin()
    assert workers[0].getter.center.failed_workers == ()
    with pytest.raises(DeadlineExceededError, match=text):
        hook.after_create_session()


def test_a_round_is_over_when_its_hooks_are(mesh):
    """A worker that begins later belongs to the next round, which is counted from zero."""
    workers = pair(mesh, 1, num=2)
    hooks = [worker.optimizer.make_session_run_hook(not place, place, wait_timeout=0)
             for place, worker in enumerate(workers)]  # fmt: skip
    hooks[1].begin()
    with hooks[0], hooks[1]:
        pass
    hooks[1].begin()
    with pytest.raises(DeadlineExceededError, match=r"have started, \[1\]"):
        hooks[1].after_create_session()


def test_a_worker_that_fails_leaves_the_others_running(mesh, caplog):
    workers = pair(mesh, 1, num=3)
    center, meet = workers[0].getter.center, threading.Barrier(3)

    def work(place):
        with workers[place].optimizer.make_session_run_hook(False, place):
            meet.wait(LIMIT_S)
            if place == 1:
                raise RuntimeError("out of luck")
            for _ in range(5):
                workers[place].step({"v": np.ones(3, "float32")})

    with caplog.at_level(logging.WARNING, "gradreduce"):
        threads = [center.start_worker(place, lambda place=place: work(place))
                   for place in range(3)]  # fmt: skip
        ended(threads[0], threads[2])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of luck"):
                threads[1].join(LIMIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["worker 1 failed, the other workers continue: RuntimeError: out of luck"]
    assert center.failed_workers == (1,)
    assert (workers[0].center["v"] == -5).all()
    with workers[1].optimizer.make_session_run_hook(False, 1):
        assert center.failed_workers == ()
        workers[1].step({"v": np.ones(3, "float32")})
    assert (workers[1].local["v"] == -5.5).all()


def test_a_worker_without_a_hook_fails_too(mesh):
    center = gr.AGNCenter(mesh)
    threads = [center.start_worker(place, lambda: {}["no key"]) for place in (7, 3)]
    for thread in threads:
        with pytest.raises(KeyError, match="no key"):
            thread.join(LIMIT_S)
    assert sorted(center.failed_workers) == [3, 7]


def test_invalid_workers_are_refused(mesh):
    (worker,) = pair(mesh, num=1)
    center, hook = worker.getter.center, worker.optimizer.make_session_run_hook
    empty = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 1,
                            gr.AGNCustomGetter(mesh, center=gr.AGNCenter(mesh)))  # fmt: skip
    none = "the list of local variables should not be empty"
    for call, error, text in [
        (lambda: worker.optimizer.get_init_op(-1), ValueError, "task_index=-1 must be at least 0"),
        (lambda: worker.optimizer.get_init_op(0.5), TypeError, "task_index=0.5 must be an integer"),
        (lambda: hook(True, "0"), TypeError, "task_index='0' must be an integer"),
        (lambda: hook(True, 0, wait_timeout="x"), TypeError, "wait_timeout='x' must be a number"),
        (lambda: hook(True, 0, wait_timeout=float("nan")), ValueError, "wait_timeout=nan must be"),
        (lambda: empty.get_init_op(0), ValueError, none),
        (lambda: empty.make_session_run_hook(True, 0), ValueError, none),
        (lambda: center.start_worker(-1, print), ValueError, "task_index=-1 must be at least 0"),
        (lambda: center.start_worker("a", print), TypeError, "task_index='a' must be an integer"),
        (lambda: center.start_worker(0, 3), TypeError, "work=3 is not callable"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert center.failed_workers == ()
