"""The same operations by other libraries (peers), and whole all-reduces by them.

A peer has a function for each operation that it knows, which takes lists of its arrays and returns
its candidates. Outputs exist before the clock starts, unless the operation allocates them.
"""

import importlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .clock import Call
from .runner import Bench

Calls = dict[str, Call]
Operations = Mapping[str, Callable[..., Calls]]
Tensors = Sequence[Sequence[np.ndarray]]  # [tensor][replica]

ONE_DEVICE, HIERARCHICAL = "tf one device", "tf hierarchical_copy"
SUM_AND_COPIES = "sum, copies"  # of a library, whose name comes before


@dataclass(frozen=True)
class Peer:
    name: str  # how the names of its candidates begin
    take: Callable[[np.ndarray], Any]  # converts a host array to one on the measured device
    # Of add_n, add_into, accumulate, many, all_reduce, pack and segment_sum those that it has.
    operations: Operations
    without: frozenset[str] = frozenset()  # dtypes that it cannot add, or only slowly


def peer_calls(peers: Sequence[Peer], operation: str, *operands: Sequence[np.ndarray]) -> Calls:
    """Returns the candidates of all peers for an operation on lists of host arrays."""
    found: Calls = {}
    for peer in peers:
        if operation in peer.operations and operands[0][0].dtype.name not in peer.without:
            taken = ([peer.take(host) for host in hosts] for hosts in operands)
            calls = peer.operations[operation](*taken)
            found |= {f"{peer.name} {way}": call for way, call in calls.items()}
    return found


def find_peers(bench: Bench) -> list[Peer]:
    """Returns the installed peers, and notes missing ones."""
    found = []
    array_library = importlib.import_module("cupy" if bench.on_gpu else "numpy")
    if hasattr(array_library, "concatenate"):
        name, without = array_library.__name__, frozenset({"bfloat16"})
        found.append(Peer(name, array_library.asarray, _of_arrays(array_library), without))
    else:
        bench.absent["cupy"] = "the stand-in of the tests has no arithmetic"
    if (torch := find_torch(bench)) is not None:
        operations = _of_torch_on_gpu(torch) if bench.on_gpu else _of_torch(torch)
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


def _operations(names: str, library: Any, copy: Any, zero: Any, add_rows: Any) -> Operations:
    """Returns the operations of a library, by its functions and the names of its candidates."""
    chain, add, pack, rows = names.split(", ")
    return {
        "add_n": lambda arrays: {chain: partial(_chain, arrays)},
        "accumulate": lambda operands: {add: partial(operator.iadd, *operands)},
        "many": lambda *columns: {"chains": partial(_chains, columns)},
        "all_reduce": lambda *tensors: {SUM_AND_COPIES: sum_and_copies(library, copy, tensors)},
        "pack": lambda flat, arrays: {pack: partial(library.concatenate, arrays, out=flat[0])},
        "segment_sum": lambda values, indices, out: {
            rows: partial(
                in_order, partial(zero, out[0]), partial(add_rows, out[0], indices[0], values[0])
            )
        },
    }


def _of_arrays(library: Any) -> Operations:
    """NumPy, or CuPy on the current stream."""
    functions = library, library.copyto, lambda out: out.fill(0)
    if library is np:
        return _operations("chain, +=, concatenate, add.at", *functions, np.add.at)
    scatter = importlib.import_module("cupyx").scatter_add
    return _operations("chain, +=, concatenate, scatter_add", *functions, scatter)


def _of_torch(torch: Any) -> Operations:
    """PyTorch on the CPU."""
    of, names = torch.Tensor, "add + add_, add_, cat, index_add_"

    def add_rows(out: Any, indices: Any, values: Any) -> None:
        out.index_add_(0, indices, values)

    def add_into(outs: list[Any], tensors: list[Any]) -> Calls:
        calls = [partial(outs[0].copy_, tensors[0])]
        calls += [partial(outs[0].add_, tensor) for tensor in tensors[1:]]
        return {"copy_ + add_": partial(in_order, *calls)}

    return {**_operations(names, torch, of.copy_, of.zero_, add_rows), "add_into": add_into}


def _of_torch_on_gpu(torch: Any) -> Operations:
    """PyTorch on a GPU, on CuPy's current stream."""

    def on_stream(make: Callable[..., Calls]) -> Callable[..., Calls]:
        return lambda *operands: {
            way: partial(on_current_stream, torch, call) for way, call in make(*operands).items()
        }

    return {name: on_stream(make) for name, make in _of_torch(torch).items()}


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


def _chains(columns: Iterable[Sequence[Any]]) -> list[Any]:
    """Adds the first arrays of all columns, then the second ones, and so on."""
    return [_chain(row) for row in zip(*columns, strict=True)]


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
        reduce = partial(cross_device_ops.batch_reduce, tf.distribute.ReduceOp.MEAN, pairs)
        calls[name] = reduce
        calls[f"{name} in tf.function"] = tf.function(partial(_values, reduce))
    return calls


def _values(reduce: Callable[[], Sequence[Any]]) -> list[Any]:
    """Returns a value that a ``tf.function`` can return."""
    return [mirrored.values for mirrored in reduce()]
