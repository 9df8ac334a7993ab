"""Prints the code lines and statements of ``src/gradreduce``, per folder; checks their limits.

``[tool.gradreduce.max_statements]`` in ``pyproject.toml`` has the limit of each folder: its
statements and 2 % more. Exit status 1 above a limit. ``--limits`` prints that table anew.
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


def limits_of(found: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The limit of each folder: its statements and 2 % more, rounded up."""
    return {folder: -(-statements * 102 // 100) for folder, (_, statements) in found.items()}


def above_limits(found: dict[str, tuple[int, int]], limits: dict[str, int]) -> list[str]:
    """A line for each folder that has more statements than its limit, or only one of the two."""
    lines = [
        f"{folder}: {statements} statements, its limit is {limits[folder]}"
        for folder, (_, statements) in found.items()
        if folder in limits and statements > limits[folder]
    ]
    lines += [f"{folder}: has no limit" for folder in found if folder not in limits]
    return lines + [
        f"{folder}: has a limit, but no code" for folder in limits if folder not in found
    ]


def main(arguments: list[str]) -> int:
    """Prints the table, or with ``--limits`` the limits to paste; returns the exit status."""
    found = count_folders(PACKAGE)
    if arguments == ["--limits"]:
        print("[tool.gradreduce.max_statements]")
        for folder, limit in limits_of(found).items():
            print(f'"{folder}" = {limit}')
        return 0
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    limits: dict[str, int] = pyproject["tool"]["gradreduce"]["max_statements"]
    print(f"{'folder':<20}{'code lines':>12}{'statements':>12}{'limit':>12}")
    for folder, (lines, statements) in found.items():
        print(f"{folder:<20}{lines:>12}{statements:>12}{limits.get(folder, '-'):>12}")
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    print(f"{'total':<20}{total[0]:>12}{total[1]:>12}{sum(limits.values()):>12}")
    faults = above_limits(found, limits)
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
