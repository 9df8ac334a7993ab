"""The recommender: sparse and dense gradients train alike, and the table says what differs."""

from pathlib import Path

import pytest
from support.examples import cells, is_picture, load_example

pytestmark = pytest.mark.repo
SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "recommender.py")
FEW = ("--backend", "sim", "--steps", "2", "--placement", "0,0,1,1")


@pytest.fixture
def run(capsys):
    """Runs the example in this process; returns exit status, table, and text."""
    script = load_example("recommender")

    def run_with(*flags):
        status = script.main([*FEW, *flags])
        text = capsys.readouterr().out
        return status, {row[0]: row[1:] for row in cells(text)}, text

    return run_with


@pytest.mark.slow
@pytest.mark.early(SCRIPT, COLUMNS="100", NO_COLOR="1", PYTHONIOENCODING="utf-8")
def test_the_plain_command_reaches_the_goal(early):
    assert (early.returncode, early.stderr) == (0, "")
    assert early.stdout.count("100%") == 2  # the progress bars
    assert "80 steps of sgd; devices: 4 on simulated 0, 1, 2, 3" in early.stdout
    table = {row[0]: row[1:] for row in cells(early.stdout)}
    for name in ("loss of the first step", "loss of the last step", "loss on held-out ratings"):
        sparse, dense = map(float, table[name])
        assert sparse == pytest.approx(dense, abs=2e-4)
    assert table["rows that a replica adds per step"] == ["512", "12,000"]
    sparse, dense = [int(text.replace(",", "")) for text in table["bytes per step"]]
    assert 0 < 10 * sparse < dense
    assert "The tables are equal up to rounding" in early.stdout
    assert is_picture(early.folder / "recommender.png")


def test_the_goal_is_missed_after_two_steps(run):
    status, table, text = run()
    assert status == 1
    assert float(table["loss on held-out ratings"][0]) > 0.62
    assert "is above 0.62." in text
    assert "The tables are equal up to rounding" in text


def test_lazy_adam_leaves_other_rows_as_they_are(run):
    status, table, text = run("--optimizer", "adam", "--output", "a.png")
    assert status == 1
    assert len(set(table["loss of the first step"])) == 1
    assert "with lazy=True only the rows of a sparse gradient" in text
    assert "equal up to rounding" not in text
    assert is_picture(Path("a.png"))


def test_tables_that_differ_are_an_error(run, monkeypatch):
    script = load_example("recommender")
    monkeypatch.setattr(script, "GOAL", 1.0)
    assert run()[0] == 0
    monkeypatch.setattr(script, "TOLERANCE", -1.0)
    status, _, text = run()
    assert status == 1
    assert "The tables are not equal" in text
