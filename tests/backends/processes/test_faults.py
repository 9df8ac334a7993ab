"""Faults of one process: the others say which process it was, and no process is left behind."""

import re
import time

import pytest
from support.processes import MPI, TORCHRUN, end_group, start

GONE = r"process 1: closed its mesh after 3 calls"
SILENT = r"process 1 of 2 (did not answer within [\d.]+ s|has gone .*)"
TENSORS = r"packs 1 to 2 of 2 \(tensors 0 to 1\): "
DIFFERENT = r"the processes reduce different tensors: tensor 0 is "

# The fault, what a survivor prints (None: the launcher ends it), and whether it comes at once.
FAULTS = {
    "killed_before": None,
    "killed_inside": None,
    "stopped": TENSORS + SILENT,
    "shape": DIFFERENT + r"float32\[(21|6)\]",
    "dtype": r"the processes reduce different tensors: tensor 1 is float(32|64)\[80000\]",
    "order": DIFFERENT + r"float(32\[6\]|64\[80000\])",
    "known_plan": TENSORS + DIFFERENT + r"float32\[[36]\]",
    "fewer_steps": TENSORS + GONE,
    "left_early": TENSORS + SILENT,
    "user_error": TENSORS + SILENT,
    "late": r"process.* did not start within 3 s|has not come to open_mesh within 3 s",
    "version": r"the version of gradreduce is [\d.]+ in process",
}
IN_CI = [("stopped", "mpi"), ("shape", "torchrun"), ("known_plan", "mpi"), ("fewer_steps", "mpi"),
         ("left_early", "torchrun"), ("killed_inside", "torchrun")]  # fmt: skip


def cases():
    for name in FAULTS:
        for launcher in (TORCHRUN, MPI):
            marks = [pytest.mark.faults, *launcher.marks]
            if (name, launcher.values[0]) not in IN_CI:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, launcher.values[0], marks=marks)


@pytest.mark.parametrize(("name", "launcher"), list(cases()))
def test_a_planted_fault(name, launcher):
    begin = time.monotonic()
    program = start(launcher, 2, "planted", name)
    try:
        text, _ = program.communicate(timeout=90)
    finally:
        left = end_group(program)
    assert not left, "processes that were left behind"
    assert time.monotonic() - begin < 60
    assert program.returncode != 0, text
    assert "a sum of some replicas only" not in text
    survivors = re.findall(r"^survived ([\d.]+) (.*)$", text, re.MULTILINE)
    if FAULTS[name] is None:
        assert "SIGKILL" in text or "signal 9" in text or program.returncode == 137, text
        return
    if name == "user_error" and launcher == "torchrun" and not survivors:
        return  # torchrun ends the others as soon as one fails
    assert survivors, text
    for seconds, error in survivors:
        assert re.search(FAULTS[name], error), text
        assert float(seconds) <= 3 + 2, "the deadline and two seconds"
