"""The backend ``"gradreduce"`` of ``torch.distributed``, in processes of torchrun."""

from pathlib import Path

import pytest
from support.processes import run

pytestmark = pytest.mark.torch


# Tests of PyTorch's wheel that need no GPU, with three processes and without a profiler.
SAMPLE = [
    "test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_reduce_product",
    "test_all_reduce_sum_complex", "test_all_reduce_coalesced_sum", "test_reduce_sum_twice",
    "test_all_gather", "test_broadcast", "test_barrier_full_group", "test_scatter",
    "test_send_recv_any_source", "test_batch_isend_irecv_gloo_tags",
]  # fmt: skip
OTHERS = [
    "test_all_gather_coalesced_complex", "test_all_gather_coalesced_full_group",
    "test_all_gather_coalesced_simple", "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex", "test_all_gather_full_group", "test_all_gather_object_default_pg",
    "test_all_gather_object_subgroup", "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_coalesced_full_group_min", "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_coalesced_full_group_sum", "test_all_reduce_coalesced_max",
    "test_all_reduce_coalesced_max_complex_unsupported", "test_all_reduce_coalesced_min",
    "test_all_reduce_coalesced_product", "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max", "test_all_reduce_full_group_min",
    "test_all_reduce_full_group_product", "test_all_reduce_full_group_sum", "test_all_reduce_max",
    "test_all_reduce_min", "test_barrier", "test_batch_isend_irecv_gloo",
    "test_broadcast_full_group", "test_gather", "test_gather_checks", "test_isend",
    "test_reduce_full_group_max", "test_reduce_full_group_min",
    "test_reduce_full_group_product", "test_reduce_full_group_sum", "test_reduce_max",
    "test_reduce_min", "test_reduce_product", "test_reduce_sum", "test_scatter_checks",
    "test_scatter_complex", "test_scatter_object_list", "test_send_recv",
    "test_send_recv_with_tag",
]  # fmt: skip


def check(size, program, *arguments):
    done = run("torchrun", size, str(Path(__file__).with_name(program)), *arguments)
    assert done.returncode == 0, done.text
    assert done.text.count("done") == size


def test_calls_have_the_bits_of_one_process():
    check(4, "backend_calls.py")  # also over two of the processes


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_training_gives_the_weights_of_gloo(size, tmp_path):
    check(size, "backend_training.py", str(tmp_path))


@pytest.mark.expecttest
@pytest.mark.parametrize(
    "names", [SAMPLE, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["sample", "others"]
)
def test_tests_of_pytorch_pass(names):
    check(3, "backend_torch_tests.py", *names)
