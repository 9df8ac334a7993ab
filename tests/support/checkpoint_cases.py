"""An object of every class that has checkpoints, with gradients, on two simulated devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.exact_data import exact_data

import gradreduce as gr

SHAPES = {"w.0": (4, 3), "b": (3,), "scale": ()}


def _variables(mesh, dtype="float32"):
    return [
        gr.Variable(exact_data(shape, dtype), name, device=mesh) for name, shape in SHAPES.items()
    ]


def dense(mesh, **options) -> SimpleNamespace:
    options |= {"reduction_type": "SUM", "device": mesh}
    acc = gr.ConditionalAccumulator("bfloat16", (None, 2), **options)

    def step(seed):
        if acc.num_accumulated() == 3:
            acc.take_grad(3)
        with gr.replica(seed % 2):
            acc.apply_grad(exact_data((3, 2), "bfloat16", seed=seed), acc.global_step)
        acc.apply_grad(exact_data((3, 2), "bfloat16"), -1)

    return SimpleNamespace(save=acc.state_dict, load=acc.load_state_dict, step=step)


def exact(mesh) -> SimpleNamespace:
    return dense(mesh, exact=True)


def sparse(mesh) -> SimpleNamespace:
    acc = gr.SparseConditionalAccumulator("float16", (9, 2), device=mesh)

    def step(seed):
        if acc.num_accumulated() == 3:
            acc.take_grad(3)
        with gr.replica(seed % 2):
            rows = exact_data((3, 2), "float16", seed=seed)
            acc.apply_grad([8, seed % 8, 8], rows, local_step=acc.global_step)

    return SimpleNamespace(save=acc.state_dict, load=acc.load_state_dict, step=step)


def optimizer(mesh) -> SimpleNamespace:
    made, variables = gr.AdamOptimizer(0.1, master_dtype="float32"), _variables(mesh, "bfloat16")

    def step(seed):
        made.learning_rate = 2.0**-seed
        made.apply_gradients(
            [(exact_data(each.shape, each.dtype, seed=seed), each) for each in variables]
        )

    def load(state):
        made.load_state_dict(state, variables)

    return SimpleNamespace(save=made.state_dict, load=load, step=step, variables=variables)


def _agn(mesh) -> tuple[gr.AGNCenter, gr.AGNOptimizer, Callable[[int], None]]:
    center = gr.AGNCenter(mesh)
    getter = gr.AGNCustomGetter(mesh.devices[1], center=center)
    variables = [
        gr.get_variable(name, exact_data(shape, "float32"), custom_getter=getter)
        for name, shape in SHAPES.items()
    ]
    inner = gr.MomentumOptimizer(0.1, 0.5, use_nesterov=True)
    worker = gr.AGNOptimizer(inner, 1, getter, communication_period=2, distance_scale=0.5)

    def step(seed):
        inner.momentum = 2.0**-seed
        grads = [exact_data(each.shape, each.dtype, seed=seed) for each in variables]
        grads[0] = gr.IndexedSlices(grads[0][:2], [3, 1], variables[0].shape)
        worker.apply_gradients(list(zip(grads, variables, strict=True)))

    return center, worker, step


def agn_center(mesh) -> SimpleNamespace:
    center, _, step = _agn(mesh)
    return SimpleNamespace(save=center.state_dict, load=center.load_state_dict, step=step)


def agn_worker(mesh) -> SimpleNamespace:
    _, worker, step = _agn(mesh)
    return SimpleNamespace(save=worker.state_dict, load=worker.load_state_dict, step=step)


def sync_step(mesh, *, rows: bool = False, **options) -> SimpleNamespace:
    variables = _variables(mesh, "bfloat16")
    made = gr.SyncStep(
        variables,
        gr.AdamOptimizer(0.1, master_dtype="float32"),
        gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh),
        num_required=4,
        loss_scale=gr.DynamicLossScale(4.0, growth_interval=2),
        sparse_variables=[each for each in variables if rows and each.shape],
        **options,
    )

    def step(seed):
        made.optimizer.epsilon = 2.0**-seed
        grads = [exact_data(each.shape, each.dtype, seed=seed) for each in made.variables]
        if rows:  # other replicas have other rows
            pairs = [
                [
                    gr.IndexedSlices(grad[:num], list(range(num))) if grad.shape else grad
                    for grad in grads
                ]
                for num in (1, 2)
            ]
        else:
            pairs = [grads, grads]
        made([[[grad] for grad in of_replica] for of_replica in pairs])

    return SimpleNamespace(save=made.state_dict, load=made.load_state_dict, step=step)


def sharded_sync_step(mesh) -> SimpleNamespace:
    return sync_step(mesh, shard_optimizer=True)


def sparse_sync_step(mesh) -> SimpleNamespace:
    return sync_step(mesh, rows=True)


CASES = {
    each.__name__: each
    for each in (
        dense,
        exact,
        sparse,
        optimizer,
        agn_center,
        agn_worker,
        sync_step,
        sharded_sync_step,
        sparse_sync_step,
    )
}
NUM_STEPS = 3  # after so many steps, a sum waits for more gradients


def unnamed(mesh) -> SimpleNamespace:
    """An optimizer of Variables without a name, whose state has fingerprints of their values."""
    made = gr.MomentumOptimizer(0.5, 0.5)
    variables = [
        gr.Variable(exact_data((3,), "float32", seed=seed), device=mesh) for seed in range(3)
    ]

    def step(seed):
        made.apply_gradients([(exact_data((3,), "float32", seed=seed), each) for each in variables])

    load = partial(made.load_state_dict, variables=variables)
    return SimpleNamespace(save=made.state_dict, load=load, step=step)


@contextmanager
def after_steps(make: Callable[[Any], SimpleNamespace]) -> Iterator[SimpleNamespace]:
    """Context manager: a case after ``NUM_STEPS`` steps; its ``fresh`` makes another object."""
    with gr.open_mesh([0, 1], backend="sim", strict=True) as mesh:
        made = make(mesh)
        for seed in range(NUM_STEPS):
            made.step(seed)
        made.fresh = lambda: make(mesh)
        yield made


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All entries of a state that are neither a dict nor a list of entries, with their paths."""
    inner: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in inner:
        if isinstance(each, Mapping) or key == "partial_sums":
            yield from leaves(each, (*path, key))
        else:
            yield (*path, key), each


