"""The digits example trains in several processes to the weights of one."""

from pathlib import Path

import numpy as np
import pytest
from support.examples import rows_of
from support.processes import MPI, TORCHRUN, run

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_digits.py"
FLAGS = ["--backend", "sim", "--micro-batches", "2", "--learning-rate", "0.2", "--steps", "100"]

pytestmark = pytest.mark.repo


def script(folder: Path, *flags: str) -> list[str]:
    files = ["--output", str(folder / "digits.png"), "--save-weights", str(folder / "w.npz")]
    return [str(SCRIPT), *FLAGS, *files, *flags]


def result(folder: Path, text: str) -> tuple[dict[str, np.ndarray], str, str]:
    """The weights, the accuracy and the digest of a run; checks that one process reports."""
    assert text.count("training") == text.count("Saved the figure") == 1, text  # bar, last line
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of(text)
    with np.load(folder / "w.npz") as weights:
        return dict(weights), rows["test accuracy"], rows["digest of the weights"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    done = run("none", 1, *script(folder, "--devices", "2"))
    assert done.returncode == 0, done.text
    return result(folder, done.text)


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI])
def test_the_digits_example_trains_to_the_weights_of_one_process(launcher, alone, tmp_path):
    done = run(launcher, 2, *script(tmp_path, "--devices", "1"))
    assert done.returncode == 0, done.text
    weights, *reported = result(tmp_path, done.text)
    assert reported == list(alone[1:])
    assert weights.keys() == alone[0].keys()
    for name, value in weights.items():
        assert value.tobytes() == alone[0][name].tobytes(), name
