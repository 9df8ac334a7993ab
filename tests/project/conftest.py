"""The sources of the package, parsed once for the tests of this folder."""

import ast
from pathlib import Path

import pytest

import gradreduce

PACKAGE = Path(gradreduce.__file__).parent


@pytest.fixture(scope="package")
def sources() -> dict[str, list[ast.AST]]:
    """The path of each file in the package -> all nodes of its text, the module first."""
    return {
        path.relative_to(PACKAGE).as_posix(): [*ast.walk(ast.parse(path.read_text("utf-8")))]
        for path in sorted(PACKAGE.rglob("*.py"))
    }
