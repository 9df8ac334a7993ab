"""Programs of training and of optimizers, for ``mesh_programs.py``."""

from collections.abc import Callable

import numpy as np
from optim.agn.team import Own, Worker
from optim.test_update_rules import RULES
from support.exact_data import exact_data, random_data
from support.reduction_calls import SHAPES, on_one_gpu, overwrite, read

import gradreduce as gr
from gradreduce.device import Mesh


def trained(
    algorithm: str, num_packs: int, mesh: Mesh, *, rows: bool = False, exact: bool = False,
    **options,
) -> list[np.ndarray]:  # fmt: skip
    """Steps with three micro-batches; of those that are clipped, one is not finite.

    With ``rows`` the variables that have rows get rows that repeat.
    """
    rng = np.random.default_rng(5)
    cross = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh, exact=exact)
    variables = [gr.Variable(rng.normal(size=shape).astype("f4"), str(shape), device=mesh)
                 for shape in SHAPES]  # fmt: skip
    if rows:
        options["sparse_variables"] = [each for each in variables if each.shape]
    step = gr.SyncStep(variables, gr.MomentumOptimizer(0.1, 0.9), cross, **options)
    for number in range(3):
        terms = [[list(rng.normal(size=(3, *shape)).astype("f4")) for shape in SHAPES]
                 for _ in mesh]  # fmt: skip
        is_wrong = number == 1 and "clip_norm" in options
        if is_wrong:
            terms[-1][0][2][0] = np.inf
        if rows:
            terms = [[_as_rows(grads) for grads in of_replica] for of_replica in terms]
        assert step(terms) is not is_wrong
    return read(buffer for variable in variables for buffer in variable.buffers)


def _as_rows(grads: list[np.ndarray]) -> list:
    """The rows of arrays that have rows, in another order for each; the last occurs twice."""
    return [
        grad if not grad.shape
        else gr.IndexedSlices(grad, [*np.roll(np.arange(len(grad)), turn)[:-1], 0], grad.shape)
        for turn, grad in enumerate(grads)
    ]  # fmt: skip


CLIPPED = {"clip_norm": 1.0, "loss_scale": gr.DynamicLossScale(8.0, growth_interval=2)}


class Signs(gr.Optimizer):
    """A rule that a user has written."""

    _slot_names = ("mean",)

    def __init__(self, **more):
        super().__init__("Signs", **more)

    def _apply(self, variable, slots, gradient):
        slots["mean"] += gradient
        variable -= np.sign(slots["mean"])


OPTIMIZERS = {
    **{name: make for name, (_, make, _) in RULES.items()},
    "lazy adam": lambda **more: gr.AdamOptimizer(0.5, lazy=True, **more),
    "own": Signs,
}


def optimized(make: Callable[..., gr.Optimizer], mesh: Mesh) -> list[np.ndarray]:
    """Dense and sparse gradients, per replica and of one device, and a checkpoint on the way."""
    optimizer = make(master_dtype="float32")
    table = gr.Variable(exact_data((7, 3), "float16"), "table", device=mesh)
    weights = gr.Variable(exact_data((40,), "float32"), "weights", device=mesh)
    alone = gr.Variable(exact_data((5,), "float32"), "alone", device=mesh.devices[1])
    for turn in range(3):
        given = exact_data((6, 4, 3), "float16", seed=turn)
        parts = [gr.IndexedSlices(part, [5, turn, 5, 2]) for part in given[: len(mesh)]]
        whole = list(exact_data((len(mesh), 40), "float32", seed=turn))
        pairs = [(gr.PerReplica(parts, mesh), table), (gr.PerReplica(whole, mesh), weights),
                 (exact_data((5,), "float32", seed=turn), alone)]  # fmt: skip
        optimizer.cross_device_ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        optimizer.apply_gradients(pairs)
        if turn == 1:
            optimizer.load_state_dict(optimizer.state_dict(), [alone, table, weights])
        del given, parts, whole, pairs
    kept = [table, weights, alone, *optimizer.variables()]
    return read(buffer for each in kept for buffer in each.buffers)


