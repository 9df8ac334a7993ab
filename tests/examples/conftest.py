"""Fixtures of the examples: plain output, a folder for each test, and no thread that stays."""

import threading

import pytest

WORKERS = ("agn-worker", "ThreadPoolExecutor")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """No colours, the simulation, and a current folder of the test's own."""
    for name in ("FORCE_COLOR", "GRADREDUCE_BACKEND", "GRADREDUCE_SIM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith(WORKERS) for name in names), names
