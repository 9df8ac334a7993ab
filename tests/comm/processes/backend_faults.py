"""Faults of one process in groups of the backend: ``backend_faults.py FOLDER``.

Each case has a group of its own, and a folder for its flight records. The processes need a launcher
that does not end all of them when one is killed.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradreduce.torch.backend  # noqa: F401  # registers it

DEADLINE = 3.0
RANK, SIZE = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
MAX = dist.ReduceOp.MAX
Call = Callable[[Any], object]


def summed(*shape: int, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.all_reduce(torch.ones(shape, dtype=dtype), group=group)


def largest(*shape: int, dtype: torch.dtype = torch.int32) -> Call:
    return lambda group: dist.all_reduce(torch.ones(shape, dtype=dtype), MAX, group)


def sent(*shape: int) -> Call:
    return lambda group: dist.broadcast(torch.ones(shape), 0, group)


def gathered(*shape: int) -> Call:
    def call(group: Any) -> None:
        parts = [torch.zeros(shape) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.ones(shape), group)

    return call


def shared(*shape: int) -> Call:
    def call(group: Any) -> None:
        dist.reduce_scatter_single(
            torch.zeros(1, dtype=torch.int32), torch.ones(shape, dtype=torch.int32), group=group
        )

    return call


def kill(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Name -> what the faulty process calls, what the others call, and what all errors say of it.
MISSING = r"process {0} of \d (has not come to call 1 \(|did not answer within|has ended, or)"
CASES: dict[str, tuple[Call | None, Call, str]] = {
    "sum_never": (None, summed(2, 3), MISSING),
    "copy_never": (None, gathered(3), MISSING),
    "sum_late": (summed(3), summed(3), MISSING),
    "copy_late": (sent(3), sent(3), MISSING),
    "shares_never": (None, shared(SIZE), MISSING),
    "sum_shape": (summed(7), summed(2, 3), r"float32\[7\] in process {0}"),
    "copy_shape": (largest(100000), largest(5), r"int32\[100000\] in process {0}"),
    "sum_dtype": (summed(3, dtype=torch.float64), summed(3), r"float64\[3\] in process {0}"),
    "copy_dtype": (largest(3, dtype=torch.int8), largest(3), r"int8\[3\] in process {0}"),
    "sum_operation": (sent(2, 3), summed(2, 3), r"broadcast of float32\[2, 3\] in process {0}"),
    "copy_operation": (largest(3), sent(3), r"all_reduce of int32\[3\] in process {0}"),
    "copy_killed": (kill, gathered(2, 2), MISSING),
    "sum_killed": (kill, summed(2, 2), MISSING),
    "first_late": (sent(3), sent(3), r"these have not come to open_mesh within 3 s: {0};"),
}
KILLED = [case for case in CASES if case.endswith("killed")]  # process 3, then process 2
KNOWN = ("never", "killed")  # both calls are the same: the second is not compared before it runs


def run(case: str, group: Any, faulty: int, folder: Path) -> None:
    """Makes two calls in the group; the second has the fault. ``first_late`` has no other call."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / case / "rank_")
    wrong, right, says = CASES[case]
    call, number = wrong if faulty == RANK else right, 0
    ranks = range(dist.get_world_size(group))
    store = dist.group.WORLD.get_group_store()
    if case != "first_late":
        group._limit, number = None, 1  # the fault alone has a deadline
        (right if case.endswith(KNOWN) else summed(4))(group)
        group._limit = group.options.deadline
        # A process that is slower would hear of the fault in its first call.
        store.set(f"{case}/first/{RANK}", "")
        store.wait([f"{case}/first/{rank}" for rank in ranks])
    if faulty == RANK and case.endswith(("late", "never")):
        store.wait([f"{case}/{rank}" for rank in ranks if rank != RANK])
    if call is None:
        return
    begin = time.monotonic()
    try:
        call(group)
    except Exception as error:
        seconds = time.monotonic() - begin
        text = f"{case}, process {RANK} after {seconds:.1f} s: {type(error).__name__}: {error}"
        print(text, flush=True)
        label = rf"^\w+ {number} of group '\d+' \(\w+\[[\d, ]+\].*\): .*"
        assert re.search(label + says.format(faulty), str(error)), text
        assert seconds <= DEADLINE + 2, text
    else:
        raise AssertionError(f"{case}: no error")
    store.set(f"{case}/{RANK}", "")


def join(folder: Path) -> None:
    """Makes the default group, with a store in process 0 on a free port."""
    port = folder / "port"
    if RANK == 0:
        store = dist.TCPStore("localhost", 0, SIZE, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), SIZE, False)
    os.environ["GRADREDUCE_DEADLINE"] = str(DEADLINE)
    limit = timedelta(seconds=60)
    store.set_timeout(limit)
    dist.init_process_group("gradreduce", store=store, rank=RANK, world_size=SIZE, timeout=limit)


def main(folder: Path) -> None:
    join(folder)
    # Now, because all processes of the default group make each group.
    left = {case: SIZE - index for index, case in enumerate((*KILLED, "first_late"))}
    groups = {case: dist.new_group(range(left.get(case, SIZE))) for case in CASES}
    for case, group in groups.items():
        if left.get(case, SIZE) > RANK:
            run(case, group, left.get(case, 2) - 1, folder)
            dist.destroy_process_group(group)
    if RANK == 0:  # it has the store
        dist.group.WORLD.get_group_store().wait(["first_late/1"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("done", flush=True)
    os._exit(0)  # the default group has processes that have ended