def crossed(has_copies: bool, is_sparse: bool, mesh: Mesh) -> list[np.ndarray]:
    """A variable on both devices of a GPU, or a gradient on the device without a copy of it."""
    near = on_one_gpu(mesh)
    home, beside = near.devices[0], near.devices[-1]
    start = np.zeros((6, 3), "float32")
    variable = gr.Variable(start, "v", device=near if has_copies else home)
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    for turn in range(4):
        variable.assign_add(exact_data((6, 3), "float32", seed=turn))  # each copy in its queue
        owner = home if has_copies else beside
        given = owner.empty((6, 3), "float32")
        for seed in range(40):  # a reader that does not wait reads an earlier one
            owner.upload(exact_data((6, 3), "float32", seed=seed), out=given)
        if is_sparse:
            given = gr.IndexedSlices(given, [1, 4, 1, 0, 5, 4])
        optimizer.apply_gradients([(given, variable)])
        del given
    return read(buffer for each in (variable, *optimizer.variables()) for buffer in each.buffers)


def mirrored(mesh: Mesh) -> list[np.ndarray]:
    """A gradient that is overwritten when the update has returned."""
    variable = gr.Variable(random_data((37,), "float32"), device=mesh)
    value = random_data((37,), "float32", seed=1)
    gradient = gr.Mirrored([device.upload(value) for device in mesh], mesh)
    gr.GradientDescentOptimizer(0.5).apply_gradients([(gradient, variable)])
    overwrite(gradient.buffers)
    return read(variable.buffers)


def clipped(mesh: Mesh) -> list[np.ndarray]:
    """Arrays that a queued launch of each device will write, overwritten after the call."""
    given = []
    for place, device in enumerate(mesh):
        terms = [device.upload(exact_data((40,), "float32", seed=place)) for _ in range(2)]
        given.append(gr.add_n(terms, output_type="buffer"))
    found, norm = gr.clip_by_global_norm(given, 1.0)
    overwrite(given)
    return read([*found, norm])


AGN_SHAPES = {"table": (7, 3), "weights": (40,), "bias": (5,)}
AGN_WAYS = {
    "momentum": (lambda: gr.MomentumOptimizer(0.5, 0.5, master_dtype="float32"),
                 {"distance_scale": 2.0, "reset_momentum": True}),
    "lazy adam": (lambda: gr.AdamOptimizer(0.5, lazy=True), {"use_locking": False}),
    "own": (Own, {}),
}  # fmt: skip
AGN_WEIGHTS = (1, 1, 3, 2, [3, 1], 1, 0, 0.5, 1)  # of the steps


def trained_by_agn(way: str, mesh: Mesh) -> list[np.ndarray]:
    """Three workers, one with two replicas; their gradients are freed before they are read."""
    (make, more), last = AGN_WAYS[way], len(mesh) - 1
    center = gr.AGNCenter(mesh[[0, *range(2, len(mesh))]])
    dtype = "float16" if way == "momentum" else "float32"
    starts = {name: exact_data(shape, dtype) for name, shape in AGN_SHAPES.items()}
    homes = [mesh.devices[1], mesh[[last, last - 1]], mesh.devices[0]]
    team = [Worker(home, center, starts, make, 3, 2, **more) for home in homes]
    for turn in range(9):
        worker = team[turn % 3]
        worker.step(_agn_gradients(worker, mesh, dtype, turn), weight=AGN_WEIGHTS[turn])
        if turn == 4:
            worker.optimizer.get_init_op(1)()
        if turn == 5:
            center.load_state_dict(center.state_dict())
            worker.optimizer.load_state_dict(worker.optimizer.state_dict())
    kept = [var for worker in team[::-1] for var in worker.variables.values()]
    kept += [worker.getter.accumulation(var)
             for worker in team for var in worker.variables.values()]  # fmt: skip
    kept += [each for worker in team for each in worker.inner.variables()]
    kept += [*center.variables(), *center._shared.slot_variables()]
    return [buffer.numpy() for each in kept for buffer in each.buffers]


def _agn_gradients(worker: Worker, mesh: Mesh, dtype: str, seed: int) -> dict:
    home = mesh.devices[seed % len(mesh)]
    grads = {name: home.upload(exact_data(shape, dtype, seed=seed))
             for name, shape in AGN_SHAPES.items()}  # fmt: skip
    if seed % 3 == 1:  # several replicas
        whole = [exact_data(AGN_SHAPES["weights"], dtype, seed=seed + place) for place in (0, 1)]
        grads["weights"] = gr.PerReplica(whole, devices=worker.getter.devices)
    if seed % 2:
        rows = exact_data((4, 3), dtype, seed=seed)
        grads["table"] = gr.IndexedSlices(mesh.devices[-2].upload(rows), [5, seed % 7, 5, 2])
    if seed > 5:
        del grads["bias"]
    return grads
