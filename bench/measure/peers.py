"""The same operations by other libraries (peers), out of place.

A peer returns its candidates for the name of an operation, none if it has no such operation.
Outputs exist before the clock starts, unless the operation allocates them.
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

__all__ = ["ArrayPeer", "Peer", "Peers", "TensorFlowPeer", "TorchPeer", "find_peers"]

Calls = dict[str, Call]
Peers = tuple[list["Peer"], dict[str, str]]
SPLIT = 4  # inputs in the first half of an all_sum


class Peer:
    """A library to compare with, with an optional method per operation."""

    name = ""

    def take(self, host: np.ndarray) -> Any:
        """Converts a host array to the library's array on the measured device."""
        raise NotImplementedError

    def takes(self, dtype: np.dtype) -> bool:
        """Returns whether it can add this dtype."""
        return True

    def calls(self, operation: str, *operands: Sequence[np.ndarray]) -> Calls:
        """Returns its candidates for an operation.

        Args:
            operation: ``add_n``, ``add_into``, ``accumulate``, ``many``, ``all_sum``, ``pack``,
                ``unpack``, ``scale`` or ``segment_sum``.
            operands: lists of host arrays, as the method of that name takes them.
        """
        made: Callable[..., Calls] | None = getattr(self, operation, None)
        if made is None or not self.takes(operands[0][0].dtype):
            return {}
        calls = made(*([self.take(host) for host in hosts] for hosts in operands))
        return {f"{self.name} {way}": call for way, call in calls.items()}


def find_peers(*, on_gpu: bool) -> Peers:
    """Returns the installed peers, and the reasons for missing ones."""
    wanted: list[tuple[str, Callable[[], Peer]]] = [
        ("cupy" if on_gpu else "numpy", partial(ArrayPeer, "cupy" if on_gpu else "numpy")),
        ("torch", partial(TorchPeer, "cuda" if on_gpu else "cpu")),
    ]
    if not on_gpu:
        wanted.append(("tensorflow", TensorFlowPeer))
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for library, make in wanted:
        if library not in ("numpy", "cupy") and importlib.util.find_spec(library) is None:
            absent[library] = "not installed"
            continue
        try:
            found.append(make())
        except Unfit as error:
            absent[library] = str(error)
    return found, absent


class Unfit(Exception):
    """Raised if an installed library cannot be measured."""


class ArrayPeer(Peer):
    """NumPy, or CuPy on the current stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._np = importlib.import_module(name)
        if not hasattr(self._np, "concatenate"):
            raise Unfit("the stand-in of the tests has no arithmetic")

    def take(self, host: np.ndarray) -> Any:
        return self._np.asarray(host)

    def takes(self, dtype: np.dtype) -> bool:
        return dtype.name != "bfloat16"  # slow in NumPy, missing in CuPy

    def add_n(self, arrays: list[Any]) -> Calls:
        calls: Calls = {"chain": partial(_chain, arrays)}
        if self.name == "cupy":
            calls["stack-sum"] = partial(self._stack_sum, arrays)
        return calls

    def _stack_sum(self, arrays: list[Any]) -> Any:
        return self._np.stack(arrays).sum(axis=0)

    def accumulate(self, operands: list[Any]) -> Calls:
        return {"+=": partial(_add_in_place, *operands)}

    def many(self, *columns: list[Any]) -> Calls:
        return {"chains": partial(_chains, list(zip(*columns, strict=True)))}

    def all_sum(self, outs: list[Any], inputs: list[Any]) -> Calls:
        return {"chains, copies": partial(_all_sum, self._np.copyto, outs, inputs)}

    def pack(self, flat: list[Any], arrays: list[Any]) -> Calls:
        return {"concatenate": partial(self._np.concatenate, arrays, out=flat[0])}

    def unpack(self, flat: list[Any], arrays: list[Any]) -> Calls:
        parts = _parts(flat[0], [array.size for array in arrays])
        return {"copyto": partial(_for_each, self._np.copyto, arrays, parts)}

    def scale(self, arrays: list[Any]) -> Calls:
        return {"*=": partial(_for_each, _negate, arrays)}

    def segment_sum(self, values: list[Any], indices: list[Any], out: list[Any]) -> Calls:
        if self.name == "cupy":
            scatter = importlib.import_module("cupyx").scatter_add
            return {"scatter_add": partial(_scatter, scatter, out[0], indices[0], values[0])}
        return {"add.at": partial(_scatter, np.add.at, out[0], indices[0], values[0])}


class TorchPeer(Peer):
    """PyTorch: single operations, and on GPUs its functions for lists of tensors."""

    name = "torch"

    def __init__(self, place: str) -> None:
        self._torch = importlib.import_module("torch")
        self._place = place
        if place == "cuda" and not self._torch.cuda.is_available():
            raise Unfit("built without CUDA")

    def take(self, host: np.ndarray) -> Any:
        if host.dtype.name == "bfloat16":
            tensor = self._torch.from_numpy(host.view(np.int16)).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(host)
        return tensor.to(self._place)

    def calls(self, operation: str, *operands: Sequence[np.ndarray]) -> Calls:
        calls = super().calls(operation, *operands)
        if self._place == "cpu":
            return calls
        return {name: partial(self._on_current_stream, call) for name, call in calls.items()}

    def _on_current_stream(self, call: Call) -> Any:
        """Runs a call on CuPy's current stream."""
        pointer = importlib.import_module("cupy").cuda.get_current_stream().ptr
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(pointer)):
            return call()

    def add_n(self, tensors: list[Any]) -> Calls:
        calls: Calls = {
            "copy + add_": partial(self._copy_chain, tensors),
            "add + add_": partial(_chain, tensors),
        }
        if self._place == "cuda":
            calls["_foreach"] = partial(self._foreach, [[tensor] for tensor in tensors])
        return calls

    def add_into(self, outs: list[Any], tensors: list[Any]) -> Calls:
        return {"copy_ + add_": partial(_add_into, outs[0], tensors)}

    def _copy_chain(self, tensors: list[Any]) -> Any:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return total

    def _foreach(self, columns: Sequence[list[Any]]) -> Any:
        totals = self._torch._foreach_add(columns[0], columns[1])
        for column in columns[2:]:
            self._torch._foreach_add_(totals, column)
        return totals

    def accumulate(self, operands: list[Any]) -> Calls:
        return {"add_": partial(_add_in_place, *operands)}

    def many(self, *columns: list[Any]) -> Calls:
        if self._place == "cuda":
            return {"_foreach": partial(self._foreach, columns)}
        return {"chains": partial(_chains, list(zip(*columns, strict=True)))}

    def all_sum(self, outs: list[Any], inputs: list[Any]) -> Calls:
        return {"chains, copies": partial(_all_sum, _copy_tensor, outs, inputs)}

    def pack(self, flat: list[Any], tensors: list[Any]) -> Calls:
        return {"cat": partial(self._torch.cat, tensors, out=flat[0])}

    def unpack(self, flat: list[Any], tensors: list[Any]) -> Calls:
        parts = _parts(flat[0], [tensor.numel() for tensor in tensors])
        if self._place == "cuda":
            return {"_foreach": partial(self._torch._foreach_copy_, tensors, parts)}
        return {"copy_": partial(_for_each, _copy_tensor, tensors, parts)}

    def scale(self, tensors: list[Any]) -> Calls:
        if self._place == "cuda":
            return {"_foreach": partial(self._torch._foreach_mul_, tensors, -1.0)}
        return {"mul_": partial(_for_each, _negate, tensors)}

    def segment_sum(self, values: list[Any], indices: list[Any], out: list[Any]) -> Calls:
        scatter = partial(_index_add, out[0], indices[0], values[0])
        return {"index_add_": scatter}


