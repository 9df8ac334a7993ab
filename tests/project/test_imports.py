"""Rules about imports that the contracts of pyproject.toml cannot express."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import gradreduce

Sources = Mapping[str, Sequence[ast.AST]]  # of the fixture ``sources``
IN_CYCLES = ("gradreduce.device", "gradreduce.comm")  # their modules may import each other


def parsed(text: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(text))]


def module_of(path: str) -> str:
    return "gradreduce." + path.removesuffix(".py").replace("/", ".")


def imported(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The dotted names that a file imports anywhere, those for annotations included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module_of(path).split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(sources: Sources) -> dict[str, set[str]]:
    """Module -> the modules that it imports; the folders of ``IN_CYCLES`` are one module each."""
    modules = {module_of(path).removesuffix(".__init__") for path in sources}

    def shown(name: str) -> str:
        module = name if name in modules else name.rpartition(".")[0]
        return next((folder for folder in IN_CYCLES if module.startswith(folder)), module)

    edges: dict[str, set[str]] = {}
    for path, nodes in sources.items():
        module = shown(module_of(path).removesuffix(".__init__"))
        found = {shown(name) for name in imported(path, nodes)}
        edges.setdefault(module, set()).update(found - {module})
    return edges


def cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_cycles_of_annotations_stay_inside_device_or_comm(sources):
    edges = graph(sources)
    edges["gradreduce.device"].remove("gradreduce.reduce.flat_buffer")  # see pyproject.toml
    assert cycle(edges) == []


def test_a_cycle_is_found():
    texts = {
        "a/__init__.py": "if TYPE_CHECKING:\n    from gradreduce.a.b import B",
        "a/b.py": "from .c import C",
        "a/c.py": "def load():\n    import gradreduce.a",
        "a/d.py": "from . import c",
    }
    found = cycle(graph({path: parsed(text) for path, text in texts.items()}))
    assert {*found} == {"gradreduce.a", "gradreduce.a.b", "gradreduce.a.c"}


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


def transports(sources: Sources) -> dict[str, set[str]]:
    """File -> the names, attributes and keywords in it that pickle or listen."""
    found = {}
    for path, nodes in sources.items():
        values = (
            getattr(node, key, None) for node in nodes for key in ("id", "attr", "arg", "name")
        )
        names = {value for value in values if isinstance(value, str)}
        bad = {name for name in names if PICKLING.fullmatch(name) or LISTENING.fullmatch(name)}
        bad |= names & BY_NAME
        if "MPI" in names:
            bad |= names & MPI_OBJECTS
        if bad:
            found[path] = bad
    return found


def test_only_the_store_of_pytorch_listens_and_nothing_unpickles(sources):
    assert transports(sources) == {
        "__init__.py": {"import_module"},  # imports parts of the package
        "comm/launchers.py": {"import_module"},  # likewise
        "comm/torch_group.py": {"TCPStore", "PrefixStore", "rendezvous"},
        "cli/system_info.py": {"import_module"},  # imports the libraries that it describes
        "torch/backend.py": {"PrefixStore"},
        "torch/ddp_hook.py": {"get_objects"},  # of gc
        "torch/flight_dump.py": {"pickle"},  # writes what PyTorch's analyzer reads
    }


# The functions that import at their first call: CONTRIBUTING.md says when they may.
LATE = {
    "__init__.py": {"__getattr__"},
    "__main__.py": {"main"},
    "backends/__init__.py": {"_cuda_backend", "_open_sim"},
    "backends/cuda/nccl.py": {"_nccl"},
    "comm/launchers.py": {"_import"},
    "cli/pictures.py": {"new_figure"},
    "device/mesh.py": {"flat_buffer"},
    "comm/description.py": {"digest_of"},
    "optim/agn/simulate.py": {"__init__"},  # numpy.random
    "cli/system_info.py": {"_gpus", "_import_version", "_read_version", "find_system_info"},
}
LATE_IN_NUMPY = np.__numpy_submodules__ - {"dtypes", "exceptions", "lib", "linalg"}


def is_import(node: ast.AST) -> bool:
    """Whether a node imports, or reads an attribute of NumPy that NumPy then imports."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "np" and node.attr in LATE_IN_NUMPY
    is_by_name = isinstance(node, ast.Name) and node.id in BY_NAME
    return is_by_name or isinstance(node, ast.Import | ast.ImportFrom)


def late_imports(sources: Sources) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path, nodes in sources.items():
        for node in nodes:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and any(map(is_import, ast.walk(node))):
                found.setdefault(path, set()).add(node.name)
    return found


def test_no_function_imports_at_its_first_call(sources):
    """A fork meanwhile would leave the lock of the import held in the child, for ever.

    ``test_import.py`` makes first calls, and so finds what a library of ours imports in them.
    """
    assert late_imports(sources) == LATE


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


@pytest.mark.repo
def test_only_ops_reexports_names_of_its_modules():
    names = [found.name for found in pkgutil.walk_packages(gradreduce.__path__, "gradreduce.")
             if found.ispkg and found.name not in NEED_A_LIBRARY]  # fmt: skip
    hidden = {}
    for package in map(importlib.import_module, ["gradreduce", *names]):
        modules = {found.name for found in pkgutil.iter_modules(package.__path__)}
        held = {name: vars(package).get(name, gradreduce) for name in modules}
        other = {name for name in modules if not isinstance(held[name], types.ModuleType)}
        if other:
            hidden[package.__name__] = other
    private = {name.rpartition(".")[2] for name in protected_modules()}
    assert hidden == {"gradreduce.ops": private}
