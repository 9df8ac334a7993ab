"""The description of the GPUs that ``gradreduce info`` shows."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from fake_cupy import surface

import gradreduce as gr
from gradreduce.cli import system_info
from gradreduce.cli.app import command

pytestmark = pytest.mark.fake_cupy


@pytest.mark.parametrize("can_peer", [True, False])
def test_gpus_and_their_peers_are_described(gpus, can_peer):
    gpus(num_gpus=2, peers=can_peer)
    found = system_info.find_system_info()
    assert [gpu.peers for gpu in found.gpus] == [(False, can_peer), (can_peer, False)]
    assert (found.versions["CUDA driver"], found.versions["CUDA runtime"]) == ("13.1", "12.9")
    peer = "1" if can_peer else "no other GPU"
    assert found.device_lines()[0] == (
        f"GPU 0       Fake GPU, compute capability 9.0, 1.0 GiB, peer access to {peer}"
    )


@pytest.mark.parametrize("can_peer", [True, False])
def test_the_check_of_the_command_line_runs_on_gpus(gpus, can_peer):
    gpus(num_gpus=2, peers=can_peer)
    result = CliRunner().invoke(
        command, ["check", "--backend", "cuda", "--devices", "0,0,1", "--json", "-"]
    )
    found = {each["what"]: each["outcome"] for each in json.loads(result.output)["checks"]}
    captured = found.pop("captured step (CUDA graph)")
    assert set(found.values()) == {"works"}, result.output
    assert captured == ("works" if can_peer else "FAILED")  # a graph needs peers
    assert result.exit_code == (0 if can_peer else 1)


def test_a_trace_shows_labels_as_nvtx_ranges(gpus):
    gpus(num_gpus=2)
    surface.RANGES.clear()
    with gr.open_mesh(2, backend="cuda") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        for nvtx in (False, True):
            assert surface.RANGES == []
            with mesh.trace(nvtx=nvtx):
                ops.all_reduce([[np.ones(3)] for _ in mesh])
    assert surface.RANGES[0] == "+pack 1 of 1 (tensor 0)"
    assert surface.RANGES.count("-") * 2 == len(surface.RANGES)


def test_a_benchmark_names_gpus_and_versions(gpus):
    gpus()
    options = ("--backend", "cuda", "--devices", "0,0,1", "--iterations", "1", "--max-bytes", "1K")
    result = CliRunner().invoke(command, ["bench", "all-reduce", *options, "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["wrong"] for row in found["rows"]] == [0]
    machine = found["machine"]
    assert machine["gpus"] == ["Fake GPU"] * 2
    assert "CuPy" in machine["versions"]
    assert machine["versions"]["CUDA driver"] == "13.1"
    assert "threads" not in machine
