"""Runs tests of PyTorch's wheel on ``"gradreduce"``: ``backend_torch_tests.py TEST …``."""

import os
import sys
import unittest
from typing import Any

os.environ["BACKEND"] = "gloo"  # read at the import: other backends skip most of the tests

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed import distributed_test

import gradreduce.torch.backend  # noqa: F401  # registers it


class Tests(distributed_test.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    """Their runner starts processes for each test; these use those of torchrun."""

    rank = property(lambda self: dist.get_rank())
    world_size = property(lambda self: str(dist.get_world_size()))

    def _barrier(self, *arguments: Any, **options: Any) -> None:
        dist.barrier()


def main() -> None:
    dist.init_process_group("gradreduce")
    result = unittest.TestResult()
    for name in sys.argv[1:]:
        Tests(name).run(result)
        dist.barrier()
    dist.destroy_process_group()
    for test, text in (*result.failures, *result.errors, *result.skipped):
        sys.exit(f"{test}: {text}")
    assert result.testsRun == len(sys.argv) - 1


if __name__ == "__main__":
    main()
    print("done", flush=True)
