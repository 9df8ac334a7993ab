"""Peers of all-reduce on the CPU: the mean of replicas of many tensors.

``found`` are candidates with their operands; ``absent`` says why a library is left out.

NumPy and PyTorch add the replicas of each tensor into the first output, divide it there, and copy
it into the others; the outputs exist before the clock starts. TensorFlow's own two reductions run
on four logical CPU devices, eagerly and inside ``tf.function``. The four results of its
ReductionToOneDevice share one memory: it writes one replica where all others write four.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .clock import Call

__all__ = [
    "HIERARCHICAL",
    "NUMPY",
    "ONE_DEVICE",
    "SUM_AND_COPIES",
    "find_all_reduce_peers",
    "numpy_sum_and_copies",
]

ONE_DEVICE, HIERARCHICAL = "tf one device", "tf hierarchical_copy"
SUM_AND_COPIES, NUMPY = "torch sum, copies", "numpy sum, copies"
INSIDE = " in tf.function"

Tensors = Sequence[Sequence[np.ndarray]]  # [tensor][replica]


def find_all_reduce_peers(tensors: Tensors) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the candidates of installed libraries, and the reasons for missing ones."""
    found: dict[str, Call] = {NUMPY: numpy_sum_and_copies(tensors)}
    absent: dict[str, str] = {}
    makers: dict[str, Callable[[Tensors], dict[str, Call]]] = {
        "torch": _torch, "tensorflow": _tensorflow,
    }  # fmt: skip
    for library, make in makers.items():
        if importlib.util.find_spec(library) is None:
            absent[library] = "not installed"
        else:
            found |= make(tensors)
    return found, absent


def numpy_sum_and_copies(tensors: Tensors) -> Call:
    """Returns NumPy's mean of each tensor's replicas, copied to all outs."""
    outs = [[np.empty_like(each) for each in replicas] for replicas in tensors]

    def call() -> None:
        for replicas, into in zip(tensors, outs, strict=True):
            total = np.add(replicas[0], replicas[1], out=into[0])
            for replica in replicas[2:]:
                total += replica
            total /= len(replicas)
            for out in into[1:]:
                np.copyto(out, total)

    return call


def _torch(tensors: Tensors) -> dict[str, Call]:
    torch = importlib.import_module("torch")
    taken = [[torch.from_numpy(each) for each in replicas] for replicas in tensors]
    outs = [[torch.empty_like(each) for each in replicas] for replicas in taken]

    def call() -> None:
        for replicas, into in zip(taken, outs, strict=True):
            total = torch.add(replicas[0], replicas[1], out=into[0])
            for replica in replicas[2:]:
                total.add_(replica)
            total.div_(len(replicas))
            for out in into[1:]:
                out.copy_(total)

    return {SUM_AND_COPIES: call}


def _tensorflow(tensors: Tensors) -> dict[str, Call]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = importlib.import_module("tensorflow")
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
