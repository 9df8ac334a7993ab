"""On GPUs, public calls compile their kernels before their first launch, and not again."""

from __future__ import annotations

import pytest
from support.compiled_first import CALLS, check_compiled_first

import gradreduce as gr

pytestmark = pytest.mark.fake_cupy


@pytest.mark.parametrize("name", CALLS)
def test_no_call_compiles_after_its_first_launch(name, gpus):
    gpus(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        check_compiled_first(mesh, CALLS[name])
