"""Workers of one center, and a sequential model of them in plain NumPy."""

import numpy as np
import pytest
from optim.test_update_rules import RULES, Model
from support.exact_data import same

import gradreduce as gr
from gradreduce.optim.slots import MASTER


class Own(gr.Optimizer):
    """A rule that a user has written: momentum, whose slot has another name."""

    _slot_names = ("direction",)

    def __init__(self, **more):
        super().__init__("Own", **more)

    def _apply(self, variable, slots, gradient):
        slots["direction"] *= 0.5
        slots["direction"] += gradient
        variable -= slots["direction"] * 0.25


def own(w, step, grad, var, direction):
    direction = direction * w(0.5) + grad
    return [var - direction * w(0.25), direction]


# Like RULES: formula, a function that makes an optimizer, its slots and initial values.
KINDS = {
    **{name: RULES[name] for name in ("sgd", "momentum", "nesterov", "adam", "adamw", "lion")},
    "lazy adam": (RULES["adam"][0], lambda **more: RULES["adam"][1](lazy=True, **more),
                  {"m": 0, "v": 0}),
    "own": (own, Own, {"direction": 0}),
}  # fmt: skip
BOTH_IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["numpy", pytest.param("compiled", marks=pytest.mark.host)], indirect=True
)
STARTS = {"table": (5, 2), "weights": (7,), "scale": ()}


def whole(shape, dtype="float32", seed=0) -> np.ndarray:
    """Small integers: sums of a period, and their means over a power of two, are exact."""
    return np.random.default_rng(seed).integers(-8, 8, shape, endpoint=True).astype(dtype)


class Worker:
    """A getter, variables by name, and an optimizer."""

    def __init__(self, home, center, starts, make, num_worker=1, period=1, **options):
        self.getter = gr.AGNCustomGetter(home, center=center)
        self.variables = {
            name: gr.get_variable(name, value, custom_getter=self.getter)
            for name, value in starts.items()
        }
        self.inner = make()
        self.optimizer = gr.AGNOptimizer(
            self.inner, num_worker, self.getter, communication_period=period, **options
        )

    def step(self, grads, **more) -> bool:
        """Runs a step with gradients by name."""
        pairs = [(grad, self.variables[name]) for name, grad in grads.items()]
        return self.optimizer.apply_gradients(pairs, **more)

    @property
    def local(self) -> dict:
        return {name: var.numpy() for name, var in self.variables.items()}

    @property
    def center(self) -> dict:
        return {
            name: self.getter.center_variable(var).numpy() for name, var in self.variables.items()
        }

    @property
    def sums(self) -> dict:
        return {name: self.getter.accumulation(var).numpy()
                for name, var in self.variables.items()}  # fmt: skip

    def everything(self) -> dict:
        """The complete state of worker and center, as bytes; reading it changes nothing."""
        kept = [*self.optimizer.variables(), self.optimizer.local_step]
        found = [(each.name, each) for each in kept]
        for name, var in self.variables.items():
            found += [(name, var), (f"c/{name}", self.getter.center_variable(var)),
                      (f"a/{name}", self.getter.accumulation(var))]  # fmt: skip
        values = [(name, [buffer.numpy() for buffer in var.buffers]) for name, var in found]
        return {
            "powers": self.inner._slots.powers,
            "arrays": [(n, [(a.dtype.str, a.shape, a.tobytes()) for a in v]) for n, v in values],
        }


def one_variable(mesh, inner=None, period=1, value=None, center=None, **options):
    """A getter with one variable, the variable, and an optimizer that nobody else uses."""
    getter = gr.AGNCustomGetter(mesh.devices[0], center=center or gr.AGNCenter(mesh))
    value = np.zeros(2, "float32") if value is None else value
    var = gr.get_variable("w", value, custom_getter=getter)
    inner = inner or gr.MomentumOptimizer(1.0, 0.5)
    return getter, var, gr.AGNOptimizer(inner, 1, getter, period, **options)


