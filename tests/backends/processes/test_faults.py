"""Faults of one process: the others say which process it was, and no process is left behind."""

import re

import pytest
from support.processes import MPI, TORCHRUN, run_scenario

GONE = r"process 1: closed its mesh after 3 calls"
SILENT = r"process 1 of 2 (did not answer within [\d.]+ s|has gone .*)"
TENSORS = r"packs 1 to 2 of 2 \(tensors 0 to 1\): "
DIFFERENT = r"the processes reduce different tensors: tensor 0 is "

# The fault, and what a survivor prints (None: the launcher ends it).
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
    "late": r"ha(ve|s) not come to open_mesh within 3 s",
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
    done = run_scenario(launcher, 2, "planted", name)
    assert done.returncode != 0, done.text
    assert "a sum of some replicas only" not in done.text
    survivors = re.findall(r"^survived ([\d.]+) of ([\d.]+) s: (.*)$", done.text, re.MULTILINE)
    for seconds, deadline, error in survivors or [("-", "-", "the launcher's report")]:
        print(f"{name} by {launcher}, {seconds} of {deadline} s: {error}")  # shown by -rP
    if FAULTS[name] is None:
        killed = "SIGKILL" in done.text or "signal 9" in done.text or done.returncode == 137
        assert killed, done.text
        return
    if name == "user_error" and launcher == "torchrun" and not survivors:
        return  # torchrun ends the others as soon as one fails
    assert survivors, done.text
    for seconds, deadline, error in survivors:
        assert re.search(FAULTS[name], error), done.text
        assert float(seconds) <= float(deadline) + 2
