"""``gradreduce bench`` on GPUs names what its times depend on."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from gradreduce.cli.app import command

pytestmark = pytest.mark.fake_cupy


def test_gpus_and_versions_are_named():
    from gradreduce.backends.cuda.gpus import cuda_versions, list_gpus  # imports CuPy

    options = ("--backend", "cuda", "--devices", "0,0,1", "--iterations", "1", "--max-bytes", "1K")
    result = CliRunner().invoke(command, ["bench", "all-reduce", *options, "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["wrong"] for row in found["rows"]] == [0]
    machine = found["machine"]
    assert machine["gpus"] == [gpu.name for gpu in list_gpus()[:2]]
    assert "CuPy" in machine["versions"]
    assert machine["versions"]["CUDA driver"] == cuda_versions()["driver"]
    assert "threads" not in machine
