"""The example that trains a PyTorch module by AGN, with workers in threads and in processes."""

import importlib
import re
from pathlib import Path

import pytest
from support.examples import rows_of
from support.libraries import torch

pytestmark = [pytest.mark.torch, pytest.mark.repo]
FEW = ("--backend", "sim", "--workers", "2", "--steps", "40", "--period", "5")


@pytest.fixture
def train(capsys):
    """Runs the example in this process; returns exit status, rows of the table, and text."""
    script = importlib.import_module("agn_torch")
    threads = torch.get_num_threads()

    def run(*flags):
        status = script.main([*FEW, *flags])
        text = capsys.readouterr().out
        return status, rows_of(text), text

    yield run
    torch.set_num_threads(threads)


def check(status, rows, text, devices):
    assert rows["devices"] == devices
    assert rows["pushes"] == "16"
    accuracy = float(rows["test accuracy"])
    assert accuracy > 0.5  # a guess has 0.1
    assert status == (accuracy < 0.95)
    assert all(re.search(rf"worker {index} .*100%", text) for index in range(2))
    assert Path("agn_torch.png").read_bytes().startswith(b"\x89PNG")


def test_workers_in_threads_learn(train):
    check(*train(), devices="2 on simulated 0, 1")


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_workers_in_processes_learn(train):
    check(*train("--engine", "ray"), devices="1 on simulated 0, in each of 2 processes")
