"""The tests of the examples, in their own pytest process: their libraries take 100 MB."""

import pytest
from support.background_runs import ROOT

pytestmark = [pytest.mark.repo, pytest.mark.slow]
TESTS = ROOT / "tests"
PYTEST = ("-m", "pytest", "-q", str(TESTS / "examples"), str(TESTS / "project" / "test_readme.py"))


@pytest.mark.early(*PYTEST)
def test_the_examples_pass(early):
    early.check_passed(may_skip=True)


@pytest.mark.exhaustive
@pytest.mark.early(*PYTEST, "-m", "exhaustive")
def test_what_a_plain_run_leaves_out_passes_too(early):
    early.check_passed(may_skip=True)
