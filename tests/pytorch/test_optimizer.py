"""``gr.torch.Optimizer``: a PyTorch optimizer from any optimizer of this library."""

import copy
import io
from functools import partial
from weakref import WeakSet

import numpy as np
import pytest
from support.libraries import torch
from support.meshes import mesh_of

import gradreduce as gr

pytestmark = pytest.mark.torch


class Signs(gr.Optimizer):
    """A rule in Python, with a hyperparameter and a slot."""

    _slot_names = ("total",)

    def __init__(self, lr):
        super().__init__("Signs")
        self.lr = lr

    def _apply(self, variable, slots, gradient):
        slots["total"] += gradient
        variable -= self.lr * np.sign(slots["total"])


RULES = {
    "sgd": gr.GradientDescentOptimizer,
    "momentum": partial(gr.MomentumOptimizer, momentum=0.9),
    "nesterov": partial(gr.MomentumOptimizer, momentum=0.9, use_nesterov=True),
    "adam": gr.AdamOptimizer,
    "adamw": gr.AdamWOptimizer,
    "lion": partial(gr.LionOptimizer, weight_decay=0.1),
    "adagrad": gr.AdagradOptimizer,
    "rmsprop": partial(gr.RMSPropOptimizer, centered=True),
    "python": lambda lr, **options: Signs(lr),
}
MASTERS = {"master_dtype": "float32"}


mesh = mesh_of(1)


def net(dtype="float32", seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return made.to(getattr(torch, dtype))


def own(module, mesh):
    """Variables with copies of the parameters."""
    return [gr.Variable(each.detach().clone(), device=mesh[0]) for each in module.parameters()]


def backward(module, step=0):
    torch.manual_seed(step)
    x = torch.randn(5, 3).to(module[0].weight.dtype)
    module.zero_grad()
    loss = module(x).square().mean()
    loss.backward()
    return loss


def pairs(module, variables):
    return list(zip([each.grad for each in module.parameters()], variables, strict=True))


def assert_same(module, variables):
    for parameter, variable in zip(module.parameters(), variables, strict=True):
        found = parameter.detach().float().numpy()
        assert (found == variable.numpy().astype(np.float32)).all()


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("dtype", "options"), [
    ("float32", {}), ("float64", {}), ("bfloat16", {}), ("bfloat16", MASTERS), ("float16", MASTERS),
])  # fmt: skip
@pytest.mark.parametrize("rule", RULES)
def test_it_has_the_bits_of_the_rule_and_continues_after_a_saved_state(rule, dtype, options, mesh):
    module = net(dtype)
    direct, variables = RULES[rule](0.1, **options), own(module, mesh)
    optimizer = gr.torch.Optimizer(RULES[rule](0.1, **options), gr.torch.variables(module, mesh))
    assert isinstance(optimizer, torch.optim.Optimizer)
    for step in range(6):
        backward(module, step)
        if step < 2:
            module[0].bias.grad = None  # not used yet
        direct.apply_gradients(pairs(module, variables))
        optimizer.step()
        assert_same(module, variables)
        slots = [direct.get_slot(var, name) for var in variables for name in direct._slots.by_name]
        shown = [each for p in module.parameters() for each in optimizer.state.get(p, {}).values()]
        for slot, tensor in zip([each for each in slots if each], shown, strict=True):
            assert (tensor.float().numpy() == slot.numpy().astype(np.float32)).all()
        if step == 3:
            state = saved(optimizer)
            weights = {key: each.clone() for key, each in module.state_dict().items()}
            module = net(dtype, seed=1)
            module.load_state_dict(weights)
            optimizer = gr.torch.Optimizer(RULES[rule](9.0, **options), module.named_parameters())
            optimizer.load_state_dict(state)
            assert list(optimizer.param_groups[0]["params"]) == list(module.parameters())


def test_without_a_mesh_it_uses_the_open_one_or_that_of_the_data_parallel(monkeypatch):
    monkeypatch.setattr("gradreduce.backends._opened", WeakSet())
    monkeypatch.setattr("gradreduce.backends.default_mesh", lambda: pytest.fail("another mesh"))

    def launches(module, parameters, mesh):
        optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), parameters)
        module(torch.ones(5, 3)).sum().backward()
        with mesh.journal() as journal:
            optimizer.step()
        return journal.launches

    gr.open_mesh(1, backend="sim").close()
    failed = gr.open_mesh(1, backend="sim")
    failed.mesh_state.fail("a test")
    with gr.open_mesh(1, backend="sim") as mesh:
        module = net()
        assert launches(module, module.parameters(), mesh) == 1
        with gr.open_mesh(1, backend="sim"):
            module = net()
            module[0].weight.requires_grad_(False)
            dp = gr.torch.DataParallel(module, mesh)
            assert launches(dp, dp.parameters(), mesh) == 1
    failed.close()


