"""Packs tensors into flat buffers and unpacks them, as a ``FlatPlan`` says.

A flat buffer that its tensors already are (``mesh.flat_buffer``) is used where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradreduce import ops
from gradreduce.device import (
    ALIGNMENT,
    Block,
    Buffer,
    Device,
    DType,
    by_physical,
    flat_layout,
    fork_streams,
    join_streams,
)

from .packing import FlatPlan, Pieces

# What is written and what is read on a device, one by one.
_Move = tuple[Device, list[Buffer], list[Buffer]]


@dataclass(frozen=True)
class Options:
    """What a reduction may overwrite, and where its results go.

    Attributes:
        consume: gradients may be overwritten, and what lies between them in a flat buffer.
        targets: ``targets[tensor][replica]``, where the results go; None: into new memory.
        in_place: whether these may be written while other replicas are still read.
    """

    consume: bool = False
    targets: Sequence[Sequence[Buffer]] | None = None
    in_place: bool = True


@dataclass(frozen=True)
class PackBuffers:
    """The flat buffers of one plan while they are reduced.

    Attributes:
        plan: what they hold.
        inputs: one for each replica.
        outs: one for each replica; the inputs themselves where those are ours to overwrite.
        results: one for each replica: the outs, or where they are cast to; None where the results
            go into ``targets``.
        filling: for each replica what is moved into its input; None if it lies there.
        targets: for each replica where its sums are moved; None if the results are their place.
        divisor: of what is moved.
    """

    plan: FlatPlan
    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    results: tuple[Buffer, ...] | None
    filling: tuple[Sequence[Buffer] | None, ...]
    targets: tuple[Sequence[Buffer] | None, ...]
    divisor: float = 1

    @cached_property
    def views(self) -> list[list[Buffer]] | None:
        """The tensors in the results, ``[replica][tensor]``, if they are packed there too.

        They are where nothing lies between them and the results are the inputs.
        """
        if self.results is not self.inputs or self.plan.has_gaps or None in self.filling:
            return None
        offsets = self.plan.layout.offsets
        return [
            flat.parts(offsets, [tensor.shape for tensor in tensors or ()])
            for flat, tensors in zip(self.inputs, self.filling, strict=True)
        ]

    @cached_property
    def is_packed(self) -> bool:
        """Whether anything is packed into them."""
        return any([each is not None for each in self.filling])

    @cached_property
    def is_unpacked(self) -> bool:
        """Whether anything is moved or cast out of them."""
        if self.results is not None and self.results[0] is not self.outs[0]:
            return True
        return any([each is not None for each in self.targets])


def lay_out(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    options: Options,
    divisors: Sequence[float],
) -> list[PackBuffers]:
    """Allocates the flat buffers of each plan on every device; packs nothing yet.

    Tensors need not be packed if they lie in one flat buffer already, or if one is reduced alone
    in its own dtype; except a caller's memory that another physical device must read: peers can
    access only memory of our pool.

    Args:
        plans: from ``plan_packing``.
        gradients: ``gradients[tensor][replica]``.
        devices: of the replicas.
        options: what may be overwritten, and where results go.
        divisors: of what is moved into the flat buffers of each plan; but for 1, all is.

    Returns:
        Flat buffers, in the order of ``plans``.
    """
    owned_only = len(by_physical(devices)) > 1
    # With ``targets`` or ``consume`` much needs no new memory, and it is not known yet how much.
    fresh = options.targets is None and not options.consume
    allocator = _Allocator(plans if fresh else ())
    return [
        _allocate(plan, divisor, gradients, devices, options, (allocator, owned_only))
        for plan, divisor in zip(plans, divisors, strict=True)
    ]


class _Allocator:
    """Allocates new memory for the flat buffers of one call.

    Tensors that are reduced alone share one allocation for each device and dtype, like packed
    ones: allocating and freeing each tensor takes longer than all the rest.

    Args:
        plans: all plans to allocate; a tensor reduced alone that is not among them gets its own.
    """

    def __init__(self, plans: Sequence[FlatPlan]) -> None:
        self._alone = [plan for plan in plans if not plan.together]
        # (device, id of a dtype) -> id of a plan -> its part, until it is taken
        self._parts: dict[tuple[Device, int], dict[int, Buffer]] = {}

    def take(self, plan: FlatPlan, device: Device, dtype: DType) -> Buffer:
        """Returns a buffer for a whole plan."""
        if not plan.together:
            key = (device, id(dtype))
            if key not in self._parts:
                self._parts[key] = self._shared(device, dtype)
            part = self._parts[key].pop(id(plan), None)
            if part is not None:
                return part
        return device.allocate((plan.layout.size,), dtype)

    def _shared(self, device: Device, dtype: DType) -> dict[int, Buffer]:
        plans = [
            plan for plan in self._alone if dtype in (plan.wire, plan.sum_dtype, plan.out_dtype)
        ]
        if len(plans) < 2:
            return {}
        sizes = [plan.layout.size for plan in plans]
        layout = flat_layout(sizes, dtype.itemsize)
        whole = device.allocate((layout.size,), dtype)
        parts = whole.parts(layout.offsets, [(size,) for size in sizes])
        return {id(plan): part for plan, part in zip(plans, parts, strict=True)}


def _allocate(
    plan: FlatPlan,
    divisor: float,
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    options: Options,
    memory: tuple[_Allocator, bool],
) -> PackBuffers:
    allocator, owned_only = memory
    targets = options.targets
    tensors = list(zip(*[gradients[tensor] for tensor in plan.tensors], strict=True))
    wanted = targets and list(zip(*[targets[tensor] for tensor in plan.tensors], strict=True))
    as_it_is = plan.wire == plan.dtype and divisor == 1
    inputs, outs, filling, leaving = [], [], [], []
    for replica, device in enumerate(devices):
        flat = None
        if as_it_is and _may_be_flat(tensors[replica]):
            flat = _already_flat(plan, tensors[replica], owned_only)
        filling.append(tensors[replica] if flat is None else None)
        ours = flat is None or options.consume
        if flat is None:
            flat = allocator.take(plan, device, plan.wire)
        inputs.append(flat)
        out = None
        if wanted is not None and options.in_place and plan.sum_dtype == plan.out_dtype:
            out = _already_flat(plan, wanted[replica], owned_only, written=True)
        leaving.append(wanted[replica] if wanted is not None and out is None else None)
        if out is None and ours and plan.wire == plan.sum_dtype:
            out = flat
        outs.append(allocator.take(plan, device, plan.sum_dtype) if out is None else out)
    results = _results(plan, outs, allocator, wanted is not None)
    all_inputs = tuple(inputs)
    if results is not None and results == all_inputs:
        results = all_inputs
    return PackBuffers(
        plan, all_inputs, tuple(outs), results, tuple(filling), tuple(leaving), divisor
    )


def _results(
    plan: FlatPlan, outs: Sequence[Buffer], allocator: _Allocator, in_targets: bool
) -> tuple[Buffer, ...] | None:
    """Returns the flat buffers of the results: the outs themselves if their dtype is right."""
    if in_targets:
        return None
    if plan.sum_dtype == plan.out_dtype:
        return tuple(outs)
    return tuple(allocator.take(plan, out.device, plan.out_dtype) for out in outs)


def fill(parts: Iterable[tuple[PackBuffers, int, int]]) -> None:
    """Packs tensors into ranges of flat buffers: one launch per physical device and dtype.

    Args:
        parts: flat buffers, and the first and last but one element of a range of each.
    """
    moves: dict[float, list[_Move]] = {}
    for pack_buffers, start, stop in parts:
        if not pack_buffers.is_packed:
            continue
        pieces = pack_buffers.plan.pieces[start, stop]
        for replica, tensors in enumerate(pack_buffers.filling):
            if tensors is not None:
                flat = pack_buffers.inputs[replica]
                if pack_buffers.views is None:
                    into = flat.parts(pieces.begins, pieces.spans)  # gaps are written too
                else:
                    into = _parts_of(pack_buffers.views[replica], pieces)
                move = (flat.device, into, _parts_of(tensors, pieces))
                moves.setdefault(pack_buffers.divisor, []).append(move)
    for divisor, each in moves.items():
        _move(each, divisor)


def unpack_into(parts: Iterable[tuple[PackBuffers, int, int]]) -> None:
    """Unpacks sums from ranges of the outs to where the results go; see ``fill``."""
    moves: list[_Move] = []
    for pack_buffers, start, stop in parts:
        for replica, out in enumerate(pack_buffers.outs if pack_buffers.is_unpacked else ()):
            targets = pack_buffers.targets[replica]
            if targets is not None:
                pieces = pack_buffers.plan.pieces[start, stop]
                sums = out.parts(pieces.begins, pieces.shapes)
                moves.append((out.device, _parts_of(targets, pieces), sums))
            elif pack_buffers.results is not None and pack_buffers.results[replica] is not out:
                whole = ([start], [(stop - start,)])
                moves.append(
                    (out.device, pack_buffers.results[replica].parts(*whole), out.parts(*whole))
                )
    _move(moves, 1)


def unpack(
    pack_buffers: Sequence[PackBuffers], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[Buffer, ...]]:
    """Returns the reduced tensors, views of the flat results: ``[tensor][replica]``."""
    found: list[tuple[Buffer, ...]] = [()] * len(shapes)
    for flat in pack_buffers:
        inside = [shapes[tensor] for tensor in flat.plan.tensors]
        if len(inside) == 1 and flat.results and inside[0] == flat.results[0].shape:
            found[flat.plan.tensors[0]] = flat.results
            continue
        offsets = flat.plan.layout.offsets
        columns = flat.views or [result.parts(offsets, inside) for result in flat.results or ()]
        for tensor, replicas in zip(flat.plan.tensors, zip(*columns, strict=True), strict=True):
            found[tensor] = replicas
    return found


def _parts_of(tensors: Sequence[Buffer], pieces: Pieces) -> list[Buffer]:
    """Returns the part of each tensor that lies in a range."""
    found = [tensors[index] for index in pieces.tensors]
    for place, start in pieces.cut:
        (found[place],) = found[place].parts([start], [pieces.shapes[place]])
    return found


def move_into(pairs: Sequence[tuple[Buffer, Buffer]]) -> None:
    """Copies each second buffer into its first: one launch per physical device."""
    _move([(out.device, [out], [part]) for out, part in pairs], 1)


def _move(moves: Sequence[_Move], divisor: float) -> None:
    """Copies and divides buffers: one launch per physical device and dtype."""
    by_gpu: dict[int, list[_Move]] = {}
    for move in moves:
        by_gpu.setdefault(move[0].physical, []).append(move)
    for here in by_gpu.values():
        sharing = [device for device, _, _ in here]
        leader = sharing[0]
        if len(here) > 1:
            join_streams(leader, sharing)
        ops.pack_unchecked([each[1:] for each in here], divisor=divisor, device=leader)
        if len(here) > 1:
            fork_streams(leader, sharing)


def _may_be_flat(tensors: Sequence[Buffer]) -> bool:
    """Whether the first and the last tensor lie in one block, if neither is empty."""
    first, last = tensors[0], tensors[-1]
    return first.block is last.block or not first.size or not last.size


def _already_flat(
    plan: FlatPlan, tensors: Sequence[Buffer], owned_only: bool, *, written: bool = False
) -> Buffer | None:
    """Returns the flat buffer in which the tensors already lie as planned, or None.

    One that is written has no gaps, or gaps that belong to no tensor.
    """
    if not plan.together:
        return _alone(tensors[0], owned_only)
    filled = [index for index, tensor in enumerate(tensors) if tensor.size]
    if not filled:
        return tensors[0] if tensors[0].size == plan.layout.size else None
    block = tensors[filled[0]].block
    if owned_only and not block.owned:
        return None
    if written and plan.has_gaps and not _in_gaps(plan, tensors, block):
        return None
    offsets, itemsize = plan.layout.offsets, tensors[filled[0]].dtype.itemsize
    start = tensors[filled[0]].address - offsets[filled[0]] * itemsize
    for index in filled:
        expected = start + offsets[index] * itemsize
        if tensors[index].block is not block or tensors[index].address != expected:
            return None
    offset = start - block.address
    size = plan.layout.size
    inside = offset >= 0 and offset + size * itemsize <= block.nbytes
    if not inside or start % ALIGNMENT:
        return None
    return Buffer(block, offset, (size,), tensors[filled[0]].dtype)


def _alone(tensor: Buffer, owned_only: bool) -> Buffer | None:
    """Returns a single tensor as a flat buffer, if it can be read in place."""
    if tensor.size and owned_only and not tensor.block.owned:
        return None
    return tensor if len(tensor.shape) == 1 else tensor.parts((0,), ((tensor.size,),))[0]


def _in_gaps(plan: FlatPlan, tensors: Sequence[Buffer], block: Block) -> bool:
    """Whether the planned gaps behind the tensors belong to no other tensor."""
    gaps = block.gaps or {}
    itemsize = tensors[0].dtype.itemsize
    return all(
        (span - tensor.size) * itemsize <= gaps.get(tensor.offset + tensor.nbytes, 0)
        for tensor, span in zip(tensors, plan.layout.spans, strict=True)
        if tensor.size
    )