def pair(mesh, period=1, make=None, starts=None, num=2, **options) -> list[Worker]:
    """Workers of a center that is distributed over the mesh."""
    center = options.pop("center", None) or gr.AGNCenter(mesh)
    make = make or (lambda: gr.GradientDescentOptimizer(0.5))
    starts = {"v": np.zeros(3, "float32")} if starts is None else starts
    return [Worker(mesh.devices[place % len(mesh)], center, starts, make, num, period, **options)
            for place in range(num)]  # fmt: skip


# -- the model ------------------------------------------------------------------------------------


def move(model, turn, grad, rows):
    """Moves a variable in a turn, which all variables and the center count together."""
    model.step = turn - 1
    model.move(grad, rows)


class ModelWorker:
    def __init__(self, center, kind, starts, period, masters, gamma, resets):
        self.center, self.kind, self.period = center, kind, period
        self.gamma, self.resets = gamma, resets
        self.local = {
            name: Model(KINDS[kind], value, master=masters) for name, value in starts.items()
        }
        self.pulled = {name: copy.value for name, copy in self.local.items()}
        self.sums = {name: None for name in starts}  # sum, and the rows that were touched
        self.weights = []  # of the steps since the last push
        self.steps = self.turn = 0

    def refuses(self, weight) -> bool:
        """Whether all steps of the period would have weight 0."""
        return not (weight or any(self.weights) or (self.steps + 1) % self.period)

    def step(self, grads, weight=1) -> bool:
        """Runs a step with dense gradients, each with the rows that it touches."""
        self.turn += weight != 0
        self.weights.append(weight)
        for name, (grad, rows) in grads.items() if weight else ():
            move(self.local[name], self.turn, grad[rows], rows)
            wide = grad.astype(self.local[name].wide) * weight
            total, touched = self.sums[name] or (np.zeros_like(wide), set())
            self.sums[name] = (total + wide, None if rows is ... or touched is None
                               else touched | set(rows))  # fmt: skip
        self.steps += 1
        if self.steps % self.period:
            return False
        self.turn += 1
        for name in self.sums:
            self.push(name)
        self.weights = []
        return True

    def push(self, name):
        if self.sums[name] is None:
            return
        (total, touched), center, local = self.sums[name], self.center[name], self.local[name]
        if self.gamma is not None:
            away = center.value.astype(center.wide) - self.pulled[name].astype(center.wide)
            total = total / (away * away / center.wide.type(self.gamma) + center.wide.type(1))
        rows = ... if touched is None else sorted(touched)
        weight = sum(self.weights)
        by = self.period if weight == len(self.weights) else weight
        move(center, self.turn, (total / center.wide.type(by))[rows], rows)
        local.state[0] = center.state[0].copy()
        self.pulled[name], self.sums[name] = center.value, None
        for name, state in zip(KINDS[self.kind][2], local.state[1:], strict=True):
            if self.resets and name in ("momentum", "m"):
                state[...] = 0

    def start(self):
        """Copies the center; slots and the number of steps stay."""
        for name, center in self.center.items():
            self.local[name].state[0] = center.state[0].copy()
            self.pulled[name], self.sums[name] = center.value, None
        self.weights = []

    def check(self, worker: Worker):
        """Checks all values, bit by bit, on every device of the worker."""
        names = tuple(KINDS[self.kind][2])
        for name, var in worker.variables.items():
            center = worker.getter.center_variable(var)
            for each, copy in ((var, self.local[name]), (center, self.center[name])):
                found = [each, *(worker.optimizer.get_slot(each, slot) for slot in names)]
                values = [copy.value, *copy.state[1:]]
                if copy.state[0].dtype != copy.dtype:
                    found.append(worker.optimizer.get_slot(each, MASTER))
                    values.append(copy.state[0])
                for at, wanted in zip(found, values, strict=True):
                    assert at is None or all(same(b.numpy(), wanted) for b in at.buffers), at
        assert worker.optimizer.local_step.numpy() == self.steps

    def check_sums(self, worker: Worker):
        for name, var in worker.variables.items():
            wanted = np.zeros(var.shape, self.local[name].wide)
            if self.sums[name] is not None:
                wanted = wanted + self.sums[name][0]
            for buffer in worker.getter.accumulation(var).buffers:
                assert np.array_equal(buffer.numpy(), wanted), name
