"""Actors compute what accumulators and centers of this process compute, bit for bit."""

import pickle
import re
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.exact_data import FLOATS, exact_data, same
from support.libraries import jnp, torch
from support.ray_cluster import in_actor

import gradreduce as gr
from gradreduce.errors import brief

pytestmark = pytest.mark.ray
BIG = (300, 100)  # travels alone
COMPILED = pytest.param(2, "compiled", marks=[pytest.mark.host, pytest.mark.exhaustive])


def specs() -> dict[str, tuple[Any, ...]]:
    """Accumulators of every dtype, dense and sparse."""
    found: dict[str, tuple[Any, ...]] = {str(dtype): (dtype, (5,)) for dtype in FLOATS}
    found |= {"big": ("float32", BIG), "empty": ("float64", (0, 2))}
    found |= {f"rows of {dtype}": (dtype, (6, 2), True) for dtype in FLOATS}
    return {**found, "big rows": ("bfloat16", (1000, 100), True)}


def gradients(seed: int) -> list[Any]:
    found: list[Any] = []
    for number, (dtype, shape, *is_sparse) in enumerate(specs().values()):
        if is_sparse:
            rng = np.random.default_rng(seed + number)
            indices = rng.integers(0, shape[0], shape[0] // 2)
            values = exact_data((len(indices), shape[1]), dtype, seed=seed, num_terms=128)
            found.append(gr.IndexedSlices(values, indices, list(shape)))
        else:
            found.append(exact_data(shape, dtype, seed=seed, num_terms=128))
    return found


def check_same(found: list[Any], wanted: list[Any]) -> None:
    for left, right in zip(found, wanted, strict=True):
        if isinstance(right, gr.IndexedSlices):
            assert tuple(left.dense_shape) == tuple(right.dense_shape)
            check_same([left.indices, left.values], [right.indices, right.values])
        else:
            assert same(np.asarray(left), np.asarray(right))


def apply_to_both(shared: Any, own: list[Any], grads: list[Any], step: int, weight: float) -> None:
    """Also tries to apply a stale gradient."""
    named = dict(reversed(list(zip(specs(), grads, strict=True))))
    for of_shared, local_step, is_added in ((named, step, True), (grads, step - 1, False)):
        assert shared.apply_grads(of_shared, local_step, weight=weight) is is_added
        assert gr.apply_grads(own, grads, local_step, weight=weight) is is_added


KINDS: dict[str, tuple[str, dict[str, str]]] = {  # the reduction type, and options
    "MEAN": ("MEAN", {}),
    "SUM": ("SUM", {}),
    "per_gradient": ("MEAN", {"sparse_mean": "per_gradient"}),
}


@pytest.mark.parametrize(
    ("kind", "num_shards"),
    [("MEAN", 2), ("SUM", 1), ("per_gradient", 2)]
    + [
        pytest.param(*each, marks=pytest.mark.exhaustive)
        for each in (("MEAN", 1), ("SUM", 2), ("per_gradient", 1))
    ],
)
def test_a_set_is_its_accumulators_called_together(unique_name, kind, num_shards, tmp_path):
    """Also after the actors were restarted from snapshots."""
    reduction_type, options = KINDS[kind]
    sparse, dense = partial(gr.SparseConditionalAccumulator, **options), gr.ConditionalAccumulator
    own = [
        (sparse if is_sparse else dense)(dtype, shape, name=name, reduction_type=reduction_type)
        for name, (dtype, shape, *is_sparse) in specs().items()
    ]

    def counts(each: Any) -> tuple[int, ...]:
        return each.global_step, each.num_accumulated(), each.num_dropped

    options = {**options, "num_shards": num_shards, "snapshots": tmp_path, "durability": "push"}
    make = partial(gr.ray.AccumulatorSet, specs(), unique_name, reduction_type, **options)
    with make() as shared:
        other = pickle.loads(pickle.dumps(make()))
        for turn, (step, weights) in enumerate([(0, [1, 1]), (1, [0, 3, 1]), (7, [0.5])]):
            num_required = len(weights)
            if step == 7:
                for each in (shared, *own):
                    each.set_global_step(step)
            for number, weight in enumerate(weights):
                grads = gradients(10 * turn + number) if weight else [None] * len(own)
                apply_to_both((shared, other)[number % 2], own, grads, step, weight)
                assert counts(shared) == counts(own[0])
            in_actor(unique_name, lambda actor: actor._load(actor._snapshots.newest()) and None)
            # To this process, and from it.
            states = [each.state_dict() for each in own]
            state = shared.state_dict()
            for each, left, right in zip(own, state["accumulators"], states, strict=True):
                assert left.keys() == right.keys()
                assert left.get("weight") == right.get("weight")
                each.load_state_dict(left)
            other.load_state_dict({**state, "accumulators": states})
            taken = shared.take_grads(num_required, timeout=30)
            assert list(taken) == list(specs())
            wanted = gr.take_grads(own, num_required, output_type="numpy")
            check_same(list(taken.values()), wanted)
            assert counts(other) == counts(own[0])


def test_a_weight_is_in_the_command_that_sends_the_gradient(unique_name, monkeypatch):
    with gr.ray.ConditionalAccumulator("float32", [2], unique_name) as shared:
        call, sent = shared._client.call, []

        def noted(command, messages, origin):
            sent.append((command.weight, messages))
            return call(command, messages, origin)

        monkeypatch.setattr(shared._client, "call", noted)
        for weight in (1, 2, 0):
            shared.apply_grad([1.0, 2.0], weight=weight)
        (_, unweighted), *_ = sent
        assert sent == [(1, unweighted), (2, unweighted), (0, [])]
        assert len(unweighted) == 1


def test_errors_of_weights_change_no_shard(unique_name):
    specs = {"w": ("float64", [3]), "b": ("float64", [])}
    with gr.ray.AccumulatorSet(specs, unique_name, num_shards=2) as shared:
        assert shared.apply_grads({"w": None, "b": None}, weight=0)
        with pytest.raises(gr.errors.InvalidArgumentError, match=r"^all gradients in the accumu"):
            shared.take_grads(1, timeout=30)
        grads = [[1.0, 0.5, 0.0], -1.0]
        assert shared.apply_grads(grads, weight=1e308)
        with pytest.raises(gr.errors.InvalidArgumentError, match=r"the sum of all weights exce"):
            shared.apply_grads(grads, weight=1e308)
        for weight, kind in (([1], TypeError), (-1, ValueError), (1 + 0j, TypeError)):
            with pytest.raises(kind, match=rf"^weight={re.escape(brief(weight))} must be a "):
                shared.apply_grads(grads, weight=weight)
        with pytest.raises(ValueError, match=r"^grads has 1 entries, the set has 2"):
            shared.apply_grads([None], weight=0)
        assert (shared.global_step, shared.num_accumulated()) == (0, 2)
        states = shared.state_dict()["accumulators"]
        assert [state["weight"] for state in states] == [[1e308]] * 2
        found = shared.take_grads(2, timeout=30)
        assert (found["w"].tolist(), found["b"]) == (grads[0], grads[1])


def test_a_sparse_accumulator_has_the_mean_of_one_in_this_process(unique_name):
    own = gr.SparseConditionalAccumulator("float32", sparse_mean="per_gradient")
    with gr.ray.SparseConditionalAccumulator(
        "float32", None, unique_name, sparse_mean="per_gradient"
    ) as shared:
        copied = pickle.loads(pickle.dumps(shared))
        for each in (own, shared):
            each.apply_grad([1, 4], [[2.0], [6.0]])
        own.apply_grad([4], [[6.0]])
        copied.apply_grad([4], [[6.0]])
        state = shared.state_dict()
        old = {key: value for key, value in state.items() if key != "sparse_mean"}
        text = f"state of accumulator {unique_name!r}['sparse_mean'] is 'per_row'; expected "
        with pytest.raises(ValueError, match=f"^{re.escape(text)}'per_gradient'$"):
            shared.load_state_dict(old)  # of an older version
        shared.load_state_dict(own.state_dict())
        own.load_state_dict(state)
        for each in (own, shared):
            indices, values, _ = each.take_grad(2, timeout=60)
            assert (indices.tolist(), values.tolist()) == ([1, 4], [[1.0], [6.0]])
    with gr.ray.SparseConditionalAccumulator("float32", None, f"{unique_name}-old") as shared:
        shared.load_state_dict(old)
        assert shared.take_grad(2, timeout=60)[1].tolist() == [[2.0], [6.0]]


def test_the_process_that_takes_is_warned_of_an_inexact_sum(unique_name):
    """``test_exact.py`` has the sums, their orders and restarts, without Ray."""
    with gr.ray.ConditionalAccumulator("float32", BIG, unique_name, exact=True) as shared:
        other = pickle.loads(pickle.dumps(shared))
        for scale in (1.0, 1e-12, 1e-24, 1e-36):
            assert shared.apply_grad(np.full(BIG, scale, np.float32))
        with pytest.warns(gr.InexactSumWarning, match=f"^the exact sum of {unique_name!r} did not"):
            other.take_grad(4, timeout=30)


def test_other_float_dtypes_are_cast_when_asked(unique_name):
    specs = {"dense": ("float32", [2]), "rows": ("float32", [3, 1], True)}
    grads = [np.array([1.0, 2.0]), gr.IndexedSlices(np.array([[3.0]]), [1])]
    with gr.ray.AccumulatorSet(specs, unique_name) as shared:
        with pytest.raises(ValueError, match="pass cast=True"):
            shared.apply_grads(grads)
        assert shared.apply_grads(grads, cast=True)
        dense, rows = shared.take_grads(1, timeout=30).values()
        assert (dense.tolist(), rows.values.tolist()) == ([1.0, 2.0], [[3.0]])
        assert dense.dtype == rows.values.dtype == np.float32


def test_an_accumulator_has_the_members_of_one_in_this_process(unique_name, caplog):
    own = gr.ConditionalAccumulator("float32", [None, 2], unique_name)
    with gr.ray.ConditionalAccumulator("float32", [None, 2], unique_name) as shared:
        other = pickle.loads(pickle.dumps(shared))
        assert isinstance(shared, gr.ConditionalAccumulatorBase)
        assert (shared.dtype, shared.shape) == (own.dtype, (None, 2))
        assert shared.accumulator_ref == other.accumulator_ref
        for call in (gr.apply_grads, lambda found, grads: gr.take_grads(found, 1, timeout=0)):
            with pytest.raises(TypeError, match=r"for those of gr\.ray use an AccumulatorSet$"):
                call([shared], [np.ones((1, 2), np.float32)])
        warned = []
        for each in (own, shared):
            each.set_global_step(3)
            assert not each.apply_grad(np.ones((1, 2), np.float32), 0)  # told, so no warning
            for _ in range(2):
                assert not each.apply_grad(np.ones((1, 2), np.float32))
            warned.append([text for text in caplog.messages if "without local_step" in text])
            caplog.clear()
        text = f"accumulator {unique_name!r} is at step 3 and dropped a gradient without local_step"
        own.close()
    assert len(warned[0]) == len(warned[1]) == 1
    assert warned[1][0].startswith(text)
    assert warned[1][0].partition(" is at ")[2] == warned[0][0].partition(" is at ")[2]


def test_a_set_with_names_takes_and_returns_dicts(unique_name):
    specs = {"w": ("float32", [1]), "b": ("float64", [])}
    with gr.ray.AccumulatorSet(specs, unique_name) as named:
        for grads, text in (
            ({"w": [1.0]}, "grads lacks [b] and has unknown []; pass one gradient for each name"),
            ({"w": [1.0], "b": 2.0, "c": 3.0}, "grads lacks [] and has unknown [c]; pass one"),
            ({"w": [1.0, 2.0], "b": 2.0}, "grads['w'], for accumulator 'w': "),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                named.apply_grads(grads)
        assert named.num_accumulated() == 0
        assert named.apply_grads({"b": 2.0, "w": [1.0]})
        assert named.apply_grads([[3.0], 4.0])  # in the order of the specs
        assert named.take_grads(2, timeout=30) == {"w": [2.0], "b": 3.0}
    with gr.ray.AccumulatorSet(list(specs.values()), f"{unique_name}-list") as listed:
        with pytest.raises(TypeError, match=r"^grads is a dict, but the specs of the set are a li"):
            listed.apply_grads({"w": [1.0], "b": 2.0})
        assert listed.apply_grads([[1.0], 2.0])
        assert listed.take_grads(1, timeout=30) == [[1.0], 2.0]


@pytest.mark.torch
def test_tensors_in_tensors_out(unique_name, tmp_path, monkeypatch):
    """Also after the actor, which does not import PyTorch, has loaded a snapshot."""
    options = {"snapshots": tmp_path, "durability": "push"}
    with gr.ray.ConditionalAccumulator("bfloat16", [2], unique_name, **options) as shared:
        shared.apply_grad(None, weight=0)  # not read, so it is not the first
        shared.apply_grad(torch.ones(2, dtype=torch.bfloat16))
        shared.apply_grad(np.ones(2), 0, cast=True)
        assert "torch" not in in_actor(unique_name, lambda _: list(__import__("sys").modules))
        in_actor(unique_name, lambda actor: actor._load(3) and None)
        state = shared.state_dict()
        assert state["kind"] == "torch"
        found = shared.take_grad(3, timeout=30)
        assert (type(found), found.dtype) == (torch.Tensor, torch.bfloat16)
        assert found.tolist() == [1.0, 1.0]
        found += 1  # the caller owns it
        shared.load_state_dict(state)
        own = gr.ConditionalAccumulator("bfloat16", [2])
        own.load_state_dict(state)
        assert torch.equal(own.take_grad(3), shared.take_grad(3, timeout=30))
        for output_type, kind in (("numpy", np.ndarray), ("torch", torch.Tensor)):
            shared.apply_grad([1.0, 2.0], shared.global_step)
            assert type(shared.take_grad(1, timeout=30, output_type=output_type)) is kind
        shared.load_state_dict(state)
        with pytest.raises(ValueError, match=r"^output_type='list' is not one of "):
            shared.take_grad(2, output_type="list")
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            assert type(shared.take_grad(3, timeout=30)) is np.ndarray


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.exhaustive
def test_gradients_of_pytorch_and_jax(unique_name):
    sparse = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2), check_invariants=True)
    specs = {"big": ("float32", BIG), "half": ("bfloat16", [3]), "rows": ("float32", [5, 2], True)}
    with gr.ray.AccumulatorSet(specs, unique_name, "SUM", num_shards=2) as shared:
        shared.apply_grads([torch.full(BIG, 2.0), jnp.ones(3, jnp.bfloat16), sparse])
        rows = gr.IndexedSlices(jnp.ones((1, 2)), torch.tensor([3]))
        shared.apply_grads([jnp.full(BIG, 3.0), torch.ones(3, dtype=torch.bfloat16), rows])
        with pytest.raises(ValueError, match=r"the tensor requires grad: pass tensor.detach\(\)"):
            shared.apply_grads([torch.ones(BIG, requires_grad=True), jnp.ones(3), sparse])
        big, half, rows = shared.take_grads(2, timeout=30).values()
    assert isinstance(big, torch.Tensor)
    assert isinstance(half, jnp.ndarray)
    assert torch.equal(big, torch.full(BIG, 5.0))
    assert half.astype(np.float32).tolist() == [2.0] * 3
    assert torch.equal(rows.to_dense(), torch.tensor([0.0, 1, 0, 2, 0])[:, None].expand(5, 2))
    with gr.ray.AGNCenter(f"{unique_name}-center") as center:
        for ones in (torch.ones(2), jnp.ones(2)):
            getter = gr.AGNCustomGetter(gr.default_mesh()[0], center=center)
            weights = gr.get_variable("w", ones, custom_getter=getter)
            rule = gr.GradientDescentOptimizer(0.5)
            optimizer = gr.AGNOptimizer(rule, 2, getter, communication_period=1)
            optimizer.apply_gradients([(ones, weights)])
        assert weights.numpy().tolist() == [0.0, 0.0]


