"""The backend ``"gradreduce"`` of ``torch.distributed``, in processes of torchrun."""

from pathlib import Path

import pytest
from support.processes import run

pytestmark = pytest.mark.torch


def check(size, program, *arguments):
    done = run("torchrun", size, str(Path(__file__).with_name(program)), *arguments)
    assert done.returncode == 0, done.text
    assert done.text.count("done") == size


def test_calls_have_the_bits_of_one_process():
    check(4, "backend_calls.py")  # also over two of the processes


@pytest.mark.parametrize("size", [2, 4])
def test_training_gives_the_weights_of_gloo(size, tmp_path):
    check(size, "backend_training.py", str(tmp_path))
