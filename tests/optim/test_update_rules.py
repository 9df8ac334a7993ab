"""The update rules against plain NumPy, one rounding for each operation, bit by bit."""

import math
from functools import partial

import numpy as np
import pytest
from support.compiled_first import watched_compiles
from support.exact_data import FLOATS, random_data, same
from support.update_formulas import FORMULAS

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.optim.slots import MASTER

RATE, DECAY = 0.1, 0.9  # neither is a float32


def of(name, scalars):
    """A rule with scalars, or a function of the step that returns them.

    It takes the accumulate type, the step, the gradient, the variable and its slots; it returns
    the new values of variable and slots.
    """
    formula = FORMULAS[name][0]

    def step_of(w, step, grad, *state):
        values = scalars(step) if callable(scalars) else scalars
        return formula(*state, grad, *map(w, values))

    return step_of


def adam(step, is_torch=False):
    power1 = power2 = 1.0
    for _ in range(step):
        power1, power2 = power1 * DECAY, power2 * 0.99
    correction = math.sqrt(1 - power2)
    epsilon = 0.01 * (correction if is_torch else 1)
    return RATE * correction / (1 - power1), 1 - DECAY, 1 - 0.99, epsilon


# name -> the formula, an optimizer, its slots and their initial values
RULES = {
    "sgd": (of("sgd", (RATE,)), partial(gr.GradientDescentOptimizer, RATE), {}),
    "momentum": (of("momentum", (RATE, DECAY)), partial(gr.MomentumOptimizer, RATE, DECAY),
                 {"momentum": 0}),
    "nesterov": (
        of("nesterov", (RATE, DECAY)),
        partial(gr.MomentumOptimizer, RATE, DECAY, use_nesterov=True),
        {"momentum": 0}),
    "adam": (of("adam", adam), partial(gr.AdamOptimizer, RATE, DECAY, 0.99, 0.01),
             {"m": 0, "v": 0}),
    "adam of torch": (
        of("adam", partial(adam, is_torch=True)),
        partial(gr.AdamOptimizer, RATE, DECAY, 0.99, 0.01, eps_mode="torch"),
        {"m": 0, "v": 0}),
    "adamw": (
        of("adamw", lambda step: (*adam(step, is_torch=True), 1 - RATE * 0.3)),
        partial(gr.AdamWOptimizer, RATE, DECAY, 0.99, 0.01, 0.3),
        {"m": 0, "v": 0}),
    "lion": (
        of("lion", (RATE, DECAY, 1 - DECAY, 0.99, 1 - 0.99, 1 - RATE * 0.3)),
        partial(gr.LionOptimizer, RATE, DECAY, 0.99, 0.3),
        {"m": 0}),
    "adagrad": (of("adagrad", (RATE,)), partial(gr.AdagradOptimizer, RATE, 0.2),
                {"accumulator": 0.2}),
    "rmsprop": (
        of("rmsprop", (RATE, 1 - 0.8, DECAY, 0.001, 0)),
        partial(gr.RMSPropOptimizer, RATE, 0.8, DECAY, 0.001),
        {"rms": 1, "momentum": 0}),
    "rmsprop of torch": (
        of("rmsprop", (RATE, 1 - 0.8, DECAY, 0, 0.001)),
        partial(gr.RMSPropOptimizer, RATE, 0.8, DECAY, 0.001, eps_mode="torch"),
        {"rms": 0, "momentum": 0}),
    "rmsprop centered": (
        of("rmsprop_centered", (RATE, 1 - 0.8, DECAY, 0.001, 0)),
        partial(gr.RMSPropOptimizer, RATE, 0.8, DECAY, 0.001, centered=True),
        {"rms": 1, "mg": 0, "momentum": 0}),
}  # fmt: skip


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


