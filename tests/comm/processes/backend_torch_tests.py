"""Runs PyTorch's own tests of collectives, over gloo, and those that pass over ``"gradreduce"``.

``backend_torch_tests.py SIZE TEST …`` or ``backend_torch_tests.py SIZE PART/PARTS`` prints a JSON
object of the tests that gloo passes: "passed", or the end of the output of our backend. Each test
has SIZE processes of its own. They are forked, because importing PyTorch takes seconds.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
import unittest
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": sys.argv[1]}  # for other names most are skipped

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed import distributed_test

import gradreduce.torch.backend  # noqa: F401  # registers it

SIZE, SECONDS = int(sys.argv[1]), 60


class Tests(distributed_test.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    """Without PyTorch's runner, which starts Python for each process of each test."""

    rank = property(lambda self: dist.get_rank())
    world_size = property(lambda self: str(SIZE))


def run_in_child(backend: str, name: str, rank: int, folder: Path) -> None:
    """Runs a test in one of its processes; raises if it does not pass."""
    torch.set_num_threads(1)
    distributed_test.Barrier.init()
    limit = timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, SECONDS))
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, world_size=SIZE, rank=rank, timeout=limit)
    result = unittest.TestResult()
    Tests(name).run(result)
    for _, text in (*result.failures, *result.errors, *result.skipped):
        raise AssertionError(text)
    distributed_test.Barrier.sync()
    if dist.is_initialized():
        dist.destroy_process_group()


def start(backend: str, name: str, rank: int, folder: Path) -> int:
    """Starts one of the processes of a test; returns its number."""
    number = os.fork()
    if number == 0:
        signal.alarm(SECONDS)
        file = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(file, stream)
        status = 1
        with suppress(BaseException):  # PyTorch skips by SystemExit
            try:
                run_in_child(backend, name, rank, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
        os._exit(status)
    return number


def outcome(backend: str, name: str) -> str:
    """Returns "passed", or the end of the output of a process."""
    with tempfile.TemporaryDirectory() as path:
        os.environ["TEMP_DIR"] = path  # of the barriers in their tests
        for folder in ("barrier", "test_dir", "init_dir"):
            Path(path, folder).mkdir()
        numbers = [start(backend, name, rank, Path(path)) for rank in range(SIZE)]
        statuses = [os.waitpid(number, 0)[1] for number in numbers]
        for rank, status in enumerate(statuses):
            if status != 0:
                return Path(path, f"output{rank}").read_text()[-2000:] or f"status {status}"
    return "passed"


def main(*names: str) -> None:
    if "/" in names[0]:
        part, parts = map(int, names[0].split("/"))
        names = tuple([name for name in sorted(dir(Tests)) if name.startswith("test_")])
        names = names[part::parts]
    passed = [name for name in names if outcome("gloo", name) == "passed"]
    found: dict[str, Any] = {name: outcome("gradreduce", name) for name in passed}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
