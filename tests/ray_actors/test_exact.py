"""Exact sums in actors: no order of arrival changes a bit, and a client warns of what is lost."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray_actors.actor_world import load
from ray_actors.actors_at_once import Actors
from support.exact_sums import exact_means, exact_sums, weighted

import gradreduce as gr
from gradreduce.device import as_dtype

SPECS = {"a/w": ("float32", [300]), "b/w": ("float32", [7]), "half": ("bfloat16", [40, 3]),
         "wide": ("float64", [9])}  # fmt: skip
PLAIN = [1.0] * 12
WEIGHTS = [1.0, 3.0, 0.5, 7.0, 0.375, 2.0, 1.0, 0.25, 5.0, 1.0, 0.625, 1.0]


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with load() as found:
        yield found


@pytest.fixture
def actors(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    made = Actors(modules, monkeypatch)
    yield made
    made.close()


def gradients(num: int) -> list[dict[str, np.ndarray]]:
    """Terms of several magnitudes, of which many cancel; three words hold their sums."""
    rng, found = np.random.default_rng(5), list[dict[str, np.ndarray]]()
    for number in range(num):
        terms = {}
        for name, (dtype, shape) in SPECS.items():
            values = rng.standard_normal(shape) * np.exp2(rng.integers(-15, 16, shape))
            if number % 2:
                near = np.where(rng.random(shape) < 0.5, 0.0, values * 1e-4)
                values = near - found[-1][name].astype(np.float64)
            terms[name] = values.astype(as_dtype(dtype))
        found.append(terms)
    return found


def digest(arrays: Any) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize(
    ("kind", "weights", "num_orders", "restarts"),
    [("MEAN", PLAIN, 100, False), ("SUM", WEIGHTS, 10, False), ("MEAN", WEIGHTS, 5, True)],
)
def test_no_order_of_arrival_changes_a_bit(
    modules, actors, tmp_path, kind, weights, num_orders, restarts
):
    """Also if the actors are restarted between two gradients, or before the take."""
    grads, rng, options = gradients(12), np.random.default_rng(0), {}
    if restarts:
        options = {"num_shards": 2, "snapshots": tmp_path, "durability": "push"}
    make = modules.accumulators.AccumulatorSet
    clients = [make(SPECS, "a", kind, exact=True, worker=str(i), **options) for i in range(3)]
    taken, digests, states = {}, set(), set()
    for step in range(num_orders):
        last = rng.integers(1, 13) if restarts else 0
        for number, index in enumerate(rng.permutation(12), 1):
            client = clients[rng.integers(3)]
            assert client.apply_grads(grads[index], step, weight=weights[index])
            if number == last:
                actors.restart()
        if step < 3:
            saved = clients[2].state_dict()["accumulators"]
            states.add(digest(each["partial_sums"][0] for each in saved))
        taken = clients[step % 3].take_grads(12)
        digests.add(digest(taken.values()))
    assert len(digests) == len(states) == 1
    for name, found in taken.items():
        terms = [weighted(each[name], by) for each, by in zip(grads, weights, strict=True)]
        wanted = exact_sums(terms, found.dtype)
        if kind == "MEAN":
            wanted = exact_means(terms, sum(weights), found.dtype)
        assert found.dtype == as_dtype(SPECS[name][0])
        assert found.tobytes() == wanted.tobytes()
    clients[0].close()


TEXT = (
    "the exact sum of {!r} did not fit into its words, or overflowed on the way: its bits may "
    "depend on the order of the terms. Pass a larger words= (sums of float64 in one call "
    "always have 8)"
)
LOST = {"a/w": ("float32", [2]), "b/w": ("float32", [2]), "c": ("float32", [1])}


def apply_lost(shared: Any) -> None:
    """The sum of b/w has three floats."""
    for term in (1.0, 1e-10, 1e-20):
        assert shared.apply_grads([[1.0, 2.0], [term, 1.0], [term + 1]], shared.global_step)


def warned(call: Any) -> list[str]:
    """The warnings of a call; the actors are in this process, and would be heard."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(each.category is gr.InexactSumWarning for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_client_that_takes_is_warned_once_of_a_sum_that_did_not_fit(
    modules, actors, tmp_path, num_shards
):
    options = {"num_shards": num_shards, "snapshots": tmp_path, "durability": "push"}
    shared = modules.accumulators.AccumulatorSet(LOST, "a", exact=True, words=2, **options)
    text, of_take = [TEXT.format("b/w")], lambda: shared.take_grads(3)
    assert warned(lambda: apply_lost(shared)) == []
    assert warned(of_take) == text
    shared.apply_grads([[1.0, 2.0]] * 2 + [[1.0]], 1)  # the next sum fits
    assert warned(lambda: shared.take_grads(1)) == []

    def lose_answer(method: str) -> bool:
        if method != "take":
            return False
        actors.on_answer = lambda method: False
        return True

    def lose_actors(method: str) -> bool:
        is_lost = lose_answer(method)
        if is_lost:
            actors.restart()
        return is_lost

    for lose in (lose_answer, lose_actors):
        apply_lost(shared)
        actors.on_answer = lose
        assert warned(of_take) == text
    apply_lost(shared)
    actors.restart()  # from words without flags
    states: list[Any] = []
    assert warned(lambda: states.append(shared.state_dict())) == text
    assert warned(of_take) == text
    for _ in range(2):  # the sums of a state are what its words are
        shared.load_state_dict(states[0])
        assert warned(of_take) == []
        apply_lost(shared)
    shared.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_client_is_warned_although_devices_are_later_than_the_host(
    modules, actors, monkeypatch, seed
):
    monkeypatch.setattr(modules.shard_state, "open_mesh", partial(gr.open_mesh, schedule_seed=seed))
    shared = modules.accumulators.AccumulatorSet(LOST, "a", exact=True, words=2)
    for call in (lambda: shared.take_grads(3), shared.state_dict):
        apply_lost(shared)
        assert warned(call) == [TEXT.format("b/w")]
    shared.close()


