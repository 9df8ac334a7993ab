"""Rules of a center: formulas, ages, weights, rounds and checkpoints."""

import math
import threading

import numpy as np
import pytest
from optim.agn.team import Worker, pair, whole

import gradreduce as gr
from gradreduce import center_rules as rules
from gradreduce.optim.agn.rounds import Round
from gradreduce.weights import ONE

RATE, DECAY, ALPHA = 0.5, 0.25, 0.75


class PlainMean(rules.CenterRule):
    def update(self, center, slots, push, age, weight):
        center -= RATE * weight * push


class PlainStaleness(rules.CenterRule):
    def update(self, center, slots, push, age, weight):
        center -= np.float32(RATE * math.exp(-ALPHA * age)) * (push * weight)


class PlainNesterov(rules.CenterRule):
    _slot_names = ("momentum",)

    def update(self, center, slots, push, age, weight):
        slots["momentum"] *= DECAY
        slots["momentum"] += weight * push
        center -= RATE * (weight * push + DECAY * slots["momentum"])


class PlainDelayed(rules.CenterRule):
    _slot_names = ("momentum", "delayed", "count")

    def update(self, center, slots, push, age, weight):
        slots["count"] += 1
        slots["delayed"] += weight * push
        center -= RATE * weight * push / 2
        if slots["count"].flat[0] % 2 == 0:
            slots["momentum"] *= DECAY
            slots["momentum"] += slots["delayed"] / 2
            center -= RATE * DECAY * slots["momentum"]
            slots["delayed"][...] = 0


# name -> the rule of the library, and the same one in Python
BOTH = {
    "mean": (lambda: rules.Mean(RATE), PlainMean),
    "staleness": (lambda: rules.StalenessScaled(RATE, ALPHA), PlainStaleness),
    "nesterov": (lambda: rules.Nesterov(RATE, DECAY), PlainNesterov),
    "delayed": (lambda: rules.DelayedNesterov(2, RATE, DECAY), PlainDelayed),
}
quiet = pytest.mark.filterwarnings("ignore:Nesterov diverges")


def center_of(mesh, rule, **options):
    return gr.AGNCenter(mesh, center_rule=rule, **options)


def pushed(mesh, rule, turns, *, dtype="float32", period=1, weights=(1,), num=2, **options):
    """Trains workers in turns, one after the other; returns them and their results."""
    starts = {"w": whole((5,), dtype, 9)}
    center = center_of(mesh, rule, **options)
    team = pair(mesh, period, lambda: gr.GradientDescentOptimizer(0.25), starts, num, center=center)
    found = []
    for turn, place in enumerate(turns):
        grads = {"w": 2 * whole((5,), dtype, turn)}
        found.append(team[place].step(grads, weight=weights[turn % len(weights)]))
    return team, found


