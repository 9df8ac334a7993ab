"""A mesh and two Variables that losses read."""

from __future__ import annotations

import pytest

import gradreduce as gr


@pytest.fixture(scope="module")
def mesh():
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True) as made:
        yield made


@pytest.fixture
def v(mesh):
    return gr.Variable([1.0, 2.0, 3.0], "v", device=mesh)


@pytest.fixture
def w(mesh):
    return gr.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "w", device=mesh.devices[1])