class Model:
    """A variable, or rows of it, and its slots, updated by a rule in plain NumPy.

    Attributes:
        state: the variable and its slots. If there is a master, it replaces the variable.
    """

    def __init__(self, rule, values, *, master=False):
        self.formula, _, starts = rule
        self.dtype, self.wide = values.dtype, accumulate_dtype(values.dtype)
        kept = self.wide if master else self.dtype
        self.state = [values.astype(kept), *(np.full(values.shape, start, kept)
                                             for start in starts.values())]  # fmt: skip
        self.step = 0

    def move(self, grad, rows=...):
        self.step += 1
        old = [array[rows].astype(self.wide) for array in self.state]
        with np.errstate(all="ignore"):
            new = self.formula(self.wide.type, self.step, grad.astype(self.wide), *old)
            for array, part in zip(self.state, new, strict=True):
                array[rows] = part

    @property
    def value(self):
        """The variable; that of a master is rounded."""
        with np.errstate(all="ignore"):
            return self.state[0].astype(self.dtype)

    def check(self, optimizer, variable, names):
        """Checks every copy of the variable, of its slots and of its master, bit by bit."""
        wanted = {"": self.value, **dict(zip(names, self.state[1:], strict=True))}
        if self.state[0].dtype != self.dtype:
            wanted[MASTER] = self.state[0]
        for name, value in wanted.items():
            each = optimizer.get_slot(variable, name) if name else variable
            assert all(same(buffer.numpy(), value) for buffer in each.buffers), each


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_four_steps(mesh, rule, dtype):
    _, make, starts = rule
    optimizer, shapes = make(), [(3, 7), (), (257,)]
    start = [random_data(shape, dtype, seed=place) for place, shape in enumerate(shapes)]
    variables = [gr.Variable(values, device=mesh) for values in start]
    models = [Model(rule, values) for values in start]
    for turn in range(4):
        grads = [random_data(shape, dtype, seed=10 * turn + len(shape)) for shape in shapes]
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        for variable, model, grad in zip(variables, models, grads, strict=True):
            model.move(grad)
            model.check(optimizer, variable, starts)
    assert optimizer.get_slot_names() == sorted(starts)
    assert all(slot.dtype == dtype for slot in map(optimizer.get_slot, variables, starts))


def test_a_learning_rate_may_be_a_callable_or_a_variable_read_for_each_update(mesh, rule):
    """A callable is called once for each update, of several variables and dtypes."""
    _, make, _ = rule
    optimizers, asked = [make() for _ in range(3)], []
    held = gr.Variable(RATE, trainable=False, dtype="float64", device=mesh)
    optimizers[1].learning_rate = lambda: asked.append(held.numpy()) or asked[-1]
    optimizers[2].learning_rate = held
    starts = [random_data((5,), dtype) for dtype in ("float32", "float64")]
    teams = [[gr.Variable(start, device=mesh) for start in starts] for _ in optimizers]
    for turn in range(1, 4):
        held.assign(RATE / turn)
        optimizers[0].learning_rate = RATE / turn
        for optimizer, variables in zip(optimizers, teams, strict=True):
            optimizer.apply_gradients([(var.numpy(), var) for var in variables])
        for plain, *others in zip(*teams, strict=True):
            assert all(same(plain.numpy(), other.numpy()) for other in others)
    assert len(asked) == 3


def test_a_learning_rate_is_passed_as_a_variable(mesh):
    rate, variable = gr.Variable(2.0, device=mesh), gr.Variable([1.0], device=mesh)
    gr.GradientDescentOptimizer(rate).apply_gradients([([1.0], variable)])
    assert variable.numpy().tolist() == [-1.0]
    with pytest.raises(ValueError, match="must hold one number"):
        gr.GradientDescentOptimizer(variable)


