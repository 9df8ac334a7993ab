"""The README's promises that a test can keep: its commands and its example."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import gradreduce as gr

pytestmark = pytest.mark.repo
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_the_two_commands_are_there():
    text = README.read_text(encoding="utf-8")
    assert 'python -m pip install ".[examples]" && python examples/train_digits.py' in text
    assert 'python -m pip install ".[test]" && python -m pytest' in text


def test_the_ten_lines_of_the_digits_example_train_it():
    """They stand beside its command, and are what it does; how their names are made is said."""
    text = README.read_text(encoding="utf-8")
    code = re.search(r"python examples/train_digits.py\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) == 10
    said = " ".join(code[0][: -len(code[1])].split())
    for name in (
        "mesh = gr.open_mesh(",
        "optimizer = gr.MomentumOptimizer(0.1, 0.9)",
        "w = [gr.Variable(value, device=mesh) for value in initial]",
        "next_batch()",
    ):
        assert name in said
    assert all(len(line) <= 100 for line in code[1].splitlines())
    example = importlib.import_module("digits")
    digits, rng = example.load(), np.random.default_rng(0)

    def next_batch():
        picks = rng.integers(len(digits.train_images), size=16)
        return digits.train_images[picks], digits.train_labels[picks]

    with gr.open_mesh([0, 0, 1, 1], backend="sim") as mesh:
        initial = example.initial_weights(rng).values()
        names = {"gr": gr, "np": np, "mesh": mesh, "num_steps": 60, "next_batch": next_batch}
        w = names["w"] = [gr.Variable(value, device=mesh) for value in initial]
        names["optimizer"] = gr.MomentumOptimizer(0.1, 0.9)
        exec(compile(code[1], "README.md", "exec"), names)
        assert all((buffer.numpy() == each.numpy()).all() for each in w for buffer in each.buffers)
        assert example.accuracy([each.numpy() for each in w], digits) > 0.8


def test_the_example_runs_and_prints_what_its_comments_say(capsys):
    text = README.read_text(encoding="utf-8")
    code = re.search(r"## Fifteen lines\n+```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    lines = [line for line in code[1].splitlines() if line.strip()]
    assert len(lines) <= 15
    assert all(len(line) <= 110 for line in lines)
    exec(compile(code[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed == "[[1.5 1.5]\n [1.5 1.5]\n [1.5 1.5]] 6 576\n[1.5 1.5 1.5 1.5 1.5]\n"


def test_the_example_of_a_checkpoint_puts_back_what_it_saved(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "load_state_dict" in block]
    monkeypatch.chdir(tmp_path)
    with gr.open_mesh([0, 0, 1], backend="sim") as mesh:
        accumulator = gr.ConditionalAccumulator("float32", device=mesh)
        accumulator.apply_grad([1.0, 2.0])
        names = {"accumulator": accumulator, "mesh": mesh, "np": np, "json": json}
        for part in code.split("\n\n"):
            exec(compile(part, "README.md", "exec"), names)
            if "load" not in part:
                accumulator.apply_grad([5.0, 5.0])
        assert accumulator.take_grad(1).values[2].tolist() == [1.0, 2.0]


def test_the_example_of_adding_over_time_prints_what_its_comments_say(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "take_grads" in block]
    exec(compile(code, "README.md", "exec"), {})
    wanted = ["[True, True, True, True] [1.5 1.5 1.5] [ 7  8  9 10 11]", "False 1 1"]
    assert capsys.readouterr().out.splitlines() == wanted
    for line in wanted:
        assert f"# {line.replace('[True, True, True, True]', '4 x True')}\n" in code


def test_the_example_of_gradients_prints_what_its_comment_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "embedding_lookup" in block]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[7 3 7] (3, 8) (8, 3) float32\n"
    assert "# [7 3 7] (3, 8) (8, 3) float32\n" in code


def test_the_example_of_agn_prints_what_its_comment_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "AGNOptimizer" in block]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[1. 2.]\n"
    assert "# [1. 2.]\n" in code


@pytest.mark.torch
def test_the_example_of_pytorch_prints_what_its_comment_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "import torch" in block]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "0.5 1.0\n"
    assert "# 0.5 1.0\n" in code


def test_every_file_it_names_exists():
    text = README.read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name in re.findall(r"`((?:src|examples|bench|kernels)/[\w/.]+\.\w+)`", text):
        assert (ROOT / name).is_file(), name
