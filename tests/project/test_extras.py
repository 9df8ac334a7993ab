"""pip can install the combinations of extras that documents and error messages name."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.background_runs import ROOT

pytestmark = pytest.mark.repo
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*/README.md"),
    *(ROOT / "examples").glob("*.py"),
    *(ROOT / "bench").glob("*.py"),
    ROOT / ".ci" / "run",
    ROOT / ".pre-commit-config.yaml",
]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def combinations_in(text: str) -> set[tuple[str, ...]]:
    """Extras that a text names together, as in ``".[cuda13,torch]"``, sorted."""
    found = re.findall(r"(?:gradreduce|\.)\[([a-z0-9]+(?:,[a-z0-9]+)*)\](?!\()", text)
    return {tuple(sorted(extras.split(","))) for extras in found}


def documented() -> set[tuple[str, ...]]:
    found = (combinations_in(text_of(path)) for path in DOCUMENTS)
    return {(extra,) for extra in EXTRAS}.union(*found)


def largest(combinations: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those that no other one contains: versions that suit one suit all that it contains."""
    return [one for one in sorted(combinations) if not any(set(one) < set(b) for b in combinations)]


def images() -> list[tuple[tuple[str, ...], list[str]]]:
    """The extras and the other libraries of the images, from the table of docs/containers.md."""
    rows = re.findall(
        r"^\| `(1\d)`.* \| `(.*)` \|", text_of(ROOT / "docs/containers.md"), re.MULTILINE
    )
    return [((f"cuda{cuda}", "test"), libraries.split()) for cuda, libraries in rows]


def resolve(
    extras: tuple[str, ...], python: str, libraries: Iterable[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Chooses versions of all packages, from their metadata; downloads and installs no package."""
    named = [word for extra in extras for word in ("--extra", extra)]
    return subprocess.run(
        [
            sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml"), "-", *named,
            "--python", sys.executable, "--python-version", python, "--only-binary", ":all:",
            "--python-platform", "x86_64-manylinux_2_28", "--quiet", "--no-header", "--no-annotate",
        ],
        input="\n".join(libraries), capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip


def test_documents_name_extras_that_exist_and_no_pair_that_cannot_be_installed():
    for extras in documented():
        assert set(extras) <= set(EXTRAS), extras
        assert not {"cuda12", "cuda13"} <= set(extras), extras
        assert not {"cuda12", "torch"} <= set(extras), extras


CASES = [(extras, []) for extras in largest(documented())] + images()


@pytest.mark.exhaustive
@pytest.mark.uv
@pytest.mark.parametrize("python", [PYTHONS[0], PYTHONS[-1]])
@pytest.mark.parametrize(("extras", "libraries"), CASES, ids=lambda names: ",".join(names))
def test_every_documented_combination_can_be_resolved(extras, libraries, python):
    done = resolve(extras, python, libraries)
    assert done.returncode == 0, done.stderr
    assert "numpy==" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.uv
def test_pytorch_and_cupy_for_cuda_12_cannot_be_resolved():
    """If this fails, the documents may name the pair again."""
    done = resolve(("cuda12", "torch"), PYTHONS[0])
    assert done.returncode == 1
    assert "cupy-cuda12x" in done.stderr and "torch" in done.stderr, done.stderr
