"""Prints the code lines and statements of ``src/gradreduce``, per folder; checks their limit.

The limit of all code lines is ``max_code_lines`` in ``pyproject.toml``. Exit status 1 above it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "gradreduce"

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is only a string, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count(source: str) -> tuple[int, int]:
    """The code lines and the statements of a module, both without docstrings.

    Code lines are those of all tokens but comments, from the first line of a token to its last.
    Statements are the nodes of type ``ast.stmt``.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    statements = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            if is_docstring(node):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            else:
                statements += 1
    return len(lines), statements


def count_folders(package: Path) -> dict[str, tuple[int, int]]:
    """Folder of the package -> the code lines and statements of the files right inside it."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(package.rglob("*.py")):
        folder = path.parent.relative_to(package).as_posix()
        lines, statements = count(path.read_text(encoding="utf-8"))
        total = found.get(folder, (0, 0))
        found[folder] = total[0] + lines, total[1] + statements
    return dict(sorted(found.items()))


def main() -> int:
    """Prints the table; returns the exit status."""
    found = count_folders(PACKAGE)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    limit: int = pyproject["tool"]["gradreduce"]["max_code_lines"]
    total = sum(lines for lines, _ in found.values())
    found["total"] = total, sum(statements for _, statements in found.values())
    print(f"{'folder':<16}{'code lines':>12}{'statements':>12}")
    for folder, (lines, statements) in found.items():
        print(f"{folder:<16}{lines:>12}{statements:>12}")
    print(f"{'limit':<16}{limit:>12}")
    if total > limit:
        print(f"src/gradreduce has {total - limit} code lines more than max_code_lines allows.")
    return int(total > limit)


if __name__ == "__main__":
    sys.exit(main())