def test_an_invalid_learning_rate_changes_nothing(mesh, rule):
    _, make, starts = rule
    optimizer, variable = make(), gr.Variable([1.0], device=mesh)
    optimizer.apply_gradients([([1.0], variable)])
    kept = [variable, *(optimizer.get_slot(variable, name) for name in starts)]
    before = [each.numpy().tolist() for each in kept]
    for wrong, error, text in [
        (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda: None, TypeError, "<lambda> returned None; it must return a number"),
        ("fast", ValueError, "learning_rate='fast' must be a number"),
    ]:
        optimizer.learning_rate = wrong
        with pytest.raises(error, match=text):
            optimizer.apply_gradients([([1.0], variable)])
    assert [each.numpy().tolist() for each in kept] == before
    optimizer.learning_rate = RATE  # Adam's powers have not changed either
    optimizer.apply_gradients([([1.0], variable)])
    model = Model(rule, np.ones(1, "float32"))
    model.move(np.ones(1, "float32"))
    model.move(np.ones(1, "float32"))
    model.check(optimizer, variable, starts)


def test_the_powers_of_adam_are_one_pair_for_all_variables(mesh):
    """They change once for each update, whichever variables it has. AGN depends on this."""
    optimizer = gr.AdamOptimizer(RATE, DECAY, 0.99)
    one, two = (gr.Variable([1.0], device=mesh) for _ in range(2))
    assert optimizer.variables() == []
    for variable in (one, two, two):
        optimizer.apply_gradients([([1.0], variable)])
    powers = [each for each in optimizer.variables() if "power" in each.name]
    assert [each.name for each in powers] == ["beta1_power", "beta2_power"]
    wanted = [DECAY * DECAY**3, 0.99 * 0.99**3]
    assert np.allclose([float(each) for each in powers], wanted, rtol=1e-6)
    assert len(optimizer.variables()) == 2 + 4
    assert [each.name for each in optimizer.variables()] == sorted(
        each.name for each in optimizer.variables()
    )


def test_names_of_slots_are_those_of_tensorflow(mesh):
    variable = gr.Variable([1.0], "w", device=mesh)
    for optimizer, wanted in [
        (gr.AdamOptimizer(), {"m": "w/Adam", "v": "w/Adam_1"}),
        (gr.RMSPropOptimizer(0.1), {"rms": "w/RMSProp", "momentum": "w/RMSProp_1"}),
        (
            gr.RMSPropOptimizer(0.1, centered=True),
            {"rms": "w/RMSProp", "mg": "w/RMSProp_1", "momentum": "w/RMSProp_2"},
        ),
        (gr.AdagradOptimizer(0.1), {"accumulator": "w/Adagrad"}),
        (gr.AdagradOptimizer(0.1, name="mine"), {"accumulator": "w/mine"}),
    ]:
        optimizer.apply_gradients([([1.0], variable)])
        assert {name: optimizer.get_slot(variable, name).name for name in wanted} == wanted


