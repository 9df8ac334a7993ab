"""Runs a case: does its steps in order, and compares errors and results."""

import builtins
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gradreduce as gr
from gradreduce.errors import CancelledError, DeadlineExceededError

from . import accumulators, aggregation, agn, gradients, packing, reduction
from .encoding import check_equal
from .world import AbsentError, Doing, World

PATH = Path(__file__).parent.parent / "data" / "tensorflow_cases.json"
FAMILIES = (accumulators, aggregation, agn, gradients, packing, reduction)
STEPS: dict[str, Doing] = {kind: do for family in FAMILIES for kind, do in family.STEPS.items()}

INVALID = (ValueError, TypeError)
ENDED = (CancelledError, DeadlineExceededError)
# As the file's "errors" maps them; a class that is not in it stands for itself.
ERRORS: dict[str, tuple[type[Exception], ...]] = {
    **dict.fromkeys(("InvalidArgumentError", "ValueError", "TypeError", "AssertionError"), INVALID),
    **dict.fromkeys(("CancelledError", "DeadlineExceededError"), ENDED),
}


@dataclass(frozen=True)
class Case:
    """One case of the file."""

    id: str
    level: str  # "must" or "quirk"
    better: str | None  # what a sounder library would do
    steps: tuple[tuple[int, dict[str, Any]], ...]  # each with its place in the file
    out: dict[str, Any]  # what the steps must have stored, by name
    errors: dict[int, str]  # the class of error that a step must raise, by its place
    tolerance: dict[str, float]  # rtol and atol
    newer: dict[str, Any] | None = None  # what TensorFlow 2.21 gave, where that differs
    check: Callable[[dict[str, Any]], None] | None = None  # what else must hold of the stored

    def __str__(self) -> str:
        return self.id


@cache
def read_file() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


@cache
def all_cases() -> tuple[Case, ...]:
    return tuple(_case(written) for written in read_file()["cases"])


def errors_of(expected: dict[str, Any]) -> dict[int, str]:
    return {each["step"]: each["error_class"] for each in expected.get("errors", ())}


def run(case: Case, mesh: gr.Mesh, *, as_buffers: bool) -> None:
    """Asserts that a case holds; raises ``AbsentError`` if a step has no counterpart here."""
    world = World(mesh, as_buffers)
    with world.cleanup:
        for place, step in case.steps:
            _do(world, step, case.errors.get(place), f"{case} step {place}, {step['do']}")
        for name, expected in case.out.items():
            assert name in world.names, f"{case}: no step gave {name!r}"
            check_equal(world.names[name], expected, case.tolerance, f"{case} {name}")
        if case.check is not None:
            case.check(world.names)


def _do(world: World, step: dict[str, Any], wanted: str | None, where: str) -> None:
    """One step, which raises what it must and nothing else."""
    try:
        made = STEPS[step["do"]](world, step)
    except (NotImplementedError, AbsentError, AssertionError):
        raise
    except Exception as error:
        allowed = () if wanted is None else ERRORS.get(wanted) or (getattr(builtins, wanted),)
        if isinstance(error, allowed):
            return
        text = f"{where}: {wanted or 'no error'} expected, got {type(error).__name__}: {error}"
        raise AssertionError(text) from error
    assert wanted is None, f"{where}: {wanted} expected, got {made!r}"
    if "as" in step:
        world.names[step["as"]] = made


def _case(written: dict[str, Any]) -> Case:
    newer = written["oracles"].get("tf-2.21.0")
    return Case(
        id=written["id"],
        level=written["level"],
        better=written.get("better"),
        steps=tuple(enumerate(written["steps"])),
        out=written["expected"].get("out", {}),
        errors=errors_of(written["expected"]),
        tolerance=written["tolerance"],
        newer=newer.get("differs") if isinstance(newer, dict) else None,
    )
