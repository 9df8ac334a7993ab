"""Rules about imports that the contracts of pyproject.toml cannot express."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import gradreduce

PACKAGE = Path(gradreduce.__file__).parent


class Sources(Mapping[str, tuple[ast.Module, bool]]):
    """Module -> its source, and whether it is a package; parsed when asked for, to save memory."""

    def __init__(self) -> None:
        self._paths = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = ["gradreduce", *path.relative_to(PACKAGE).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            self._paths[".".join(parts[:-1] if is_package else parts)] = path, is_package

    def __getitem__(self, module: str) -> tuple[ast.Module, bool]:
        path, is_package = self._paths[module]
        return ast.parse(path.read_text(encoding="utf-8")), is_package

    def __contains__(self, module: object) -> bool:
        return module in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def imported(module: str, source: ast.Module, is_package: bool) -> Iterator[str]:
    """The dotted names that a module imports anywhere, those for annotations included."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            above = above[: len(above) + is_package - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(sources: Mapping[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Module -> the modules of the same sources that it imports; for packages their members."""
    edges: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        found = set()
        for name in imported(module, source, is_package):
            found.add(name if name in sources else name.rpartition(".")[0])
        edges[module] = (found & sources.keys()) - {module}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for each in edges[left.pop()] - seen:
                seen.add(each)
                left.append(each)
        return seen

    ways = {module: reached(module) for module in edges}
    found: list[set[str]] = []
    for module, there in ways.items():
        both = {each for each in there if module in ways[each]}
        if both and both not in found:
            found.append(both)
    return found


def test_cycles_of_annotations_stay_inside_device_or_comm():
    edges = graph(Sources())
    edges["gradreduce.device.mesh"].remove("gradreduce.reduce.flat_buffer")  # see pyproject.toml
    for found in cycles(edges):
        folders = {module.rpartition(".")[0] for module in found}
        assert all(each.startswith("gradreduce.device") for each in folders) or (
            folders == {"gradreduce.comm"}
        ), found


def test_a_cycle_is_found():
    text = {
        "a": "if TYPE_CHECKING:\n    from a.b import B",
        "a.b": "from .c import C",
        "a.c": "def load():\n    import a",
        "a.d": "from . import c",
    }
    planted = {name: (ast.parse(source), name == "a") for name, source in text.items()}
    assert cycles(graph(planted)) == [{"a", "a.b", "a.c"}]


