"""Backup workers train on the CUDA backend, from many threads at once."""

import gc
import importlib
import sys
import threading
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.repo
STEPS = 4
FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)
ROUNDING = 0 if FAKE else 1e-4  # cuBLAS adds the products of a matrix in its own order
PLACED = [
    pytest.param("0,0,0,0", 0, marks=pytest.mark.gpu),
    pytest.param("0,0,1,1", 6, marks=pytest.mark.multi_gpu(2)),
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    module = importlib.import_module("sync_replicas")
    gc.freeze()  # libraries stay; each gc.collect() would search them
    return module


def train(example, backend: str, *flags: str):
    options = example.read_options(
        example.make_parser(),
        ["--workers", "4", "--steps", str(STEPS), "--backend", backend, *flags],
    )
    with importlib.import_module("command_line").open_devices(options) as mesh:
        return example.train(mesh, example.load(), options)


@pytest.mark.parametrize(("placement", "seed"), PLACED)
def test_workers_in_step_end_with_the_weights_of_the_simulation(
    example, gpus, monkeypatch, placement, seed
):
    # Each worker waits until all have their tokens, so that none takes two.
    line = threading.Barrier(4)
    draw = example.SyncReplicas.next_step

    def in_step(sync):
        token = draw(sync)
        line.wait(60)
        return token

    monkeypatch.setattr(example.SyncReplicas, "next_step", in_step)
    gpus(seed)
    flags = ("--placement", placement, "--replicas-to-aggregate", "4")
    found = train(example, "cuda", *flags).weights
    wanted = train(example, "sim", *flags).weights
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=ROUNDING, err_msg=name)


@pytest.mark.parametrize(("placement", "seed"), PLACED)
def test_a_straggler_is_dropped(example, gpus, placement, seed):
    gpus(seed)
    history = train(example, "cuda", "--placement", placement, "--late-every", "1")
    assert history.global_step == STEPS
    assert not any(each.kept for each in history.gradients[-1])
    assert history.num_dropped >= len(history.gradients[-1]) >= 1


@pytest.mark.fake_cupy
@pytest.mark.parametrize(
    ("num_gpus", "placed"), [(8, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (3, [0, 0, 1, 2]), (1, [0] * 4)]
)
def test_four_devices_are_the_first_four_gpus(example, gpus, num_gpus, placed):
    gpus(0, num_gpus=num_gpus)
    options = example.read_options(example.make_parser(), ["--backend", "cuda", "--workers", "4"])
    with importlib.import_module("command_line").open_devices(options) as mesh:
        assert [device.physical for device in mesh] == placed
