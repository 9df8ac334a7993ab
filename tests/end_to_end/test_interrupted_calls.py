"""Ctrl-C anywhere in a call that changes state: the call was made, or it was not."""

import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.signal_injection import ctrl_c, interrupted_at, num_points_of
from support.threads import in_threads

import gradreduce as gr
from gradreduce.accumulator import take_queue
from gradreduce.accumulator.state import PendingTake
from gradreduce.arrays import caller_streams
from gradreduce.device import Device

LIMIT_S = 30.0
PLACEMENT = [0, 0, 1, 1]


class World(NamedTuple):
    """One training on its own mesh.

    Attributes:
        call: what is interrupted.
        shown: all that it changes, comparable.
        again: what is done afterwards, by another thread; returns what else is to be compared.
    """

    call: Callable[[], object]
    shown: Callable[[], object]
    again: Callable[[], object]


def bits(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: bits(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [bits(value) for value in found]
    return (str(found.dtype), found.tobytes()) if isinstance(found, np.ndarray) else found


def copies(*variables):
    return [[copy.numpy() for copy in each.buffers] for each in variables]


def ones(mesh, value=1.0, size=5):
    return gr.PerReplica([np.full(size, value + at, "float32") for at in range(4)], mesh)


def rows(mesh, value=1.0):
    made = [np.full((2, 3), value + at, "float32") for at in range(4)]
    return gr.PerReplica([gr.IndexedSlices(each, [3, 1], (5, 3)) for each in made], mesh)


def counter(mesh):
    return gr.Variable(0, "step", trainable=False, device=mesh)


def optimizer(mesh, make=gr.AdamOptimizer, warm=True, sparse=False, loads=False):
    shape = (5, 3) if sparse else (5,)
    var, step = gr.Variable(np.ones(shape, "float32"), "w", device=mesh), counter(mesh)
    made = make()
    gradient = np.full(shape, 2, "float32")
    if sparse:
        gradient = gr.IndexedSlices(gradient[:2], [3, 1], shape)

    def call():
        made.apply_gradients([(gradient, var)], step)

    before = made.state_dict()
    before["hyperparameters"]["learning_rate"] = 0.5
    if warm:
        call()

    def shown():
        return bits((copies(var, step), made.state_dict()))

    return World((lambda: made.load_state_dict(before, var)) if loads else call, shown, call)


class Own(gr.Optimizer):
    """An optimizer of a user, with a rule on arrays."""

    _slot_names = ("direction",)

    def _apply(self, variable, slots, gradient):
        slots["direction"] += gradient
        variable -= slots["direction"]


def agn(mesh, warm=1, make=gr.AdamOptimizer, call=None):
    """AGN that pushes at every second step."""
    getter = gr.AGNCustomGetter(mesh[[0, 1]], center=gr.AGNCenter(mesh[[2, 3]]))
    start, step = np.ones(5, "float32"), counter(mesh)
    var, other = (gr.get_variable(name, start, custom_getter=getter) for name in "vw")
    made = gr.AGNOptimizer(make(), 1, getter, 2)

    def apply():
        made.apply_gradients([(start, var), (start + 1, other)], step)

    before = made.state_dict()
    made.prepare([var, other])  # zeros, which stay at the center if the first step fails
    before_of_center = getter.center.state_dict()
    for _ in range(warm):
        apply()
    getter.center_variable(other).assign(start * 3)

    def shown():
        kept = copies(var, other, step), made.state_dict(), getter.center.state_dict()
        return bits((kept, copies(made.local_step)))

    made_call = partial(call, made, step, before, before_of_center) if call else apply
    return World(made_call, shown, apply)


def agn_push_repeated(mesh):
    """Repeats a push that failed before it changed anything."""

    def push(made, step, *_):
        worker = made._worker
        worker._submit(worker._ready_push(worker.inner._slots.powers, (), step))

    return agn(mesh, call=push)


def agn_start(mesh):
    return agn(mesh, 2, call=lambda made, *_: made.get_init_op(0)())


def agn_load(mesh):
    return agn(mesh, 3, call=lambda made, _, before, __: made.load_state_dict(before))


def center_load(mesh):
    return agn(mesh, 3, call=lambda made, *saved: made._getter.center.load_state_dict(saved[2]))


def accumulators(mesh, kinds, device=None):
    device = mesh if device is None else device
    made = [
        gr.SparseConditionalAccumulator("float32", device=device)
        if sparse
        else gr.ConditionalAccumulator("float32", device=device)
        for sparse in kinds
    ]

    def apply(value, step=0):
        gradients = [rows(mesh, value) if sparse else ones(mesh, value) for sparse in kinds]
        return gr.apply_grads(made, gradients, step)

    def take():
        found = gr.take_grads(made, 4, timeout=LIMIT_S)
        return bits([numpy_of(part) for each in found for part in getattr(each, "parts", [each])])

    def shown():
        return bits([each.state_dict() for each in made])

    return made, apply, take, shown


def numpy_of(part):
    if isinstance(part, gr.IndexedSlices):
        return part.indices, numpy_of(part.values)
    return part.numpy() if hasattr(part, "numpy") else np.asarray(part)


def apply(mesh, kinds=(False,), on_one=False):
    _, bring, take, shown = accumulators(mesh, kinds, mesh.devices[2] if on_one else None)
    bring(1.0)
    return World(lambda: bring(2.0), shown, lambda: (bring(3.0), take()))


def apply_that_serves(mesh, kinds=(False,)):
    made, bring, _, shown = accumulators(mesh, kinds)
    ticket = PendingTake(tuple(each.accumulator_ref for each in made), 4)
    ticket.in_call.acquire()
    take_queue.join(ticket)

    def all_shown():
        return shown(), ticket.done.is_set(), bool(ticket.taken)

    return World(
        lambda: bring(2.0), all_shown, lambda: (bring(3.0, 1), bring(4.0, 1), ticket.done.is_set())
    )


def take_that_timed_out(mesh):
    """A take whose timeout has passed, while a later one needs fewer gradients."""
    (acc,), bring, take, shown = accumulators(mesh, (False,))
    first, behind = (PendingTake((acc.accumulator_ref,), number) for number in (8, 4))
    bring(1.0)
    for each in (first, behind):
        each.in_call.acquire()
        take_queue.join(each)

    def all_shown():
        return shown(), [each.done.is_set() for each in (first, behind)], bool(behind.taken)

    def again():
        take_queue.withdraw(first)
        return bring(2.0, 1), take()

    return World(lambda: take_queue.withdraw(first, 0), all_shown, again)


def take(mesh, kinds=(False,), on_one=False):
    _, bring, take, shown = accumulators(mesh, kinds, mesh.devices[2] if on_one else None)
    bring(1.0)
    bring(2.0)
    return World(take, shown, lambda: (bring(3.0, 1), take()))


def load(mesh, kinds=(False,)):
    (acc,), bring, _, shown = accumulators(mesh, kinds)
    before = acc.state_dict()
    bring(1.0)
    return World(lambda: acc.load_state_dict(before), shown, lambda: bring(2.0))


def sync_step(mesh, loads=False, **options):
    starts = [np.ones(5, "float32"), np.ones((2, 2), "float32")]
    variables = [gr.Variable(start, f"v{start.size}", device=mesh) for start in starts]
    made = gr.AdamOptimizer()
    step = gr.SyncStep(variables, made, gr.AllReduceCrossDeviceOps(mesh=mesh), **options)
    terms = [[[start + at, start] for start in starts] for at in range(4)]

    def shown():
        kept = [each.state_dict() for each in step.accumulators]
        rest = (step.global_step, step.loss_scale)
        return bits((copies(*variables), made.state_dict(), kept, rest))

    before = step.state_dict()
    if loads:
        step(terms)
    call = (lambda: step.load_state_dict(before)) if loads else (lambda: step(terms))
    return World(call, shown, lambda: step(terms))


def assign(mesh):
    var = gr.Variable(np.ones(5, "float32"), device=mesh)
    value = np.full(5, 2, "float32")
    return World(
        lambda: var.assign(value),
        lambda: bits(copies(var)),
        lambda: bits(copies(var.assign_add(value))),
    )


SCENARIOS = {
    "optimizer": optimizer,
    "first step of an optimizer": lambda mesh: optimizer(mesh, warm=False),
    "rows": lambda mesh: optimizer(mesh, lambda: gr.MomentumOptimizer(0.5, 0.5), sparse=True),
    "rule on arrays": lambda mesh: optimizer(mesh, lambda: Own("own")),
    "agn step": lambda mesh: agn(mesh, 2),
    "agn step and push": agn,
    "first agn step": lambda mesh: agn(mesh, 0),
    "agn push repeated": agn_push_repeated,
    "agn start": agn_start,
    "apply": apply,
    "sparse apply": lambda mesh: apply(mesh, (True,)),
    "joint apply": lambda mesh: apply(mesh, (False, True, False)),
    "apply on one device": lambda mesh: apply(mesh, (False, True), on_one=True),
    "apply that serves": apply_that_serves,
    "joint apply that serves": lambda mesh: apply_that_serves(mesh, (True, False)),
    "take": take,
    "sparse take": lambda mesh: take(mesh, (True,)),
    "take that timed out": take_that_timed_out,
    "joint take": lambda mesh: take(mesh, (False, True, False)),
    "take on one device": lambda mesh: take(mesh, (False, True), on_one=True),
    "SyncStep": sync_step,
    "SyncStep that clips": lambda mesh: sync_step(
        mesh, clip_norm=1.0, loss_scale=gr.DynamicLossScale(8.0, growth_interval=1)
    ),
    "assign": assign,
    "load of an optimizer": lambda mesh: optimizer(mesh, loads=True),
    "load of agn": agn_load,
    "load of a center": center_load,
    "load of an accumulator": load,
    "load of a sparse accumulator": lambda mesh: load(mesh, (True,)),
    "load of a SyncStep": lambda mesh: sync_step(mesh, loads=True),
}


class Case(NamedTuple):
    """A call on one kind of mesh."""

    scenario: Callable[[gr.Mesh], World]
    seed: int | None = None

    def open(self):
        return gr.open_mesh(PLACEMENT, backend="sim", schedule_seed=self.seed)

    def known(self):
        """The state before and after the call, and the results of continuing from each."""
        found = []
        for is_made in (False, True):
            with self.open() as mesh:
                world = self.scenario(mesh)
                if is_made:
                    world.call()
                found.append((world.shown(), (world.again(), world.shown())))
        assert found[0][0] != found[1][0]
        return found

    def num_places(self):
        with self.open() as mesh:
            return num_points_of(self.scenario(mesh).call)

    def check(self, expected, place):
        with self.open() as mesh:
            world = self.scenario(mesh)
            interrupted, reached = interrupted_at(place, world.call)
            assert interrupted or reached < place  # another run may have filled a cache
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            with caller_streams.StreamScope():  # waits of the interrupted call do not count
                assert caller_streams._thread.scope.frame is sys._getframe()
            state = world.shown()
            states = [before for before, _ in expected]
            assert state in states, f"at place {place} it is neither made nor not made"
            found = in_threads(world.again)[0], world.shown()
            assert found == expected[states.index(state)][1], place


CASES = {name: Case(scenario) for name, scenario in SCENARIOS.items()} | {
    f"{name}, queued": Case(SCENARIOS[name], 5) for name in ("agn step", "apply", "take")
}


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_call_is_complete_or_has_no_effect(name):
    case = CASES[name]
    expected, total, offset = case.known(), case.num_places(), random.Random(name).random()
    parts = 24 if name.startswith("load") else 4  # a load writes only at its end
    for part in range(parts):
        case.check(expected, 1 + int((part + offset) * (total - 1) / parts))


STRIDE = 40


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1, 1 + STRIDE))
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_call_is_complete_or_has_no_effect_at_every_point(name, first):
    case = CASES[name]
    expected = case.known()
    for place in range(first, case.num_places() + 1, STRIDE):
        case.check(expected, place)


