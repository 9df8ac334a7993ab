"""Runs the calls that ``test_values.py`` has drawn, over several processes or in one.

A case is a dict that fits into JSON: the call, the shapes and dtypes of its tensors, all options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gradreduce as gr

Case = dict[str, Any]
Rows = list[list[np.ndarray]]  # for each replica of this process the results
WAYS: dict[str, Callable[[Side], Rows]] = {}
# Devices of each process, and the seed of their schedule.
LAYOUTS: dict[str, tuple[Sequence[int], int | None]] = {
    "one": ((1,), None),
    "two": ((2,), None),
    "uneven": ((1, 3, 2), 7),
}


def counts_of(layout: str, num_processes: int) -> list[int]:
    """The number of devices of each process."""
    counts, _ = LAYOUTS[layout]
    return [counts[rank % len(counts)] for rank in range(num_processes)]


def as_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def random_array(
    seed: Sequence[int], shape: Sequence[int], dtype: np.dtype, *, exact: bool = False
) -> np.ndarray:
    """A random array. Unless ``exact``, the bits of a sum depend on the order of additions."""
    random = np.random.default_rng(seed)
    if exact or dtype.kind in "iu":
        return random.integers(0, 20, shape).astype(dtype)
    return np.asarray(random.standard_normal(shape) * 100).astype(dtype)


class Side(NamedTuple):
    """A case on a mesh over all processes, or on a mesh of one process with all replicas.

    Attributes:
        case: the call.
        mesh: the mesh.
        firsts: the number of the first replica of each process.
    """

    case: Case
    mesh: gr.Mesh
    firsts: Sequence[int]

    @property
    def replicas(self) -> range:
        first = self.firsts[self.mesh.process_index]
        return range(first, first + len(self.mesh))

    @property
    def ops(self) -> gr.AllReduceCrossDeviceOps:
        packing, wire = self.case["packing"], self.case["wire_dtype"]
        if self.has_exact_terms:
            return gr.AllReduceCrossDeviceOps("nccl", *packing, mesh=self.mesh)
        if self.is_exact:
            wire = "float32" if wire == "float32" else None
            return gr.AllReduceCrossDeviceOps(  # two words hold three terms of random_array
                None, *packing, mesh=self.mesh, wire_dtype=wire, exact=True, words=2
            )
        groups = None if self.case["groups"] == "exact" else self.case["groups"]
        return gr.AllReduceCrossDeviceOps(
            "hierarchical_copy",
            *packing,
            mesh=self.mesh,
            reduction_groups=groups,
            wire_dtype=wire,
        )

    @property
    def has_exact_terms(self) -> bool:
        """Whether all sums of the terms are exact, because nccl promises no order of additions."""
        return self.case["groups"] == "nccl"

    @property
    def is_exact(self) -> bool:
        """Whether the sums are those of real numbers; IndexedSlices do not have them."""
        return self.case["groups"] == "exact" and self.case["way"] != "rows"

    @property
    def op(self) -> gr.ReduceOp:
        return gr.ReduceOp[self.case["op"]]

    @property
    def dtypes(self) -> list[np.dtype]:
        names = self.case["dtypes"]
        if self.is_exact:
            names = ["float32" if name == "float64" else name for name in names]
        return [as_dtype(name) for name in names]

    def tensors(self, replica: int, turn: int = 0) -> list[np.ndarray]:
        """The arrays of a replica."""
        pairs, exact = zip(self.case["shapes"], self.dtypes, strict=True), self.has_exact_terms
        return [
            random_array([self.case["seed"], turn, replica, index], *each, exact=exact)
            for index, each in enumerate(pairs)
        ]

    def grads(self, turn: int = 0) -> Rows:
        """``[replica][tensor]`` of this process."""
        return [self.tensors(replica, turn) for replica in self.replicas]


def way(run: Callable[[Side], Rows]) -> Callable[[Side], Rows]:
    WAYS[run.__name__] = run
    return run


@way
def plain(side: Side) -> Rows:
    return side.ops.all_reduce(side.grads(), side.op)


@way
def into_out(side: Side) -> Rows:
    grads = side.grads()
    side.ops.all_reduce(grads, gr.ReduceOp.SUM, out=grads)
    return grads


@way
def prepared(side: Side) -> Rows:
    columns = [
        [device.upload(grad) for device, grad in zip(side.mesh, column, strict=True)]
        for column in zip(*side.grads(), strict=True)
    ]
    values = [gr.PerReplica(column) for column in columns]
    step = side.ops.prepare(side.op, [(value, value) for value in values])
    for column, grads in zip(columns, zip(*side.grads(1), strict=True), strict=True):
        for buffer, grad in zip(column, grads, strict=True):
            buffer.device.upload(grad, out=buffer)
    results = step()
    return [[result.values[index].numpy() for result in results] for index in range(len(side.mesh))]


@way
def flat(side: Side) -> Rows:
    shapes, dtype = side.case["shapes"], side.dtypes[0]
    buffer = side.mesh.flat_buffer(shapes, dtype)
    op = gr.ReduceOp.SUM if dtype.kind in "iu" else side.op
    step = buffer.prepare_all_reduce(op, cross_device_ops=side.ops)
    for views, grads in zip(buffer.views, side.grads(), strict=True):
        for view, grad in zip(views, grads, strict=True):
            view.device.upload(grad.astype(dtype), out=view)
    step()
    return [[view.numpy() for view in views] for views in buffer.views]


@way
def attached(side: Side) -> Rows:
    import torch

    shapes = side.case["shapes"]
    buffer = side.mesh.flat_buffer(shapes, np.float32)
    parameters = [[torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in side.mesh]
    buffer.attach(parameters)
    step = buffer.prepare_all_reduce(side.op, cross_device_ops=side.ops)
    for row, grads in zip(parameters, side.grads(), strict=True):
        row[0].grad = None  # as after zero_grad()
        for parameter, grad in zip(row[1:], grads[1:], strict=True):
            (parameter * torch.from_numpy(grad.astype("f4"))).sum().backward()
    step()
    return [[parameter.grad.numpy() for parameter in row] for row in parameters]


@way
def shares(side: Side) -> Rows:
    n = side.mesh.num_replicas
    grads = [[np.resize(grad, (n * max(1, grad.size), 3)) for grad in row] for row in side.grads()]
    found = side.ops.reduce_scatter(grads, side.op)
    gathered = side.ops.all_gather(found)
    outs = [[np.empty_like(each) for each in row] for row in found]
    wholes = [[np.empty_like(each) for each in row] for row in gathered]
    side.ops.reduce_scatter(grads, side.op, out=outs)
    side.ops.all_gather(outs, out=wholes)
    parts = zip(found, gathered, outs, wholes, strict=True)
    return [[*share, *whole, *out, *again] for share, whole, out, again in parts]


@way
def rows(side: Side) -> Rows:
    parts = []
    for replica in side.replicas:
        random = np.random.default_rng([side.case["seed"], replica])
        number = int(random.integers(0, 4))
        values = random_array([side.case["seed"], replica, 0], (number, 3), side.dtypes[0])
        parts.append(gr.IndexedSlices(values, random.integers(0, 6, number), (6, 3)))
    value = gr.PerReplica(parts, side.mesh)
    total = side.ops.reduce(side.op, value, value, coalesce=side.case["seed"] % 2 == 0)
    return [[np.array(each.values), np.array(each.indices)] for each in total.values]


@way
def copies(side: Side) -> Rows:
    process = side.case["seed"] % len(side.firsts)
    if side.mesh.num_processes == 1:
        made = side.ops.broadcast(side.tensors(side.firsts[process]), side.mesh)
    else:
        made = side.ops.broadcast(side.grads()[0], side.mesh, process=process)
    return [[each.values[index] for each in made] for index in range(len(side.mesh))]


@way
def steps(side: Side) -> Rows:
    return _trained(side, shard=False)


@way
def sharded(side: Side) -> Rows:
    return _trained(side, shard=side.mesh.num_processes > 1)


def _trained(side: Side, *, shard: bool) -> Rows:
    """Trains; returns each replica's variables, and their slots."""
    dtypes = [np.dtype("f4") if dtype.kind in "iuc" else dtype for dtype in side.dtypes]
    variables = [
        gr.Variable(np.ones(shape, dtype), f"v{index}", device=side.mesh)
        for index, (shape, dtype) in enumerate(zip(side.case["shapes"], dtypes, strict=True))
    ]
    required = side.mesh.num_replicas * (1 + side.case["seed"] % 2)
    optimizer = gr.AdamOptimizer(0.1, master_dtype="float32")
    clips = side.case["seed"] // 2 % 2 == 1
    options = {"clip_norm": 0.5, "skip_nonfinite": True} if clips else {}
    options |= {"num_required": required, "shard_optimizer": shard}
    step = gr.SyncStep(variables, optimizer, side.ops, **options)
    for turn in range(4):
        grads = side.grads(turn)
        terms = [[[g.astype(d)] for g, d in zip(row, dtypes, strict=True)] for row in grads]
        if turn == 2:  # other processes may have all shards of the first variable
            terms = [[row[0], *[None] * (len(row) - 1)] for row in terms]
        if clips and turn == 3:
            terms[-1][-1][0].fill(np.nan)  # the last replica of each process
        step(terms)
    slots = step.state_dict()["optimizer"]["slots"]
    state = [array for name in sorted(slots) for array in slots[name].values()]
    return [[*[v.buffers[i].numpy() for v in variables], *state] for i in range(len(side.mesh))]


def results_of(case: Case, mesh: gr.Mesh, num_processes: int) -> Rows:
    """Makes the call on a mesh over all processes, or on a mesh of one with all replicas."""
    ends = np.cumsum(counts_of(case["layout"], num_processes)).tolist()
    firsts = [0, *ends[:-1]]
    groups = case["groups"]
    if groups == "processes" and mesh.num_processes == 1:
        groups = [list(range(*each)) for each in zip(firsts, ends, strict=True)]
    return WAYS[case["way"]](Side({**case, "groups": groups}, mesh, firsts))


def check(case: Case, wanted: Rows, found: Rows) -> None:
    """Compares the bits of a case over processes with those of one process."""
    for replica, (row, other) in enumerate(zip(wanted, found, strict=True)):
        for a, b in zip(row, other, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (case, replica, a, b)
            assert a.tobytes() == b.tobytes(), (case, replica, a, b)