# Names of PyTorch and mpi4py that pickle or listen on a port, and imports by name, which could.
# tests/comm/processes/program.py raises if a library makes Python do it anyway.
PICKLING = re.compile(r"\w+_object(s|_list)?|allow_pickle|pickle|rpc")
LISTENING = re.compile(r"\w+Store|rendezvous|\w*_rendezvous|Open_port|Publish_name|__import__")
BY_NAME = {"import_module"}
# The methods of mpi4py that pickle; methods for buffers begin with a capital letter.
MPI_OBJECTS = {
    *("allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "gather", "ibsend"),
    *("improbe", "irecv", "isend", "issend", "mprobe", "recv", "reduce", "scan", "scatter"),
    *("send", "sendrecv", "ssend"),
}


def used(source: ast.Module) -> set[str]:
    """The names, attributes and keywords of a module."""
    found = set()
    for node in ast.walk(source):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                found.add(value)
    return found


def transports(sources: Mapping[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Module -> the names in it that pickle or listen."""
    found = {}
    for module, (source, _) in sources.items():
        names = used(source)
        bad = {name for name in names if PICKLING.fullmatch(name) or LISTENING.fullmatch(name)}
        bad |= names & BY_NAME
        if "MPI" in names:
            bad |= names & MPI_OBJECTS
        if bad:
            found[module] = bad
    return found


def test_only_the_store_of_pytorch_listens_and_nothing_pickles():
    assert transports(Sources()) == {
        "gradreduce": {"import_module"},  # imports parts of the package
        "gradreduce.comm.launchers": {"import_module"},  # likewise
        "gradreduce.comm.torch_group": {"TCPStore", "PrefixStore", "rendezvous"},
        "gradreduce.cli.system_info": {"import_module"},  # imports the libraries that it describes
        "gradreduce.torch.ddp_hook": {"get_objects"},  # of gc
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dist.broadcast_object_list(found)", "broadcast_object_list"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("from torch.distributed import TCPStore", "TCPStore"),
        ("importlib.import_module(name)", "import_module"),
        ("MPI.COMM_WORLD.send(1, 0)", "send"),
    ],
)
def test_what_pickles_or_listens_is_found(text, name):
    assert transports({"a": (ast.parse(text), False)}) == {"a": {name}}


# The functions that import at their first call: CONTRIBUTING.md says when they may.
LATE = {
    "gradreduce": {"__getattr__"},
    "gradreduce.__main__": {"main"},
    "gradreduce.backends": {"_cuda_backend", "_open_sim"},
    "gradreduce.backends.cuda.nccl": {"_nccl"},
    "gradreduce.comm.launchers": {"_import"},
    "gradreduce.cli.pictures": {"new_figure"},
    "gradreduce.device.mesh": {"flat_buffer"},
    "gradreduce.comm.description": {"digest_of"},
    "gradreduce.cli.system_info": {"_gpus", "_import_version", "_read_version", "find_system_info"},
}
LATE_IN_NUMPY = np.__numpy_submodules__ - {"dtypes", "exceptions", "lib", "linalg"}


def is_import(node: ast.AST) -> bool:
    """Whether a node imports, or reads an attribute of NumPy that NumPy then imports."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "np" and node.attr in LATE_IN_NUMPY
    is_by_name = isinstance(node, ast.Name) and node.id in BY_NAME
    return is_by_name or isinstance(node, ast.Import | ast.ImportFrom)


def late_imports(sources: Mapping[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Module -> its functions that import."""
    found: dict[str, set[str]] = {}
    for module, (source, _) in sources.items():
        for node in ast.walk(source):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and any(map(is_import, ast.walk(node))):
                found.setdefault(module, set()).add(node.name)
    return found


def test_no_function_imports_at_its_first_call():
    """A fork meanwhile would leave the lock of the import held in the child, for ever.

    ``test_import.py`` makes first calls, and so finds what a library of ours imports in them.
    """
    assert late_imports(Sources()) == LATE


@pytest.mark.parametrize("text", ["import a", "from a import b", "import_module('a')", "np.ma.x"])
def test_a_late_import_is_found(text):
    source = ast.parse(f"class A:\n    def f(self):\n        np.linalg.norm(1)\n        {text}")
    assert late_imports({"a": (source, False)}) == {"a": {"f"}}


def protected_modules() -> list[str]:
    """The modules of ops that only ops may import, by the import contract."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    [contract] = [
        contract
        for contract in tomllib.loads(text)["tool"]["importlinter"]["contracts"]
        if contract.get("allowed_importers") == ["gradreduce.ops"]
    ]
    assert contract["allowed_importers"] == ["gradreduce.ops"]
    return contract["protected_modules"]


NEED_A_LIBRARY = ("gradreduce.backends.cuda", "gradreduce.ray", "gradreduce.torch")


def packages() -> Iterator[types.ModuleType]:
    yield gradreduce
    for found in pkgutil.walk_packages(gradreduce.__path__, "gradreduce."):
        if found.ispkg and found.name not in NEED_A_LIBRARY:
            yield importlib.import_module(found.name)


@pytest.mark.repo
def test_only_ops_reexports_names_of_its_modules():
    hidden = {}
    for package in packages():
        names = {found.name for found in pkgutil.iter_modules(package.__path__)}
        other = {
            name
            for name in names
            if not isinstance(vars(package).get(name, gradreduce), types.ModuleType)
        }
        if other:
            hidden[package.__name__] = other
    private = {name.rpartition(".")[2] for name in protected_modules()}
    assert hidden == {"gradreduce.ops": private}


def compared_backends(source: ast.AST) -> list[int]:
    """The lines that compare the name of a backend."""
    return [
        node.lineno
        for node in ast.walk(source)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "backend"
    ]


def test_code_above_the_backends_asks_what_they_can_do():
    assert compared_backends(
        ast.parse("if a.b.backend != 'sim' or 'cuda' == mesh.backend: c()")
    ) == [
        1,
        1,
    ]
    for module, (source, _) in Sources().items():
        is_backend = module.startswith("gradreduce.backends")
        assert is_backend or not compared_backends(source), module