def test_parameters_of_other_memory_formats_are_updated_in_place():
    def make(strided):
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Linear(2, 2))
        if strided:
            made[0].to(memory_format=torch.channels_last)
            made[1].weight = torch.nn.Parameter(made[1].weight.detach().t().contiguous().t())
        optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), made.parameters())
        return list(made.parameters()), optimizer

    (contiguous, one), (strided, other) = make(False), make(True)
    addresses = [each.data_ptr() for each in strided]
    for step in range(4):
        torch.manual_seed(step)
        for plain, turned in zip(contiguous, strided, strict=True):
            plain.grad = torch.randn_like(plain)
            turned.grad = plain.grad if step == 0 else torch.empty_like(turned).copy_(plain.grad)
        one.step()
        other.step()
        assert all(map(torch.equal, contiguous, strided))
        for plain, turned in zip(contiguous, strided, strict=True):
            assert all(one.state[plain][name].equal(other.state[turned][name]) for name in "mv")
            assert other.state[turned]["m"].stride() == turned.stride()
        if step == 2:  # of the other memory format
            states = [saved(each) for each in (other, one)]
            one.load_state_dict(states[0])
            other.load_state_dict(states[1])
    assert [each.data_ptr() for each in strided] == addresses
    strided[0].data = strided[0].data.contiguous()
    with pytest.raises(RuntimeError, match="was replaced or moved to other memory"):
        other.step()


def groups_of(module):
    return [
        {"params": module[0].parameters(), "lr": 0.2},
        {"params": [module[2].weight], "betas": (0.5, 0.75), "name": "last"},
    ]


def test_each_group_has_its_own_options_and_powers(mesh):
    module = net()
    variables = own(module, mesh)
    optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), groups_of(module))
    direct = [gr.AdamOptimizer(0.2), gr.AdamOptimizer(0.1, 0.5, 0.75), gr.AdamOptimizer(0.05)]
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": module[2].bias, "lr": 0.05})
        backward(module, step)
        rows = pairs(module, variables)
        direct[0].apply_gradients(rows[:2])
        direct[1].apply_gradients(rows[2:3])
        if step >= 2:
            direct[2].apply_gradients(rows[3:])
        optimizer.step()
        assert_same(module, variables)
    powers = [group["beta1_power"] for group in optimizer.param_groups]
    assert powers == [each._slots.powers[0] for each in direct]
    assert optimizer.param_groups[1]["name"] == "last"
    optimizer.load_state_dict(saved(optimizer))
    backward(module, 4)
    for each, chosen in zip(direct, (slice(2), slice(2, 3), slice(3, 4)), strict=True):
        each.apply_gradients(pairs(module, variables)[chosen])
    optimizer.step()
    assert_same(module, variables)


SCHEDULERS = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 6},
    "ReduceLROnPlateau": {"patience": 0},
}


@pytest.mark.whole_product
@pytest.mark.parametrize("rule", ["momentum", "adam"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_pytorch_change_its_options(name, rule, mesh):
    module, other = net(), net()
    direct, variables = RULES[rule](0.1), own(module, mesh)
    optimizer = gr.torch.Optimizer(RULES[rule](0.1), gr.torch.variables(module, mesh))
    reference = (
        torch.optim.Adam(other.parameters(), 0.1)
        if rule == "adam"
        else torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    )
    make = partial(getattr(torch.optim.lr_scheduler, name), **SCHEDULERS[name])
    made = [make(optimizer), make(reference)]
    for step in range(5):
        (options,) = reference.param_groups
        direct.learning_rate = options["lr"]
        if rule == "adam":
            direct.beta1, direct.beta2 = options["betas"]
        else:
            direct.momentum = options["momentum"]
        backward(module, step)
        direct.apply_gradients(pairs(module, variables))
        optimizer.step()
        reference.step()
        assert_same(module, variables)
        for each in made:
            each.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert options["lr"] != 0.1
    optimizer.param_groups[0]["lr"] = 0.0  # by hand
    before = [each.detach().clone() for each in module.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, module.parameters()))


def test_a_gradscaler_unscales_and_leaves_a_step_out(mesh):
    module = net()
    direct, variables = gr.AdamOptimizer(0.1), own(module, mesh)
    optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), gr.torch.variables(module, mesh))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        backward(module, step)
        if step != 2:
            direct.apply_gradients(pairs(module, variables))
        optimizer.zero_grad()
        scaler.scale(module(torch.zeros(1, 3)).sum() * 0).backward()
        backward(module, step)
        for parameter in module.parameters():
            parameter.grad *= scaler.get_scale()  # a power of two
        if step == 2:
            module[0].weight.grad[1, 1] = float("inf")
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_same(module, variables)
    assert scaler.get_scale() == 512.0
    assert optimizer.param_groups[0]["beta1_power"] == direct._slots.powers[0]


