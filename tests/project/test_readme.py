"""Every Python block of README and docs runs, and prints what its comments say."""

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.repo
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [page for page in (README, *sorted((ROOT / "docs").rglob("*.md"))) if page.is_file()]


def blocks_of(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def libraries_of(block: str) -> list[pytest.MarkDecorator]:
    found = re.findall(r"^import (torch|jax|safetensors)\b", block, re.MULTILINE)
    marks = [getattr(pytest.mark, library) for library in found]
    return [*marks, pytest.mark.ray] if "gr.ray." in block else marks


IMPORTS = "import numpy as np\nimport gradreduce as gr\n"


def without_imports(block: str) -> str:
    return block.replace("import numpy as np\n", "").replace("import gradreduce as gr\n", "")


# The README shows the imports once. A block of two pages runs once: with Ray that saves a second.
BLOCKS = {
    without_imports(block): pytest.param(
        IMPORTS + block if path == README else block,
        id=f"{path.relative_to(ROOT).as_posix()}-{number}",
        marks=libraries_of(block),
    )
    for path in PAGES
    for number, block in enumerate(blocks_of(path), 1)
    if "sklearn" not in block  # has a test of its own below
    and "sys.argv" not in block  # has one in tests/pytorch/test_docs.py
}.values()


def printed_lines(block: str) -> list[str]:
    """The expected output of its prints, from the comments beside them or on the next line."""
    found = re.findall(r"^( *)print\(.*\)(?:  |\n\1)# (.*)$", block, re.MULTILINE)
    return [comment for _, comment in found]


@pytest.mark.whole_product
@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_runs_and_prints_what_its_comments_say(
    block, capsys, tmp_path, monkeypatch, request
):
    if "gr.ray." in block:
        request.getfixturevalue("cluster")
    monkeypatch.chdir(tmp_path)
    assert all(len(line) <= 100 for line in block.splitlines())
    exec(compile(block, "block", "exec"), {"__name__": "block"})
    lines = iter(capsys.readouterr().out.splitlines())
    for wanted in printed_lines(block):
        assert wanted in lines  # after the one before


def test_comments_beside_prints_are_compared():
    block = "print(1)  # 1\nfor x in y:\n    print(x)\n    print(f(x))  # [2 3]\nprint(4)\n# 4\n"
    assert printed_lines(block) == ["1", "[2 3]", "4"]
    assert sum(len(printed_lines(block)) for path in PAGES for block in blocks_of(path)) > 15


def test_the_training_example_trains_every_copy_alike():
    (code,) = [block for path in PAGES for block in blocks_of(path) if "sklearn" in block]
    names = {"__name__": "block"}
    exec(compile(code, "README.md", "exec"), names)
    w = names["w"]
    assert all((buffer.numpy() == each.numpy()).all() for each in w for buffer in each.buffers)
    example = importlib.import_module("digits")
    assert example.accuracy([each.numpy() for each in w], example.load()) > 0.8
