"""The Dockerfile keeps its promises, read as Docker reads it: one instruction after another.

Nothing is built here; that needs a Docker daemon and a GPU.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parent.parent


class Instruction(NamedTuple):
    """One instruction of a Dockerfile: its name in capitals, and the text after it."""

    name: str
    text: str


def instructions(dockerfile: str) -> list[Instruction]:
    """Splits a Dockerfile, with comment lines dropped and continued lines joined.

    Docker drops a comment line also between continued lines, so they go first.
    """
    lines = (line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    pairs = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [Instruction(name.upper(), " ".join(text.split())) for name, _, text in pairs]


def commands(run: str) -> list[list[str]]:
    """The words of every command of a RUN instruction."""
    return [shlex.split(command) for command in re.split(r"&&|;", run)]


@pytest.fixture(scope="module")
def docker() -> list[Instruction]:
    return instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(docker) -> list[list[str]]:
    return [words for step in docker if step.name == "RUN" for words in commands(step.text)]


def positions(docker: list[Instruction], name: str, text: str) -> list[int]:
    return [i for i, step in enumerate(docker) if step.name == name and text in step.text]


def test_the_parser_joins_lines_and_drops_comments():
    text = '# first\nFROM a\nrun b \\\n  # inside\n  && c  d \\\n  && e\nCMD ["f"]\n'
    assert instructions(text) == [("FROM", "a"), ("RUN", "b && c d && e"), ("CMD", '["f"]')]
    assert commands("b && c 'd e'") == [["b"], ["c", "d e"]]


def test_the_base_image_has_no_cuda_libraries(docker):
    assert docker[0] == ("FROM", "nvidia/cuda:12.9.1-base-ubuntu24.04")
    assert [step.name for step in docker].count("FROM") == 1


def test_apt_brings_python_venv_and_the_compiler_and_nothing_more(docker, runs):
    (install,) = [words for words in runs if words[:2] == ["apt-get", "install"]]
    options = {word for word in install[2:] if word.startswith("-")}
    assert set(install[2:]) - options == {"g++", "python3", "python3-venv"}
    assert "--no-install-recommends" in options
    assert options & {"-y", "--yes"}, "the build has nobody to ask"


def test_the_package_lists_are_removed_in_the_layer_that_fetched_them(docker):
    (layer,) = [step.text for step in docker if step.name == "RUN" and "apt-get" in step.text]
    names = [words[:2] for words in commands(layer)]
    assert names == [["apt-get", "update"], ["apt-get", "install"], ["rm", "-rf"]]
    assert commands(layer)[-1][-1] == "/var/lib/apt/lists/*"


def test_the_venv_is_first_on_path_before_pip_runs(docker, runs):
    (create,) = [words for words in runs if words[:3] == ["python3", "-m", "venv"]]
    (made,) = positions(docker, "RUN", "python3 -m venv")
    (path,) = positions(docker, "ENV", "PATH=")
    (installed,) = positions(docker, "RUN", "pip install")
    assert made < path < installed
    (value,) = shlex.split(docker[path].text)
    assert value == f"PATH={create[-1]}/bin:$PATH"


def test_pip_installs_the_package_for_cuda_12_with_its_tests(docker, runs):
    (words,) = [words for words in runs if "pip" in words]
    assert words == ["pip", "install", ".[cuda12,test]"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cuda12", "test"} <= set(extras["optional-dependencies"])


def test_everything_copied_exists_and_is_not_ignored(docker):
    sources = [word for step in docker if step.name == "COPY" for word in step.text.split()[:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "kernels", "tests"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    ignored = [s for s in sources for pattern in patterns if fnmatch.fnmatch(s, pattern)]
    assert ignored == []


def test_what_is_copied_is_there_before_pip_needs_it(docker):
    (installed,) = positions(docker, "RUN", "pip install")
    copies = [i for i, step in enumerate(docker) if step.name == "COPY"]
    (workdir,) = [i for i, step in enumerate(docker) if step.name == "WORKDIR"]
    assert workdir < min(copies)
    assert max(copies) < installed


def test_the_container_cannot_pass_without_a_gpu(docker):
    last = docker[-1]
    assert last.name == "CMD"
    assert json.loads(last.text) == ["pytest", "--require-gpu"]
    assert not [step for step in docker if step.name == "ENTRYPOINT"], "it would swallow CMD"


def test_the_file_says_why():
    comments = [
        line.lstrip("# ")
        for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    ]
    text = " ".join(comments)
    for reason in ("wheels", "refuses pip", "--gpus all"):
        assert reason in text
