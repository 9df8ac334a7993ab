"""Watches which kernels public calls compile: none late, a second time, or with a lock held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.device import Device, Mesh

Kernels = list[tuple[int, str, tuple]]  # physical device, name, template
# Makes public calls on a mesh; yields after each.
Calls = Callable[[Mesh], Iterator[None]]
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


class CompileWatch:
    """The kernels that the devices of a mesh have compiled since the last ``start``.

    Attributes:
        compiled: all of them.
        late: those that were compiled after the first launch, or while an accumulator was locked.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, str, tuple]] = set()
        self.start()

    def start(self) -> None:
        self.compiled: Kernels = []
        self.late: Kernels = []
        self._has_launched = False

    def uses(self, device: Device, kernel, template, *, launches: bool) -> None:
        used = device.physical, kernel.name, template
        if used not in self._known:
            self._known.add(used)
            self.compiled.append(used)
            accumulators = [key for key, _ in device.mesh.mesh_state.listeners()]
            if self._has_launched or any(each.lock._is_owned() for each in accumulators):
                self.late.append(used)
        self._has_launched |= launches


@contextmanager
def watched_compiles(mesh: Mesh) -> Iterator[CompileWatch]:
    """Watches a mesh that has compiled nothing; a plain simulation acts as if it compiled."""
    watch = CompileWatch()

    def watched(device, method, launches):
        def noted(kernel, template, *rest):
            watch.uses(device, kernel, template, launches=launches)
            return method(kernel, template, *rest)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for device in mesh.devices:
            patch.setattr(device, "compiles", True)
            patch.setattr(device, "_compile_kernel", watched(device, device._compile_kernel, False))
            patch.setattr(device, "_make_launch", watched(device, device._make_launch, True))
        yield watch


def check_compiled_first(mesh: Mesh, calls: Calls) -> None:
    """Checks that no call compiles after its first launch, and that a second one does not at all.

    Nor does the mesh log what finds out what must be compiled.
    """
    rounds = []
    with watched_compiles(mesh) as watch:
        for turn in range(2):
            with mesh.journal() as journal:
                for _ in calls(mesh):
                    assert watch.late == []
                    assert turn == 0 or watch.compiled == []
                    watch.start()
            rounds.append(journal.launches)
    assert rounds[0] == rounds[1] > 0


def rows_of(mesh: Mesh, dtype: str, shape=(6,), num: int = 2) -> list[list[np.ndarray]]:
    """``[device][tensor]``, full of ones."""
    return [[np.ones(shape, dtype) for _ in range(num)] for _ in mesh.devices]


def dense(mesh: Mesh, dtype: str = "float32") -> gr.PerReplica:
    return gr.PerReplica([device.upload(np.ones((4, 3), dtype)) for device in mesh.devices], mesh)


def slices(mesh: Mesh, dtype: str = "float32") -> gr.PerReplica:
    return gr.PerReplica(
        [
            gr.IndexedSlices(device.upload(np.ones((2, 3), dtype)), [1, device.index % 3], (4, 3))
            for device in mesh.devices
        ],
        mesh,
    )


def mixed(mesh: Mesh) -> gr.PerReplica:
    return gr.PerReplica([dense(mesh).parts[0], *slices(mesh).parts[1:]], mesh)


def all_reduce(mesh: Mesh, **options) -> Iterator[None]:
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **options)
    for dtype in ("float16", "float32", "int8", "int16"):
        for op in (SUM, MEAN):
            ops.all_reduce(rows_of(mesh, dtype), op)
            yield
    for dtype, out_dtype, op in [("float64", "float64", SUM), ("uint8", "float32", MEAN)]:
        out = [[device.empty((6,), out_dtype) for _ in range(2)] for device in mesh.devices]
        ops.all_reduce(rows_of(mesh, dtype), op, out=out)
        yield
    ops.all_reduce(rows_of(mesh, "float32", (100_000,)))
    yield


