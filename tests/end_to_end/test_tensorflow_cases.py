"""The results of TensorFlow, case by case; see ``tensorflow_cases/__init__.py``."""

import re
from collections.abc import Callable, Iterator

import pytest
from tensorflow_cases.better import BETTER, as_here
from tensorflow_cases.runner import STEPS, Case, all_cases, read_file, run
from tensorflow_cases.waived import WAIVED
from tensorflow_cases.world import NUM_DEVICES, AbsentError

import gradreduce as gr

# The implementation of kernels, and whether arrays are NumPy's or Buffers.
WAYS = [
    pytest.param(("numpy", False), id="numpy-arrays"),
    pytest.param(("numpy", True), id="numpy-buffers"),
    pytest.param(("compiled", True), id="compiled-buffers", marks=pytest.mark.host),
]
PLACEMENT = [0, 0, 1, 1, 2, 2, 3, 3]

Runner = Callable[[Case], None]


def parametrized(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


HOLDING = [case for case in all_cases() if case.id not in WAIVED]
DIFFERENT = [case for case in all_cases() if case.id in WAIVED]


@pytest.fixture(scope="module", params=WAYS)
def way(request) -> Iterator[tuple[gr.Mesh, bool]]:
    implementation, as_buffers = request.param
    with gr.open_mesh(PLACEMENT, backend="sim", kernels=implementation, strict=True) as mesh:
        assert len(mesh) == NUM_DEVICES
        yield mesh, as_buffers


@pytest.fixture
def runner(way, monkeypatch) -> Runner:
    """Runs a case on eight logical devices, on four physical ones."""
    mesh, as_buffers = way
    monkeypatch.setattr("gradreduce.arrays.distributed.default_mesh", lambda: mesh)
    return lambda case: run(case, mesh, as_buffers=as_buffers)


@pytest.mark.filterwarnings("ignore:agg_small_grads")  # TensorFlow says nothing
@parametrized(HOLDING)
def test_a_case_holds(case, runner):
    runner(as_here(case))


@parametrized(DIFFERENT)
def test_a_waived_case_does_not_hold(case, runner):
    with pytest.raises((AssertionError, AbsentError)):
        runner(as_here(case))


@parametrized([case for case in DIFFERENT if WAIVED[case.id].instead])
def test_what_holds_in_place_of_a_waived_case(case, runner):
    runner(WAIVED[case.id].instead(case))


def test_every_case_is_run_or_waived():
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids) == read_file()["count"]
    assert set(WAIVED) <= set(ids)
    assert len(HOLDING) + len(WAIVED) == len(ids)


def test_only_quirks_have_a_better_behavior():
    quirks = {case.id: case.better for case in all_cases() if case.level == "quirk"}
    assert {id_ for id_, better in quirks.items() if better} <= set(BETTER) <= set(quirks)


def test_every_kind_of_step_is_known():
    kinds = re.split("[/,]", ",".join(read_file()["step_vocabulary"]))
    used = {step["do"] for case in all_cases() for _, step in case.steps}
    assert used <= set(STEPS) <= {kind.strip() for kind in kinds}
