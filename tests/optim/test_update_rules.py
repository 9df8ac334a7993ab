"""The update rules against plain NumPy, one rounding for each operation, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.compiled_first import watched_compiles
from support.exact_data import FLOATS, random_data, same

import gradreduce as gr
from gradreduce.device import accumulate_dtype

RATE, DECAY = 0.1, 0.9  # neither is a float32


# Formulas in the accumulate type `w`; arguments are the old slots and the number of the step.


def sgd(w, step, grad, var):
    return [var - w(RATE) * grad]


def momentum(w, step, grad, var, mom):
    moved = w(DECAY) * mom + grad
    return [var - w(RATE) * moved, moved]


def nesterov(w, step, grad, var, mom):
    moved = w(DECAY) * mom + grad
    return [var - (w(RATE) * grad + w(RATE) * w(DECAY) * moved), moved]


def adam(w, step, grad, var, mom, square):
    power1 = power2 = 1.0
    for _ in range(step):
        power1, power2 = power1 * DECAY, power2 * 0.99
    rate = RATE * math.sqrt(1 - power2) / (1 - power1)
    mom = mom + w(1 - DECAY) * (grad - mom)
    square = square + w(1 - 0.99) * (grad * grad - square)
    return [var - w(rate) * mom / (np.sqrt(square) + w(0.01)), mom, square]


def torch_adam(w, step, grad, var, mom, square, scale=1.0):
    power1 = power2 = 1.0
    for _ in range(step):
        power1, power2 = power1 * DECAY, power2 * 0.99
    rate, epsilon = RATE * math.sqrt(1 - power2) / (1 - power1), 0.01 * math.sqrt(1 - power2)
    mom = mom + w(1 - DECAY) * (grad - mom)
    square = square + w(1 - 0.99) * (grad * grad - square)
    return [w(scale) * var - w(rate) * mom / (np.sqrt(square) + w(epsilon)), mom, square]


def adamw(w, step, grad, var, mom, square):
    return torch_adam(w, step, grad, var, mom, square, 1 - RATE * 0.3)


def lion(w, step, grad, var, mom):
    sign = np.sign(w(DECAY) * mom + w(1 - DECAY) * grad)
    return [w(1 - RATE * 0.3) * var - w(RATE) * sign, w(0.99) * mom + w(1 - 0.99) * grad]


def adagrad(w, step, grad, var, total):
    total = total + grad * grad
    return [var - w(RATE) * grad / np.sqrt(total), total]


def rmsprop(w, step, grad, var, square, mom):
    square = square + w(1 - 0.8) * (grad * grad - square)
    mom = w(DECAY) * mom + w(RATE) * grad / np.sqrt(square + w(0.001))
    return [var - mom, square, mom]


def rmsprop_centered(  # operands
    w, step, grad, var, square, mean, mom
):
    square = square + w(1 - 0.8) * (grad * grad - square)
    mean = mean + w(1 - 0.8) * (grad - mean)
    mom = w(DECAY) * mom + w(RATE) * grad / np.sqrt(square - mean * mean + w(0.001))
    return [var - mom, square, mean, mom]


def torch_rmsprop(w, step, grad, var, square, mom):
    square = square + w(1 - 0.8) * (grad * grad - square)
    mom = w(DECAY) * mom + w(RATE) * grad / (np.sqrt(square) + w(0.001))
    return [var - mom, square, mom]


# name -> the formula, an optimizer, its slots and their initial values
RULES = {
    "sgd": (sgd, lambda **more: gr.GradientDescentOptimizer(RATE, **more), {}),
    "momentum": (momentum, lambda **more: gr.MomentumOptimizer(RATE, DECAY, **more),
                 {"momentum": 0}),
    "nesterov": (
        nesterov,
        lambda **more: gr.MomentumOptimizer(RATE, DECAY, use_nesterov=True, **more),
        {"momentum": 0},
    ),
    "adam": (adam, lambda **more: gr.AdamOptimizer(RATE, DECAY, 0.99, 0.01, **more),
             {"m": 0, "v": 0}),
    "adam of torch": (
        torch_adam,
        lambda **more: gr.AdamOptimizer(RATE, DECAY, 0.99, 0.01, eps_mode="torch", **more),
        {"m": 0, "v": 0}),
    "adamw": (adamw, lambda **more: gr.AdamWOptimizer(RATE, DECAY, 0.99, 0.01, 0.3, **more),
              {"m": 0, "v": 0}),
    "lion": (lion, lambda **more: gr.LionOptimizer(RATE, DECAY, 0.99, 0.3, **more), {"m": 0}),
    "adagrad": (adagrad, lambda **more: gr.AdagradOptimizer(RATE, 0.2, **more),
                {"accumulator": 0.2}),
    "rmsprop": (rmsprop, lambda **more: gr.RMSPropOptimizer(RATE, 0.8, DECAY, 0.001, **more),
                {"rms": 1, "momentum": 0}),
    "rmsprop of torch": (
        torch_rmsprop,
        lambda **more: gr.RMSPropOptimizer(RATE, 0.8, DECAY, 0.001, eps_mode="torch", **more),
        {"rms": 0, "momentum": 0}),
    "rmsprop centered": (
        rmsprop_centered,
        lambda **more: gr.RMSPropOptimizer(RATE, 0.8, DECAY, 0.001, centered=True, **more),
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

    def check(self, optimizer, variable, names):
        """Checks every copy of the variable and of its slots, bit by bit."""
        values = [self.state[0].astype(self.dtype), *self.state[1:]]
        found = [variable, *(optimizer.get_slot(variable, name) for name in names)]
        for each, value in zip(found, values, strict=True):
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


def test_a_learning_rate_may_be_a_callable_called_once_for_each_update(mesh, rule):
    _, make, _ = rule
    plain, called = make(), make()
    asked = []

    def rate():
        asked.append(RATE / (1 + len(asked)))
        return asked[-1]

    called.learning_rate = rate
    pairs = []
    for optimizer in (plain, called):
        variables = [gr.Variable(random_data((5,), dtype), device=mesh)
                     for dtype in ("float32", "float64")]  # fmt: skip
        pairs.append(variables)
        for turn in range(3):
            if optimizer is plain:
                optimizer.learning_rate = RATE / (1 + turn)
            optimizer.apply_gradients([(var.numpy(), var) for var in variables])
    assert len(asked) == 3
    assert all(same(one.numpy(), two.numpy()) for one, two in zip(*pairs, strict=True))


def test_a_learning_rate_may_be_a_variable_read_for_each_update(mesh, rule):
    name, make, _ = rule
    plain, told = make(), make()
    rate = gr.Variable(RATE, trainable=False, dtype="float64", device=mesh)
    told.learning_rate = rate
    variables = [gr.Variable([1.0, 2.0], device=mesh) for _ in range(2)]
    for value in (RATE, RATE / 2):
        rate.assign(value)
        plain.learning_rate = value
        for optimizer, variable in zip((plain, told), variables, strict=True):
            optimizer.apply_gradients([(variable.numpy(), variable)])
        assert same(*(variable.numpy() for variable in variables)), name


def test_a_learning_rate_is_passed_as_a_variable(mesh):
    rate, variable = gr.Variable(2.0, device=mesh), gr.Variable([1.0], device=mesh)
    optimizer = gr.GradientDescentOptimizer(rate)
    for value, after in ((1.0, 0.0), (0.0, 0.0), (-3.0, 3.0)):
        rate.assign(value)
        optimizer.apply_gradients([([1.0], variable)])
        assert variable.numpy().tolist() == [after]
    beta = gr.Variable(0.5, device=mesh)
    adam = gr.AdamOptimizer(0.1, beta1=beta)
    adam.apply_gradients([([1.0], variable)])
    beta.assign(1.0)
    before = variable.numpy()
    with pytest.raises(ValueError, match=r"beta1=1\.0 must be at least 0 and below 1"):
        adam.apply_gradients([([1.0], variable)])
    assert same(variable.numpy(), before)
    with pytest.raises(ValueError, match="must hold one number"):
        gr.GradientDescentOptimizer(variable)


def test_an_invalid_learning_rate_changes_nothing(mesh, rule):
    _, make, starts = rule
    optimizer, variable = make(), gr.Variable([1.0], device=mesh)
    optimizer.apply_gradients([([1.0], variable)])
    kept = [variable, *(optimizer.get_slot(variable, name) for name in starts)]
    before = [each.numpy().tolist() for each in kept]
    for wrong in (lambda: 1 / 0, lambda: None, "fast"):
        optimizer.learning_rate = wrong
        with pytest.raises((ZeroDivisionError, TypeError, ValueError)):
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


@pytest.mark.parametrize("make", [gr.AdamWOptimizer, gr.LionOptimizer])
def test_weights_decay_in_all_rows_unless_it_is_lazy(mesh, make):
    for lazy, wanted in [(False, [0.75, 0.75, 0.75]), (True, [1.0, 0.75, 1.0])]:
        variable = gr.Variable([1.0, 1.0, 1.0], dtype="float64", device=mesh)
        optimizer = make(0.5, weight_decay=0.5, lazy=lazy)
        optimizer.apply_gradients([(gr.IndexedSlices(np.zeros(1), [1]), variable)])
        assert variable.numpy().tolist() == wanted


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


@pytest.mark.parametrize("value", [0, -0.5, float("nan")])
def test_adagrad_starts_above_zero(value):
    with pytest.raises(ValueError, match="initial_accumulator_value must be positive"):
        gr.AdagradOptimizer(0.1, value)


def test_defaults_are_those_of_tensorflow():
    adam, rms = gr.AdamOptimizer(), gr.RMSPropOptimizer(0.1)
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.epsilon) == (0.001, 0.9, 0.999, 1e-8)
    assert adam.lazy is False
    assert (rms.decay, rms.momentum, rms.epsilon) == (0.9, 0.0, 1e-10)
    assert gr.AdagradOptimizer(0.1).initial_accumulator_value == 0.1
    lion = gr.LionOptimizer()  # of the paper's own code
    assert (lion.learning_rate, lion.beta1, lion.beta2, lion.weight_decay) == (1e-4, 0.9, 0.99, 0)
    assert [each.get_name() for each in (adam, rms)] == ["Adam", "RMSProp"]


def test_a_learning_rate_may_change_between_steps(mesh):
    optimizer = gr.MomentumOptimizer(0.5, 0.0)
    variable = gr.Variable([1.0], device=mesh)
    optimizer.apply_gradients([(np.ones(1, "float32"), variable)])
    optimizer.learning_rate, optimizer.momentum = 0.25, 1.0
    optimizer.apply_gradients([(np.ones(1, "float32"), variable)])
    assert variable.numpy().tolist() == [0.0]
    plain = gr.GradientDescentOptimizer(np.float32(0.5))
    plain.apply_gradients([([1.0], variable)])
    plain.learning_rate = 2.0
    plain.apply_gradients([([1.0], variable)])
    assert variable.numpy().tolist() == [-2.5]


def test_another_rule_is_compiled_before_its_first_step(mesh):
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    variable = gr.Variable([1.0], device=mesh.devices[0])
    for _ in range(2):
        optimizer.apply_gradients([([1.0], variable)])
    optimizer.use_nesterov = True
    with watched_compiles(mesh) as watch:
        for _ in range(2):
            optimizer.apply_gradients([([1.0], variable)])
    assert {name for _, name, _ in watch.compiled} == {"nesterov"}
    assert watch.late == []
    assert variable.numpy() == 1 - 0.5 - 0.75 - (0.5 + 0.25 * 1.75) - (0.5 + 0.25 * 1.875)


def test_nesterov_is_off_by_default():
    optimizer = gr.MomentumOptimizer(0.5, 0.9)
    assert optimizer.use_nesterov is False
    assert (optimizer.learning_rate, optimizer.momentum) == (0.5, 0.9)


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


@pytest.mark.parametrize("wrong", [None, "fast", [0.1], gr.ReduceOp.SUM])
def test_a_learning_rate_is_a_number(wrong):
    for make in (
        lambda: gr.GradientDescentOptimizer(wrong),
        lambda: gr.MomentumOptimizer(wrong, 0.9),
        lambda: gr.MomentumOptimizer(0.1, wrong),
        lambda: gr.AdamOptimizer(wrong),
        lambda: gr.AdamOptimizer(epsilon=wrong),
        lambda: gr.AdagradOptimizer(wrong),
        lambda: gr.RMSPropOptimizer(0.1, momentum=wrong),
    ):
        with pytest.raises((TypeError, ValueError)):
            make()
