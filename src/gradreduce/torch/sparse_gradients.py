"""Averages the sparse gradients of embeddings, as IndexedSlices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Mesh
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .weights import divide


def sparse_indices(module: Any, trained: Sequence[tuple[str, Any]]) -> list[int]:
    """Returns which of a module's parameters get sparse gradients, as DDP finds them."""
    sparse = {
        id(each.weight)
        for each in module.modules()
        if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse
    }
    return [index for index, (_, each) in enumerate(trained) if id(each) in sparse]


def average_sparse(
    names: Sequence[str],
    parameters: Sequence[Sequence[Any]],
    mesh: Mesh,
    cross_device_ops: AllReduceCrossDeviceOps,
    total: float | None = None,
) -> None:
    """Replaces sparse gradients by their means over all replicas; the host waits.

    A ``.grad`` of None counts as one without rows. It stays None if it is None in all replicas.

    Args:
        names: the names of the parameters.
        parameters: ``[replica][parameter]``.
        mesh: the devices of the replicas.
        cross_device_ops: reduces them.
        total: the sum of the weights of all replicas. None: the gradients have no weights.

    Raises:
        ValueError: a gradient is dense.
    """
    grads = [
        {name: _sparse_gradient(name, each) for name, each in zip(names, row, strict=True)}
        for row in parameters
    ]
    op = ReduceOp.MEAN if total is None else ReduceOp.SUM
    means = cross_device_ops.all_reduce(grads, op, coalesce=True)
    for of_replica in means:
        for mean in of_replica.values():
            divide(mean._values(), total)
    is_set = [mean._nnz() > 0 for mean in means[0].values()]
    if not all(is_set):  # in all processes
        here = [
            any([each.grad is not None for each in column])
            for column in zip(*parameters, strict=True)
        ]
        rows = Replicas(mesh.devices).compare_numbers(
            "DataParallel: sparse gradients without rows", here
        )
        is_set = [any(column) for column in zip(*rows, strict=True)]
    for row, of_replica in zip(parameters, means, strict=True):
        for parameter, mean, found in zip(row, of_replica.values(), is_set, strict=True):
            if found:
                parameter.grad = _growable(mean)


def _sparse_gradient(name: str, parameter: Any) -> Any:
    """Returns the gradient with one row for each index, which DDP sends, too."""
    grad = parameter.grad
    if grad is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        # PyTorch 2.11's and 2.12's ``sparse_coo_tensor`` warns, even with check_invariants=False.
        return torch.ops.aten._sparse_coo_tensor_unsafe(
            indices, parameter.detach()[:0], parameter.shape
        )
    check_sparse(name, grad)
    return grad.coalesce()


def check_sparse(name: str, grad: Any) -> None:
    """Raises ``ValueError`` if the gradient of an embedding with sparse=True is dense."""
    if not grad.is_sparse:
        raise ValueError(
            f"{name} has a dense gradient, but its embedding has sparse=True: use it only by "
            "calls of the embedding, or make that with sparse=False"
        )


def as_coo(mean: IndexedSlices) -> Any:
    """Converts rows in a Buffer to the gradient of an embedding."""
    return _growable(mean._as_result("coo"))


def _growable(mean: Any) -> Any:
    """PyTorch adds to a gradient without rows by resizing it, but ours owns no storage."""
    return mean if mean._nnz() else mean.clone()
