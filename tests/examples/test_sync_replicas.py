"""Backup workers: what is kept is added up exactly, what is late is dropped, all threads end."""

import gc
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from support import examples
from support.examples import cells, is_picture, load_example, options_of, rows_of

import gradreduce as gr

pytestmark = pytest.mark.repo

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sync_replicas.py"
ALLOWED_S = 60.0  # the promise for the whole command on two cores
STEPS = 20


@pytest.fixture(scope="module")
def script():
    return load_example("sync_replicas")


@pytest.fixture(scope="module")
def digits(script):
    return script.load()


def train(script, digits, *flags):
    return examples.train(script, digits, "--steps", str(STEPS), *flags)


def batches(script, digits, worker):
    """Pictures and labels of a worker's gradients, in order, with the seed 0."""
    rng = np.random.default_rng([0, worker])
    while True:
        pick = rng.integers(len(digits.train_images), size=script.BATCH_SIZE)
        yield digits.train_images[pick], digits.train_labels[pick]


def plain(script, updates):
    """Synchronous training with momentum, updated in plain NumPy.

    ``updates[step][worker]`` lists the batches of that worker in that update. Additions are in the
    order that gradreduce promises: each device's as they come, then the halves of the mesh.
    """
    weights = list(script.initial_weights(np.random.default_rng(0)).values())
    moments = [np.zeros_like(weight) for weight in weights]
    rate, decay, rule = np.float32(0.1), np.float32(0.9), gr.GradientDescentOptimizer(1.0)
    for workers in updates:
        sums = [[np.zeros_like(weight) for weight in weights] for _ in workers]
        variables = [gr.Variable(weight) for weight in weights]
        for total, brought in zip(sums, workers, strict=True):
            for batch in brought:
                gradients = script.loss_and_gradients(rule, variables, *batch)[1]
                for into, gradient in zip(total, gradients, strict=True):
                    into += gradient
        count = np.float32(sum(map(len, workers)))
        for place, (weight, moment) in enumerate(zip(weights, moments, strict=True)):
            moment[...] = decay * moment + halves([total[place] for total in sums]) / count
            weight -= rate * moment
    return weights


def halves(arrays):
    middle = len(arrays) // 2
    sides = [sum(side[1:], side[0]) for side in (arrays[:middle], arrays[middle:]) if side]
    return sum(sides[1:], sides[0])


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--workers", "4", "--replicas-to-aggregate", "4"],
        ["--workers", "3", "--replicas-to-aggregate", "7"],
        ["--workers", "6", "--replicas-to-aggregate", "3", "--stragglers", "3",
         "--late-every", "1", "--placement", "0,0,1,1,2,0"],
    ],
    ids=["a backup", "no backup", "several each", "more late than not"],
)  # fmt: skip
def test_each_update_is_the_mean_of_what_was_kept_at_its_step(script, digits, flags):
    options = options_of(script, "--steps", str(STEPS), *flags)
    history = train(script, digits, *flags)
    updates = [[[] for _ in range(options.workers)] for _ in range(STEPS)]
    for worker, gradients in enumerate(history.gradients):
        for each, batch in zip(gradients, batches(script, digits, worker), strict=False):
            if each.kept:
                updates[each.local_step][worker].append(batch)
    # Bit for bit: each gradient in one update or none, computed by the weights of its own step.
    assert all(map(np.array_equal, history.weights.values(), plain(script, updates)))
    counts = [sum(map(len, workers)) for workers in updates]
    assert min(counts) >= options.replicas_to_aggregate
    assert max(counts) <= max(options.workers, options.replicas_to_aggregate)
    gradients = [each for worker in history.gradients for each in worker]
    assert history.global_step == STEPS
    assert history.num_dropped == sum(not each.kept for each in gradients)
    assert history.num_dropped == 0 or options.workers > options.replicas_to_aggregate
    assert not any(each.kept for each in gradients if each.held)
    assert len(history.losses) == STEPS


# The straggler -----------------------------------------------------------------------------------


