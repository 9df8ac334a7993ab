"""Faults of one process: the others name it, no process is left running, the record shows it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import MPI, SLURM, TORCHRUN, run, run_fault

DEADLINE = 3.0
PROGRAM = Path(__file__).with_name("failing_backward.py")
ANALYZER = "torch.distributed.flight_recorder.fr_trace"
TENSORS = r"packs 1 to 2 of 2 \(tensors 0 to 1\): "
LATE = r"process 1 of \d (did not answer within [\d.]+ s)"
GONE = r"process 1 of \d has ended, or its connection has broken \(.*\)"
ENDED = r"process 1: ended without closing its mesh after 3 calls"
DIFFERENT = r"the processes pass different tensors: tensor 0 is "
STOPPED = r"(process 1( of \d)?(:| did not answer| has ended)|process \d: .*process 1)"
INTERRUPTED = r"^KeyboardInterrupt|process 1: stopped in .*tensor.*: KeyboardInterrupt\(\)"

# The fault, and what a survivor prints (None: the launcher ends it).
FAULTS = {
    "killed_before": None,
    "killed_inside": None,
    "killed_after": None,
    "ended": TENSORS + GONE,
    "stopped": TENSORS + LATE,
    "stopped_at_end": r"process 1 of 2 has not come to close within [\d.]+ s",
    "killed_at_end": r"process 1 of 2 has ended without closing its mesh, or its connection",
    "ended_at_end": r"process 1 of 2 has ended without closing its mesh, or its connection",
    "store_ended_at_end": r"process 0 of 2 has ended without closing its mesh, or its connection",
    "stopped_without_deadline": TENSORS + LATE,
    "shape": DIFFERENT + r"float32\[(21|6)\]",
    "new_plan": r"num_packs is \d in process \d, \d in process \d",
    "dtype": r"the processes pass different tensors: tensor 1 is float(32|64)\[80000\]",
    "order": DIFFERENT + r"float(32\[6\]|64\[80000\])",
    "known_plan": TENSORS + DIFFERENT + r"float32\[[36]\]",
    "fewer_steps": TENSORS + r"process 1: closed its mesh after 3 calls",
    "left_early": TENSORS + ENDED,
    "user_error": TENSORS + r"process 1: ended by RuntimeError\(.an error of the user's code.\)",
    "told": TENSORS + r"process 1: left its mesh by ValueError\(.an error of the user's code.\)",
    "busy": r"^KeyboardInterrupt|process 0: stopped in .*tensor.*: KeyboardInterrupt\(\)",
    "late": r"ha(ve|s) not come to open_mesh within 3 s|process 0: opens no mesh",
    "version": r"the version of gradreduce is [\d.]+ in process",
    "no_devices": r"process 0: opens no mesh: ValueError: devices_per_process=0|^ValueError",
    "port_taken": r"the store of the processes at \S+:\d+ cannot be reached|come to open_mesh",
    "no_host": r"the store of the processes at no-such-host.invalid:\d+ cannot be reached",
    # srun's first process has the store for the notices of all.
    "store_stopped": TENSORS + r"process 0 of 2 did not answer within",
}
# Faults that the others notice before the deadline, so that they raise at once.
AT_ONCE = {"told", "busy", "left_early", "fewer_steps", "new_plan", "version", "no_devices",
           "killed_at_end", "ended_at_end", "store_ended_at_end"}  # fmt: skip
LAUNCHERS = {"torchrun": TORCHRUN, "mpi": MPI, "slurm": SLURM}
# MPI: mpiexec ends all at once.
TORCHRUN_ONLY = {"port_taken", "no_host", "ended", "ended_at_end"}
# torchrun ends all when a process is killed, and has the store itself.
SLURM_ONLY = ("store_stopped", "killed_at_end", "store_ended_at_end")
IN_CI = [("stopped", "mpi"), ("shape", "mpi"), ("known_plan", "mpi"), ("told", "torchrun"),
         ("left_early", "mpi"), ("killed_inside", "torchrun")]  # fmt: skip
# The number of the last exchange of a call.
LAST_EXCHANGES = {"reduce": 1, "prepared": 1, "sync_step": 2, "broadcast": 0, "slices": 2}
OTHER_MESHES = {"subgroups": 4, "two_meshes": 3, "threads": 3}  # and the number of processes


class Case(NamedTuple):
    """A fault, and where it is made."""

    fault: str
    launcher: str
    size: int = 2
    call: str = "reduce"
    deadline: float = DEADLINE


def cases() -> Iterator[Case]:
    yield from [Case(fault, "slurm") for fault in SLURM_ONLY]
    for launcher in ("torchrun", "mpi"):
        yield from [
            Case(fault, launcher)
            for fault in FAULTS
            if (launcher == "torchrun" or fault not in TORCHRUN_ONLY) and fault not in SLURM_ONLY
        ]
        for deadline in (0.5, 8.0):
            yield Case("stopped", launcher, deadline=deadline)
        for fault in ("stopped", "known_plan", "told"):
            yield Case(fault, launcher, 4)
        for fault, (call, size) in product(("stopped", "told"), OTHER_MESHES.items()):
            yield Case(fault, launcher, size, call)
        for act, (call, last) in product(("stop", "interrupt"), LAST_EXCHANGES.items()):
            yield Case(f"{act}_in_exchange_{last}", launcher, 3, call)
        yield Case("kill_in_exchange_1", launcher, 3)


def as_parameter(case: Case) -> object:
    marks = [pytest.mark.faults, *LAUNCHERS[case.launcher].marks]
    if (case.fault, case.launcher) not in IN_CI or case != Case(case.fault, case.launcher):
        marks.append(pytest.mark.exhaustive)
    name = f"{case.fault}-{case.launcher}-{case.size}-{case.call}-{case.deadline:g}"
    return pytest.param(case, marks=marks, id=name)


def expected(case: Case) -> str | None:
    """What a survivor prints."""
    if case.fault.startswith("kill_"):
        return None
    if case.fault.startswith("stop_"):
        return "tensor.*process 1"
    if case.fault.startswith("interrupt_"):
        return INTERRUPTED
    pattern = FAULTS[case.fault]
    if case.size > 2 and pattern is not None:
        # In a group of two the rank is another. A process may also hear of it from a third one.
        pattern = pattern.replace(TENSORS, "").replace("process 1", r"process \d")
        return f"{pattern}|{STOPPED}" if case.call == "reduce" else f"{pattern}|process \\d"
    return pattern


@pytest.mark.parametrize("case", list(map(as_parameter, cases())))
def test_a_planted_fault(case: Case) -> None:
    done = run_fault(case.launcher, case.size, case.fault, case.call, case.deadline)
    assert done.returncode != 0, done.text
    assert "a sum of some replicas only" not in done.text
    survivors = re.findall(r"^survived ([\d.]+) of ([\d.]+) s: (.*)$", done.text, re.MULTILINE)
    for seconds, deadline, error in survivors or [("-", "-", "the launcher's report")]:
        print(f"{case}, {seconds} of {deadline} s: {error}")  # shown by -rP
    wanted = expected(case)
    if wanted is None:
        killed = "SIGKILL" in done.text or "signal 9" in done.text or done.returncode == 137
        assert killed, done.text
        return
    if case.fault == "user_error" and case.launcher == "torchrun" and not survivors:
        return  # torchrun ends the others as soon as one fails
    assert survivors, done.text
    for seconds, deadline, error in survivors:
        assert re.search(wanted, error), done.text
        limit = 1.5 if case.fault in AT_ONCE else float(deadline) + 2
        assert float(seconds) <= limit, done.text
    if case.call == "subgroups":
        assert done.text.count("done") == 2, done.text  # the other half goes on


@pytest.mark.torch
@pytest.mark.parametrize(
    ("share", "times", "runs"),
    [(0, 1, 3), *[pytest.param(each, 5, 2, marks=pytest.mark.exhaustive) for each in range(1, 6)]],
)
@pytest.mark.parametrize("kind", ["DataParallel", "comm_hook"])
def test_an_error_in_backward_ends_the_process_by_its_traceback(
    kind: str,
    share: int,  # of 50 runs, which take longer than a test may
    times: int,
    runs: int,
) -> None:
    for _ in range(times):
        done = run("none", 1, str(PROGRAM), kind, str(runs))
        assert done.returncode == 0, done.text
        assert done.text.count("statuses 1 1") == runs, done.text
        assert done.text.count("ValueError: of the user's hook") == runs, done.text


@pytest.mark.repo
@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.faults
def test_the_analyzer_names_the_process_that_hangs(tmp_path, monkeypatch):
    from flight_to_torch import main

    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    done = run_fault("mpi", 2, "stopped")
    files = list(tmp_path.glob("flight.*.rank*.json"))
    assert [path.suffixes[-2] for path in files] == [".rank0"], done.text
    main([str(tmp_path / "folder"), *map(str, files)])
    found = subprocess.run(
        [sys.executable, "-m", ANALYZER, str(tmp_path / "folder")], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    said = found.stdout + found.stderr
    assert said.count("Not all ranks joining collective") == 1, said
    assert "sequence number: 3\n" in said
    assert "missing ranks: {1}\n" in said
    assert "input sizes: [[6], [80000]]" in said
    assert "collective state: started" in said
