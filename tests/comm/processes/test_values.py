"""Sums over the processes of a launcher have the bits of one process with the same replicas."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.exhaustive import examples
from support.process_cases import LAYOUTS, WAYS, counts_of
from support.processes import MPI, SLURM, TORCHRUN, check_scenario

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "int16", "int32", "int64", "uint8",
)  # fmt: skip
SHAPES = ((3, 5), (40000,), (7,), (20000,), (), (0,))
# num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group
PACKING = ((0, 0, 10), (1, 0, 10), (3, 0, 10), (0, 100, 2))


@st.composite
def cases(draw: Any, num_processes: int) -> dict[str, Any]:
    """A call, for ``process_cases.py``."""
    layout = draw(st.sampled_from(list(LAYOUTS)))
    n = sum(counts_of(layout, num_processes))
    order = draw(st.permutations(range(n)))
    num_tensors = draw(st.integers(1, 4))
    return {
        "layout": layout,
        "groups": [order[number::3] for number in range(3)],
        "dtypes": [draw(st.sampled_from(DTYPES)) for _ in range(num_tensors)],
        "shapes": [draw(st.sampled_from(SHAPES)) for _ in range(num_tensors)],
        "packing": draw(st.sampled_from(PACKING)),
        "wire_dtype": draw(st.sampled_from([None, None, "float16", "bfloat16", "float32"])),
        "op": draw(st.sampled_from(["SUM", "MEAN"])),
        "seed": draw(st.integers(0, 99)),
    }


def drawn(num_processes: int, number: int, ways: Sequence[str]) -> list[dict[str, Any]]:
    """Fixed cases, because each process would draw others."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(num_processes))
    def keep(case: dict[str, Any]) -> None:
        number = len(found)
        kinds = [case["groups"], None, "exact", "processes", "nccl"]
        kind = kinds[number // len(ways) % len(kinds)]
        found.append({**case, "way": ways[number % len(ways)], "groups": kind})

    keep()
    return found


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI, SLURM])
def test_processes_have_the_bits_of_one(launcher, tmp_path):
    size = {"torchrun": 2, "mpi": 4, "slurm": 2}[launcher]
    ways = [way for way in WAYS if launcher != "mpi" or way != "attached"]  # needs PyTorch
    found = drawn(size, examples({"slurm": 44}.get(launcher, 132)), ways)
    found.append({**found[0], "way": "plain", "shapes": [[7]] * 1000, "dtypes": ["float32"] * 1000})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(found))
    check_scenario(launcher, size, "values", str(file))
