"""The fake is called as CuPy 14.2 is."""

import inspect

import pytest
from fake_cupy import surface
from fake_cupy.signatures import PROBES, differences, probed

pytestmark = pytest.mark.fake_cupy


def test_the_fake_is_as_recorded():
    assert differences() == []


def test_a_changed_parameter_is_detected(monkeypatch):
    def record(self, queue=None):
        raise AssertionError

    monkeypatch.setattr(surface.Event, "record", record)
    assert [text.split()[0] for text in differences()] == ["cupy.cuda.Event.record"]
    assert "queue" in inspect.signature(surface.Event.record).parameters


@pytest.mark.parametrize("expression", PROBES)
def test_arguments_are_taken_as_cupy_takes_them(expression):
    assert probed(expression) == PROBES[expression]
