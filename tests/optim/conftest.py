"""Meshes to train on."""

from collections.abc import Iterator

import pytest
from optim.model import Model

import gradreduce as gr

IMPLEMENTATIONS = ["numpy", pytest.param("compiled", marks=pytest.mark.host)]
MESHES = [([0, 0], True), ([0, 1, 1, 2, 0], True), ([0, 1, 1, 2, 0], False)]


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param


@pytest.fixture(
    scope="session",
    params=MESHES,
    ids=lambda param: f"{''.join(map(str, param[0]))}{'' if param[1] else '-no-peers'}",
)
def mesh(request, implementation) -> Iterator[gr.Mesh]:
    placement, peers = request.param
    options = {"peer_access": peers, "kernels": implementation, "strict": True}
    with gr.open_mesh(placement, backend="sim", **options) as made:
        yield made


@pytest.fixture
def model(mesh) -> Model:
    return Model(mesh)
