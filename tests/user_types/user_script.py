"""A program as users write it, for mypy and basedpyright: what calls return, and what they refuse.

It runs too (tests/project/test_user_types.py). A refused call has an ignore, which the checkers
report where it is not needed.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import gradreduce as gr

Floats = NDArray[np.float32]


def ones() -> Floats:
    return np.ones(3, np.float32)


mesh = gr.open_mesh(2, backend="sim", kernels="numpy", processes="none")
buffer = mesh.devices[0].put(ones())
tensor = torch.ones(3)
slices = gr.IndexedSlices(ones().reshape(3, 1), [0, 1, 1], (3, 1))

# Sums of one device: arrays of one library in, an array of that library out.
assert_type(gr.add_n([ones(), ones()]), Floats)
assert_type(gr.add_n((tensor, tensor)), torch.Tensor)
assert_type(gr.add_n([buffer, buffer]), gr.Buffer)
assert_type(gr.add_n([tensor, tensor], output_type="numpy"), NDArray[Any])
assert_type(gr.add_n([tensor, tensor], output_type="buffer"), Any)
assert_type(gr.add_n([slices, slices]), Any)  # a dense array of the kind of the rows
assert_type(gr.add_n([1.0, 2.0]), Any)
assert_type(gr.accumulate_n([tensor, tensor], shape=[3]), torch.Tensor)
assert_type(gr.accumulate_n([tensor, tensor], output_type="numpy"), NDArray[Any])
total = gr.aggregate((ones() for _ in range(3)), gr.AggregationMethod.EXPERIMENTAL_TREE)
assert_type(total, Floats | Any)  # None if there are no terms
assert_type(gr.aggregate([slices, slices]), Any)  # IndexedSlices with the rows of both
assert_type(gr.aggregate([tensor, None], output_type="numpy"), NDArray[Any] | Any)

# Sums across devices, with the structure of the gradients.
ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, wire_dtype="bfloat16")
lists = [[tensor, tensor], [tensor, tensor]]
assert_type(ops.all_reduce(lists), list[list[torch.Tensor]])
assert_type(gr.all_reduce(lists, gr.ReduceOp.SUM, mesh=mesh), list[list[torch.Tensor]])
dicts = [{"w": ones(), "b": None}, {"w": ones(), "b": None}]
assert_type(ops.all_reduce(dicts), list[dict[str, Floats | None]])
assert_type(ops.all_reduce(((tensor,), (tensor,))), tuple[tuple[torch.Tensor], tuple[torch.Tensor]])
assert_type(ops.all_reduce(lists, output_type="numpy"), Any)
assert_type(ops.all_reduce([[slices], [slices]]), list[list[gr.IndexedSlices]])
assert_type(ops.all_reduce(lists, gr.ReduceOp.SUM, deadline=9.0), list[list[torch.Tensor]])
rows = [[torch.ones(4)], [torch.ones(4)]]
shares = ops.reduce_scatter(rows, gr.ReduceOp.SUM)
assert_type(shares, list[list[torch.Tensor]])
assert_type(ops.all_gather(shares), list[list[torch.Tensor]])
shared = ({"w": ones()}, {"w": ones()})
assert_type(ops.all_gather(shared), tuple[dict[str, Floats], dict[str, Floats]])
assert_type(ops.reduce_scatter(rows, output_type="numpy"), Any)
assert_type(ops.all_gather(shares, output_type="numpy"), Any)
value = gr.PerReplica([ones(), ones()], mesh)
assert_type(ops.batch_reduce(gr.ReduceOp.MEAN, [(value, mesh)]), list[gr.Mirrored])
assert_type(ops.reduce(gr.ReduceOp.MEAN, value, mesh), gr.Mirrored)

# Sums over time, clipping, variables.
accumulator = gr.ConditionalAccumulator("float32", [3], reduction_type="SUM", device=mesh)
assert_type(accumulator.apply_grad(value), bool)
# The type of the first gradient, or Mirrored: known only at run time.
assert_type(accumulator.take_grad(1), Any)
accumulator.apply_grad(value, local_step=1)
assert_type(gr.take_grads([accumulator], 1), list[Any])
clipped, norm = gr.clip_by_global_norm([tensor, None], 1.0)
assert_type(clipped, list[torch.Tensor | None])
variable = gr.Variable(ones(), "w", dtype="float32", device=mesh)
assert_type(variable.numpy(), NDArray[Any])
step = gr.SyncStep([variable], gr.AdamOptimizer(0.1, eps_mode="torch"), ops)
assert_type(step([[[ones()]], [[ones()]]]), bool)


def of_pytorch() -> None:
    """Needs PyTorch's own types; never called."""
    gr.torch.Optimizer(gr.MomentumOptimizer(0.1, 0.9), [tensor])
    gr.torch.Optimizer(tensor, [tensor])  # type: ignore[arg-type]
    linear = torch.nn.Linear(8, 1)
    assert_type(gr.torch.DataParallel(linear, mesh).module, torch.nn.Linear)
    assert_type(gr.torch.DataParallel([linear, linear], mesh).module.in_features, int)
    gr.torch.DataParallel(linear, mesh, device_ids=[0])  # type: ignore[call-arg]
    gr.AdamOptimizer(lr=0.1)  # type: ignore[call-arg]


def of_ray(
    dense: gr.ray.ConditionalAccumulator, sparse: gr.ray.SparseConditionalAccumulator
) -> None:
    """Needs Ray; never called."""
    assert_type(dense.take_grad(1), Any)  # of the library of the gradients
    assert_type(sparse.take_grad(1), tuple[NDArray[Any], Any, tuple[int, ...] | None])
    gr.ray.AccumulatorSet([], "name", sparse_mean="row")  # type: ignore[arg-type]


def refused() -> None:
    """Words that no call takes; never called."""
    gr.AllReduceCrossDeviceOps("ring")  # type: ignore[arg-type]
    gr.ConditionalAccumulator("float32", reduction_type="mean")  # type: ignore[arg-type]
    gr.SparseConditionalAccumulator("float32", sparse_mean="row")  # type: ignore[arg-type]
    gr.open_mesh(2, backend="gpu")  # type: ignore[arg-type]
    gr.open_mesh(2, kernels="cuda")  # type: ignore[arg-type]
    gr.AdamOptimizer(0.1, eps_mode="keras")  # type: ignore[arg-type]
    gr.add_n([tensor, tensor], output_type="tensor")  # type: ignore[call-overload]
    ops.all_reduce(lists, output_type="list")  # type: ignore[call-overload]
    ops.reduce_scatter(lists, output_type="list")  # type: ignore[call-overload]
    ops.all_gather(lists, output_type="list")  # type: ignore[call-overload]