@quiet
@pytest.mark.parametrize("push", ["gradient_mean", "delta"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", BOTH)
def test_a_kernel_computes_what_the_rule_in_python_does(mesh, name, dtype, push):
    turns = [0, 1, 1, 0, 0, 1, 0, 0]  # ages from 0 to 2
    by_kernel, in_python = [
        pushed(mesh, make(), turns, dtype=dtype, push=push)[0][0].center["w"] for make in BOTH[name]
    ]
    if dtype == "float32" or name != "staleness":  # whose factor is no small number
        assert np.array_equal(by_kernel, in_python)
    assert not np.array_equal(by_kernel, whole((5,), dtype, 9))
    weighted = [
        pushed(mesh, make(), [0, 1], dtype=dtype, push=push, weights=(1, 3))[0][0].center["w"]
        for make in BOTH[name]
    ]
    if dtype == "float32" or name != "staleness":
        assert np.array_equal(*weighted)


@quiet
@pytest.mark.parametrize("name", BOTH)
def test_a_rule_gets_rows_of_sparse_pushes(mesh, name):
    values = []
    for make in BOTH[name]:
        center = center_of(mesh, make())
        worker = Worker(mesh[[0, 1]], center, {"t": whole((6, 2), seed=3)},
                        lambda: gr.GradientDescentOptimizer(0.25))  # fmt: skip
        for turn in range(4):
            rows = gr.IndexedSlices(2 * whole((3, 2), seed=turn), [4, turn, 4], (6, 2))
            # The slots of a rule in Python change only where there are rows.
            grad = 2 * whole((6, 2), seed=turn) if name == "delayed" else rows
            assert worker.step({"t": grad})
        values.append(worker.center["t"])
    assert np.array_equal(*values)


def test_a_delayed_momentum_changes_all_rows(mesh):
    found = []
    for is_sparse in (True, False):
        center = center_of(mesh, rules.DelayedNesterov(2, RATE, DECAY))
        worker = Worker(mesh.devices[0], center, {"t": np.zeros((4, 1), "float32")},
                        lambda: gr.GradientDescentOptimizer(0.25))  # fmt: skip
        for row in (1, 1, 3, 3):
            grad = gr.IndexedSlices(np.float32([[8]]), [row], (4, 1))
            if not is_sparse:
                dense = np.zeros((4, 1), "float32")
                dense[row] = 8
                grad = dense
            worker.step({"t": grad})
        found.append(worker.center["t"])
    assert np.array_equal(*found)
    assert found[0][1] != -10  # the second momentum step has moved row 1 too


def test_one_worker_and_mean_are_gradient_descent(mesh):
    random = np.random.default_rng(5)
    start, grads = random.normal(size=(1, 7)), random.normal(size=(4, 7))
    worker = Worker(mesh.devices[0], center_of(mesh, rules.Mean(0.3)), {"w": start[0]},
                    lambda: gr.GradientDescentOptimizer(0.1))  # fmt: skip
    wanted = gr.Variable(start[0], device=mesh.devices[0])
    plain = gr.GradientDescentOptimizer(0.3)
    for grad in grads:
        worker.step({"w": grad})
        plain.apply_gradients([(grad, wanted)])
        assert worker.center["w"].tobytes() == wanted.numpy().tobytes()
        assert worker.local["w"].tobytes() == wanted.numpy().tobytes()


@quiet
def test_delayed_nesterov_of_one_push_is_nesterov(mesh):
    found = [
        pushed(mesh, rule, [0, 1, 1, 0, 1], weights=(3, 1))[0][0].center["w"]
        for rule in (rules.Nesterov(0.3, 0.9), rules.DelayedNesterov(1, 0.3, 0.9))
    ]
    assert found[0].tobytes() == found[1].tobytes()


def test_without_age_staleness_changes_nothing(mesh):
    found = [
        pushed(mesh, rule, [0, 0, 0], num=1)[0][0].center["w"]
        for rule in (rules.Mean(0.3), rules.StalenessScaled(0.3, 5.0))
    ]
    assert found[0].tobytes() == found[1].tobytes()


class Seen(rules.CenterRule):
    """Keeps what it gets."""

    def __init__(self, *seen):
        super().__init__()
        self.seen = list(seen)

    def update(self, center, slots, push, age, weight):
        self.seen.append((age, weight, push.tolist()))
        center -= push


@pytest.mark.parametrize("implementation", ["numpy"], indirect=True)
def test_a_rule_gets_age_and_relative_weight(mesh, implementation):
    rule = Seen()
    pushed(mesh, rule, [0, 1, 1, 0, 1, 0], weights=(1, 3, 2, 2))
    assert [age for age, *_ in rule.seen] == [0, 1, 0, 2, 1, 1]
    weights = [weight for _, weight, _ in rule.seen]
    assert weights == [1, 3 / 2, 2 / (6 / 3), 2 / (8 / 4), 1 / (9 / 5), 3 / (12 / 6)]


# -- rounds ---------------------------------------------------------------------------------------


def in_threads(center, team, train):
    """Runs ``train(worker, task)`` of each worker in its own thread, inside its hook."""

    def work(task):
        hook = team[task].optimizer.make_session_run_hook(task == 0, task, wait_timeout=60)
        with hook:
            train(team[task], task)

    threads = [center.start_worker(task, lambda task=task: work(task)) for task in range(len(team))]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def rounds(mesh, rule, num_steps, *, num=3, period=2, weights=(1, 1, 1), move=None, **options):
    """Trains threads in rounds of all; returns the workers. ``move`` moves the center elsewhere."""
    options = {"num_required": num, **options}
    center = center_of(mesh, rule, **options)
    if move is not None:
        move(center)
    starts = {"w": whole((5,), seed=9), "v": whole((2, 2), seed=8)}
    team = pair(mesh, period, lambda: gr.GradientDescentOptimizer(0.25), starts, num, center=center)

    def train(worker, task):
        for turn in range(num_steps):
            grads = {name: 8 * whole(value.shape, seed=10 * turn + task)
                     for name, value in starts.items()}  # fmt: skip
            is_push = worker.step(grads, weight=weights[task])
            assert is_push is (turn % period == period - 1)

    in_threads(center, team, train)
    return team


@pytest.mark.parametrize("weights", [(1, 1, 2), (4, 2, 2)])
def test_a_round_of_all_is_a_synchronous_step(mesh, weights):
    team = rounds(mesh, rules.Nesterov(RATE, DECAY), 4, weights=weights)
    for name, start in (("w", whole((5,), seed=9)), ("v", whole((2, 2), seed=8))):
        center = gr.Variable(start, device=mesh.devices[0])
        optimizer = gr.MomentumOptimizer(RATE, DECAY, use_nesterov=True)
        for turn in (0, 2):
            terms = [w * 8 * whole(start.shape, seed=10 * each + task)
                     for task, w in enumerate(weights) for each in (turn, turn + 1)]  # fmt: skip
            mean = np.sum(terms, axis=0, dtype="float32") / np.float32(2 * sum(weights))
            optimizer.apply_gradients([(mean, center)])
        for worker in team:
            assert np.array_equal(worker.center[name], center.numpy())
            assert np.array_equal(worker.local[name], center.numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_deltas_with_rate_one_average_the_variables(mesh, dtype):
    center = center_of(mesh, rules.Mean(), push="delta", num_required=2)
    starts = {"w": np.zeros(4, dtype)}
    make = lambda: gr.MomentumOptimizer(0.5, 0.5, master_dtype="float32")  # noqa: E731
    team = pair(mesh, 2, make, starts, 2, center=center)
    plain = [gr.Variable(np.zeros(4, dtype), device=mesh.devices[0]) for _ in range(2)]
    inner = [make() for _ in range(2)]
    grads = [[whole((4,), dtype, 10 * turn + task) for turn in range(4)] for task in range(2)]
    in_threads(center, team,
               lambda worker, task: [worker.step({"w": grad}) for grad in grads[task]])  # fmt: skip
    for turn in range(4):
        for task in range(2):
            inner[task].apply_gradients([(grads[task][turn], plain[task])])
        if turn % 2:
            mean = (plain[0].numpy() + plain[1].numpy()) / 2
            for variable in plain:
                variable.assign(mean)
    for worker in team:
        assert np.array_equal(worker.center["w"], plain[0].numpy())


def test_workers_that_ended_are_not_waited_for(mesh):
    center = center_of(mesh, rules.Mean(RATE), num_required=3)
    team = pair(mesh, 1, None, {"w": np.zeros(1, "float32")}, 3, center=center)
    steps = (1, 2, 4)
    in_threads(center, team, lambda worker, task: [
        worker.step({"w": np.float32([2])}) for _ in range(steps[task])])  # fmt: skip
    assert center.values()["w"] == [-4]
    assert center.state_dict()["progress"]["num_updates"] == 4


def test_a_round_has_the_age_of_its_oldest_push():
    several = Round()
    for age in (1, 3, 0):
        several.add([], ONE, age, is_delta=False)
    assert (several.age, several.num_pushes, several.weight) == (3, 3, 3 * ONE)


def test_a_round_is_complete_with_its_quorum_or_after_grace(mesh):
    center = center_of(mesh, rules.Mean(RATE), num_required=2, grace=10)
    state, now = center._state, [0.0]
    state.clock = lambda: now[0]
    team = pair(mesh, 1, None, {"w": np.zeros(1, "float32")}, 4, center=center)
    threads = []

    def push(place):
        threads.append(center.start_worker(place, lambda: team[place].step({"w": np.float32([2])})))

    def count_is(count):
        state._waiters.until(lambda: state._round.num_pushes == count)

    push(0)
    count_is(1)
    assert state.seconds_left(state._round) is None
    push(1)
    count_is(2)
    now[0] = 4.0
    assert state.seconds_left(state._round) == 6
    push(2)
    count_is(3)
    now[0] = 9.0
    push(3)  # everyone
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert center.values()["w"] == [-1]
    assert center.state_dict()["progress"]["num_updates"] == 1


def test_a_push_that_waits_in_vain_belongs_to_its_round(mesh):
    center = center_of(mesh, rules.Mean(RATE), num_required=2)
    team = pair(mesh, 1, None, {"w": np.zeros(1, "float32")}, 2, center=center)
    step = gr.Variable(0, "step", trainable=False, device=mesh.devices[0])
    wanted = "the round of this push has 1 of 2 pushes at 90 % of the deadline; the next call waits"
    for _ in range(2):
        before = team[0].center
        with pytest.raises(gr.DeadlineExceededError, match=wanted):
            team[0].step({"w": np.float32([2])}, global_step=step, deadline=3.0)
        assert team[0].center == before
    assert team[0].optimizer.local_step.numpy() == 1  # the second call did not get to its step
    other = center.start_worker(1, lambda: team[1].step({"w": np.float32([6])}))
    started = threading.Event()
    retry = center.start_worker(
        0, lambda: (started.set(), team[0].step({"w": np.float32([4])}, global_step=step))
    )
    started.wait(60)
    other.join(60)
    assert center.values()["w"] == [-2]
    last = center.start_worker(1, lambda: team[1].step({"w": np.float32([4])}))
    for thread in (retry, last):
        thread.join(60)
        assert not thread.is_alive()
    assert center.values()["w"] == [-4]
    assert step.numpy() == 2


def test_a_rule_that_raises_leaves_the_round_for_the_next_call(mesh):
    class Broken(rules.CenterRule):
        is_broken = True

        def update(self, center, slots, push, age, weight):
            center -= push
            if self.is_broken:
                raise ArithmeticError("no")

    center = center_of(mesh, rule := Broken(), num_required=1)
    (worker,) = pair(mesh, 1, None, {"w": np.zeros(1, "float32")}, 1, center=center)
    with pytest.raises(ArithmeticError):
        worker.step({"w": np.float32([2])})
    assert worker.center["w"] == [0]
    rule.is_broken = False
    worker.step({"w": np.float32([4])})
    assert worker.center["w"] == [-6]


# -- old pushes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_required", [None, 1])
def test_a_push_that_is_too_old_is_dropped(mesh, num_required):
    rule = Seen()
    team, found = pushed(mesh, rule, [0, 0, 1, 1], max_staleness=1, num_required=num_required)
    assert found == [True, True, False, True]
    assert [age for age, *_ in rule.seen] == [0, 0, 0]
    assert [worker.optimizer.num_dropped for worker in team] == [0, 1]
    count = gr.Variable(0, "count", trainable=False, device=mesh.devices[0])
    before = team[0].center
    assert team[1].step({"w": whole((5,))}, global_step=count)
    assert team[1].step({"w": whole((5,))}, global_step=count)
    assert not team[0].step({"w": whole((5,))}, global_step=count)
    assert count.numpy() == 2
    assert not np.array_equal(team[0].center["w"], before["w"])
    assert np.array_equal(team[0].local["w"], team[0].center["w"])
    assert not team[0].sums["w"].any()


# -- checkpoints ----------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("push", ["gradient_mean", "delta"])
@pytest.mark.parametrize("name", BOTH)
def test_a_training_continues_from_any_push(mesh, name, push):
    turns = [0, 1, 1, 0, 0, 1, 0]
    starts = {"w": whole((5,), "float16", 9)}

    def new_team():
        center = center_of(mesh, BOTH[name][0](), push=push)
        make = lambda: gr.MomentumOptimizer(0.25, 0.5, master_dtype="float32")  # noqa: E731
        return pair(mesh, 2, make, starts, 2, center=center)

    def states(team):
        return [team[0].getter.center.state_dict(), *(w.optimizer.state_dict() for w in team)]

    def step(team, turn):
        grad = 2 * whole((5,), "float16", turn)
        team[turns[turn]].step({"w": grad}, weight=1 + turn % 3)

    team, kept = new_team(), []
    for turn in range(len(turns)):
        kept.append(states(team))
        step(team, turn)
    wanted = [worker.everything() for worker in team]
    for begin, state in enumerate(kept):
        team = new_team()
        team[0].getter.center.load_state_dict(state[0])
        for worker, own in zip(team, state[1:], strict=True):
            worker.optimizer.load_state_dict(own)
        for turn in range(begin, len(turns)):
            step(team, turn)
        assert [worker.everything() for worker in team] == wanted


def test_a_load_ends_the_round(mesh):
    center = center_of(mesh, rules.Mean(RATE), num_required=2)
    team = pair(mesh, 1, None, {"w": np.zeros(1, "float32")}, 2, center=center)
    saved = center.state_dict()
    thread = center.start_worker(0, lambda: team[0].step({"w": np.float32([2])}))
    state = center._state
    state._waiters.until(lambda: state._round.num_pushes == 1)
    center.load_state_dict(saved)  # the waiting push is added again
    state._waiters.until(lambda: state._round.num_pushes == 1)
    team[1].step({"w": np.float32([6])})
    thread.join(60)
    assert not thread.is_alive()
    assert center.values()["w"] == [-2]


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"center_rule": 3}, TypeError, "center_rule=3 is not a CenterRule of gr.center_rules"),
        ({"push": "sum"}, ValueError, "push='sum' must be 'gradient_mean' or 'delta'"),
        ({"num_required": 2}, ValueError,
         "push, num_required, grace and max_staleness need a center_rule="),
        ({"center_rule": rules.Mean(), "grace": 1}, ValueError, "grace=1 needs num_required="),
        ({"center_rule": rules.Mean(), "num_required": 0}, ValueError,
         "num_required=0 must be at least 1"),
        ({"center_rule": rules.Mean(), "max_staleness": -1}, ValueError,
         "max_staleness=-1 must be at least 0"),
        ({"center_rule": rules.Mean(), "grace": None, "num_required": 1}, TypeError,
         "grace=None must be a number of seconds"),
    ],
)  # fmt: skip
def test_wrong_options_of_a_center(mesh, options, error, text):
    with pytest.raises(error) as raised:
        gr.AGNCenter(mesh, **options)
    assert str(raised.value) == text


def test_wrong_options_of_a_worker(mesh):
    center = center_of(mesh, rules.Mean(), num_required=2)
    with pytest.raises(ValueError, match="num_required=2 of the center is more than num_worker=1"):
        pair(mesh, num=1, center=center)
    with pytest.raises(ValueError, match="is for a center without a rule"):
        pair(mesh, num=2, center=center, distance_scale=0.5)
    with pytest.warns(UserWarning, match="rounds have 1 of 2 pushes: pass num_required=2"):
        pair(mesh, num=2, center=center_of(mesh, rules.Nesterov()))
    with pytest.raises(ValueError, match="num_pushes=0 must be at least 1"):
        rules.DelayedNesterov(0)
    with pytest.raises(NotImplementedError, match="CenterRule has no rule: override update"):
        pushed(mesh, rules.CenterRule(), [0])