def test_states_are_those_of_one_process_and_of_any_number_of_shards(modules, actors):
    grads, make = gradients(5), modules.accumulators.AccumulatorSet
    one = make(SPECS, "one", exact=True)
    for index in (0, 1, 2):
        one.apply_grads(grads[index], weight=WEIGHTS[index])
    state = one.state_dict()
    assert [each["partial_sums"][0].shape for each in state["accumulators"]] == [
        (3, 300), (3, 7), (3, 40, 3), (3, 9)
    ]  # fmt: skip
    two = make(SPECS, "two", exact=True, num_shards=2)
    two.load_state_dict(state)
    own = [gr.ConditionalAccumulator(*each, name=name, exact=True) for name, each in SPECS.items()]
    for each, saved in zip(own, state["accumulators"], strict=True):
        each.load_state_dict(saved)
    back = make(SPECS, "back", exact=True)
    back.load_state_dict({**state, "accumulators": [each.state_dict() for each in own]})
    digests = set()
    for shared in (one, two, back):
        for index in (4, 3):
            shared.apply_grads(grads[index], weight=WEIGHTS[index])
        digests.add(digest(shared.take_grads(5).values()))
        shared.close()
    gr.apply_grads(own, list(grads[3].values()), weight=WEIGHTS[3])
    gr.apply_grads(own, list(grads[4].values()), weight=WEIGHTS[4])
    digests.add(digest(gr.take_grads(own, 5)))
    assert len(digests) == 1


@pytest.mark.parametrize("sparse_mean", ["per_row", "per_gradient"])
def test_rows_have_the_bits_of_any_order_of_arrival(modules, actors, sparse_mean):
    """Also in a set with dense accumulators, and after a restart from a state."""
    rng, digests = np.random.default_rng(1), set()
    grads = [
        {"rows": gr.IndexedSlices(each["a/w"][:100].reshape(50, 2), rng.integers(0, 9, 50), (9, 2)),
         "half": each["half"]}
        for each in gradients(6)
    ]  # fmt: skip
    specs = {"rows": ("float32", [9, 2], True), "half": SPECS["half"]}
    options = {"sparse_mean": sparse_mean, "exact": True, "words": 4}
    mesh = gr.open_mesh(1, backend="sim")
    own = gr.SparseConditionalAccumulator("float32", [9, 2], device=mesh.devices[0], **options)
    alone = modules.accumulators.SparseConditionalAccumulator
    for step in range(5):
        shared = modules.accumulators.AccumulatorSet(specs, f"set-{step}", **options)
        one = alone("float32", [9, 2], f"one-{step}", **options)
        for number, index in enumerate(rng.permutation(6)):
            shared.apply_grads(grads[index], weight=WEIGHTS[index])
            one.apply_indexed_slices_grad(grads[index]["rows"], weight=WEIGHTS[index])
            own.apply_indexed_slices_grad(grads[index]["rows"], step, weight=WEIGHTS[index])
            if number == 3:
                shared.load_state_dict(shared.state_dict())
        for taken in (shared.take_grads(6)["rows"], one.take_indexed_slices_grad(6),
                      own.take_indexed_slices_grad(6)):  # fmt: skip
            digests.add(digest([taken.indices, taken.values]))
        shared.close()
        one.close()
    assert len(digests) == 1


def test_what_is_refused(modules, actors):
    make, dense = modules.accumulators.AccumulatorSet, [("float32", [2])]
    for error, text, specs, options in (
        (TypeError, "exact='yes' must be True or False", dense, {"exact": "yes"}),
        (ValueError, "words=9 must be at least 2, and at most 8", dense, {"words": 9}),
    ):
        with pytest.raises(error, match=f"^{re.escape(text)}$"):
            make(specs, "a", **options)
    one = modules.accumulators.ConditionalAccumulator
    shared = one("float32", [2], "a", exact=True)
    shared.apply_grad([1.0, 2.0])
    state = shared.state_dict()
    for options, text in (
        ({}, "exact True, not False"),
        ({"words": 4, "exact": True}, "words 3, not 4"),
        ({"words": 4}, "exact True, not False, and words 3, not 4"),
    ):
        with pytest.raises(ValueError, match=f"^the actor 'a' has {text}; use another name, or "):
            one("float32", [2], "a", **options)
    for options, text in (({}, "['format'] is 'gradreduce exact"), ({"exact": True, "words": 4},
                          "['partial_sums'][0]")):  # fmt: skip
        with one("float32", [2], "other", **options) as other:
            with pytest.raises(ValueError, match=re.escape(f"state of accumulator 'other'{text}")):
                other.load_state_dict(state)
            assert other.num_accumulated() == 0
    assert shared.take_grad(1).tolist() == [1.0, 2.0]
    shared.close()