def with_destinations(mesh: Mesh, ops: gr.CrossDeviceOps) -> Iterator[None]:
    first, last = mesh.devices[0], mesh.devices[-1]
    none = gr.PerReplica([device.empty((0, 3), "float32") for device in mesh.devices], mesh)
    ops.batch_reduce(SUM, [(none, first)])  # launches nothing
    yield
    for op in (SUM, MEAN):
        ops.batch_reduce(op, [(dense(mesh), first), (dense(mesh, "int32"), last)])
        yield
        ops.batch_reduce(op, [(slices(mesh), mesh), (slices(mesh, "float16"), first)])
        yield
        ops.batch_reduce(op, [(mixed(mesh), mesh), (dense(mesh, "float64"), mesh)])
        yield
    ops.batch_reduce(SUM, [(slices(mesh), mesh), (dense(mesh), last)], coalesce=True)
    yield
    for value in (dense(mesh), dense(mesh, "float16")):
        ops.broadcast(value.values[0], mesh)
        yield


def shares(mesh: Mesh, **options) -> Iterator[None]:
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **options)
    for dtype in ("float16", "float32", "int16"):
        made = ops.reduce_scatter(rows_of(mesh, dtype, (3 * mesh.num_replicas, 2)), MEAN)
        yield
        ops.all_gather(made)
        yield


def steps(mesh: Mesh) -> Iterator[None]:
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    captures = [ops.capture] * (mesh.mesh_state.peer_access is not False)
    for make in (ops.prepare, *captures):
        step = make(MEAN, [(dense(mesh), mesh), (dense(mesh, "int16"), mesh)])
        yield
        step()
        yield
    flat = mesh.flat_buffer([(5,), (7,)], "float16")
    step = flat.prepare_all_reduce(MEAN)
    yield
    step()
    yield


def dense_accumulators(mesh: Mesh, dtype: str, **options) -> Iterator[None]:
    acc = gr.ConditionalAccumulator(dtype, **options)
    yield
    for given in (dense(mesh, dtype), dense(mesh, "float64"), dense(mesh, dtype)):
        acc.apply_grad(given, cast=True)
        yield
    for given in (dense(mesh, dtype).parts[-1], slices(mesh, dtype).parts[-1]):
        acc.apply_grad(given)
        yield
    acc.take_grad(2)
    yield
    two = [gr.ConditionalAccumulator(each, **options) for each in (dtype, "float32")]
    yield
    for _ in range(2):
        gr.apply_grads(two, [dense(mesh, dtype), dense(mesh)])
        yield
    gr.take_grads(two, 1)
    yield


def sparse_accumulators(mesh: Mesh, dtype: str, **options) -> Iterator[None]:
    acc = gr.SparseConditionalAccumulator(dtype, **options)
    yield
    for given in (slices(mesh, dtype), slices(mesh, "float64"), slices(mesh, dtype)):
        acc.apply_indexed_slices_grad(given, cast=True)
        yield
    acc.apply_grad([3, 2, 0], np.ones((3, 3), dtype))
    yield
    acc.take_grad(2)
    yield


def optimizers(
    mesh: Mesh, make: Callable[[], gr.Optimizer], dtype: str, *, sparse: bool = False
) -> Iterator[None]:
    one = gr.Variable(np.ones((4, 3), dtype), "one", device=mesh)
    two = gr.Variable(np.ones((4, 3)), "two", device=mesh)
    step = gr.Variable(0, "step", trainable=False, device=mesh)
    yield
    for optimizer in (make(), make()):
        optimizer.apply_gradients([(dense(mesh, dtype), one), (dense(mesh, "float64"), two)], step)
        yield
        rows = slices(mesh, dtype).parts[-1] if sparse else np.ones((4, 3), dtype)
        optimizer.apply_gradients([(rows, one), (np.ones((4, 3)), two)], step)
        yield
    if sparse:
        optimizer.apply_gradients([(slices(mesh, dtype), one), (slices(mesh, "float64"), two)])
        yield
    early = make()
    early.prepare([one, two])
    yield
    state = optimizer.state_dict()
    yield
    optimizer.load_state_dict(state, [one, two])
    yield


