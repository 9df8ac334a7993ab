"""Workers use a center through ``Center`` only, so that it can be in another process."""

import signal

import pytest
from optim.agn.team import KINDS, Worker, whole
from ray_actors.test_center import Client, modules

import gradreduce as gr

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


def center_on_shards(modules, mesh, num_shards):
    """A center on shards that exchange messages with the workers, and their connection."""
    center, client = gr.AGNCenter(mesh), Client(modules, num_shards)
    center._shared = modules.center.RemoteCenter(client, center.devices, "w")
    return center, client


def gradients(seed):
    grads = {name: whole(value.shape, value.dtype, seed + at)
             for at, (name, value) in enumerate(STARTS.items())}  # fmt: skip
    if seed % 3 == 0:
        del grads["wide"]
    for name in ("table", "sparse half") if seed % 4 < 2 else ("sparse half",):
        grads[name] = gr.IndexedSlices(grads[name][:3], [4, seed % 6, 4])
    return grads


def trained(mesh, center, kind, **options):
    """Two workers, with two replicas and with one; returns the complete state as bytes."""
    team = [
        Worker(
            home, center, STARTS, lambda: KINDS[kind][1](master_dtype="float32"), 2, 3, **options
        )
        for home in (mesh[[0, 1]], mesh.devices[3])
    ]
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
