"""AGN uses only those protected members of ``Optimizer`` that its docstring names."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import gradreduce as gr
from gradreduce.optim import agn

# The attribute of a getter, and of a center, that the files of the package share.
SHARED = "_shared"
SOURCES = sorted(Path(agn.__file__).parent.glob("*.py"))


def documented() -> set[str]:
    paragraphs = inspect.getdoc(gr.Optimizer).split("\n\n")
    (paragraph,) = [each for each in paragraphs if each.startswith("Protected members")]
    return set(re.findall(r"``(_\w+)``", paragraph)) - {"_apply"}


def accesses(tree: ast.AST) -> list[ast.Attribute]:
    """Accesses to protected members of other objects than ``self``."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and ast.unparse(node.value) not in ("self", "super()")
    ]


def test_it_uses_documented_members_only():
    found = [
        (path.name, each) for path in SOURCES for each in accesses(ast.parse(path.read_text()))
    ]
    known = documented() | {SHARED}
    unknown = [f"{name}:{each.lineno} {ast.unparse(each)}" for name, each in found
               if each.attr not in known]  # fmt: skip
    assert not unknown
    assert known == {each.attr for _, each in found}, "documented, but not used"
    optimizer = gr.GradientDescentOptimizer(0.1)
    assert all(hasattr(optimizer, name) for name in documented())
