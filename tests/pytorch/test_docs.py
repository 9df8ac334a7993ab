"""The scripts of README and docs/pytorch.md train, also in the processes of torchrun."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.processes import run

pytestmark = [pytest.mark.torch, pytest.mark.repo]
ROOT = Path(__file__).parents[2]
README, PAGE = (ROOT / name for name in ("README.md", "docs/pytorch.md"))
STEPS = 40
# name, script, arguments, whether the data of process 1 are too large for float32
LAUNCHED = [
    ("before", "before.py", ["before.ckpt", STEPS], False),
    ("after", "after.py", ["after.ckpt", STEPS], False),
    ("half", "after.py", ["half.ckpt", STEPS // 2], False),
    ("resumed", "after.py", ["half.ckpt", STEPS], False),
    ("inf", "after.py", ["inf.ckpt", 1], True),
]


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def scripts():
    """The three scripts that have arguments: DDP, ours for torchrun, ours for one process."""
    return [block for block in blocks(PAGE) if "sys.argv" in block]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Runs scripts in two processes; returns the state of each run in each process."""
    import torch

    folder = tmp_path_factory.mktemp("launched")
    for name, script in zip(("before", "after"), scripts(), strict=False):
        (folder / f"{name}.py").write_text(script, encoding="utf-8")
    program = str(Path(__file__).with_name("program.py"))
    done = run("torchrun", 2, program, str(folder), json.dumps(LAUNCHED))
    assert done.returncode == 0, done.text
    return {
        name: [torch.load(folder / f"{name}.{rank}") for rank in range(2)] for name, *_ in LAUNCHED
    }


def weights(state):
    return list(state["net"].values())


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.equal(other)


@pytest.fixture
def in_one_process(tmp_path, monkeypatch):
    """Runs the script for one process; returns its names."""
    (tmp_path / "one.py").write_text(scripts()[2], encoding="utf-8")

    def train(checkpoint, steps):
        monkeypatch.setattr(sys, "argv", ["one.py", str(tmp_path / checkpoint), str(steps)])
        return runpy.run_path(str(tmp_path / "one.py"), run_name="__main__")

    return train


def test_the_readme_shows_the_change_from_one_script_to_the_other():
    (diff,) = blocks(README, "diff")
    lines = [(line[:1] or " ", line[1:]) for line in diff.splitlines()]
    for script, sign in zip(scripts(), "-+", strict=False):
        assert script.splitlines() == [line for kind, line in lines if kind in f" {sign}"]
    assert sum(kind == "+" for kind, _ in lines) == 5  # as both pages say


def test_two_processes_compute_the_bits_of_ddp(launched):
    for state in (*launched["before"], *launched["after"]):
        assert_equal(weights(state), weights(launched["before"][0]))


def test_a_resumed_run_computes_the_bits_of_an_undisturbed_one(launched):
    for state in launched["resumed"]:
        assert state["first"] == STEPS // 2
        assert_equal(weights(state), weights(launched["after"][0]))
    assert not weights(launched["half"][0])[0].equal(weights(launched["after"][0])[0])


def initial_weights():
    import torch

    torch.manual_seed(0)
    return list(
        torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        ).parameters()
    )


def test_all_processes_skip_a_step_if_one_has_an_inf(launched):
    for state in launched["inf"]:
        assert_equal(weights(state), initial_weights())
        assert state["scaler"]["scale"] == 2.0**15  # half


def test_one_process_computes_the_bits_of_two_and_resumes(launched, in_one_process):
    in_one_process("w.ckpt", STEPS // 2)
    names = in_one_process("w.ckpt", STEPS)
    assert names["loss"] < 0.1
    for net in names["nets"]:
        assert_equal(net.parameters(), weights(launched["after"][0]))


def test_all_replicas_of_one_process_skip_a_step_if_one_has_an_inf(in_one_process, monkeypatch):
    import torch

    randn, calls = torch.randn, []

    def too_large(*shape, **options):  # for replica 1
        calls.append(shape)
        return torch.full(shape, 1e38) if len(calls) > 2 else randn(*shape, **options)

    monkeypatch.setattr(torch, "randn", too_large)
    names = in_one_process("w.ckpt", 1)
    for net in names["nets"]:
        assert_equal(net.parameters(), initial_weights())
    assert names["scaler"].get_scale() == 2.0**15


@pytest.mark.usefixtures("one_process")
def test_the_script_with_the_hook_trains():
    (block,) = [block for block in blocks(PAGE) if "register_comm_hook" in block]
    names = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    weight = names["train"](steps=60)
    assert ((weight - 1).abs() < 0.1).all()