def changed(state: Any, path: Sequence[Any], value: Any) -> Any:
    """A state with another value at a path; without that entry if the value is ``...``."""
    if not path:
        return value
    copy, (key, *rest) = state.copy(), path
    if value is ... and not rest:
        del copy[key]
    else:
        copy[key] = changed(state[key], rest, value) if rest else value
    return copy


def where(path: tuple[Any, ...]) -> str:
    """The name of an entry in error messages."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def bits(state: Any) -> dict[str, Any]:
    """A state in a form that compares with ``==``."""
    return {where(path): _bits(leaf) for path, leaf in leaves(state)}


def _bits(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return type(leaf), leaf
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def schemas() -> list[str]:
    """A line for every entry of the state of each class, sorted."""
    lines = []
    for name in [name for name in CASES if name != "sharded_sync_step"]:  # as sync_step
        make = CASES[name]
        with gr.open_mesh(2, backend="sim") as mesh:
            case = make(mesh)
            for seed in range(NUM_STEPS):
                case.step(seed)
            for path, leaf in leaves(case.save()):
                kind = type(leaf).__name__
                if isinstance(leaf, np.ndarray):
                    kind = f"{leaf.dtype}{list(leaf.shape)}"
                elif path[-1] == "format":
                    kind = repr(leaf)
                lines.append(f"{name}: {where(path)}: {kind}")
    return sorted(lines)
