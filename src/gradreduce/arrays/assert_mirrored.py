"""Compares the copies of variables and modules on all devices and processes of a mesh.

Each process hashes its copies, and all processes exchange the hashes: first of whole tensors, then
of the parts of the first tensor that differs, then of the parts of that part, down to one element.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradreduce.comm.description import Description, digest_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Device, Mesh
from gradreduce.errors import brief

from .convert import as_list, host_array, is_module
from .distributed import DistributedValues
from .indexed_slices import IndexedSlices
from .variable import Variable

_PARTS = 1024  # the number of parts of a tensor that are hashed separately


def assert_mirrored(values: Any, mesh: Mesh | None = None) -> None:
    """Raises unless all copies of each tensor have the same bits.

    With several processes, every process makes this call, and all raise the same error. NaN equals
    NaN, and 0.0 differs from -0.0. The host waits for the tensors and copies each to host memory.

    Args:
        values: a Variable, a ``Mirrored`` or a list of these: compares their copies on all devices
            of all processes. Or PyTorch modules: a list of replicas, a ``gr.torch.DataParallel``,
            or one module: compares their parameters, also with those of the other processes of
            ``mesh``. Buffers of modules, such as running statistics, are not compared.
        mesh: the mesh of PyTorch modules; required for one module. Not needed for Variables.

    Raises:
        AssertionError: a tensor differs. The message names the first such tensor, its first element
            that differs, and the two values with their replicas; or the two shapes, dtypes or names
            if these differ.
        TypeError: ``values`` is something else, or contains IndexedSlices.
        ValueError: ``values`` is empty, or one module without ``mesh``.
        InvalidArgumentError: another process makes another call. The mesh has failed.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> w = gr.Variable([1.0, 2.0], "w", device=mesh)
        >>> gr.assert_mirrored([w])
        >>> w.buffers[1].array[0] = 7.0  # damage a copy
        >>> gr.assert_mirrored([w])
        Traceback (most recent call last):
            ...
        AssertionError: 'w'[0] differs: 1.0 in replica 0, 7.0 in replica 1
    """
    copies, device = _copies_of(values, mesh)
    if device is None:
        problem = _difference(copies, [_ComparedReplica.of(copy) for copy in copies], None)
    else:
        replicas = Replicas([device])
        label = replicas.group.label(replicas.group.rank)
        rows = [_ComparedReplica.of(copy, label) for copy in copies]
        with replicas.call(Description.of({"call": "assert_mirrored", "tensors": []})):
            problem = _difference(copies, rows, device)
    if problem is not None:
        raise AssertionError(problem)


class _Copy(NamedTuple):
    """One replica of all tensors.

    Attributes:
        names: the names of the tensors.
        tensors: arrays of any library.
    """

    names: list[str]
    tensors: list[Any]

    def array(self, index: int) -> np.ndarray:
        """Returns a tensor in host memory, flat, with the same bits for every NaN."""
        array = np.ascontiguousarray(host_array(self.tensors[index])).reshape(-1)
        if array.dtype.kind in "fcV":  # bfloat16 is of kind V
            is_nan = np.isnan(array)
            if is_nan.any():
                array = np.where(is_nan, np.array(np.nan).astype(array.dtype), array)
        return array


class _ComparedReplica(NamedTuple):
    """The data of a replica that is compared.

    Attributes:
        process: the process that has it, for errors; empty if there is one process.
        tensors: texts with name, dtype and shape of each tensor.
        digests: the hash of each tensor.
    """

    process: str
    tensors: list[str]
    digests: list[int]

    @classmethod
    def of(cls, copy: _Copy, process: str = "") -> _ComparedReplica:
        """Describes and hashes the tensors of a replica."""
        described = [
            f"{name!r} ({str(each.dtype).removeprefix('torch.')}{list(each.shape)})"
            for name, each in zip(copy.names, copy.tensors, strict=True)
        ]
        return cls(process, described, [_digest(copy.array(i)) for i in range(len(described))])


def _copies_of(values: Any, mesh: Mesh | None) -> tuple[list[_Copy], Device | None]:
    """Returns the replicas of this process, and the device for exchanges with other processes."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={brief(mesh)} must be a Mesh; gr.open_mesh() opens one")
    modules = _modules_of(values, mesh)
    if modules:
        return [_copy_of_module(each) for each in modules], mesh[0] if mesh else None
    if isinstance(values, Variable | DistributedValues):
        values = [values]
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"values={brief(values)} must be Variables, Mirrored values or PyTorch modules"
        )
    if not values:
        raise ValueError("values is empty; pass at least one")
    names, rows = zip(*[_buffers_of(*each) for each in enumerate(values)], strict=True)
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the values have different numbers of copies; pass those of one mesh")
    return [_Copy(list(names), list(row)) for row in zip(*rows, strict=True)], rows[0][0].device


