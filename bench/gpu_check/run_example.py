"""Section ``example``: trains on eight logical devices, on one GPU and simulated.

The networks must reach the same accuracy. Their bits differ, because each backend computes its
gradients by its own library, and cuBLAS adds the products of a matrix in another order. (With the
fake CuPy both are NumPy's, and the bits are the same.) The section ``tests`` compares our own
operations bit by bit.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from .record import FAILED, PASSED
from .section import Check, Checks, Verdict, scratch, skipped
from .setting import ROOT, Setting

__all__ = ["example"]

SCRIPT = ROOT / "examples" / "train_digits.py"
NEEDED = ("sklearn", "matplotlib", "rich")
ALGORITHMS = ("hierarchical_copy", "nccl")
NUM_DEVICES = 8
STEPS, FAKE_STEPS = 150, 4  # 500, the example's own number, took an H100 over 40 s
LARGEST_DIFFERENCE = 0.03  # of the accuracies; 11 of the 360 test images
SHARE = 1 / (2 * len(ALGORITHMS))  # of the time, for each training
BELOW_GOAL = 1  # the example's exit status when the accuracy is below its goal


def example(setting: Setting) -> Checks:
    """Trains with each algorithm on both backends, and compares them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield skipped("the digits", f"not installed: {', '.join(missing)}")
        return
    for algorithm in ALGORITHMS[:1] if setting.fake else ALGORITHMS:
        wanted = yield _training(setting, algorithm, "sim")
        found = yield _training(setting, algorithm, "cuda")
        if wanted.outcome == found.outcome == PASSED:
            yield _comparison(algorithm, found.figures, wanted.figures)


def _training(setting: Setting, algorithm: str, backend: str) -> Check:
    name = f"{algorithm} on {backend}"
    flags = {
        "--backend": backend,
        "--devices": str(NUM_DEVICES),
        "--placement": ",".join("0" * NUM_DEVICES),
        "--all-reduce": algorithm,
        "--steps": str(FAKE_STEPS if setting.fake else STEPS),
        "--output": str(scratch(setting, name, ".png")),
    }
    words = [word for pair in flags.items() for word in pair]
    # So few steps reach no goal.
    passes = frozenset({0, BELOW_GOAL} if setting.fake else {0})
    command = setting.python(str(SCRIPT), *words)
    return Check(name, command, SHARE * setting.limit, read=table_of, passes=passes)


def table_of(output: str) -> Mapping[str, Any]:
    """Parses the table that the example prints."""
    rows = dict(re.findall(r"^│\s*(\S.*?)\s*│\s*(\S.*?)\s*│$", output, re.MULTILINE))
    return {
        "accuracy": float(rows["test accuracy"]),
        "digest": rows["digest of the weights"],
        "steps_per_second": float(rows["steps/s"]),
        "launches_per_step": float(rows["launches per step"]),
    }


def _comparison(algorithm: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Verdict:
    figures = {
        "same_bits": found["digest"] == wanted["digest"],
        "accuracy_difference": found["accuracy"] - wanted["accuracy"],
    }
    name = f"{algorithm}: cuda and sim agree"
    if abs(figures["accuracy_difference"]) <= LARGEST_DIFFERENCE:
        return Verdict(name, PASSED, figures)
    reason = f"accuracies {found['accuracy']} and {wanted['accuracy']} differ"
    return Verdict(name, FAILED, figures, reason)
