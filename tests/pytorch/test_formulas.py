"""Rules with PyTorch's formulas against torch.optim, and DynamicLossScale against GradScaler."""

from functools import partial

import numpy as np
import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch

NUM_STEPS, EPSILON = 8, 1e-3
# case -> a function from eps_mode to the rule; PyTorch's optimizer, and its options
CASES = {
    "AdamW": (
        lambda _: gr.AdamWOptimizer(0.05, 0.8, 0.95, EPSILON, 0.3),
        ("AdamW", {"betas": (0.8, 0.95), "weight_decay": 0.3}),
    ),
    "Adam": (
        lambda mode: gr.AdamOptimizer(0.05, 0.8, 0.95, EPSILON, eps_mode=mode),
        ("Adam", {"betas": (0.8, 0.95)}),
    ),
}
for more in ({}, {"momentum": 0.5}, {"momentum": 0.5, "centered": True}):
    make = partial(gr.RMSPropOptimizer, 0.05, 0.9, epsilon=EPSILON, **more)
    CASES[f"RMSprop {' '.join(more)}"] = (
        lambda mode, make=make: make(eps_mode=mode),
        ("RMSprop", {"alpha": 0.9, **more}),
    )


def trained(make, dtype):
    """The parameters after steps with fixed gradients, some of them small or zero."""
    rng = np.random.default_rng(0)
    parameters = [torch.tensor(rng.normal(size=shape), dtype=getattr(torch, dtype))
                  for shape in ((5, 4), (7,), ())]  # fmt: skip
    optimizer = make(parameters)
    for _ in range(NUM_STEPS):
        for each in parameters:
            grad = rng.normal(size=each.shape) * rng.choice([0, 1e-3, 1], each.shape)
            each.grad = torch.tensor(grad, dtype=each.dtype)
        optimizer.step()
    return np.concatenate([each.numpy().ravel() for each in parameters]).astype(np.float64)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case, dtype, bound):
    rule, (name, options) = CASES[case]
    kind = getattr(torch.optim, name)
    found, others = (
        trained(lambda each, mode=mode: gr.torch.Optimizer(rule(mode), each), dtype)
        for mode in ("torch", "tensorflow")
    )
    wanted = trained(lambda each: kind(each, 0.05, eps=EPSILON, **options), dtype)
    assert np.abs(found - wanted).max() <= bound
    if case != "AdamW":  # TensorFlow adds epsilon elsewhere
        assert np.abs(found - others).max() > 1e-3


def test_defaults_are_those_of_pytorch():
    ours, theirs = gr.AdamWOptimizer(), torch.optim.AdamW([torch.zeros(1)]).defaults
    found = (ours.learning_rate, (ours.beta1, ours.beta2), ours.epsilon, ours.weight_decay)
    assert found == tuple(theirs[name] for name in ("lr", "betas", "eps", "weight_decay"))
    assert (ours.eps_mode, ours.lazy) == ("torch", False)


def test_weight_decay_is_an_option_of_a_parameter_group():
    decayed, kept = torch.ones(2), torch.ones(2)
    groups = [{"params": [decayed]}, {"params": [kept], "weight_decay": 0.0}]
    optimizer = gr.torch.Optimizer(gr.AdamWOptimizer(0.5, weight_decay=0.5), groups)
    for each in (decayed, kept):
        each.grad = torch.zeros(2)
    optimizer.step()
    assert (decayed.tolist(), kept.tolist()) == ([0.75, 0.75], [1.0, 1.0])


@pytest.mark.parametrize("options", [{}, {"growth_factor": 3.0, "backoff_factor": 0.25}], ids=str)
def test_the_scales_and_skipped_steps_are_those_of_grad_scaler(options):
    init, options = 1024.0, {"growth_interval": 3, **options}
    scaler = torch.amp.GradScaler("cpu", init_scale=init, **options)
    weight = torch.ones(3, requires_grad=True)
    sgd = torch.optim.SGD([weight], 1.0)
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable(np.ones(3), "w", dtype="float32", device=mesh)
        rule = gr.DynamicLossScale(init, **options)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        step = gr.SyncStep([variable], gr.GradientDescentOptimizer(1.0), ops, loss_scale=rule)
        for number in range(20):
            factor = np.inf if number in (2, 9, 10) else 1.0
            sgd.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(sgd)
            scaler.update()
            gradient = np.full(3, factor * step.loss_scale, np.float32)
            step([[[gradient]], [[gradient]]])
            assert step.loss_scale == scaler.get_scale()
            assert variable.numpy().tolist() == weight.tolist()
        assert step.num_skipped == 3
        defaults = gr.DynamicLossScale()
        assert defaults.init_scale == torch.amp.GradScaler("cpu").get_scale()
        assert defaults.growth_interval == torch.amp.GradScaler("cpu").get_growth_interval()
