"""Golden files in tests/data: public names, error messages, entries of checkpoints.

``PYTHONPATH=src:tests python -m support.golden_files`` writes them from the code.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from support import checkpoint_cases

import gradreduce as gr

DATA = Path(__file__).parent.parent / "data"
PACKAGE = Path(gr.__file__).parent


# --- public names ---------------------------------------------------------------------------------


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public name with its object, also those of the public submodules."""
    for name in gr.__all__:
        found = getattr(gr, name)
        if not inspect.ismodule(found):
            yield name, found
            continue
        for inner in found.__all__:
            if inner not in gr.__all__ and not inner.startswith("_"):
                yield f"{name}.{inner}", getattr(found, inner)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods, properties and constants that no public base class has."""
    public = [getattr(gr, name) for name in gr.__all__]
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        inherited = any(issubclass(base, owner) for base in cls.__mro__[1:] if base in public)
        shown = name == "__call__" or not name.startswith("_")
        if shown and not inherited and owner.__module__.startswith("gradreduce"):
            yield name, getattr(cls, name)


def attributes(cls: type) -> Iterator[str]:
    """Names in the "Attributes" section of the class's docstring."""
    _, _, section = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    for line in section.split("\n\n")[0].splitlines():
        if named := re.match(r"    (\w+(?:, \w+)*):", line):
            yield from (name for name in named[1].split(", ") if not name.startswith("_"))


def signature(function: Callable[..., Any]) -> str:
    """The signature without annotations, which mypy checks."""
    found = inspect.signature(function)
    parameters = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def public_api() -> list[str]:
    """A line for every public name, with its signature if it can be called."""
    lines = []
    for name, found in public_names():
        if not inspect.isclass(found):
            lines.append(name + signature(found))
        elif issubclass(found, Exception | Enum):
            lines.append(f"class {name}({', '.join(base.__name__ for base in found.__bases__)})")
        else:
            lines.append(f"class {name}{signature(found)}")
        if inspect.isclass(found):
            held = dict(members(found))
            for member, bound in held.items():
                callable_ = callable(bound) and not isinstance(bound, Enum)
                lines.append(f"{name}.{member}{signature(bound) if callable_ else ''}")
            lines += [f"{name}.{member}" for member in attributes(found) if member not in held]
    return sorted(lines, key=lambda line: line.removeprefix("class "))


def public_objects() -> Iterator[tuple[str, Any]]:
    """Public classes and functions, and methods and properties of the classes, by name."""
    for name, found in public_names():
        yield name, found
        for member, bound in members(found) if inspect.isclass(found) else ():
            slot = inspect.isdatadescriptor(bound) and not isinstance(bound, property)
            if not slot and (callable(bound) or hasattr(bound, "__get__")):
                yield f"{name}.{member}", bound


# --- error messages -------------------------------------------------------------------------------

FIELD = "{…}"


def template(text: ast.expr) -> str:
    """The text of an expression, with a field in place of values known only at run time."""
    match text:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return FIELD


def messages_of(tree: ast.Module) -> Iterator[str]:
    """The messages of the errors that a file creates or raises, each with its class."""
    nodes = list(ast.walk(tree))
    raised = {node.exc for node in nodes if isinstance(node, ast.Raise)}
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            text = ", ".join(template(argument) for argument in node.args)
            if (node in raised or name.endswith("Error")) and text.replace(FIELD, "").strip(", "):
                yield f"{name}: {' '.join(text.split())}"


def error_messages() -> list[str]:
    """A line for every message of an error, sorted: the class, the text."""
    return sorted(
        {
            message
            for path in PACKAGE.rglob("*.py")
            for message in messages_of(ast.parse(path.read_text(encoding="utf-8")))
        }
    )


FILES = {
    "public_api.txt": public_api,
    "error_messages.txt": error_messages,
    "checkpoints.txt": checkpoint_cases.schemas,
}


def text_of(name: str) -> str:
    return "".join(f"{line}\n" for line in FILES[name]())


def check(name: str) -> None:
    """Compares a golden file with the code."""
    assert (DATA / name).read_text(encoding="utf-8") == text_of(name), (
        "if this change is meant: PYTHONPATH=src:tests python -m support.golden_files"
    )


if __name__ == "__main__":
    for name in FILES:
        (DATA / name).write_text(text_of(name), encoding="utf-8")
