"""A mesh and two Variables that losses read."""

import pytest
from support.meshes import mesh_of

import gradreduce as gr

mesh = mesh_of([0, 0, 1], scope="module", strict=True)


@pytest.fixture
def v(mesh):
    return gr.Variable([1.0, 2.0, 3.0], "v", device=mesh)


@pytest.fixture
def w(mesh):
    return gr.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "w", device=mesh.devices[1])
