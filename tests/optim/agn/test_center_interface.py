"""Workers use a center through ``Center`` only, so that it can be in another process."""

import signal
from pprint import pformat

import numpy as np
import pytest
from optim.agn.team import KINDS, Worker, whole
from optim.agn.test_center_rules import BOTH, rounds
from ray_actors.test_center import Client, modules

import gradreduce as gr
from gradreduce import checkpoint

__all__ = ["modules"]

STARTS = {
    "table": whole((6, 3)),
    "half": whole((7,), "float16", 1),
    "sparse half": whole((6, 2), "float16", 2),
    "wide": whole((4,), "float64", 3),
}


@pytest.fixture
def here():
    """Devices of the workers; shards have devices of their own."""
    with gr.open_mesh(4, backend="sim") as mesh:
        yield mesh


def on_shards(modules, center, num_shards):
    """Moves a center to shards that exchange messages with the workers; returns it as Ray does."""
    options = center._state.options
    remote = object.__new__(modules.center.AGNCenter)
    remote._client = Client(modules, num_shards, options)
    center._shared = modules.center.RemoteCenter(remote._client, center.devices, "w", options)
    return remote


def center_on_shards(modules, mesh, num_shards):
    """A center on shards, and their connection."""
    center = gr.AGNCenter(mesh)
    return center, on_shards(modules, center, num_shards)._client


def gradients(seed):
    grads = {name: whole(value.shape, value.dtype, seed + at)
             for at, (name, value) in enumerate(STARTS.items())}  # fmt: skip
    if seed % 3 == 0:
        del grads["wide"]
    for name in ("table", "sparse half") if seed % 4 < 2 else ("sparse half",):
        grads[name] = gr.IndexedSlices(grads[name][:3], [4, seed % 6, 4])
    return grads


def team_of(mesh, center, kind, period=3, **options):
    """Two workers, with two replicas and with one."""
    make = lambda: KINDS[kind][1](master_dtype="float32")  # noqa: E731
    return [Worker(home, center, STARTS, make, 2, period, **options)
            for home in (mesh[[0, 1]], mesh.devices[3])]  # fmt: skip


def trained(mesh, center, kind, **options):
    """Trains two workers; returns the complete state as bytes."""
    team = team_of(mesh, center, kind, **options)
    for turn in range(9):
        if turn == 5:
            with team[1].optimizer.make_session_run_hook(False, 1):
                pass
        for place, worker in enumerate(team):
            # The first period has no weights, the others have.
            weight = (1, [3, 1][: 2 - place], 0, 0.75, 1, 5)[max(0, turn - 2) % 6]
            worker.step(gradients(2 * turn + place), weight=weight)
    return [worker.everything() for worker in team]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("kind", ["momentum", "lazy adam", "own"])
def test_training_over_a_center_elsewhere_has_the_same_bits(modules, here, kind, gamma, num_shards):
    wanted, found = (
        trained(here, center, kind, distance_scale=gamma, reset_momentum=True)
        for center in (gr.AGNCenter(here), center_on_shards(modules, here, num_shards)[0])
    )
    assert found == wanted


class Damped(gr.center_rules.CenterRule):
    """A rule in Python, with a slot and a hyperparameter."""

    _slot_names = ("total",)
    _hyperparameters = ("rate",)
    rate = 0.25

    def update(self, center, slots, push, age, weight):
        slots["total"] += push * weight
        center -= self.rate * slots["total"] / (1 + age)


