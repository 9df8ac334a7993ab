"""The results of TensorFlow, case by case; see ``tensorflow_cases/__init__.py``."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

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


def few(cases: list[Case]) -> pytest.MarkDecorator:
    """The same, of which a plain run takes every eighth case."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, marks=[pytest.mark.exhaustive] if number % 8 else [])
            for number, case in enumerate(cases)
        ],
        ids=str,
    )


HOLDING = [case for case in all_cases() if case.id not in WAIVED]
DIFFERENT = [case for case in all_cases() if case.id in WAIVED]


def quiet(case: Case) -> list[int]:
    """The indices of the steps that must not raise."""
    return [place for place, _ in case.steps if place not in case.errors]


def changed_result(expected: Any) -> Any:
    """The same with its last number, name or boolean changed; if it is empty, its shape."""
    if isinstance(expected, dict):
        key = next((key for key in ("values", "value", "data") if key in expected), None)
        key = "shape" if key == "data" and not expected["data"] else key or list(expected)[-1]
        return {**expected, key: changed_result(expected[key])}
    if isinstance(expected, list):
        return [*expected[:-1], changed_result(expected[-1])] if expected else [0]
    if isinstance(expected, bool):
        return not expected
    if isinstance(expected, str):
        return 0.0 if expected in ("nan", "inf", "-inf") else f"not {expected}"
    return -expected - 1


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


@few([case for case in HOLDING if as_here(case).out])
def test_the_runner_sees_a_wrong_result(case, runner):
    case = as_here(case)
    name, expected = next(iter(case.out.items()))
    with pytest.raises(AssertionError):
        runner(replace(case, out={**case.out, name: changed_result(expected)}, check=None))


@few([case for case in HOLDING if as_here(case).errors])
def test_the_runner_sees_an_error_that_nobody_expects(case, runner):
    with pytest.raises(AssertionError, match="no error expected"):
        runner(replace(as_here(case), errors={}))


@few([case for case in HOLDING if quiet(as_here(case))])
def test_the_runner_sees_that_nothing_was_raised(case, runner):
    case = as_here(case)
    with pytest.raises(AssertionError, match="ValueError expected"):
        runner(replace(case, errors={**case.errors, quiet(case)[0]: "ValueError"}))