@pytest.mark.jax
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
def test_lion_is_that_of_optax(dtype, bound):
    import jax
    import optax

    with jax.enable_x64(True), gr.open_mesh(1, backend="sim") as mesh:
        rng = np.random.default_rng(0)
        values = rng.normal(size=40).astype(dtype)
        variable, theirs = gr.Variable(values, device=mesh), jax.numpy.asarray(values)
        ours = gr.LionOptimizer(0.05, 0.8, 0.95, 0.3)
        rule = optax.lion(0.05, 0.8, 0.95, weight_decay=0.3)
        state = rule.init(theirs)
        for _ in range(8):
            grad = (rng.normal(size=40) * rng.choice([0, 1], 40)).astype(dtype)
            ours.apply_gradients([(grad, variable)])
            updates, state = rule.update(jax.numpy.asarray(grad), state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        assert theirs.dtype == dtype
        assert np.abs(variable.numpy() - np.asarray(theirs)).max() <= bound


@pytest.mark.parametrize("make", [gr.AdamOptimizer, lambda **o: gr.RMSPropOptimizer(0.1, **o)])
def test_epsilon_is_where_tensorflow_or_pytorch_has_it(make):
    assert (make().eps_mode, make(eps_mode="torch").eps_mode) == ("tensorflow", "torch")
    with pytest.raises(ValueError, match="eps_mode='keras' must be 'tensorflow' or 'torch'"):
        make(eps_mode="keras")
    optimizer, variable = make(), gr.Variable([1.0])
    optimizer.apply_gradients([([1.0], variable)])
    optimizer.eps_mode = "keras"
    before = variable.numpy()
    with pytest.raises(ValueError, match="eps_mode='keras' must be"):
        optimizer.apply_gradients([([1.0], variable)])
    assert same(variable.numpy(), before)
    saved = make(eps_mode="torch").state_dict()
    make(eps_mode="torch").load_state_dict(saved, [])
    with pytest.raises(ValueError, match=r"\['eps_mode'\] is 'torch'; expected 'tensorflow'"):
        make().load_state_dict(saved, [])


def test_another_rule_is_compiled_before_its_first_step(mesh):
    optimizer = gr.MomentumOptimizer(np.float32(0.5), 0.0)
    variable = gr.Variable([1.0], device=mesh.devices[0])
    for _ in range(2):
        optimizer.apply_gradients([([1.0], variable)])
    optimizer.use_nesterov, optimizer.momentum = True, 0.5
    with watched_compiles(mesh) as watch:
        for _ in range(2):
            optimizer.apply_gradients([([1.0], variable)])
    assert {name for _, name, _ in watch.compiled} == {"nesterov"}
    assert watch.late == []
    assert variable.numpy() == 1 - 0.5 - 0.5 - (0.5 + 0.25 * 1.5) - (0.5 + 0.25 * 1.75)


def test_arguments_are_in_the_order_of_tensorflow():
    made = {
        gr.GradientDescentOptimizer(0.1, True, "n"): {},
        gr.MomentumOptimizer(0.1, 0.9, True, "n", True): {"momentum": 0.9, "use_nesterov": True},
        gr.AdamOptimizer(0.1, 0.8, 0.9, 0.5, True, "n"): {"beta1": 0.8, "beta2": 0.9,
                                                          "epsilon": 0.5},
        gr.AdagradOptimizer(0.1, 0.2, True, "n"): {"initial_accumulator_value": 0.2},
        gr.RMSPropOptimizer(0.1, 0.8, 0.9, 0.5, True, True, "n"): {
            "decay": 0.8, "momentum": 0.9, "epsilon": 0.5, "centered": True,
        },
    }  # fmt: skip
    for optimizer, wanted in made.items():
        found = {name: getattr(optimizer, name) for name in wanted}
        assert (optimizer.get_name(), optimizer.learning_rate, found) == ("n", 0.1, wanted)
    assert gr.MomentumOptimizer(0.1, 0.9, True).use_nesterov is False
    assert gr.GradientDescentOptimizer(0.1, True).get_name() == "GradientDescent"
    for kind, most in [(gr.GradientDescentOptimizer, 3), (gr.MomentumOptimizer, 5),
                       (gr.AdamOptimizer, 6), (gr.AdagradOptimizer, 4),
                       (gr.RMSPropOptimizer, 7), (gr.Optimizer, 1)]:  # fmt: skip
        with pytest.raises(TypeError, match="positional argument"):
            kind(*[0.5] * (most - 1), "name", None)


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (lambda: gr.MomentumOptimizer(0.1, 0.9), "lr", "'lr': set learning_rate$"),
        (lambda: gr.MomentumOptimizer(0.1, 0.9), "momentum_", "set momentum$"),
        (lambda: gr.MomentumOptimizer(0.1, 0.9), "nesterov", "set use_nesterov$"),
        (gr.AdamOptimizer, "betas", "set beta[12] or beta[12]$"),
        (gr.AdamOptimizer, "eps", "AdamOptimizer has no attribute 'eps': set epsilon$"),
        (lambda: gr.AdagradOptimizer(0.1), "weights",
         "set learning_rate, initial_accumulator_value or cross_device_ops$"),
        (lambda: gr.RMSPropOptimizer(0.1), "centered", "centered"),  # slots were made by then
        (gr.AdamOptimizer, "lazy", "lazy"),
    ],
)  # fmt: skip
def test_an_unknown_attribute_is_not_set(make, name, text):
    optimizer = make()
    with pytest.raises(AttributeError, match=text):
        setattr(optimizer, name, True)
    before = {n for n in vars(optimizer) if not n.startswith("_")}
    assert name not in before
    for known in before:
        setattr(optimizer, known, getattr(optimizer, known))
    optimizer.cross_device_ops = gr.NcclAllReduce()


