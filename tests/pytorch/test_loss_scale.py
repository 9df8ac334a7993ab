"""DynamicLossScale beside torch.amp.GradScaler."""

import numpy as np
import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch


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
