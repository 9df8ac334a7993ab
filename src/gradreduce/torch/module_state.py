"""The states of the replicas of a DataParallel: copied from process 0, or loaded, or compared."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradreduce.arrays.assert_mirrored import assert_mirrored
from gradreduce.arrays.distributed import PerReplica
from gradreduce.comm.replicas import Replicas, abort_others_on_error
from gradreduce.device import Mesh
from gradreduce.errors import listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

_BLOCK = 2**20  # elements; their sum takes 16 MB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def broadcast_state(
    replicas: Sequence[Any], mesh: Mesh, cross_device_ops: AllReduceCrossDeviceOps
) -> None:
    """Copies the parameters and buffers of process 0's first replica to all."""
    rows, names = [], []
    copied: list[tuple[Any, Any]] = []
    for replica in replicas:
        pairs = [*replica.named_parameters(), *replica.named_buffers()]
        names = [name for name, _ in pairs]
        kept = [each.detach() for _, each in pairs]
        state = [each.contiguous() for each in kept]  # the same tensor, or a copy without gaps
        copied += [pair for pair in zip(kept, state, strict=True) if pair[0] is not pair[1]]
        rows.append([each.view(torch.uint8) if each.itemsize == 1 else each for each in state])
    values = [
        PerReplica([each], devices=[mesh[0]], name=name)
        for each, name in zip(rows[0], names, strict=True)
    ]
    cross_device_ops.broadcast(values, mesh, out=list(zip(*rows, strict=True)))
    for each, found in copied:
        each.copy_(found)


def tensors_of(module: Any) -> list[Any]:
    """Returns the values of all parameters and buffers."""
    return [each.detach() for each in (*module.parameters(), *module.buffers())]


def load_tensors(replicas: Sequence[Any], values: Sequence[Any]) -> None:
    """Copies the results of ``tensors_of`` to the parameters and buffers of all replicas."""
    for replica in replicas:
        for tensor, value in zip(tensors_of(replica), values, strict=True):
            tensor.copy_(value)


def load_state(
    replicas: Sequence[Any],
    state: Mapping[str, Any],
    mesh: Mesh,
    cross_device_ops: AllReduceCrossDeviceOps,
    *,
    strict: bool,
) -> Any:
    """Loads a state into all replicas of all processes, or into none; see ``DataParallel``."""
    first = replicas[0]
    before = copy.deepcopy(first.state_dict())
    result = error = None
    try:
        with abort_others_on_error(mesh[0]):
            try:
                result = first.load_state_dict(state, strict=strict)
            except Exception as raised:  # the other processes are told in the exchange
                error = raised
            rows = Replicas(mesh.devices).compare_numbers(
                "DataParallel.load_state_dict", [error is not None]
            )
            failed = [rank for rank, (has_failed,) in enumerate(rows) if has_failed]
    except BaseException:
        first.load_state_dict(before)
        raise
    if failed:
        first.load_state_dict(before)
        raise error or RuntimeError(
            f"load_state_dict raised an error in process {listed(failed)}: nothing was loaded in "
            "any process; pass a state that fits in every process"
        )
    with abort_others_on_error(mesh[0]):
        for other in replicas[1:]:
            other.load_state_dict(state, strict=strict)
        broadcast_state(replicas, mesh, cross_device_ops)
    return result


def check_alike(replicas: Sequence[Any], mesh: Mesh) -> None:
    """Raises unless the parameters of all replicas of all processes have the same bits.

    The host waits for one checksum of each replica. Each process sends one to the others, and more
    only if they differ. All processes raise the same error.

    Raises:
        RuntimeError: parameters differ. The message names the first one.
    """
    sums = [int(each) for each in [_checksum(replica) for replica in replicas]]
    is_alike = len(set(sums)) == 1
    rows = Replicas(mesh.devices).compare_numbers("comparison of replicas", [sums[0], is_alike])
    if all(row == [sums[0], True] for row in rows):
        return
    try:
        assert_mirrored(list(replicas), mesh)  # compares NaNs as equal
    except AssertionError as error:
        raise RuntimeError(
            f"the parameters of the replicas differ: {error}. Make the optimizer from "
            "dp.parameters(), and load a state by dp.load_state_dict(...), which writes all "
            "replicas"
        ) from None


def _checksum(module: Any) -> Any:
    """Returns a number that shows whether parameters differ, in one element on their device."""
    total, position = torch.zeros((), dtype=torch.int64), 0
    for parameter in module.parameters():
        values = parameter.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        for bits in values.view(_INTEGERS[values.itemsize]).reshape(-1).split(_BLOCK):
            positions = torch.arange(position, position + len(bits), device=bits.device)
            # The multipliers of SplitMix64. What is added depends on an element and its place, and
            # on no linear combination of them, which a permutation or a negation could keep.
            mixed = bits.to(torch.int64) ^ (positions * -7046029254386353131)
            mixed = mixed * -4658895280553007687
            mixed = (mixed ^ (mixed >> 32)) * -7723592293110705685
            total = total.to(bits.device) + mixed.sum()
            position += len(bits)
    return total