def test_closures_and_hooks_are_called(mesh):
    module = net()
    optimizer = gr.torch.Optimizer(RULES["momentum"](0.1), gr.torch.variables(module, mesh))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure():
        called.append("closure")
        assert torch.is_grad_enabled()
        return backward(module)

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert called == ["pre", "closure", "post"] * 3
    optimizer.zero_grad()
    optimizer.step()  # all gradients are None
    assert {each.grad for each in module.parameters()} == {None}
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(
        lambda optimizer: called.append("loaded" if len(optimizer.state) == 4 else "empty")
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert called[-2:] == [4, "loaded"]


@pytest.mark.parametrize("make", [
    gr.AdamOptimizer, partial(gr.AdamOptimizer, lazy=True), gr.AdagradOptimizer,
    partial(gr.MomentumOptimizer, momentum=0.9),
])  # fmt: skip
def test_sparse_gradients_are_indexed_slices(make, mesh):
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 3, sparse=True)
    direct, variables = make(0.1), own(table, mesh)
    optimizer = gr.torch.Optimizer(make(0.1), gr.torch.variables(table, mesh))
    for rows in ([1, 1, 4], [0, 4], [5]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).square().sum().backward()
        grad = table.weight.grad.coalesce()
        slices = gr.IndexedSlices(grad.values(), grad.indices()[0], (6, 3))
        direct.apply_gradients([(slices, variables[0])])
        optimizer.step()
        assert_same(table, variables)


def test_replicas_of_a_data_parallel_stay_alike():
    with gr.open_mesh(2, backend="sim") as mesh:
        dp, alone = gr.torch.DataParallel(net(), mesh), net()
        direct, variables = gr.AdamOptimizer(0.1), own(alone, mesh)
        shared = gr.torch.variables(dp.replicas, mesh)
        optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), shared)
        assert optimizer.param_groups[0]["params"][:2] == [each[0].weight for each in dp.replicas]
        for step in range(3):
            dp.zero_grad()
            for replica in dp.replicas:
                torch.manual_seed(step)
                replica(torch.randn(5, 3)).square().mean().backward()
            views = [each.grad for each in dp.parameters()]
            backward(alone, step)
            direct.apply_gradients(pairs(alone, variables))
            with mesh.journal() as journal:
                optimizer.step()
            assert len(journal.of("launch")) == 2  # one for each GPU; nothing is copied
            assert journal.of("copy") == journal.of("upload") == []
            for replica in dp.replicas:
                assert_same(replica, variables)
            assert all(each.grad is view for each, view in zip(dp.parameters(), views, strict=True))
            alone.load_state_dict(dp.module.state_dict())


def test_memory_that_is_not_the_parameters_any_more_is_not_updated(mesh):
    module = net()
    groups = [{"params": gr.torch.variables(module[index], mesh)} for index in (0, 2)]
    optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), groups)
    backward(module)
    optimizer.step()
    before = [each.detach().clone() for each in module.parameters()]
    grad = module[2].bias.grad
    module[2].bias = torch.nn.Parameter(module[2].bias.detach().clone())
    with pytest.raises(RuntimeError, match="'bias' was replaced or moved to other memory"):
        optimizer.step()
    optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), module.parameters())
    module[2].bias.data = module[2].bias.data.clone()
    module[2].bias.grad = grad
    with pytest.raises(RuntimeError, match=r"'param_groups\[0\].params\[3\]' was replaced or"):
        optimizer.step()
    assert all(map(torch.equal, before, module.parameters()))


def test_state_that_was_replaced_is_not_ignored(mesh):
    module = net()
    optimizer = gr.torch.Optimizer(RULES["momentum"](0.1), gr.torch.variables(module, mesh))
    backward(module)
    optimizer.step()
    for each in module.parameters():
        optimizer.state[each]["momentum"].zero_()  # in place, as at the start
        each.grad.zero_()
    before = module[0].bias.detach().clone()
    optimizer.step()
    assert module[0].bias.equal(before)
    optimizer.state[module[0].bias]["momentum"] = before.clone()
    with pytest.raises(RuntimeError, match=r"state of the parameter '0\.bias' was replaced"):
        optimizer.step()
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match=r"state of the parameter '0\.weight' was replaced"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # which has none
    optimizer.step()


def test_a_state_that_version_0_1_wrote_is_loaded_and_written_alike(mesh):
    slots = {"m": torch.tensor([-0.75, -0.5]), "v": torch.tensor([1.1875, 1.0])}
    group = {
        "lr": 0.5,
        "epsilon": 0.25,
        "betas": (0.5, 0.75),
        "beta1_power": 0.125,
        "beta2_power": 0.421875,
        "params": [0],
    }
    made = gr.torch.Optimizer(gr.AdamOptimizer(0.1), [torch.nn.Parameter(torch.ones(2))])
    made.load_state_dict({"state": {0: slots}, "param_groups": [group]})
    found = made.state_dict()
    assert found["param_groups"] == [group]
    assert {name: each.tolist() for name, each in found["state"][0].items()} == {
        "m": [-0.75, -0.5],
        "v": [1.1875, 1.0],
    }