def rule_of_a_program() -> type[gr.Optimizer]:
    """Returns a class that is sent by value, as one of the program that runs."""

    class Summing(gr.Optimizer):
        _slot_names = ("total",)
        _hyperparameters = ("rate",)

        def __init__(self, rate: float) -> None:
            super().__init__("Summing")
            self.rate = rate

        def _apply(self, variable: Any, slots: dict[str, Any], gradient: Any) -> None:
            slots["total"] += gradient
            variable -= self.rate * slots["total"]

    return Summing


Summing = rule_of_a_program()
RULES = {
    "sgd": lambda: gr.GradientDescentOptimizer(0.25),
    "momentum": lambda: gr.MomentumOptimizer(lambda: 0.25, 0.5, use_nesterov=True),
    "adam": lambda: gr.AdamOptimizer(0.25),
    "masters": lambda: gr.AdamOptimizer(0.25, master_dtype="float32"),
    "python": lambda: Summing(0.25),
}
MODES = {
    "dense": {},
    "halves": {"dtype": "bfloat16"},
    "sparse": {"is_sparse": True},
    "scaled": {"distance_scale": 0.5},
    "replicas": {"num_replicas": 2, "reset_momentum": True},
    "weights": {"weights": (3, 1, 0, 0.5, 1)},
    "all": {
        "dtype": "float16", "is_sparse": True, "distance_scale": 0.5, "weights": (3, 1, 0, 0.5, 1),
    },
}  # fmt: skip


