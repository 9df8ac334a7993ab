"""``tools/count_lines.py``: what counts as a code line and as a statement."""

import pytest
from count_lines import above_limits, count, count_folders, limits_of

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


def test_what_counts_as_a_line_and_as_a_statement():
    assert count(MODULE) == (15, 9)
    assert count('"""Only a docstring."""\n') == (0, 0)
    assert count("") == (0, 0)
    assert count('print(\n    """a\nb"""\n)\n') == (4, 1)
    assert count('x = f"""\n{1}\n\n"""\n') == (4, 1)


def test_files_are_summed_per_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("__init__.py", "a/one.py", "a/two.py", "a/b/three.py"):
        (tmp_path / name).write_text("x = 1\nif x:\n    x = 2\n", encoding="utf-8")
    (tmp_path / "a" / "text.md").write_text("x\n", encoding="utf-8")
    assert count_folders(tmp_path) == {".": (3, 3), "a": (6, 6), "a/b": (3, 3)}


def test_folders_are_compared_with_their_own_limits():
    """A limit is the statements and two percent, rounded up."""
    assert limits_of({".": (9, 100), "a": (9, 101), "b": (0, 0)}) == {".": 102, "a": 104, "b": 0}
    found = {".": (9, 3), "a": (9, 5)}
    assert above_limits(found, {".": 3, "a": 5}) == []
    assert above_limits(found, {".": 4, "a": 4}) == ["a: 5 statements, its limit is 4"]
    wrong = ["a: has no limit", "b: has a limit, but no code"]
    assert above_limits(found, {".": 3, "b": 1}) == wrong
