"""The scripts of docs/pytorch.md train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.repo]
PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def script_with(text):
    """The names of the one block that contains ``text``."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if text in block]
    names = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    return names


@pytest.mark.usefixtures("one_process")
def test_the_script_for_torchrun_trains():
    weight = script_with("register_comm_hook")["train"](steps=60)
    assert ((weight - 1).abs() < 0.1).all()


def test_the_scripts_with_data_parallel_train():
    weight = script_with('processes="auto"')["train"](steps=60)
    assert ((weight - 1).abs() < 0.1).all()
    one, other = script_with("dp.replicas")["train"](steps=60)
    assert one.equal(other)
    assert ((one - 1).abs() < 0.1).all()
