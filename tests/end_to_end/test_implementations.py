"""A whole step runs with one implementation of every kernel; both give the same bits."""

from functools import cache

import numpy as np
import pytest
from optim.test_update_rules import RULES
from support.exact_data import random_data, same

import gradreduce as gr
from gradreduce.backends.sim import device as sim
from gradreduce.ops import KERNELS, divide
from gradreduce.reduce.algorithms import ALGORITHMS

SHAPES = [(33, 7), (5,), (), (300,)]
PLACEMENT = [0, 0, 1]
OPTIMIZERS = [make for _, make, _ in RULES.values()]
IMPLEMENTATIONS = {"numpy": "reference", "compiled": "text"}


def terms_of(seed: int) -> list:
    """terms[replica][variable]: gradients of three micro-batches."""
    return [
        [list(random_data((3, *shape), "float32", seed=seed + replica)) for shape in SHAPES]
        for replica in range(len(PLACEMENT))
    ]


def steps(mesh: gr.Mesh) -> list[np.ndarray]:
    """Every update rule with every aggregation method and both algorithms."""
    found = []
    for place, optimizer in enumerate(OPTIMIZERS):
        variables = [
            gr.Variable(random_data(shape, "float32", seed=50), device=mesh) for shape in SHAPES
        ]
        ops = gr.AllReduceCrossDeviceOps(list(ALGORITHMS)[place % 2], 1, mesh=mesh)
        step = gr.SyncStep(variables, optimizer(), ops, aggregation_method=place % 3)
        for turn in range(2):
            assert step(terms_of(10 * turn))
        found += [variable.numpy() for variable in variables]
    return found


def periods(mesh: gr.Mesh) -> list[np.ndarray]:
    """AGN with every rule: a worker with two replicas on two GPUs, its center on one of them."""
    found = []
    for optimizer in OPTIMIZERS:
        getter = gr.AGNCustomGetter(mesh[1:3], center=gr.AGNCenter(mesh[0:1]))
        worker = gr.AGNOptimizer(optimizer(), 1, getter, 2, distance_scale=0.1)
        variables = [
            gr.get_variable(
                str(shape), random_data(shape, "float32", seed=50), custom_getter=getter
            )
            for shape in SHAPES
        ]
        for turn in range(4):
            gradients = [random_data(shape, "float32", seed=turn) for shape in SHAPES]
            told = worker.apply_gradients(list(zip(gradients, variables, strict=True)))
            assert told is bool(turn % 2)
        found += [copy.numpy() for variable in variables for copy in variable.buffers]
        found += [getter.center_variable(variable).numpy() for variable in variables]
    return found


def sums(mesh: gr.Mesh) -> list[np.ndarray]:
    """Terms from an iterator, sparse terms, and a mean of integers."""
    device = mesh.devices[1]
    terms = [device.upload(term) for term in random_data((9, 40, 5), "float16")]
    rows = gr.IndexedSlices(terms[0], np.arange(40) % 7, (40, 5))
    made = [gr.aggregate(iter(terms), method) for method in gr.AggregationMethod]
    made += [gr.add_n([rows, *terms]), rows.coalesce().values, gr.aggregate([rows, rows]).values]
    made.append(device.empty((300,), "float64"))
    divide(made[-1:], [device.upload(random_data((300,), "int64"))], 3)
    table = gr.Variable(random_data((40, 5), "float16"), device=mesh)
    gr.AdamOptimizer(0.1, lazy=True, master_dtype="float32").apply_gradients([(rows, table)])
    made += [*table.buffers, *gr.clip_by_global_norm(terms[:2], 0.5)[0]]
    return [buffer.numpy() for buffer in made]


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.SimDevice, "_reference_work", noted("reference", reference))
        patch.setattr(sim.SimDevice, "_compiled_work", noted("text", text))
        with (
            gr.open_mesh(PLACEMENT, backend="sim", strict=True, kernels=implementation) as mesh,
            mesh.journal() as journal,
        ):
            results = steps(mesh) + periods(mesh) + sums(mesh)
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
    assert all(map(same, one, other))