def trained_by_rule(mesh, center, owner, rate, saved):
    """Trains by the rule of a center; returns states and counts. ``owner`` saves and loads."""
    team, applied = team_of(mesh, center, "momentum", 2), []
    for turn in range(14):
        worker = team[turn % 8 // 4]  # ages from 0 to 2
        applied.append(worker.step(gradients(turn), weight=(1, 3, 0.75, 2)[turn % 4]))
        if turn == 7:
            rate.assign(np.float32(0.25))
            saved.append(owner.state_dict())
        if turn == 10:
            owner.load_state_dict(saved[0])  # also on shards that of a center in this process
        for shard in owner._client.states if turn == 12 and owner is not center else ():
            shard.load(checkpoint.join(*checkpoint.split(shard.save())))  # as after a restart
    states = [pformat(each.state_dict()) for each in (owner, *[w.optimizer for w in team])]
    dropped = [worker.optimizer.num_dropped for worker in team]
    return states, applied, [worker.everything() for worker in team], dropped


@pytest.mark.filterwarnings("ignore:Nesterov diverges")
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"push": "delta"}, {"max_staleness": 1}, {"max_staleness": 1, "num_required": 1}],
    ids=str,
)
@pytest.mark.parametrize("name", ["mean", "staleness", "nesterov", "delayed", "own"])
def test_a_rule_of_a_center_elsewhere_has_the_same_bits(modules, here, name, options, num_shards):
    found, saved = [], []
    for is_elsewhere in (False, True):
        rate = gr.Variable(np.float32(0.5), "rate", device=here.devices[2])
        rule = Damped() if name == "own" else BOTH[name][0]()
        if name == "mean":
            rule.learning_rate = rate  # the workers send its value
        center = gr.AGNCenter(here, center_rule=rule, **options)
        owner = on_shards(modules, center, num_shards) if is_elsewhere else center
        found.append(trained_by_rule(here, center, owner, rate, saved))
    assert pformat(saved[0]) == pformat(saved[1])
    assert found[0] == found[1]
    assert any(found[0][-1]) is ("max_staleness" in options)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("push", ["gradient_mean", "delta"])
@pytest.mark.parametrize("rule", [BOTH["nesterov"][0], Damped], ids=["nesterov", "own"])
def test_rounds_of_a_center_elsewhere_have_the_same_bits(modules, here, rule, push, num_shards):
    found = [
        [
            each.everything()
            for each in rounds(here, rule(), 4, weights=(4, 2, 2), push=push, move=move)
        ]
        for move in (None, lambda center: on_shards(modules, center, num_shards))
    ]
    assert found[0] == found[1]


def test_a_push_carries_the_sum_of_the_weights(modules, here, monkeypatch):
    elsewhere, client = center_on_shards(modules, here, 2)
    found, call = [], client.call

    def recording(command, *rest):
        found.append(getattr(command, "weight", None))
        return call(command, *rest)

    monkeypatch.setattr(client, "call", recording)
    worker = Worker(here[[0, 1]], elsewhere, STARTS, lambda: KINDS["momentum"][1](), period=2)
    for weight in (1, 1, 3, [2, 0.5], 0, 0.25, 1e16, 1):
        worker.step(gradients(1), weight=weight)
    assert [each for each in found if each is not None] == [2, 5.5, 0.25, 1e16]


def test_ctrl_c_ends_a_push_that_waits_and_the_next_call_makes_it(modules, here, monkeypatch):
    elsewhere, client = center_on_shards(modules, here, 1)
    calm, stopped = (
        Worker(here.devices[1], center, STARTS, lambda: gr.MomentumOptimizer(0.5, 0.5), period=2)
        for center in (gr.AGNCenter(here), elsewhere)
    )
    grads = [gradients(seed) for seed in range(3)]
    assert [worker.step(grads[0]) for worker in (calm, stopped)] == [False, False]
    before, call = stopped.center, client.call

    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return call(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(client, "call", interrupted)
        stopped.step(grads[1])
    assert stopped.optimizer.local_step.numpy() == 2
    assert all((value == before[name]).all() for name, value in stopped.center.items())
    assert calm.step(grads[1]) is True
    assert calm.step(grads[2]) is False
    assert stopped.step(grads[2]) is True  # makes the push first
    assert stopped.everything() == calm.everything()
