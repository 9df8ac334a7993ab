"""PyTorch's analyzer names the process that is missing from a planted hang."""

from __future__ import annotations

import subprocess
import sys

import pytest
from flight_to_torch import main
from support.processes import run_fault

ANALYZER = "torch.distributed.flight_recorder.fr_trace"


@pytest.mark.repo
@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.faults
def test_the_analyzer_names_the_process_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    done = run_fault("mpi", 2, "stopped")
    files = list(tmp_path.glob("flight.*.rank*.json"))
    assert [path.suffixes[-2] for path in files] == [".rank0"], done.text
    main([str(tmp_path / "folder"), *map(str, files)])
    found = subprocess.run(
        [sys.executable, "-m", ANALYZER, str(tmp_path / "folder")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    said = found.stdout + found.stderr
    assert said.count("Not all ranks joining collective") == 1, said
    assert "sequence number: 3\n" in said
    assert "missing ranks: {1}\n" in said
    assert "input sizes: [[6], [80000]]" in said
    assert "collective state: started" in said
