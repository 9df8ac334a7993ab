"""Every promise and method in ``gradreduce/device/README.md`` names tests that exist."""

import re
from pathlib import Path

import gradreduce.device
from gradreduce.device import Device
from gradreduce.device.run.backend import Backend

HERE = Path(__file__).parent


def readme() -> str:
    return (Path(gradreduce.device.__file__).parent / "README.md").read_text(encoding="utf-8")


def promises() -> list[str]:
    found = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^\*\*|\Z)", readme(), re.M | re.S)
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


def check_references(text: str) -> None:
    references = named(text)
    assert references, text
    for file, test in references:
        assert f"\ndef {test}(" in (HERE / file).read_text(encoding="utf-8"), (file, test)


def test_every_promise_names_tests_that_exist():
    assert len(promises()) == 27
    for promise in promises():
        check_references(promise)


def test_the_table_lists_each_method_that_a_backend_implements_with_its_test():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", readme(), re.M)
    assert sorted(name for name, _ in rows) == sorted(Backend.__abstractmethods__)
    assert Device.__abstractmethods__ == Backend.__abstractmethods__
    assert len(rows) <= 17
    for _, tests in rows:
        check_references(tests)