def variables(mesh: Mesh) -> Iterator[None]:
    for dtype in ("float16", "float32", "int16"):
        variable = gr.Variable(np.ones((4, 3), dtype), "one", trainable=False, device=mesh)
        yield
        variable.assign(np.ones((4, 3), dtype))
        yield
        variable.assign_add(np.ones((4, 3), dtype))
        yield


def sums(mesh: Mesh, devices: Sequence[Device]) -> Iterator[None]:
    for dtype in ("float16", "float64", "int16"):
        for num in (1, 2, 4):
            terms = [device.upload(np.ones((4, 3), dtype)) for device in devices] * num
            for call in (gr.add_n, gr.accumulate_n):
                call(terms)
                yield
            for method in gr.AggregationMethod:
                gr.aggregate(terms, method)
                yield
    for dtype in ("float16", "float32"):
        rows = [slices(mesh, dtype).parts[device.index] for device in devices]
        gr.add_n(rows)
        yield
        for method in gr.AggregationMethod:
            gr.aggregate([*dense(mesh, dtype).parts, *rows, *rows], method)
            yield
    rows = slices(mesh).parts[-1]
    rows.coalesce()
    yield
    rows.to_dense()
    yield


def clipping(mesh: Mesh) -> Iterator[None]:
    for dtype in ("float16", "float64"):
        given = [slices(mesh, dtype).parts[0], dense(mesh, dtype).parts[0], dense(mesh).parts[-1]]
        gr.clip_by_global_norm(given, 1.0)
        yield
        mirrored = gr.Mirrored(dense(mesh, dtype).values, mesh)
        gr.clip_by_global_norm([mirrored], 1.0)
        yield


def sync_steps(mesh: Mesh, dtype: str, **options) -> Iterator[None]:
    variables = [gr.Variable(np.ones((4, 3), dtype), name, device=mesh) for name in "ab"]
    yield
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
    step = gr.SyncStep(variables, gr.MomentumOptimizer(0.1, 0.9), ops, **options)
    yield
    for _ in range(2):
        step([[[np.ones((4, 3), dtype)]] * 2] * len(mesh))
        yield
    step.state_dict()
    yield


def agn(
    mesh: Mesh,
    inner: Callable[[], gr.Optimizer],
    worker,
    *,
    sparse: bool = False,
    center: gr.AGNCenter | None = None,
    **options,
) -> Iterator[None]:
    getter = gr.AGNCustomGetter(worker, center=center or gr.AGNCenter(mesh))
    one, two = [
        gr.get_variable(name, np.ones((4, 3), np.float16), custom_getter=getter) for name in "ab"
    ]
    yield
    optimizer = gr.AGNOptimizer(inner(), 1, getter, communication_period=2, **options)
    yield
    step = gr.Variable(0, "step", trainable=False, device=mesh)
    if worker is mesh:
        for given in ([slices] * sparse) + [dense]:
            optimizer.apply_gradients([(given(mesh, "float16"), var) for var in (one, two)])
            yield
    rows = gr.IndexedSlices(np.ones((2, 3), np.float16), [1, 2])
    whole = np.ones((4, 3), np.float16)
    for given in (whole, whole, *[rows, rows, rows, whole] * sparse):
        optimizer.apply_gradients([(given, one), (whole, two)], step)
        yield


def momentum(**options) -> gr.Optimizer:
    return gr.MomentumOptimizer(0.1, 0.9, **options)


def with_masters() -> gr.Optimizer:
    return momentum(master_dtype="float32")


class Decay(gr.Optimizer):
    """A rule in Python."""

    def _apply(self, variable, slots, gradient):
        variable -= gradient


