"""Every promise of ``gradreduce/device/README.md`` names tests, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import gradreduce.device

HERE = Path(__file__).parent


def promises() -> list[str]:
    text = (Path(gradreduce.device.__file__).parent / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^\*\*|\Z)", text, re.M | re.S)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [promise for _, promise in found]


def named(promise: str) -> list[tuple[str, str]]:
    """File and test of every reference: a file, then the tests in it."""
    references, file = [], ""
    for path, test in re.findall(r"`((?:\.\./)*(?:\w+/)*\w+\.py)`|`(test_\w+)`", promise):
        file = path or file
        if test:
            references.append((file, test))
    return references


def test_every_promise_names_tests_that_exist():
    assert len(promises()) == 27
    for promise in promises():
        references = named(promise)
        assert references, promise
        for file, test in references:
            assert f"\ndef {test}(" in (HERE / file).read_text(encoding="utf-8"), (file, test)
