"""The digits example trains on the CUDA backend to the weights of the simulation.

On the stand-in to the same bits. On a GPU cuBLAS adds the products of a matrix in its own order.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.repo

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_digits.py"
STEPS = 6
FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)
ROUNDING = 0 if FAKE else 1e-4  # of weights near 1, after six steps in float32


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits_on_cuda", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses need it
    spec.loader.exec_module(module)
    module.save_picture = lambda history, path: None  # it takes as long as the steps
    gc.freeze()  # libraries stay; each gc.collect() would search them
    return module


def weights(example, folder: Path, backend: str, *flags: str) -> dict[str, np.ndarray]:
    path = folder / f"{backend}.npz"
    example.main([
        "--backend", backend, "--steps", str(STEPS), "--output", str(folder / "digits.png"),
        "--save-weights", str(path), *flags,
    ])  # fmt: skip
    with np.load(path) as saved:
        return dict(saved)


# The last is the seed of the fake's order: 0 is fully lazy.
PLACED = [
    pytest.param("0,0,0,0", "hierarchical_copy", 0, marks=pytest.mark.gpu),
    pytest.param("0,0,0,0", "nccl", 6, marks=pytest.mark.gpu),
    pytest.param(
        "0,0,1,1", "hierarchical_copy", 6, marks=(pytest.mark.multi_gpu(2), pytest.mark.exhaustive)
    ),
    pytest.param("0,1,2,3", "hierarchical_copy", 0, marks=pytest.mark.multi_gpu(4)),
    # Real NCCL over several GPUs adds in another order.
    pytest.param("0,0,1,1", "nccl", 0, marks=(pytest.mark.fake_cupy, pytest.mark.exhaustive)),
    pytest.param("0,1,2,3", "nccl", 6, marks=pytest.mark.fake_cupy),
]


@pytest.mark.parametrize(("placement", "algorithm", "seed"), PLACED)
def test_the_weights_are_those_of_the_simulation(
    example, gpus, tmp_path, monkeypatch, placement, algorithm, seed
):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    gpus(seed)
    flags = ("--placement", placement, "--all-reduce", algorithm)
    check_equal(example, tmp_path, *flags)


@pytest.mark.parametrize(
    ("placement", "seed"),
    [
        pytest.param("0,0", 6, marks=pytest.mark.gpu),
        pytest.param("0,1", 0, marks=pytest.mark.multi_gpu(2)),
    ],
)
def test_the_weights_of_one_agn_worker_are_those_of_the_simulation(
    example, gpus, tmp_path, monkeypatch, placement, seed
):
    """In its own thread, with two replicas; more workers would race."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    gpus(seed)
    flags = ("--mode", "agn", "--workers", "1", "--replicas", "2", "--period", "2")
    check_equal(example, tmp_path, *flags, "--placement", placement)


def check_equal(example, folder: Path, *flags: str) -> None:
    found = weights(example, folder, "cuda", *flags)
    wanted = weights(example, folder, "sim", *flags)
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=ROUNDING, err_msg=name)


@pytest.mark.fake_cupy
@pytest.mark.parametrize(
    ("num_gpus", "placed"), [(8, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (3, [0, 0, 1, 2]), (1, [0] * 4)]
)
def test_four_devices_are_the_first_four_gpus(example, gpus, num_gpus, placed):
    gpus(0, num_gpus=num_gpus)
    options = example.read_options(example.make_parser(), ["--backend", "cuda", "--devices", "4"])
    with sys.modules["command_line"].open_devices(options) as mesh:
        assert [device.physical for device in mesh] == placed
