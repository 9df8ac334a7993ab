"""A mesh runs the implementation of kernels that it was opened with; both give the same bits."""

from functools import cache

import numpy as np
import pytest
from kernels.ptx.launches import scalars_of, small_row
from support.exact_data import same

import gradreduce as gr
from gradreduce.backends.sim import device as sim
from gradreduce.ops import KERNELS

IMPLEMENTATIONS = {"numpy": "reference", "compiled": "text"}
SIZES = (1, 17, 1003)


@cache
def run(implementation: str) -> tuple[list[np.ndarray], dict[str, list[str]], list[str]]:
    """Returns results, the kernels that ran as references and as CUDA text, and all launches."""
    ran: dict[str, list[str]] = {"reference": [], "text": []}
    reference, text = sim.SimDevice._reference_work, sim.SimDevice._compiled_work

    def noted(of, work):
        def call(self, kernel, *arguments):
            ran[of].append(kernel.name)
            return work(self, kernel, *arguments)

        return call

    results = []
    with (
        pytest.MonkeyPatch.context() as patch,
        gr.open_mesh(1, backend="sim", strict=True, kernels=implementation) as mesh,
        mesh.journal() as journal,
    ):
        patch.setattr(sim.SimDevice, "_reference_work", noted("reference", reference))
        patch.setattr(sim.SimDevice, "_compiled_work", noted("text", text))
        for kernel in KERNELS:
            template = kernel.templates[0]  # tests/ops have all of them
            scalars = scalars_of(kernel, template)[0]
            rows = [
                list(map(mesh[0].upload, small_row(kernel, template, scalars, *each)))
                for each in enumerate(SIZES)
            ]
            mesh[0].launch(kernel, template, rows, scalars)
            results += [buffer.numpy() for row in rows for buffer in row]
    return results, ran, [record.name for record in journal.of("launch")]


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(implementation, marks=[pytest.mark.host] * (implementation != "numpy"))
        for implementation in IMPLEMENTATIONS
    ],
)
def test_every_launch_runs_the_implementation_that_was_asked_for(implementation):
    _, ran, launched = run(implementation)
    assert ran == {"reference": [], "text": [], IMPLEMENTATIONS[implementation]: launched}
    assert set(launched) == {kernel.name for kernel in KERNELS}


@pytest.mark.host
def test_both_implementations_give_the_same_bits():
    one, other = (run(implementation)[0] for implementation in IMPLEMENTATIONS)
    with np.errstate(invalid="ignore"):  # NaNs of any payload
        assert all(map(same, one, other))
