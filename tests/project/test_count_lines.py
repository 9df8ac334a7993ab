"""``tools/count_lines.py``: what counts as a code line and as a statement."""

from __future__ import annotations

import pytest
from count_lines import count, count_folders

pytestmark = pytest.mark.repo

MODULE = '''\
"""A docstring.

Of three lines.
"""

import math  # 1: a comment beside code

# a comment alone
SIZE: int = 3  # 2
"""What the line above means."""


class A:  # 3
    """A docstring."""

    def area(self):  # 4
        """A docstring
        of two lines."""
        if SIZE: return 1; return 2  # 5: three statements
        return sum(  # 6 to 10
            [
                # a comment inside

                math.pi,
                SIZE,
            ])


TEXT = """\\
one

two
"""  # 11 to 15: a blank line of a value is one too
'''


def test_docstrings_comments_and_blank_lines_do_not_count():
    assert count(MODULE) == (15, 9)
    assert count('"""Only a docstring."""\n') == (0, 0)
    assert count("") == (0, 0)


def test_a_string_that_is_used_counts():
    assert count('print(\n    """a\nb"""\n)\n') == (4, 1)
    assert count('x = f"""\n{1}\n\n"""\n') == (4, 1)


def test_files_are_summed_per_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("__init__.py", "a/one.py", "a/two.py", "a/b/three.py"):
        (tmp_path / name).write_text("x = 1\nif x:\n    x = 2\n", encoding="utf-8")
    (tmp_path / "a" / "text.md").write_text("x\n", encoding="utf-8")
    assert count_folders(tmp_path) == {".": (3, 3), "a": (6, 6), "a/b": (3, 3)}
