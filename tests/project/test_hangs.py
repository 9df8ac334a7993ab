"""A test that hangs ends the run within five minutes and is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"
HANGS = "import threading\n\ndef test_that_hangs():\n    threading.Event().wait()\n"


@pytest.mark.repo
def test_a_test_that_hangs_ends_the_run_and_is_named(tmp_path, pytestconfig):
    assert pytestconfig.getini("faulthandler_timeout") == 300
    (tmp_path / "test_it.py").write_text(HANGS)
    sooner = ("-o", "faulthandler_timeout=0.5", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(SETTINGS), *sooner, "test_it.py"],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert 'test_it.py", line 4 in test_that_hangs' in done.stderr
