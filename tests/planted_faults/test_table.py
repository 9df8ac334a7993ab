"""The table of planted faults matches the current source."""

import re
from collections import Counter

import pytest

from planted_faults.table import ROOT, read_table

pytestmark = pytest.mark.repo
FAULTS = read_table()


def test_every_old_text_occurs_exactly_once():
    wrong = []
    for fault in FAULTS:
        try:
            fault.planted(ROOT)
        except (OSError, ValueError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_every_name_stands_for_one_fault():
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_test_is_there():
    for test, name in {fault.test: fault.name for fault in FAULTS}.items():
        path, function = re.fullmatch(r"([^:]+)::(?:\w+::)?(\w+)(?:\[.*\])?", test).groups()
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {function}(" in text, f"{name}: {test}"