class Worker:
    """A worker that trains three variables at a center."""

    def __init__(
        self, center: Any, rule: str, *, dtype: str = "float32", is_sparse: bool = False,
        num_replicas: int = 1, weights: Sequence[float] = (1,), **options: Any,
    ) -> None:  # fmt: skip
        place = gr.default_mesh()[:num_replicas] if num_replicas > 1 else gr.default_mesh()[0]
        self.getter = gr.AGNCustomGetter(place, center=center)
        self._is_sparse, self._weights = is_sparse, weights
        make = partial(gr.get_variable, dtype=dtype, custom_getter=self.getter)
        self.variables = [
            make(f"v{number}", exact_data(shape, dtype, seed=number))
            for number, shape in enumerate([(3,), (6, 2), BIG])
        ]
        self.optimizer = gr.AGNOptimizer(
            RULES[rule](), 2, self.getter, communication_period=2, **options
        )

    def step(self, seed: int) -> None:
        grads: list[Any] = [
            exact_data(var.shape, var.dtype, seed=seed + number)
            for number, var in enumerate(self.variables)
        ]
        if self._is_sparse:
            grads[1] = gr.IndexedSlices(grads[1][:2], [seed % 5, 3], [6, 2])
        weight = self._weights[seed % len(self._weights)]
        self.optimizer.apply_gradients(list(zip(grads, self.variables, strict=True)), weight=weight)

    def values(self) -> list[np.ndarray]:
        centers = [self.getter.center_variable(var) for var in self.variables]
        return [var.numpy() for var in [*self.variables, *centers]]


