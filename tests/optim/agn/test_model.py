"""Any interleaving of workers gives what a sequential model in NumPy does, bit by bit."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from optim.agn.team import BOTH_IMPLEMENTATIONS, KINDS, STARTS, ModelWorker, Worker, whole
from optim.test_update_rules import Model
from support.exhaustive import examples

import gradreduce as gr

pytestmark = BOTH_IMPLEMENTATIONS
FORMS = ("dense", "dense", "rows", "no rows", "none", "replicas", "rows of replicas")
# Of a step, or of each replica.
WEIGHTS = (1,) * 8 + (0, 2, 3, 0.5, 4096, (3, 1), (2, 2), (1, 0), (0, 0))
STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.tuples(*[st.sampled_from(FORMS)] * 3),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
        st.sampled_from(WEIGHTS),
    ),
    min_size=1,
    max_size=12,
)
SETTINGS = settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ROWS = np.array([3, 1, 3])


def gradient(form, worker, name, dtype, seed, weight):
    """A gradient for the optimizer; and for the model, a dense one and the rows it touches."""
    var = worker.variables[name]
    if not var.shape and "rows" in form:
        form = "dense"  # a number has none
    if len(var.devices) == 1:
        form = {"replicas": "dense", "rows of replicas": "rows"}.get(form, form)
    if form == "none":
        return None, None
    if form == "no rows":
        none = np.zeros((0, *var.shape[1:]), dtype)
        return gr.IndexedSlices(none, [], var.shape), (np.zeros(var.shape, dtype), [])
    values = whole(var.shape if "rows" not in form else (3, *var.shape[1:]), dtype, seed)
    apart = [values] * len(var.devices)
    if len(apart) > 1:  # replicas that differ, of the same mean
        apart[0], apart[1] = values + values, values - values
    if "replicas" in form and isinstance(weight, tuple) and any(weight):
        values = (apart[0] * weight[0] / sum(weight)).astype(dtype)
        apart = [part if each else part * np.nan for part, each in zip(apart, weight, strict=True)]
    if "rows" not in form:
        given = values if form == "dense" else gr.PerReplica(apart, devices=var.devices)
        return given, (values, ...)
    dense = np.zeros(var.shape, dtype)
    np.add.at(dense, ROWS, values)
    parts = [gr.IndexedSlices(part, ROWS, var.shape) for part in apart]
    return (parts[0] if form == "rows" and len(parts) == 1 else
            gr.IndexedSlices(values, ROWS, var.shape) if form == "rows" else
            gr.PerReplica(parts, devices=var.devices)), (dense, [1, 3])  # fmt: skip


class Run:
    """Workers that run chosen steps, and their model."""

    def __init__(self, mesh, kind, num, period, **options):
        masters, mirrored = options.pop("masters", False), options.pop("mirrored", False)
        self.dtype, self.kind = options.pop("dtype", "float32"), kind
        self.starts = {name: whole(shape, self.dtype, 5) for name, shape in STARTS.items()}
        center = gr.AGNCenter(mesh)
        more = {"master_dtype": "float32"} if masters else {}
        places = [place % len(mesh) for place in range(num)]
        homes = [mesh[[p, (p + 1) % len(mesh)]] if mirrored else mesh.devices[p] for p in places]
        self.workers = [
            Worker(home, center, self.starts, lambda: KINDS[kind][1](**more), num, period,
                   **options)
            for home in homes
        ]  # fmt: skip
        kept = {
            name: Model(KINDS[kind], value, master=masters) for name, value in self.starts.items()
        }
        ways = options.get("distance_scale"), options.get("reset_momentum", False)
        self.models = [ModelWorker(kept, kind, self.starts, period, masters, *ways) for _ in homes]
        self.shared = gr.Variable(0, trainable=False, dtype="int64", device=mesh.devices[0])
        self.pushes = 0

    def step(self, place, forms, looks, starts, weight, seed):
        worker, model = (each[place % len(self.workers)] for each in (self.workers, self.models))
        if starts:
            start = worker.optimizer.get_init_op(place)
            model.check_sums(worker)
            start()  # nothing is done before
            model.start()
            model.check(worker)
            model.check_sums(worker)
        found = {
            name: gradient(form, worker, name, self.dtype, 3 * seed + at, weight)
            for at, (form, name) in enumerate(zip(forms, STARTS, strict=True))
        }
        total = sum(weight) if isinstance(weight, tuple) else weight
        if total and all(given is None for given, _ in found.values()):
            return
        if isinstance(weight, tuple) and len(worker.getter.devices) == 1:
            weight = [total]
        whole_rows = {
            name: (dense, ... if self.kind in ("adam", "adamw", "lion") else rows)
            for name, (given, pair) in found.items() if given is not None
            for dense, rows in [pair]
        }  # fmt: skip
        given = {name: grad for name, (grad, _) in found.items()}
        if not total:  # the gradients are not read
            given = dict.fromkeys(given)
        if model.refuses(total):
            with pytest.raises(ValueError, match="steps of this period would have weight 0"):
                worker.step(given, weight=weight)
            return
        wanted = model.step(whole_rows, total)
        more = {} if weight == 1 else {"weight": weight}
        assert worker.step(given, global_step=self.shared, **more) is wanted
        self.pushes += wanted
        model.check(worker)
        if looks:  # which changes nothing of what comes
            model.check_sums(worker)

    def run(self, steps):
        for seed, step in enumerate(steps):
            self.step(*step, seed)
        for worker, model in zip(self.workers, self.models, strict=True):
            model.check(worker)
            model.check_sums(worker)
        assert self.shared.numpy() == self.pushes


WAYS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("use_locking", "reset_momentum", "mirrored")}
)
PERIODS = st.sampled_from([1, 2, 4])


@pytest.mark.parametrize("kind", KINDS)
@SETTINGS
@given(num=st.integers(1, 8), period=PERIODS, steps=STEPS, ways=WAYS)
def test_interleavings(mesh, kind, num, period, steps, ways):
    Run(mesh, kind, num, period, **ways).run(steps)


@pytest.mark.parametrize("kind", ["momentum", "own"])
@SETTINGS
@given(num=st.integers(1, 4), period=PERIODS, steps=STEPS, ways=WAYS)
def test_distance_scale(mesh, kind, num, period, steps, ways):
    Run(mesh, kind, num, period, distance_scale=0.25, **ways).run(steps)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "masters"),
    [
        ("sgd", "float16", False),
        ("momentum", "bfloat16", False),
        ("momentum", "float16", True),
        ("own", "float16", False),
        ("own", "bfloat16", True),
    ],
)
def test_half_precision(mesh, kind, dtype, masters, mirrored):
    """The data are exact; the rule rounds where the model rounds."""
    forms = [("dense", "dense", "dense"), ("rows", "none", "dense"), ("replicas", "rows", "dense"),
             ("rows of replicas", "dense", "none")]  # fmt: skip
    weights = 1, 1, 3, (3, 1), 1.5, 0.5
    steps = [(place, forms[turn % 4], turn % 3 == 0, turn == 3, weights[turn])
             for turn in range(6) for place in (0, 1)]  # fmt: skip
    Run(mesh, kind, 2, 2, dtype=dtype, masters=masters, mirrored=mirrored).run(steps)
