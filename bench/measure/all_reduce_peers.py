"""Peers of all-reduce on the CPU: the mean of replicas of many tensors.

NumPy and PyTorch add the replicas of each tensor into the first output, divide it there, and copy
it into the others; the outputs exist before the clock starts. TensorFlow's own two reductions run
on four logical CPU devices, eagerly and inside ``tf.function``. The four results of its
ReductionToOneDevice share one memory: it writes one replica where all others write four.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .clock import Call
from .peers import find_torch, tensorflow
from .runner import Bench

ONE_DEVICE, HIERARCHICAL = "tf one device", "tf hierarchical_copy"
SUM_AND_COPIES, NUMPY = "torch sum, copies", "numpy sum, copies"
INSIDE = " in tf.function"

Tensors = Sequence[Sequence[np.ndarray]]  # [tensor][replica]


def find_all_reduce_peers(bench: Bench, tensors: Tensors) -> dict[str, Call]:
    """Returns the candidates of installed libraries, and notes missing ones."""
    found: dict[str, Call] = {NUMPY: numpy_sum_and_copies(tensors)}
    if (torch := find_torch(bench)) is not None:
        taken = [[torch.from_numpy(each) for each in replicas] for replicas in tensors]
        outs = [[torch.empty_like(each) for each in replicas] for replicas in taken]
        found[SUM_AND_COPIES] = partial(_means, torch.add, torch.Tensor.copy_, taken, outs)
    if (tf := tensorflow(bench)) is not None:
        found |= _tensorflow(tf, tensors)
    return found


def numpy_sum_and_copies(tensors: Tensors) -> Call:
    """Returns NumPy's mean of each tensor's replicas, copied to all outs."""
    outs = [[np.empty_like(each) for each in replicas] for replicas in tensors]
    return partial(_means, np.add, np.copyto, tensors, outs)


def _means(add: Any, copy: Callable[..., Any], tensors: Any, outs: Any) -> None:
    for replicas, into in zip(tensors, outs, strict=True):
        total = add(replicas[0], replicas[1], out=into[0])
        for replica in replicas[2:]:
            total += replica
        total /= len(replicas)
        for out in into[1:]:
            copy(out, total)


def _tensorflow(tf: Any, tensors: Tensors) -> dict[str, Call]:
    num_replicas = len(tensors[0])
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)
    # No public function makes a PerReplica outside the run of a strategy.
    per_replica = importlib.import_module("tensorflow.python.distribute.values").PerReplica
    pairs = []
    for replicas in tensors:
        placed = []
        for index, host in enumerate(replicas):
            with tf.device(f"/cpu:{index}"):
                placed.append(tf.identity(tf.constant(host)))
        value = per_replica(placed)
        pairs.append((value, value))
    ways = {
        ONE_DEVICE: tf.distribute.ReductionToOneDevice(),
        HIERARCHICAL: tf.distribute.HierarchicalCopyAllReduce(num_packs=1),
    }
    calls: dict[str, Call] = {}
    for name, cross_device_ops in ways.items():
        reduce = partial(cross_device_ops.batch_reduce, tf.distribute.ReduceOp.MEAN, pairs)
        calls[name] = reduce
        calls[name + INSIDE] = tf.function(partial(_values, reduce))
    return calls


def _values(reduce: Callable[[], Sequence[Any]]) -> list[Any]:
    """Returns a value that a ``tf.function`` can return."""
    return [mirrored.values for mirrored in reduce()]