def train_from(center: Any, worker: Worker, state: Any) -> None:
    """Pushes, loads a state, and pushes again, to the slots that were loaded."""
    worker.step(20)
    worker.step(21)
    center.load_state_dict(state)
    worker.optimizer.get_init_op(0)()
    worker.step(22)
    worker.step(23)


@pytest.fixture(scope="module")
def names_of_centers(cluster: None) -> Iterator[dict[tuple[int, str], str]]:
    """Names of centers by shards and kernels; a test uses the actors of the one before."""
    names: dict[tuple[int, str], str] = defaultdict(lambda: f"center-{uuid.uuid4().hex[:8]}")
    yield names
    for (num_shards, _), name in names.items():
        gr.ray.AGNCenter(name, num_shards=num_shards).close()


# Makes a shard of a center one that has just started; a lambda is sent by value.
EMPTY = lambda shard: (shard._load(0), vars(shard).get("_workers", {}).clear())[1]  # noqa: E731


@pytest.mark.parametrize(("num_shards", "kernels"), [(1, "numpy"), (2, "numpy"), COMPILED])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_workers_that_take_turns_train_as_in_one_process(
    names_of_centers, rule, mode, num_shards, kernels
):
    name = names_of_centers[num_shards, kernels]
    local = gr.AGNCenter(gr.default_mesh())
    options: dict[str, Any] = {"num_shards": num_shards, "kernels": kernels}
    shared = gr.ray.AGNCenter(name, worker="first", **options)
    for shard in [name, *[f"{name}#1"] * (num_shards - 1)]:
        in_actor(shard, EMPTY)
    again = gr.ray.AGNCenter(name, worker="second", **options)
    wanted = [Worker(local, rule, **MODES[mode]) for _ in range(2)]
    found = [Worker(center, rule, **MODES[mode]) for center in (shared, again)]
    for seed in range(9):
        turn = seed % 3 % 2  # they push after other numbers of steps
        for workers in (wanted, found):
            workers[turn].step(seed)
        if seed % 4 == 0:
            check_same(found[turn].values(), wanted[turn].values())
    # The second pushed once, after one push of the first, and has pulled nothing before.
    found_workers = [each[:3] for each in shared.workers()]
    assert found_workers == [("first", 6, 0), ("second", 2, 1)]
    weights = [local._state.variables[name] for name in ("v0", "v1", "v2")]
    assert [each.name for each in shared.variables()] == [each.name for each in weights]
    state = local.state_dict()
    saved = shared.state_dict()["variables"]
    check_same([saved[name] for name in state["variables"]], list(state["variables"].values()))
    for center, workers in ((local, wanted), (shared, found)):
        train_from(center, workers[0], state)
    check_same(found[0].values(), wanted[0].values())
    values = shared.values()
    assert list(values) == list(local.values()) == ["v0", "v1", "v2"]
    check_same(list(values.values()), list(local.values().values()))
    for found_values in (list(values.values()), [each.numpy() for each in shared.variables()]):
        check_same(found_values, [each.numpy() for each in weights])
    slots = [worker.optimizer.variables() for worker in (found[0], wanted[0])]
    check_same(*[[each.numpy() for each in of_worker] for of_worker in slots])
    again.leave()
    assert [each.name for each in again.workers()] == ["first"]


def test_a_class_that_two_programs_define_alike_is_one_rule(unique_name):
    centers = [gr.ray.AGNCenter(unique_name) for _ in range(2)]
    with centers[0]:
        for center, rate in zip(centers, (0.5, 0.25), strict=True):
            getter = gr.AGNCustomGetter(gr.default_mesh()[0], center=center)
            weights = gr.get_variable("w", np.zeros(2, np.float32), custom_getter=getter)
            rule = rule_of_a_program()(rate)
            optimizer = gr.AGNOptimizer(rule, 2, getter, communication_period=1)
            optimizer.apply_gradients([(np.ones(2, np.float32), weights)])
        # total is 1, then 2, at the center: - 0.5 * 1 - 0.25 * 2
        assert weights.numpy().tolist() == [-1.0, -1.0]
