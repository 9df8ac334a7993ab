"""Compares the copies of variables and modules, on the devices and in the processes of a mesh.

Each process hashes its copies, and all exchange the hashes: of tensors, then of the parts of the
first tensor that differs, and of the parts of the first such part, down to one element.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradreduce.device import Device, Mesh
from gradreduce.device.exchange import agreed, exchange_numbers
from gradreduce.device.process_group import Description, digest_of
from gradreduce.errors import brief

from .convert import host_array, is_module
from .distributed import DistributedValues
from .indexed_slices import IndexedSlices
from .variable import Variable

_PARTS = 1024  # of a tensor, that are hashed one by one


def assert_mirrored(values: Any, mesh: Mesh | None = None) -> None:
    """Raises unless all copies of each tensor have the same bits.

    Over several processes every process makes this call, and all raise alike. NaN equals NaN, and
    0.0 differs from -0.0. The host waits for the tensors and copies each to host memory.

    Args:
        values: a Variable or ``Mirrored``, or a list of these: their copies on all devices of all
            processes. A list of PyTorch modules, the replicas, or a ``gr.torch.DataParallel``, or
            one module: their parameters, also in all processes of ``mesh``. Buffers of modules,
            such as running statistics, are not compared.
        mesh: of modules; with one module it must be given. Variables have one.

    Raises:
        AssertionError: a tensor differs. The message has the name of the first one, the first
            element that differs and its two values, with their replicas; or the two shapes, dtypes
            or names, if these differ.
        TypeError: ``values`` is something else, or has IndexedSlices.
        ValueError: ``values`` is empty, or one module without ``mesh``.
        InvalidArgumentError: another process makes another call; the mesh has failed.

    Example::

        gr.assert_mirrored(step.variables)
        gr.assert_mirrored(net, mesh)  # one module in each process
    """
    copies, leader = _copies_of(values, mesh)
    problem = _unlike(copies)
    digests: list[list[int]] = []
    if problem is None:
        tensors = range(len(copies[0].names))
        digests = [[_digest(copy.array(index)) for index in tensors] for copy in copies]
    if leader is None or leader.mesh_state.process_group is None:
        problem = problem or _difference(copies, digests, None)
    else:
        with agreed(leader, Description.of({"call": "assert_mirrored", "tensors": []})):
            found = _difference(copies, digests, leader)
        problem = problem or found
    if problem is not None:
        raise AssertionError(problem)


class _Copy(NamedTuple):
    """One replica of all tensors.

    Attributes:
        names: of the tensors.
        tensors: of any library.
    """

    names: list[str]
    tensors: list[Any]

    def array(self, index: int) -> np.ndarray:
        """Returns a tensor in host memory, flat, with one NaN for all."""
        found = np.ascontiguousarray(host_array(self.tensors[index])).reshape(-1)
        if found.dtype.kind in "fcV":  # bfloat16 is of kind V
            is_nan = np.isnan(found)
            if is_nan.any():
                found = np.where(is_nan, np.array(np.nan).astype(found.dtype), found)
        return found


def _copies_of(values: Any, mesh: Mesh | None) -> tuple[list[_Copy], Device | None]:
    """Returns the replicas of this process, and the device that exchanges with the others."""
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
    named = [_buffers_of(index, value) for index, value in enumerate(values)]
    names, rows = zip(*named, strict=True)
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the values have different numbers of copies; pass those of one mesh")
    return [_Copy(list(names), list(row)) for row in zip(*rows, strict=True)], rows[0][0].device


def _modules_of(values: Any, mesh: Mesh | None) -> list[Any]:
    """Returns the replicas of a module; none if the values are not modules."""
    if is_module(type(values)) and not isinstance(values, sys.modules["torch"].nn.ModuleList):
        if mesh is None:
            raise ValueError("one module has no copies: pass a list of replicas, or a mesh")
        is_ours = type(values).__module__ == "gradreduce.torch.data_parallel"
        return list(values.replicas) if is_ours else [values]
    is_list = isinstance(values, list | tuple) or is_module(type(values))
    return list(values) if is_list and values and is_module(type(values[0])) else []


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


def _unlike(copies: Sequence[_Copy]) -> str | None:
    """Says how names, shapes or dtypes of the replicas differ; None if they do not."""
    first = _described(copies[0])
    for replica, copy in enumerate(copies):
        for mine, theirs in zip(first, _described(copy), strict=False):
            if mine != theirs:
                return f"{mine} in replica 0 is {theirs} in replica {replica}"
        if len(first) != len(copy.names):
            return f"replica 0 has {len(first)} parameters, replica {replica} {len(copy.names)}"
    return None


def _described(copy: _Copy) -> list[str]:
    return [
        f"{name!r} ({str(each.dtype).removeprefix('torch.')}{list(each.shape)})"
        for name, each in zip(copy.names, copy.tensors, strict=True)
    ]


def _digest(array: np.ndarray) -> int:
    return int(digest_of(array.view(np.uint8).data), 16)


def _difference(
    copies: Sequence[_Copy], digests: list[list[int]], leader: Device | None
) -> str | None:
    """Describes the first difference between the copies of all processes; None without any."""
    texts = [each.encode() for each in _described(copies[0])]
    text = _digest(np.frombuffer(b"".join(texts), np.uint8)) if digests else -1
    heads = _of_all([len(copies), len(texts), text], leader, [3])
    counts = [count for count, *_ in heads]
    for process, (*_, digest) in enumerate(heads):
        if digest == -1:
            return f"the replicas of process {process} have other names, shapes or dtypes"
        if digest != heads[0][2]:
            return _unlike_processes(texts, process, leader, [count for _, count, _ in heads])
    index = -1
    if copies[0].names:
        index, other = _first_unequal(_rows(digests, leader, counts))
    if index < 0:
        return None
    arrays = [copy.array(index) for copy in copies]
    start, size = 0, arrays[0].size
    while size > 1:
        step = -(-size // _PARTS)
        starts = range(start, start + size, step)
        parts = [[_digest(array[at : at + step]) for at in starts] for array in arrays]
        rows = _rows(parts, leader, counts)
        part, _ = _first_unequal([rows[0], rows[other]])
        start, size = starts[part], min(step, start + size - starts[part])
    return _described_element(copies[0], index, start, other, arrays, leader, counts)


def _unlike_processes(
    texts: Sequence[bytes], process: int, leader: Device | None, counts: Sequence[int]
) -> str:
    """Says how the names, shapes or dtypes of a process differ from those of process 0.

    Args:
        texts: the descriptions of the tensors of this process.
        process: which differs.
        leader: see ``_difference``.
        counts: of the tensors of each process.
    """
    digests = [_digest(np.frombuffer(each, np.uint8)) for each in texts]
    found = _of_all(digests, leader, counts)
    fewer = min(counts[0], counts[process])
    index, other = _first_unequal([found[each][:fewer] for each in (0, process)])
    if other < 0:
        return f"process 0 has {counts[0]} tensors, process {process} {counts[process]}"
    own = texts[index] if index < len(texts) else b""
    sent = np.frombuffer(own[:256].ljust(256), np.int64).tolist()
    rows = [np.array(row, np.int64).tobytes() for row in _of_all(sent, leader, [32])]
    first, second = [rows[each].decode(errors="replace").rstrip() for each in (0, process)]
    return f"{first} in process 0 is {second} in process {process}"


def _described_element(
    copy: _Copy, index: int, place: int, other: int, arrays: Sequence[np.ndarray],
    leader: Device | None, counts: Sequence[int],
) -> str:  # fmt: skip
    """Says which element differs, and its values in replica 0 and the other."""
    own = [array[place : place + 1].tobytes().ljust(16, b"\0") for array in arrays]
    rows = _rows([np.frombuffer(each, np.int64).tolist() for each in own], leader, counts)
    texts = []
    for replica in (0, other):
        dtype = arrays[0].dtype
        value = np.array(rows[replica], np.int64).view(np.uint8)[: dtype.itemsize].view(dtype)[0]
        process = sum(replica >= sum(counts[: n + 1]) for n in range(len(counts)))
        where = f" (process {process})" if leader is not None else ""
        texts.append(f"{value} in replica {replica}{where}")
    shape = tuple(copy.tensors[index].shape)
    at = [int(each) for each in np.unravel_index(place, shape)] if shape else ""
    return f"{copy.names[index]!r}{at} differs: {texts[0]}, {texts[1]}"


def _of_all(numbers: list[int], leader: Device | None, counts: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of each process; ``counts`` of one entry is that of all."""
    if leader is None:
        return [numbers]
    group = leader.mesh_state.process_group
    assert group is not None
    return exchange_numbers(leader, numbers, list(counts) * (group.size // len(counts)))


def _rows(
    own: Sequence[Sequence[int]], leader: Device | None, counts: Sequence[int]
) -> list[list[int]]:
    """Returns the numbers of each replica of all processes."""
    width = len(own[0])
    found = _of_all([each for row in own for each in row], leader, [n * width for n in counts])
    flat = [each for of_process in found for each in of_process]
    return [flat[start : start + width] for start in range(0, sum(counts) * width, width)]


def _first_unequal(rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the first column that differs, and the first row that differs from row 0 there."""
    for column, entries in enumerate(zip(*rows, strict=True)):
        for row, entry in enumerate(entries):
            if entry != entries[0]:
                return column, row
    return -1, -1
