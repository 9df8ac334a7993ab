"""No example opens a port: neither its imports and calls nor a run of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.background_runs import ROOT, environment

pytestmark = pytest.mark.repo
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Names of the standard library, PyTorch and mpi4py that listen. The processes of
# multiprocessing and concurrent.futures talk through pipes.
LISTENING = re.compile(
    r"bind|listen|Listener|\w*Manager|create_server|start_server|serve_forever|\w*(HTTP|TCP|UDP|RPC)Server|\w+Store"
    r"|\w*rendezvous|Open_port|Publish_name|__import__|import_module"
)
THROUGH_PIPES = {"concurrent", "multiprocessing"}
STORED_ONLY = {"_pickle", "copyreg", "dbm", "marshal", "pickle", "shelve"}


def modules_with_sockets() -> set[str]:
    """The modules that the import contract forbids, except those that open no socket."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (found,) = [c["forbidden_modules"] for c in contracts if "opens a socket" in c["name"]]
    return {*found} - THROUGH_PIPES - STORED_ONLY


def listening_names(text: str) -> set[str]:
    """The modules and names in a program that can open a port."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(alias.name for alias in node.names)}
        else:
            found |= {
                value for key in ("id", "attr") if isinstance(value := getattr(node, key, 0), str)
            }
    forbidden = modules_with_sockets()
    return {
        name
        for name in found
        if name.partition(".")[0] in forbidden
        or any(LISTENING.fullmatch(part) for part in name.split("."))
    }


def test_no_example_names_what_listens():
    assert len(EXAMPLES) > 10
    programs = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES}
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        programs |= {f"{page.name} {number}": block for number, block in enumerate(blocks)}
    named = {name: listening_names(text) for name, text in programs.items()}
    assert {name: found for name, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import socket", "socket"),
        ("from http.server import HTTPServer", "HTTPServer"),
        ("from multiprocessing.connection import Listener", "Listener"),
        ("import torch.distributed as dist\nstore = dist.TCPStore('a', 1)", "TCPStore"),
        ("MPI.Open_port()", "Open_port"),
        ("loop.create_server(None)", "create_server"),
        ("__import__('soc' + 'ket')", "__import__"),
    ],
)
def test_what_listens_is_found(text, name):
    assert name in listening_names(text)


# Runs a program to its end. The audit hook sees every port that Python binds, even if it is closed
# again; the kernel's list (state 0A) has the listening sockets of libraries at the end.
WATCHED = """
import os, re, runpy, sys
from contextlib import suppress
from pathlib import Path

found = []
sys.addaudithook(lambda event, _: event == "socket.bind" and found.append(event))
with suppress(SystemExit):
    sys.argv = sys.argv[1:]
    kept = runpy.run_path(sys.argv[0], run_name="__main__")
mine = set()
for link in Path("/proc/self/fd").iterdir():
    with suppress(OSError):  # the one that lists the folder
        mine |= {*re.findall(r"socket:\\[(\\d+)\\]", os.readlink(link))}
for table in ("tcp", "tcp6"):
    for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
        if line.split()[3] == "0A" and line.split()[9] in mine:
            found.append("listens")
print("ports:", found)
"""


def ports(program: Path, *flags: str) -> str:
    """Runs a program in its own process; returns the ports that it reports."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(program), *flags],
        cwd=program.parent, env=environment(GRADREDUCE_BACKEND="sim"), timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_running_example_listens_nowhere(tmp_path):
    picture = tmp_path / "digits.png"
    example = ROOT / "examples" / "train_digits.py"
    assert ports(example, "--steps", "3", "--output", str(picture)) == "ports: []"
    assert picture.exists()  # it has run to its end


def test_a_port_is_found(tmp_path):
    program = tmp_path / "server.py"
    program.write_text("import socket\nserver = socket.create_server(('127.0.0.1', 0))\n")
    assert ports(program) == "ports: ['socket.bind', 'listens']"