def test_a_state_that_does_not_fit_changes_nothing(mesh):
    """A state of someone else is checked before PyTorch copies it."""
    module = net()
    optimizer = gr.torch.Optimizer(RULES["adam"](0.1), groups_of(module))
    other = gr.torch.Optimizer(RULES["momentum"](0.1), net().parameters())
    backward(module)
    optimizer.step()
    state, deep = copy.deepcopy(optimizer.state_dict()), []
    momentum, shape = copy.deepcopy(state), copy.deepcopy(state)
    momentum["state"][2] = {"momentum": momentum["state"][2]["m"]}
    shape["state"][0]["m"] = shape["state"][0]["m"][1:]
    for _ in range(900):
        deep = [deep]
    first, *others = state["param_groups"]
    where = "state_dict['param_groups'][0]"

    def with_option(name, value):
        return {**state, "param_groups": [{**first, name: value}, *others]}

    large, empty = torch.empty(1 << 20, 0), torch.empty(1, 0)
    for wrong, error, text in [
        (other.state_dict(), ValueError, "different number of parameter groups"),
        (momentum, KeyError, "'m', 'v' missing, 'momentum' unknown"),
        (shape, ValueError, "params[0]'['m'] is float32(3, 3); expected float32(4, 3)"),
        ([], TypeError, "state_dict is a list; expected a dict"),
        ({**state, "state": []}, TypeError, "state_dict['state'] must be a dict, state_dict["),
        ({**state, "state": {0: 1}}, TypeError, "state_dict['state'][0] must be a dict"),
        ({**state, "param_groups": [3]}, TypeError, f"{where} must be a dict with a list"),
        (with_option("lr", large), ValueError,
         "['lr'] has the shape (1048576, 0); expected a number or"),
        (with_option("more", deep), ValueError, ".more.0.0.0"),
        (with_option("beta1_power", empty), ValueError,
         "['beta1_power'] has the shape (1, 0); expected a"),
    ]:  # fmt: skip
        with pytest.raises(error) as raised:
            optimizer.load_state_dict(wrong)
        assert text in str(raised.value)
        found = optimizer.state_dict()
        assert found["param_groups"] == state["param_groups"]
        assert str(found) == str(state)
        for index, slots in state["state"].items():
            for name, tensor in slots.items():
                assert found["state"][index][name].equal(tensor)
    backward(module)
    optimizer.step()


def test_what_it_cannot_use_is_refused(mesh):
    module, adam = net(), RULES["adam"]
    weight, used = module[0].weight, adam(0.1)
    backward(module)
    used.apply_gradients(pairs(module, own(module, mesh)))
    decayed = {"params": module.parameters(), "weight_decay": 0.1}
    too_large = {"params": module.parameters(), "betas": (1.5, 0.9)}
    no_option = "weight_decay of a parameter group is not an option of .* which has lr, epsilon, be"
    for rule, params, error, match in [
        (torch.optim.SGD(module.parameters(), 0.1), module.parameters(), TypeError, "is not a gr"),
        (used, module.parameters(), ValueError, "has state, which would not be used"),
        (RULES["sgd"](lambda: 0.1), module.parameters(), TypeError, "learning_rate=.*is not a num"),
        (adam(0.1), [], ValueError, "empty parameter list"),
        (adam(0.1), [np.zeros(3)], TypeError, "can only optimize Tensors"),
        (adam(0.1), own(module, mesh), TypeError, "can only optimize Tensors"),
        (adam(0.1), [weight.t()], ValueError, "non-leaf"),
        (adam(0.1), [decayed], ValueError, no_option),
        (adam(0.1), [too_large], ValueError, "beta1=1.5 must be at least 0 and below 1"),
        (adam(0.1), [weight, weight.detach()[1]], ValueError, "share memory"),
        (adam(0.1), [torch.zeros(3, 4)[:, ::2]], ValueError, "is not contiguous"),
    ]:
        with pytest.raises(error, match=match):
            gr.torch.Optimizer(rule, params)
    optimizer = gr.torch.Optimizer(adam(0.1), module[0].parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": module.parameters()})
    options = {"momentum": 0.9, "learning_rate": 0.1, "beta1": 0.5, "eps_mode": "torch"}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"{name} of a parameter group is not an option"):
            optimizer.add_param_group({"params": module[2].parameters(), name: value})
    assert len(optimizer.param_groups) == 1
