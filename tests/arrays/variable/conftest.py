"""A mesh with either implementation of the kernels, and valid values of ``device=``."""

from collections.abc import Iterator

import pytest

import gradreduce as gr

IMPLEMENTATIONS = ["numpy", pytest.param("compiled", marks=pytest.mark.host)]


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def mesh(request) -> Iterator[gr.Mesh]:
    options = {"kernels": request.param, "strict": True, "peer_access": False}
    with gr.open_mesh([0, 1, 1, 2], backend="sim", **options) as made:
        yield made


@pytest.fixture(params=["device", "mesh"])
def place(request, mesh):
    """Every valid kind of ``device=``."""
    return mesh if request.param == "mesh" else mesh.devices[2]
