"""AGN uses only those protected members of ``Optimizer`` that docs/architecture.md names."""

import ast
import re
from pathlib import Path

import gradreduce as gr
from gradreduce.optim import agn

# The attribute of a getter, and of a center, that the files of the package share.
SHARED = "_shared"
ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(Path(agn.__file__).parent.glob("*.py"))


def documented() -> set[str]:
    items = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("\n- ")
    (item,) = [each for each in items if "uses these protected members of `Optimizer`" in each]
    return set(re.findall(r"`(_\w+)`", item)) - {"_apply"}


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
