"""The port of TensorFlow 1 trainings: all four learn."""

import re
from pathlib import Path

import port_from_tf1
import pytest

pytestmark = pytest.mark.repo


def test_the_four_trainings_learn(capsys, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_BACKEND", "sim")
    status = port_from_tf1.main(["--steps", "30", "--output", "ported.png"])
    text = capsys.readouterr().out
    names = ("mirrored", "conditional_accumulators", "sync_replicas", "agn")
    found = {name: float(re.findall(rf"│ {name} +│ (\S+)", text)[0]) for name in names}
    assert min(found.values()) > 0.7, found
    assert status == (min(found.values()) < 0.95)
    assert [re.findall(rf"{name} +\S+ 100%", text) != [] for name in names] == [True] * 4
    assert Path("ported.png").read_bytes().startswith(b"\x89PNG")
