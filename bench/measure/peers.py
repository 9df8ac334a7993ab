"""The same operations by other libraries (peers), and whole all-reduces by them.

A peer has a function for each operation that it knows, which takes lists of its arrays and returns
a call. Outputs exist before the clock starts, unless the operation allocates them.
"""

import importlib
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .clock import Call
from .runner import Bench

Calls = dict[str, Call]
# Operation -> the name of its candidate, and what makes the call.
Operations = Mapping[str, tuple[str, Callable[..., Call]]]
Tensors = Sequence[Sequence[np.ndarray]]  # [tensor][replica]

ONE_DEVICE, HIERARCHICAL = "tf one device", "tf hierarchical_copy"
SUM_AND_COPIES = "sum, copies"  # of a library, whose name comes before


@dataclass(frozen=True)
class Peer:
    name: str  # how the names of its candidates begin
    take: Callable[[np.ndarray], Any]  # converts a host array to one on the measured device
    operations: Operations  # those that it has
    without: frozenset[str] = frozenset()  # dtypes that it cannot add, or only slowly


def peer_calls(peers: Sequence[Peer], operation: str, *operands: Sequence[np.ndarray]) -> Calls:
    """Returns the candidates of all peers for an operation on lists of host arrays."""
    found: Calls = {}
    for peer in peers:
        if operation in peer.operations and operands[0][0].dtype.name not in peer.without:
            way, make = peer.operations[operation]
            found[f"{peer.name} {way}"] = make(*[list(map(peer.take, hosts)) for hosts in operands])
    return found


def find_peers(bench: Bench) -> list[Peer]:
    """Returns the installed peers, and notes missing ones."""
    found = []
    array_library = importlib.import_module("cupy" if bench.on_gpu else "numpy")
    if hasattr(array_library, "concatenate"):
        name, without = array_library.__name__, frozenset({"bfloat16"})
        operations = _operations("chain", "+=", array_library, array_library.copyto)
        found.append(Peer(name, array_library.asarray, operations, without))
    else:
        bench.absent["cupy"] = "the stand-in of the tests has no arithmetic"
    if (torch := find_torch(bench)) is not None:
        operations = _of_torch(torch, on_gpu=bench.on_gpu)
        found.append(Peer("torch", partial(_tensor, torch, bench.place), operations))
    return found


def find_torch(bench: Bench) -> Any:
    """Returns PyTorch if it can compute on the measured device; otherwise notes why not."""
    if not bench.has("torch"):
        return None
    torch = importlib.import_module("torch")
    if bench.on_gpu and not torch.cuda.is_available():
        bench.absent["torch"] = "built without CUDA"
        return None
    return torch


def tensorflow(bench: Bench) -> Any:
    """Returns TensorFlow if it is installed; otherwise notes that it is not."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return importlib.import_module("tensorflow") if bench.has("tensorflow") else None


def on_current_stream(torch: Any, call: Call) -> Any:
    """Runs a call of PyTorch on CuPy's current stream."""
    pointer = importlib.import_module("cupy").cuda.get_current_stream().ptr
    with torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else None):
        return call()


def _operations(chain: str, add: str, library: Any, copy: Any) -> Operations:
    """Returns the operations of a library, by the names of its candidates and its functions."""
    return {
        "add_n": (chain, lambda arrays: partial(_chain, arrays)),
        "accumulate_n": (add, lambda outs, terms: partial(operator.iadd, outs[0], terms[0])),
        "all_reduce": (SUM_AND_COPIES, lambda *tensors: sum_and_copies(library, copy, tensors)),
    }


def _of_torch(torch: Any, *, on_gpu: bool) -> Operations:
    """PyTorch; on a GPU on CuPy's current stream."""

    def add_into(outs: list[Any], tensors: list[Any]) -> Call:
        calls = [partial(outs[0].copy_, tensors[0])]
        return partial(in_order, *calls, *(partial(outs[0].add_, each) for each in tensors[1:]))

    def on_stream(make: Callable[..., Call]) -> Callable[..., Call]:
        return lambda *operands: partial(on_current_stream, torch, make(*operands))

    found = {**_operations("add + add_", "add_", torch, torch.Tensor.copy_),
             "add_n 2 into": ("copy_ + add_", add_into)}  # fmt: skip
    return {name: (way, on_stream(make) if on_gpu else make) for name, (way, make) in found.items()}


def _tensor(torch: Any, place: str, host: np.ndarray) -> Any:
    """Converts a host array to a tensor of PyTorch."""
    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(place)
    return torch.from_numpy(host).to(place)


def in_order(*calls: Call) -> None:
    for call in calls:
        call()


def _chain(arrays: Sequence[Any]) -> Any:
    total = arrays[0] + arrays[1]
    for array in arrays[2:]:
        total += array
    return total


def find_all_reduce_peers(bench: Bench, tensors: Tensors) -> Calls:
    """Returns the candidates of installed libraries on a CPU, and notes missing ones."""
    found = peer_calls(find_peers(bench), "all_reduce", *tensors)
    if (tf := tensorflow(bench)) is not None:
        found |= _tensorflow(tf, tensors)
    return found


def sum_and_copies(library: Any, copy: Callable[..., Any], tensors: Any) -> Call:
    """Returns the mean of each tensor's replicas, copied to all outs."""
    outs = [[library.empty_like(each) for each in replicas] for replicas in tensors]
    return partial(_means, library.add, copy, tensors, outs)


def _means(add: Any, copy: Callable[..., Any], tensors: Any, outs: Any) -> None:
    for replicas, into in zip(tensors, outs, strict=True):
        total = add(replicas[0], replicas[1], out=into[0])
        for replica in replicas[2:]:
            total += replica
        total /= len(replicas)
        for out in into[1:]:
            copy(out, total)


def _tensorflow(tf: Any, tensors: Tensors) -> Calls:
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in tensors[0]]
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
    calls: Calls = {}
    for name, cross_device_ops in ways.items():
        calls[name] = partial(cross_device_ops.batch_reduce, tf.distribute.ReduceOp.MEAN, pairs)
    return calls
