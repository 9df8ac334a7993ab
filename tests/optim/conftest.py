"""Meshes to train on."""

import pytest
from optim.model import Model
from support.meshes import implementation, with_and_without_peers

__all__ = ["implementation"]

mesh = with_and_without_peers([0, 0], [0, 1, 1, 2, 0])


@pytest.fixture
def model(mesh) -> Model:
    return Model(mesh)
