"""The mesh for tests of sums on one device, and the methods of aggregation."""

from collections.abc import Iterator

import pytest

import gradreduce as gr


@pytest.fixture(scope="package", params=["numpy", pytest.param("compiled", marks=pytest.mark.host)])
def mesh(request) -> Iterator[gr.Mesh]:
    """Devices 0 and 1 share a physical device; devices 2 and 3 have their own."""
    with gr.open_mesh([0, 0, 1, 2], backend="sim", kernels=request.param, strict=True) as made:
        yield made


@pytest.fixture(autouse=True)
def default(mesh, monkeypatch):
    """Makes it the default mesh, for host arrays too."""
    monkeypatch.setattr("gradreduce.backends._default", [mesh])


@pytest.fixture(params=[0, 1, 2], ids=["add_n", "tree", "accumulate_n"])
def method(request) -> int:
    return request.param