def test_a_straggler_is_delayed_until_the_others_have_continued(script, digits, monkeypatch):
    """A worker that is always late is always dropped."""
    seen, wait = [], script.SyncReplicas.await_step

    def noting(sync, step):
        wait(sync, step)
        seen.append((sync.over, sync.step - step))

    monkeypatch.setattr(script.SyncReplicas, "await_step", noting)
    history = train(script, digits, "--late-every", "1", "--lag", "3")
    assert seen and all(over or ahead >= 0 for over, ahead in seen)
    *others, late = history.gradients
    assert late and all(each.held and not each.kept for each in late)
    assert not any(each.held for worker in others for each in worker)


def test_training_continues_from_the_global_step(script):
    with gr.open_mesh(3, backend="sim") as mesh:
        variables = [gr.Variable(np.ones(2, np.float32), "w", device=mesh)]
        counter = gr.Variable(7, "global_step", trainable=False, device=mesh.devices[0])
        optimizer = gr.GradientDescentOptimizer(0.5)
        with script.SyncReplicas(variables, optimizer, counter, 2, 3) as sync:
            (mine,) = sync.accumulators
            (other,) = script.grad_accumulators(variables, sync.cross_device_ops)
            named = gr.ConditionalAccumulator("float32", (2,), "w/grad_accum", device=mesh)
            assert mine.accumulator_ref is other.accumulator_ref is named.accumulator_ref
            assert sync.first_step == 7
            gradient = np.full(2, 2, np.float32)
            assert not mine.apply_grad(gradient, 6)
            assert mine.apply_grad(gradient, 7)
            assert other.apply_grad(2 * gradient, 7)
            sync.update()
            assert not mine.apply_grad(gradient, 7)
            sync.hand_out_tokens(3)
            assert [sync.next_step() for _ in range(2)] == [8, 8]  # and a third one
            assert (int(counter), mine.num_dropped) == (8, 2)
        assert (variables[0].numpy() == 1 - 0.5 * 3).all()
        assert sync.next_step() is None
        with pytest.raises(gr.errors.CancelledError):
            mine.num_accumulated()


# The end -----------------------------------------------------------------------------------------


def fail():
    raise ArithmeticError("no more")


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize(
    ("action", "error"), [(fail, ArithmeticError), (interrupt, KeyboardInterrupt)]
)
@pytest.mark.parametrize("where", ["worker", "chief"])
def test_whatever_fails_ends_every_thread_and_reaches_the_caller(
    script, digits, monkeypatch, where, action, error
):
    name = {"worker": "loss_and_gradients", "chief": "accuracy"}[where]
    original = getattr(script, name)
    calls, waiting, wait = [], threading.Event(), script.wait

    def failing(*arguments):
        calls.append(None)
        if len(calls) == 3:
            assert waiting.wait(ALLOWED_S)  # not while the threads are being started
            action()
        return original(*arguments)

    monkeypatch.setattr(script, name, failing)
    monkeypatch.setattr(script, "wait", lambda *jobs: (waiting.set(), wait(*jobs))[1])
    closed, sync = [], script.SyncReplicas
    leave = sync.__exit__
    monkeypatch.setattr(sync, "__exit__", lambda sync, *e: closed.append(leave(sync, *e)))
    # One worker fails while all others and the chief wait for its gradient.
    flags = ("--replicas-to-aggregate", "5", "--steps", "10000")
    with pytest.raises(error):
        train(script, digits, *flags)
    assert closed == [None]
    monkeypatch.undo()
    gc.collect()
    assert train(script, digits).global_step == STEPS  # the names are free again


# The command -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.early(str(SCRIPT), COLUMNS="100", NO_COLOR="1", PYTHONIOENCODING="utf-8")
def test_the_plain_command_reaches_the_goal(early):
    assert (early.returncode, early.stderr) == (0, "")
    assert "100%" in early.stdout  # the progress bar
    found, rows = cells(early.stdout), rows_of(early.stdout)
    workers = np.array([row[2:] for row in found if row[1].startswith("sim:")], int)
    assert workers.shape == (5, 3)
    kept, dropped, held = workers.sum(axis=0)
    assert (workers[:-1, 2] == 0).all()
    assert dropped >= workers[-1, 1] >= held > 0
    assert rows["global step"] == "400"
    assert rows["accepted"] == str(kept)
    assert rows["dropped"] == f"{dropped}, {held} of them delayed"
    assert float(rows["test accuracy"]) >= 0.95
    assert float(rows["steps/s"]) > 0
    assert is_picture(early.folder / "sync_replicas.png")