# Without sums of generators; see ``compile_ahead``.
CALLS: dict[str, Calls] = {
    "nccl": lambda mesh: all_reduce(mesh, all_reduce_alg="nccl", num_packs=2),
    "copies": lambda mesh: all_reduce(mesh, all_reduce_alg="hierarchical_copy", num_packs=0),
    "half wire": lambda mesh: all_reduce(
        mesh, all_reduce_alg="hierarchical_copy", wire_dtype="float16"
    ),
    "groups": lambda mesh: all_reduce(
        mesh,
        all_reduce_alg="hierarchical_copy",
        reduction_groups=[[each] for each in range(mesh.num_replicas)],
    ),
    "groups of processes": lambda mesh: all_reduce(
        mesh, all_reduce_alg="hierarchical_copy", reduction_groups="processes"
    ),
    "shares by nccl": lambda mesh: shares(mesh, all_reduce_alg="nccl"),
    "shares by copies": lambda mesh: shares(mesh, all_reduce_alg="hierarchical_copy"),
    "destinations": lambda mesh: with_destinations(mesh, gr.AllReduceCrossDeviceOps(mesh=mesh)),
    "one device": lambda mesh: with_destinations(mesh, gr.ReductionToOneDevice(mesh=mesh)),
    "steps": steps,
    "dense accumulators of a mesh": lambda mesh: dense_accumulators(mesh, "float16", device=mesh),
    "dense accumulators of a device": lambda mesh: dense_accumulators(
        mesh, "float32", device=mesh.devices[-1]
    ),
    "dense accumulators by one device": lambda mesh: dense_accumulators(
        mesh, "float16", device=mesh, cross_device_ops=gr.ReductionToOneDevice(mesh=mesh)
    ),
    "sparse accumulators of a mesh": lambda mesh: sparse_accumulators(mesh, "float16", device=mesh),
    "sparse accumulators of a device": lambda mesh: sparse_accumulators(
        mesh, "bfloat16", device=mesh.devices[-1], sparse_mean="per_gradient"
    ),
    "sync steps": lambda mesh: sync_steps(mesh, "float16", clip_norm=1.0),
    "sharded sync steps": lambda mesh: sync_steps(
        mesh, "float32", shard_optimizer=True, clip_norm=1.0
    ),
    "checked sync steps": lambda mesh: sync_steps(mesh, "float32", check_finite=True),
    "scaled sync steps": lambda mesh: sync_steps(mesh, "float32", loss_scale=4.0),
    "variables": variables,
    "sums": lambda mesh: sums(mesh, mesh.devices[-1:]),
    "sums over devices": lambda mesh: sums(mesh, mesh.devices),
    "clipping": clipping,
    "adam": lambda mesh: optimizers(mesh, gr.AdamOptimizer, "float32"),
    "momentum with masters": lambda mesh: optimizers(mesh, with_masters, "float16"),
    "a rule in Python": lambda mesh: optimizers(mesh, lambda: Decay("decay"), "float16"),
    "agn": lambda mesh: agn(mesh, momentum, mesh.devices[-1]),
    "agn of several replicas": lambda mesh: agn(
        mesh, lambda: gr.AdamOptimizer(master_dtype="float32"), mesh, distance_scale=0.5
    ),
    "rows by agn of several replicas": lambda mesh: agn(
        mesh, momentum, mesh, sparse=True, distance_scale=0.5
    ),
    "rows by agn": lambda mesh: agn(mesh, momentum, mesh.devices[-1], sparse=True),
    "agn by a rule in Python": lambda mesh: agn(
        mesh, lambda: Decay("decay"), mesh.devices[-1], sparse=True
    ),
    "rows by adam": lambda mesh: optimizers(mesh, gr.AdamOptimizer, "float32", sparse=True),
    "rows by momentum with masters": lambda mesh: optimizers(
        mesh, with_masters, "float16", sparse=True
    ),
    "rows by a rule in Python": lambda mesh: optimizers(
        mesh, lambda: Decay("decay"), "float16", sparse=True
    ),
}
