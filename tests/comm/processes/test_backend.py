"""The backend ``"gradreduce"`` of ``torch.distributed``, in processes of torchrun."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run

pytestmark = pytest.mark.torch
SECONDS = 240.0  # the most; a training of four processes takes 50 s of two cores
# Tests of PyTorch's wheel that need no GPU, with three processes and without a profiler.
SAMPLE = [
    "test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_reduce_product",
    "test_all_reduce_sum_complex", "test_all_reduce_coalesced_sum", "test_reduce_sum_twice",
    "test_all_gather", "test_broadcast", "test_barrier_full_group", "test_scatter",
    "test_send_recv_any_source", "test_batch_isend_irecv_gloo_tags",
]  # fmt: skip
# Of all 285 tests of 2.13 gloo passes 114 without GPUs. Some need 8 processes.
PARTS, MOST_PROCESSES = 24, 8
MONITORED = (
    "test_monitored_barrier_failure_order", "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout", "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
)  # fmt: skip
WAIVED = {
    "test_get_backend": "the backend has another name than gloo",
    **dict.fromkeys(MONITORED, "PyTorch allows monitored_barrier for gloo alone"),
    **dict.fromkeys(
        ("test_barrier_timeout_group", "test_barrier_timeout_full_group"),
        "our error names the processes that have not come, without gloo's words",
    ),
}


def check(size, program, *arguments):
    script = str(Path(__file__).with_name(program))
    done = run("torchrun", size, script, *arguments, seconds=SECONDS)
    assert done.returncode == 0, done.text
    assert done.text.count("done") == size


def test_calls_have_the_bits_of_one_process():
    check(4, "backend_calls.py")  # also over two of the processes


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_training_gives_the_weights_of_gloo(size, tmp_path):
    check(size, "backend_training.py", str(tmp_path))


def outcomes(size, *names):
    """Returns the outcomes of those tests that gloo passes."""
    script = str(Path(__file__).with_name("backend_torch_tests.py"))
    done = run("none", 1, script, size, *names, seconds=SECONDS)
    assert done.returncode == 0, done.text
    return json.loads(done.text.splitlines()[-1])


# Case -> what PyTorch's analyzer says of its flight records.
MISSING = r"Not all ranks joining collective, sequence number: 1\n[^#]*missing ranks: \{%d\}\n"
WRONG = r"Collective sequence number: 1 has errors\n[^#]*Error type: %s_MISMATCH"
ERRORS = {"shape": "SIZE_OR_SYNTAX", "dtype": "COLLECTIVE_DTYPE", "operation": "COLLECTIVE_TYPE"}
FAULTS = {
    **dict.fromkeys(("sum_never", "copy_never", "shares_never"), MISSING % 1),
    **{"sum_killed": MISSING % 2, "copy_killed": MISSING % 3},
    **{f"sum_{what}": WRONG % error for what, error in ERRORS.items()},
    **{f"copy_{what}": WRONG % error for what, error in ERRORS.items()},
}
ANALYZE = """
import sys
from torch.distributed.flight_recorder.fr_trace import main
for folder in sys.argv[1:]:
    print("#", folder, flush=True)
    main([folder])
"""


def test_a_faulty_process_is_named_by_errors_and_by_the_analyzer(tmp_path):
    cases = [*FAULTS, "sum_late", "copy_late", "first_late"]
    for case in cases:
        (tmp_path / case).mkdir()
    done = run("slurm", 4, str(Path(__file__).with_name("backend_faults.py")), str(tmp_path))
    assert done.text.count("done") == 2, done.text
    said = subprocess.run(
        [sys.executable, "-c", ANALYZE, *[str(tmp_path / case) for case in FAULTS]],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout
    for case, pattern in FAULTS.items():
        assert re.search(rf"# \S+/{case}\n[^#]*{pattern}", said.stdout), said.stdout
    num_files = {case: len(list((tmp_path / case).iterdir())) for case in cases}
    assert num_files == dict.fromkeys(cases, 4) | {"sum_killed": 3, "first_late": 2}


@pytest.mark.expecttest
def test_a_sample_of_the_tests_of_pytorch_passes():
    assert outcomes("3", *SAMPLE) == dict.fromkeys(SAMPLE, "passed")


@pytest.mark.expecttest
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_all_tests_of_pytorch_that_gloo_passes_pass(part):
    found = outcomes(str(MOST_PROCESSES), f"{part}/{PARTS}")
    failed = {name: text for name, text in found.items() if text != "passed"}
    assert failed.keys() == found.keys() & WAIVED.keys(), failed
    assert len(found) >= 2


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("lightning", marks=pytest.mark.lightning),
        pytest.param("accelerate", marks=pytest.mark.accelerate),
    ],
)
def test_other_libraries_train_to_the_weights_of_gloo(library):
    check(2, "backend_libraries.py", library)
