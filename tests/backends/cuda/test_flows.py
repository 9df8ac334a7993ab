"""A training step on the CUDA backend gives the bits of the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.exact_data import DTYPES, random_data, same

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.reduce.algorithms import ALGORITHMS

SHAPES = ((3, 5), (1003,), (), (40, 70))
NUM_STEPS = 3


def case(placement, num_gpus, algorithm):
    """A placement and an algorithm, with markers for what they need.

    Real NCCL promises no order of additions, so that only the fake's has the simulation's bits;
    on one GPU it is not called.
    """
    mark = pytest.mark.gpu if num_gpus == 1 else pytest.mark.multi_gpu(num_gpus)
    if num_gpus > 1 and algorithm == "nccl":
        mark = pytest.mark.fake_cupy
    return pytest.param(
        placement, algorithm, marks=mark, id=f"{''.join(map(str, placement))}-{algorithm}"
    )


PLACED = [
    case(placement, len(set(placement)), algorithm)
    for placement in ([0], [0, 0], [0] * 8, [0, 0, 1, 1], [0, 1, 1, 2, 0])
    for algorithm in ALGORITHMS
]


@contextmanager
def opened(placement) -> Iterator[tuple[Mesh, Mesh]]:
    """Opens a mesh of GPUs and one of simulated devices."""
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        yield mesh, sim


def tensor(shape, dtype, seed: int) -> np.ndarray:
    return random_data(shape or (1,), dtype, seed=seed).reshape(shape)


def gradients(mesh: Mesh, dtype, seed: int) -> list[list[np.ndarray]]:
    """For each device one array per shape; the same on every mesh."""
    return [
        [tensor(shape, dtype, seed + 100 * place + turn) for turn, shape in enumerate(SHAPES)]
        for place in range(len(mesh))
    ]


def replicas(mesh: Mesh, seed: int) -> list[gr.PerReplica]:
    """For each shape one value on each device."""
    rows = gradients(mesh, "float32", seed)
    return [
        gr.PerReplica(
            [device.upload(array) for device, array in zip(mesh.devices, column, strict=True)], mesh
        )
        for column in zip(*rows, strict=True)
    ]


def variables_on(mesh: Mesh) -> list[gr.Variable]:
    return [
        gr.Variable(tensor(shape, "float32", turn), f"w{turn}", device=mesh)
        for turn, shape in enumerate(SHAPES)
    ]


def reduced(mesh: Mesh, dtype, algorithm: str, **options) -> list[np.ndarray]:
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, **options)
    op = gr.ReduceOp.SUM if dtype.kind in "iu" else gr.ReduceOp.MEAN
    rows = [
        [device.upload(array) for array in row]
        for device, row in zip(mesh.devices, gradients(mesh, dtype, 7), strict=True)
    ]
    results = ops.all_reduce(rows, op=op, output_type="buffer")
    return [buffer.numpy() for row in results for buffer in row]


PACKINGS = ({}, {"num_packs": 2}, {"num_packs": 0, "agg_small_grads_max_bytes": 99})


def check_all_reduce(placement, algorithm, **more) -> None:
    """Every dtype with one of the packings, which changes with the number of devices."""
    with opened(placement) as (mesh, sim):
        for turn, dtype in enumerate(DTYPES, len(mesh)):
            options = {**PACKINGS[turn % len(PACKINGS)], **more}
            found = reduced(mesh, dtype, algorithm, **options)
            wanted = reduced(sim, dtype, algorithm, **options)
            assert all(map(same, found, wanted)), (dtype, options)


@pytest.mark.parametrize(("placement", "algorithm"), PLACED)
def test_an_all_reduce_is_that_of_the_simulation(placement, algorithm, gpus):
    gpus(len(placement))
    check_all_reduce(placement, algorithm)


@pytest.mark.fake_cupy
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1, 2, 0]], ids=str)
def test_without_peer_access_too(placement, algorithm, gpus):
    gpus(len(placement), peers=False)
    check_all_reduce(placement, algorithm)


@pytest.mark.fake_cupy
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("peers", [True, False])
def test_nine_gpus(algorithm, peers, gpus):
    gpus(9, num_gpus=9, peers=peers)
    check_all_reduce(list(range(9)), algorithm)


@pytest.mark.parametrize(
    ("placement", "groups"),
    [
        pytest.param([0], ([0], []), marks=pytest.mark.gpu),
        pytest.param([0] * 8, ([7, 0, 3], [1, 2, 6, 5, 4]), marks=pytest.mark.gpu),
        pytest.param([0, 0, 1, 1], ([0, 2], [1, 3]), marks=pytest.mark.multi_gpu(2)),
        pytest.param([0, 1, 1, 2, 0], ([3, 0], [4, 2, 1]), marks=pytest.mark.multi_gpu(3)),
        pytest.param([0, 1, 1, 2, 0], ([], [4, 0, 3, 1, 2]), marks=pytest.mark.multi_gpu(3)),
    ],
    ids=str,
)
def test_other_reduction_groups_give_what_they_do_in_the_simulation(placement, groups, gpus):
    gpus(20 + len(placement))
    check_all_reduce(placement, "hierarchical_copy", reduction_groups=groups)


@pytest.mark.fake_cupy
def test_other_reduction_groups_without_peer_access_too(gpus):
    gpus(30, peers=False)
    check_all_reduce([0, 1, 1, 2, 0], "hierarchical_copy", reduction_groups=([3, 0], [4, 2, 1]))


def trained(mesh: Mesh, algorithm: str) -> list[np.ndarray]:
    """Some steps of momentum over replicas, on mirrored variables."""
    variables = variables_on(mesh)
    optimizer = gr.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
    optimizer.cross_device_ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    for step in range(NUM_STEPS):
        grads = replicas(mesh, 1000 * step)
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize(("placement", "algorithm"), PLACED)
def test_training_steps_are_those_of_the_simulation(placement, algorithm, gpus):
    gpus(40 + len(placement))
    with opened(placement) as (mesh, sim):
        assert all(map(same, trained(mesh, algorithm), trained(sim, algorithm)))


def synchronous(mesh: Mesh, algorithm: str, method: gr.AggregationMethod) -> list[np.ndarray]:
    """The whole main path: two micro-batch gradients per replica, several steps."""
    variables = variables_on(mesh)
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs=2, mesh=mesh)
    options = {"aggregation_method": method}
    if method is gr.AggregationMethod.ADD_N:
        options |= {"clip_norm": 1.0, "loss_scale": gr.DynamicLossScale(8.0, growth_interval=2)}
    step = gr.SyncStep(variables, gr.MomentumOptimizer(0.1, 0.9), ops, **options)
    for number in range(NUM_STEPS):
        micro = [gradients(mesh, "float32", 500 * (2 * number + part)) for part in range(2)]
        terms = [[list(pair) for pair in zip(*rows, strict=True)]
                 for rows in zip(*micro, strict=True)]  # fmt: skip
        skips = "clip_norm" in options and number == 1  # some elements are not finite
        if "clip_norm" in options and not skips:
            terms = [[[np.clip(np.nan_to_num(a), -9, 9) for a in pair] for pair in row]
                     for row in terms]  # fmt: skip
        assert step(terms) is not skips
    assert step.global_step == NUM_STEPS
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("method", ["ADD_N", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N"])
@pytest.mark.parametrize(("placement", "algorithm"), PLACED)
def test_a_sync_step_is_that_of_the_simulation(placement, algorithm, method, gpus):
    gpus(60 + len(placement))
    chosen = gr.AggregationMethod[method]
    with opened(placement) as (mesh, sim):
        found = synchronous(mesh, algorithm, chosen)
        assert all(map(same, found, synchronous(sim, algorithm, chosen)))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0] * 8, marks=pytest.mark.gpu),
        pytest.param([0, 0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
def test_an_accumulator_over_a_mesh(placement, gpus):
    gpus(0)
    with gr.open_mesh(placement, backend="cuda") as mesh:
        accumulator = gr.ConditionalAccumulator("float32", (5,), device=mesh)
        for step in range(2):
            values = [device.upload(np.full(5, 1 + place + step, np.float32))
                      for place, device in enumerate(mesh.devices)]  # fmt: skip
            assert accumulator.apply_grad(gr.PerReplica(values, mesh), 0)
        mean = accumulator.take_grad(2)
        wanted = (len(mesh) + 1) / 2 + 0.5
        for buffer in mean.buffers:
            assert (buffer.numpy() == wanted).all()


@pytest.mark.gpu
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_an_accumulator_on_one_device(dtype, reduction_type, gpus):
    """Stale gradients are dropped, each take begins a new sum, values equal the simulation's."""

    def taken(mesh: Mesh) -> list[np.ndarray]:
        device = mesh.devices[1]
        accumulator = gr.ConditionalAccumulator(
            dtype, (1003,), reduction_type=reduction_type, device=device
        )
        made = []
        for turn in range(4):
            kept = [
                accumulator.apply_grad(
                    device.upload(tensor((1003,), dtype, 10 * turn + part)), turn - part % 2
                )
                for part in range(4)
            ]
            assert kept == [True, False] * 2
            made.append(accumulator.take_grad(2).numpy())
        return made

    gpus(3)
    with opened([0, 0]) as (mesh, sim):
        assert all(map(same, taken(mesh), taken(sim)))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0] * 3, marks=pytest.mark.gpu),
        pytest.param([0, 1, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
def test_a_saved_accumulator_continues_on_any_backend(placement, gpus):
    """From a GPU to another accumulator there and to the simulation, and back."""
    gpus(4)
    with opened(placement) as meshes:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy")
        made = [
            gr.ConditionalAccumulator("float16", device=mesh, cross_device_ops=ops)
            for mesh in (*meshes, *meshes)
        ]
        for turn in range(4):
            with gr.replica(1 + turn % 2):
                made[0].apply_grad(tensor((1003,), "float16", turn))
        state = made[0].state_dict(deadline=60)
        made[0].apply_grad(tensor((1003,), "float16", 9))  # in place, but not in the saved state
        assert [total is None for total in state["partial_sums"]] == [True, False, False]
        for accumulator in made[1:]:
            accumulator.load_state_dict(state)
            state = accumulator.state_dict()
            accumulator.apply_grad(tensor((1003,), "float16", 9))
        taken = [accumulator.take_grad(5).buffers for accumulator in made]
        wanted, *others = [[buffer.numpy() for buffer in buffers] for buffers in taken]
        for arrays in others:
            assert all(map(same, arrays, wanted))


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0, 0, 0], marks=pytest.mark.gpu),
        pytest.param([0, 1, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_of_a_mesh_on_one_device(placement, dtype, peers, gpus):
    """Replicas are added to one sum in order; they may be overwritten after the call."""

    def taken(mesh: Mesh) -> list[np.ndarray]:
        accumulator = gr.ConditionalAccumulator(dtype, (1003,), device=mesh.devices[1])
        made = []
        for turn in range(2):
            for part in range(2):
                values = [
                    device.upload(tensor((1003,), dtype, 10 * turn + 3 * part + place))
                    for place, device in enumerate(mesh.devices)
                ]
                assert accumulator.apply_grad(gr.PerReplica(values), turn)
                for value in values:
                    value.device.upload(tensor((1003,), dtype, 99), out=value)
            made.append(accumulator.take_grad(6).numpy())
        return made

    gpus(5, peers=peers)
    with opened(placement) as (mesh, sim):
        assert all(map(same, taken(mesh), taken(sim)))


@pytest.mark.parametrize(("placement", "algorithm"), [PLACED[2], PLACED[-2]])
def test_a_reduction_is_profiled(monkeypatch, placement, algorithm):
    monkeypatch.setattr("gradreduce.reduce.profile.GPU_BYTES", 1 << 12)
    with gr.open_mesh(placement, backend="cuda") as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
        values = [
            gr.PerReplica([device.upload(tensor(shape, "float32", 0)) for device in mesh])
            for shape in SHAPES
        ]
        told = ops.profile(gr.ReduceOp.MEAN, [(value, value) for value in values])
        assert told.differences == ()
        assert told.plan.launches == sum(stage.done.launches for stage in told.stages) > 0
        assert told.floor_seconds > 0
        assert set(told.memory_bandwidth) == set(placement)