def _modules_of(values: Any, mesh: Mesh | None) -> list[Any]:
    """Returns the replicas of a module; none if the values are not modules."""
    values = as_list(values)
    if is_module(type(values)):
        if mesh is None:
            raise ValueError("one module has no copies: pass a list of replicas, or a mesh")
        is_ours = type(values).__module__ == "gradreduce.torch.data_parallel"
        return list(values.replicas) if is_ours else [values]
    has_modules = isinstance(values, list | tuple) and values and is_module(type(values[0]))
    return list(values) if has_modules else []


def _copy_of_module(module: Any) -> _Copy:
    if not is_module(type(module)):
        raise TypeError(f"{brief(module)} is not a torch.nn.Module, as the first replica is")
    pairs = list(module.named_parameters())
    return _Copy([name for name, _ in pairs], [each for _, each in pairs])


def _buffers_of(index: int, value: Any) -> tuple[str, Sequence[Any]]:
    """Returns the name of a value, and its copies."""
    if isinstance(value, Variable):
        return value.name, value.buffers
    if not isinstance(value, DistributedValues):
        raise TypeError(f"values[{index}]={brief(value)} is not a Variable or Mirrored value")
    value._discard_copies()
    if any(isinstance(part, IndexedSlices) for part in value.parts):
        raise TypeError(f"values[{index}] has IndexedSlices; pass .to_dense()")
    return value._name or f"values[{index}]", value.parts


def _digest(array: np.ndarray) -> int:
    return int(digest_of(array.view(np.uint8).data), 16)


def _difference(
    copies: Sequence[_Copy], own: list[_ComparedReplica], device: Device | None
) -> str | None:
    """Describes the first difference between the copies of all processes; None if there is none.

    Args:
        copies: the copies of this process.
        own: their compared data.
        device: the device for exchanges with other processes; None: there are none.
    """
    rows = [_ComparedReplica(*row) for row in _of_all(own, device)]
    names = [f"replica {replica}{row.process}" for replica, row in enumerate(rows)]
    for row, name in zip(rows, names, strict=True):
        for mine, theirs in zip(rows[0].tensors, row.tensors, strict=False):
            if mine != theirs:
                return f"{mine} in {names[0]} is {theirs} in {name}"
        if len(row.tensors) != len(rows[0].tensors):
            return f"{names[0]} has {len(rows[0].tensors)} tensors, {name} {len(row.tensors)}"
    index, other = _first_unequal([row.digests for row in rows])
    if index < 0:
        return None
    arrays = [copy.array(index) for copy in copies]
    start, size = 0, arrays[0].size
    while size > 1:
        step = -(-size // _PARTS)
        starts = range(start, start + size, step)
        parts = [[_digest(array[at : at + step]) for at in starts] for array in arrays]
        digests = _of_all(parts, device)
        part, _ = _first_unequal([digests[0], digests[other]])
        start, size = starts[part], min(step, start + size - starts[part])
    found = _of_all([str(array[start]) for array in arrays], device)
    shape = tuple(copies[0].tensors[index].shape)
    at = [int(each) for each in np.unravel_index(start, shape)] if shape else ""
    values = f"{found[0]} in {names[0]}, {found[other]} in {names[other]}"
    return f"{copies[0].names[index]!r}{at} differs: {values}"


def _of_all(own: list[Any], device: Device | None) -> list[Any]:
    """Returns the entries of the lists of all processes; they are JSON values."""
    if device is None:
        return own
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    replicas = Replicas([device])
    sizes = replicas.exchange_numbers([text.size])
    found = replicas.exchange_arrays([text], [[(size,)] for (size,) in sizes])
    return [row for each in found for row in json.loads(each.tobytes())]


def _first_unequal(rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the first column that differs, and its first row that differs."""
    for column, entries in enumerate(zip(*rows, strict=True)):
        for row, entry in enumerate(entries):
            if entry != entries[0]:
                return column, row
    return -1, -1
