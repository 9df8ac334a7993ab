"""The version is written once, and pre-commit and the hosted CI run the checks of `.ci/run`."""

import re
import tomllib

import pytest
from support.background_runs import ROOT

import gradreduce

pytestmark = pytest.mark.repo


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_stands_in_one_file():
    pyproject = tomllib.loads(text("pyproject.toml"))
    assert pyproject["project"]["dynamic"] == ["version"]
    assert "version" not in pyproject["project"]
    path = pyproject["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{gradreduce.__version__}"\n' in text(path)
    assert not re.search(r"^version:", text("CITATION.cff"), re.MULTILINE)


def test_pre_commit_runs_the_lints_of_ci_and_downloads_nothing():
    lines = text(".ci/run").split('lints="sanitizers, wheel and lints"')[1].splitlines()
    parts = [line.split('"')[-1].strip() for line in lines if line.startswith('part "$lints"')]
    lints = [part for part in parts if part not in ("sanitizers", "wheel")]
    config = text(".pre-commit-config.yaml")
    hooks = re.findall(r"entry: (.+)", config)
    commands = []
    for lint in lints:
        one, several = rf"^{lint}\(\) {{ (.+); }}$", rf"^{lint}\(\) {{\n((?:  .+\n)+)}}$"
        (found,) = re.findall(f"{one}|{several}", text(".ci/run"), re.MULTILINE)
        commands += (found[0] or found[1]).splitlines()
    assert len(hooks) == len(commands) >= 7
    for command, hook in zip(commands, hooks, strict=True):
        words = re.findall(r"codespell|mypy\b|ruff \w+|lint-imports|basedpyright|\S+\.py", command)
        assert words
        assert all(word in hook for word in words), command
    assert re.findall(r"repo: (.+)", config) == ["local"]
    assert set(re.findall(r"language: (.+)", config)) == {"system"}


def test_the_hosted_ci_runs_what_ci_run_does():
    steps = re.findall(r"- run: (.+)", text(".github/workflows/ci.yml"))
    assert steps == ["bash .ci/run"]
