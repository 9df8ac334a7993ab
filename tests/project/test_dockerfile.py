"""The Dockerfile keeps its promises, read as Docker reads it: one instruction after another.

Nothing is built here; that needs a Docker daemon and a GPU.
"""

import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from string import Template
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture(scope="module")
def docker() -> list[Instruction]:
    return instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(docker) -> list[list[str]]:
    texts = [step.text for step in docker if step.name == "RUN"]
    return [shlex.split(each) for text in texts for each in re.split(r"&&|;", text)]


def positions(docker: list[Instruction], name: str, text: str = "") -> list[int]:
    return [i for i, step in enumerate(docker) if step.name == name and text in step.text]


def test_each_step_has_what_it_needs(docker, runs):
    """The venv is first on the path and the files are copied before pip runs."""
    (create,) = [words for words in runs if words[:3] == ["python3", "-m", "venv"]]
    (made,) = positions(docker, "RUN", "python3 -m venv")
    (path,) = positions(docker, "ENV", "PATH=")
    (installed,) = positions(docker, "RUN", "pip install")
    (workdir,) = positions(docker, "WORKDIR")
    copies = positions(docker, "COPY")
    assert made < path < installed
    assert workdir < min(copies) < max(copies) < installed
    assert max(positions(docker, "ARG")) < installed
    (value,) = shlex.split(docker[path].text)
    assert value == f"PATH={create[-1]}/bin:$PATH"
    for place in positions(docker, "RUN"):
        subprocess.run([shutil.which("sh"), "-n", "-c", docker[place].text], check=True)
    assert not positions(docker, "ENTRYPOINT"), "it would swallow CMD"
    assert docker[-1] == ("CMD", '["pytest", "--require-gpu"]')


@pytest.mark.parametrize(
    ("cuda", "libraries"), [("12", ""), ("13", "torch jax[cuda13]"), ("12", "jax[cuda12]")]
)
def test_pip_installs_the_package_with_its_tests_and_more(docker, runs, cuda, libraries):
    """In one command, and for one CUDA version, because two NCCLs would overwrite each other."""
    upgrade, words = (words for words in runs if "pip" in words)
    assert upgrade == ["pip", "install", "--upgrade", "pip"]
    assert runs[runs.index(words) - 1] == ["set", "-f"], "jax[cuda13] is a pattern of file names"
    asked = Template(" ".join(words)).substitute(CUDA=cuda, LIBRARIES=libraries).split()
    assert asked == ["pip", "install", f".[cuda{cuda},test]", *libraries.split()]
    defaults = dict(shlex.split(step.text)[0].split("=") for step in docker if step.name == "ARG")
    assert defaults == {"CUDA": "12", "LIBRARIES": ""}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {f"cuda{cuda}", "test"} <= set(extras["optional-dependencies"])


def shown_commands(path: Path) -> list[str]:
    """Every ``docker run`` in a text, with continued lines joined."""
    lines = re.sub(r"\\\n#? *", "", path.read_text(encoding="utf-8")).splitlines()
    return [found for line in lines for found in re.findall(r"docker run [^`|]*", line)]


@pytest.mark.parametrize("name", ["Dockerfile", "docs/containers.md", "CONTRIBUTING.md"])
def test_every_docker_run_gives_nccl_its_memory(name):
    """Without peer access NCCL needs shared and locked memory."""
    commands = shown_commands(ROOT / name)
    assert commands
    for command in commands:
        words = shlex.split(command)
        assert {"--gpus", "all", "--shm-size=1g", "--ulimit", "memlock=-1"} <= set(words), command
        assert words.index("gradreduce") > words.index("memlock=-1")


def test_everything_copied_exists_and_is_not_ignored(docker):
    sources = [word for step in docker if step.name == "COPY" for word in step.text.split()[:-1]]
    wanted = {"pyproject.toml", "README.md", "LICENSE", "src", "kernels", "tests", "docs"}
    assert wanted <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    ignored = [s for s in sources for pattern in patterns if fnmatch.fnmatch(s, pattern)]
    assert ignored == []
