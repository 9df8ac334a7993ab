"""The programs of ``bench/gpu_check`` that use PyTorch, on the CPU."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.repo, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'bench'}")


@pytest.fixture
def program(folder):
    from gpu_check import torch_training

    return torch_training


def test_two_logical_devices_get_the_means(program):
    assert program.in_one_process("sim", "cpu") == 2 * program.STEPS * 3


def test_a_wrong_gradient_is_found(program, monkeypatch):
    right = program.means
    monkeypatch.setattr(program, "means", lambda step: right(step + 1))
    with pytest.raises(AssertionError, match="step 0: "):
        program.in_one_process("sim", "cpu")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_get_the_means(program):
    program.in_two_processes("sim", "cpu")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("exact", [False, True])
def test_the_backend_gives_sums_means_and_the_gradients_of_ddp(folder, exact):
    from gpu_check import torch_backend

    compared = torch_backend.in_two_processes("cpu", exact)
    assert compared == torch_backend.NUM_PROCESSES * (len(torch_backend.DTYPES) * 4 + 1)
