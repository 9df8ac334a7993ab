"""No example opens a port: neither its imports and calls nor a run of it."""

import ast
import re
import subprocess
import sys
import tomllib

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
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
        else:
            found |= {getattr(node, "id", ""), getattr(node, "attr", "")}
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


def test_what_listens_is_found():
    for text, name in (
        ("import socket", "socket"),
        ("from http.server import HTTPServer", "HTTPServer"),
        ("from multiprocessing.connection import Listener", "Listener"),
        ("import torch.distributed as dist\nstore = dist.TCPStore('a', 1)", "TCPStore"),
        ("MPI.Open_port()", "Open_port"),
        ("__import__('soc' + 'ket')", "__import__"),
    ):
        assert name in listening_names(text)


# Runs programs to their end. The audit hook sees every port that Python binds, even if it is closed
# again; the kernel's list (state 0A) has the listening sockets of libraries at the end.
WATCHED = """
import os, re, runpy, sys
from contextlib import suppress
from pathlib import Path

found, programs = [], [line.split() for line in sys.argv[1:]]
sys.addaudithook(lambda event, _: event == "socket.bind" and found.append(event))
for program in programs:
    found.clear()
    with suppress(SystemExit):
        sys.argv = program
        kept = runpy.run_path(program[0], run_name="__main__")
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


def test_a_running_example_listens_nowhere_and_a_port_is_found(tmp_path):
    example, server = ROOT / "examples" / "train_digits.py", tmp_path / "server.py"
    server.write_text("import socket\nserver = socket.create_server(('127.0.0.1', 0))\n")
    train = f"{example} --steps 3 --output {tmp_path / 'digits.png'}"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, train, str(server)], cwd=example.parent, timeout=120,
        env=environment(GRADREDUCE_BACKEND="sim"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall("^ports: .*$", done.stdout, re.MULTILINE) == [
        "ports: []",
        "ports: ['socket.bind', 'listens']",
    ]
    assert (tmp_path / "digits.png").exists()  # it has run to its end