class TensorFlowPeer(Peer):
    """TensorFlow, eagerly, on the CPU."""

    name = "tf"

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        self._tf = importlib.import_module("tensorflow")

    def take(self, host: np.ndarray) -> Any:
        return self._tf.constant(host)

    def add_n(self, tensors: list[Any]) -> Calls:
        return {"add_n": partial(self._tf.add_n, tensors)}

    def pack(self, flat: list[Any], tensors: list[Any]) -> Calls:
        return {"concat": partial(self._tf.concat, tensors, 0)}

    def segment_sum(self, values: list[Any], indices: list[Any], out: list[Any]) -> Calls:
        rows = out[0].shape[0]
        summed = partial(self._tf.math.unsorted_segment_sum, values[0], indices[0], rows)
        return {"unsorted_segment_sum": summed}


# -- what they have in common ----------------------------------------------------------------------


def _chain(arrays: Sequence[Any]) -> Any:
    """Adds arrays one by one; the first sum is a new array."""
    total = arrays[0] + arrays[1]
    for array in arrays[2:]:
        total += array
    return total


def _chains(rows: Sequence[Sequence[Any]]) -> Any:
    return [_chain(row) for row in rows]


def _add_in_place(total: Any, term: Any) -> None:
    total += term


def _add_into(out: Any, tensors: Sequence[Any]) -> None:
    out.copy_(tensors[0])
    for tensor in tensors[1:]:
        out.add_(tensor)


def _negate(array: Any) -> None:
    array *= -1.0


def _copy_tensor(out: Any, source: Any) -> None:
    out.copy_(source)


def _for_each(call: Callable[..., Any], *lists: Sequence[Any]) -> None:
    for operands in zip(*lists, strict=True):
        call(*operands)


def _all_sum(copy: Callable[..., Any], outs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Adds all inputs in two groups, and copies the sum to each output."""
    total = _chain(inputs[:SPLIT])
    total += _chain(inputs[SPLIT:])
    for out in outs:
        copy(out, total)


def _parts(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns consecutive views of a flat array."""
    starts = [0, *np.cumsum(sizes).tolist()]
    return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _scatter(add: Callable[..., Any], out: Any, indices: Any, values: Any) -> None:
    out.fill(0)
    add(out, indices, values)


def _index_add(out: Any, indices: Any, values: Any) -> None:
    out.zero_()
    out.index_add_(0, indices, values)