@pytest.mark.parametrize(
    ("kind", "wrong", "hint"),
    [
        (gr.AdamOptimizer, {"lr": 0.1}, "pass learning_rate="),
        (gr.AdamWOptimizer, {"betas": (0.9, 0.9)}, "pass beta1= and beta2="),
        (gr.LionOptimizer, {"lr": 0.1, "betas": (0.9, 0.9)}, "pass learning_rate="),
        (gr.AdamOptimizer, {"eps": 0.1}, "pass epsilon="),
        (gr.AdamOptimizer, {"weight_decay": 0.1},
         "use gr.AdamWOptimizer, which decays the variables themselves"),
        (gr.GradientDescentOptimizer, {"momentum": 0.9, "lr": 1.0}, "use gr.MomentumOptimizer"),
        (gr.GradientDescentOptimizer, {"nesterov": True},
         "use gr.MomentumOptimizer, and pass use_nesterov="),
        (gr.MomentumOptimizer, {"nesterov": True}, "pass use_nesterov="),
        (gr.AdagradOptimizer, {"lr": 0.1}, "pass learning_rate="),
        (gr.RMSPropOptimizer, {"alpha": 0.1}, "pass decay="),
        (gr.AdamOptimizer, {"params": []}, "pass it to gr.torch.Optimizer(optimizer, params)"),
    ],
)  # fmt: skip
def test_an_argument_of_pytorch_is_refused_with_ours(kind, wrong, hint):
    with pytest.raises(TypeError) as caught:
        kind(**wrong)
    assert str(caught.value) == f"{kind.__name__} has no argument {next(iter(wrong))!r}: {hint}"
    with pytest.raises(TypeError, match="unexpected keyword argument 'amsgrad'"):
        kind(amsgrad=True)


def test_a_subclass_has_any_attributes():
    class Own(gr.AdamOptimizer):
        def __init__(self):
            self.lr = 0.5
            super().__init__(self.lr)

    optimizer = Own()
    optimizer.note = "mine"
    assert (optimizer.lr, optimizer.learning_rate, optimizer.note) == (0.5, 0.5, "mine")


NUMBERS = [(gr.GradientDescentOptimizer, "learning_rate"), (gr.MomentumOptimizer, "momentum"),
           (gr.AdamOptimizer, "epsilon"), (gr.AdagradOptimizer, "initial_accumulator_value"),
           (gr.RMSPropOptimizer, "momentum")]  # fmt: skip
MASTERS = ["float64", "float16", "bfloat16", np.int32]


@pytest.mark.parametrize(
    ("kind", "wrong", "error", "text"),
    [
        *[(kind, {name: wrong}, (TypeError, ValueError), None) for kind, name in NUMBERS
          for wrong in (None, "fast", [0.1], gr.ReduceOp.SUM)],
        *[(gr.AdagradOptimizer, {"initial_accumulator_value": wrong}, ValueError,
           "initial_accumulator_value must be positive") for wrong in (0, -0.5, math.nan)],
        *[(gr.AdamOptimizer, {"master_dtype": wrong}, ValueError, "master_dtype")
          for wrong in MASTERS],
        (gr.AdamOptimizer, {"master_dtype": "half a float"}, TypeError, None),
        *[(gr.GradientDescentOptimizer, {"name": wrong}, ValueError,
           "Must specify the optimizer name") for wrong in ("", None)],
        *[(gr.GradientDescentOptimizer, {"name": wrong}, TypeError, f"name={wrong} must be a str")
          for wrong in (True, 3, b"name")],
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused(kind, wrong, error, text):
    with pytest.raises(error, match=text):
        kind(**{"learning_rate": 0.1, **wrong})