def interrupted_within(seconds, work):
    """Raises Ctrl-C at most once, at a point that the clock selects."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass


LONG = (pytest.mark.exhaustive, pytest.mark.slow)


@pytest.mark.parametrize("rounds", [20, pytest.param(1400, marks=LONG)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one in a __del__
def test_interrupts_by_the_clock(rounds):
    clock, came = random.Random(7), []
    before = signal.signal(signal.SIGALRM, lambda *_: (came.append(True), ctrl_c()))
    try:
        with gr.open_mesh(PLACEMENT, backend="sim") as mesh:
            var = gr.Variable(np.zeros(3, "float32"), device=mesh)
            step = gr.SyncStep(
                [var], gr.GradientDescentOptimizer(1.0), gr.AllReduceCrossDeviceOps(mesh=mesh)
            )
            (acc,), bring, take, _ = accumulators(mesh, (False,))
            usual = None

            def work():
                step([[[np.ones(3, "float32")]]] * 4)
                bring(2.0, 10**9)
                take()

            while len(came) < rounds:
                interrupted_within(clock.uniform(1e-4, 8e-3), work)
                assert (np.array(copies(var)) == -step.global_step).all()
                assert acc.num_accumulated() % 4 == 0
                if not acc.num_accumulated():
                    bring(2.0, 10**9)
                usual = usual or take()
                bring(2.0, 10**9)
                assert take() == usual
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["optimizer", "agn step", "apply", "assign"])
def test_streams_of_gradients_wait_before_a_late_ctrl_c(name, monkeypatch):
    """Ctrl-C may come right before the end of the call, where the streams are made to wait."""
    told = []

    def note(*who):
        told.append(who)

    monkeypatch.setattr(Device, "block_stream", note)
    with gr.open_mesh(PLACEMENT, backend="sim") as mesh:
        world = SCENARIOS[name](mesh)
        with caller_streams.StreamScope():
            caller_streams.record_input(mesh.devices[1], 5)
            world.call()
            assert told == [(mesh.devices[1], 5)]
        assert len(told) == 1
