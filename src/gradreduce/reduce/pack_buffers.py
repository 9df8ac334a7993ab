"""How tensors get into flat buffers and out of them again, as a plan says; never plans.

A flat buffer that its tensors already are (``mesh.flat_buffer``) is used where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

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

from .packing import FlatPlan, Piece

__all__ = [
    "Options",
    "PackBuffers",
    "fill",
    "lay_out",
    "move_into",
    "pack",
    "unpack",
    "unpack_into",
]

# What is written and what is read on a device, one by one.
_Move = tuple[Device, list[Buffer], list[Buffer]]


@dataclass(frozen=True)
class Options:
    """What the flow may do with memory.

    Attributes:
        consume: gradients may be overwritten, and what lies between them in a flat buffer.
        given: ``given[tensor][replica]``, where the results go; None: into new memory.
        in_place: whether what is given may be written while other replicas are still read.
    """

    consume: bool = False
    given: Sequence[Sequence[Buffer]] | None = None
    in_place: bool = True


@dataclass(frozen=True)
class PackBuffers:
    """The flat buffers of one plan while they are reduced.

    Attributes:
        plan: what they hold.
        inputs: one for each replica.
        outs: one for each replica; the inputs themselves where those are ours to overwrite.
        results: one for each replica: the outs, or where they are cast to; None where the results
            go into given memory.
        filling: for each replica what is moved into its input; None if it lies there.
        given: for each replica where its sums are moved; None if the results are their place.
        divisor: of what is moved.
    """

    plan: FlatPlan
    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    results: tuple[Buffer, ...] | None
    filling: tuple[Sequence[Buffer] | None, ...]
    given: tuple[Sequence[Buffer] | None, ...]
    divisor: float = 1

    @property
    def is_moved(self) -> bool:
        """Whether anything is moved into them or out of them."""
        cast = self.results is not None and self.results[0] is not self.outs[0]
        return cast or any(each is not None for each in (*self.filling, *self.given))


def lay_out(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    options: Options,
    divisors: Sequence[float],
) -> list[PackBuffers]:
    """The memory of each plan on every device; asks for what is missing, moves nothing.

    Nothing will be moved where the tensors lie in one flat buffer already, or where one travels
    alone, in the dtype in which it travels; unless it is a caller's memory that another physical
    device must read: a peer reads our pool's only.

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
    # Of what is given or may be overwritten much is no new memory, and nobody knows yet how much.
    fresh = options.given is None and not options.consume
    room = _Room(plans if fresh else ())
    made = []
    for plan, divisor in zip(plans, divisors, strict=True):
        pack_buffers = None
        if fresh and divisor == 1 and not plan.together:
            pack_buffers = _left_alone(plan, gradients[plan.tensors[0]], devices, room, owned_only)
        made.append(
            pack_buffers
            or _laid_out(plan, divisor, gradients, devices, options, (room, owned_only))
        )
    return made


def _left_alone(
    plan: FlatPlan,
    replicas: Sequence[Buffer],
    devices: Sequence[Device],
    room: _Room,
    owned_only: bool,
) -> PackBuffers | None:
    """As ``_laid_out`` for a tensor that is read where it lies, in a third of the time.

    Into new memory of its dtype. None where it is not that simple.
    """
    if not plan.wire == plan.dtype == plan.out_dtype:
        return None
    if owned_only and not all([each.block.owned for each in replicas]):
        return None
    outs = tuple([room.take(plan, device, plan.dtype) for device in devices])
    nothing = (None,) * len(devices)
    return PackBuffers(plan, tuple(replicas), outs, outs, nothing, nothing)


class _Room:
    """New memory for the flat buffers of one call.

    What travels alone lies in one allocation for each device and dtype, as what travels together
    does: to ask the pool for each tensor, and to give it back, takes longer than all the rest.

    Args:
        plans: of all that is asked for; what travels alone and is not among them stands alone.
    """

    def __init__(self, plans: Sequence[FlatPlan]) -> None:
        self._alone = [plan for plan in plans if not plan.together]
        # (device, id of a dtype) -> id of a plan -> its part, until it is taken
        self._parts: dict[tuple[Device, int], dict[int, Buffer]] = {}

    def take(self, plan: FlatPlan, device: Device, dtype: DType) -> Buffer:
        """A buffer for all of a plan."""
        if not plan.together:
            key = (device, id(dtype))
            if key not in self._parts:
                self._parts[key] = self._shared(device, dtype)
            part = self._parts[key].pop(id(plan), None)
            if part is not None:
                return part
        return device.empty((plan.layout.size,), dtype)

    def _shared(self, device: Device, dtype: DType) -> dict[int, Buffer]:
        plans = [
            plan for plan in self._alone if dtype in (plan.wire, plan.sum_dtype, plan.out_dtype)
        ]
        if len(plans) < 2:
            return {}
        sizes = [plan.layout.size for plan in plans]
        layout = flat_layout(sizes, dtype.itemsize)
        whole = device.empty((layout.size,), dtype)
        parts = whole.parts(layout.offsets, [(size,) for size in sizes])
        return {id(plan): part for plan, part in zip(plans, parts, strict=True)}


def _laid_out(
    plan: FlatPlan,
    divisor: float,
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    options: Options,
    memory: tuple[_Room, bool],
) -> PackBuffers:
    room, owned_only = memory
    replicas = range(len(devices))
    given = options.given
    tensors = [[gradients[tensor][replica] for tensor in plan.tensors] for replica in replicas]
    targets = given and [[given[tensor][at] for tensor in plan.tensors] for at in replicas]
    as_it_is = plan.wire == plan.dtype and divisor == 1
    inputs, outs, filling, leaving = [], [], [], []
    for replica, device in enumerate(devices):
        flat = _already_flat(plan, tensors[replica], owned_only) if as_it_is else None
        filling.append(tensors[replica] if flat is None else None)
        ours = flat is None or options.consume
        if flat is None:
            flat = room.take(plan, device, plan.wire)
        inputs.append(flat)
        out = None
        if targets is not None and options.in_place and _is_written(plan):
            out = _already_flat(plan, targets[replica], owned_only, written=True)
        leaving.append(targets[replica] if targets is not None and out is None else None)
        if out is None and ours and plan.wire == plan.sum_dtype:
            out = flat
        outs.append(room.take(plan, device, plan.sum_dtype) if out is None else out)
    return PackBuffers(
        plan, tuple(inputs), tuple(outs), _results(plan, outs, room, given is not None),
        tuple(filling), tuple(leaving), divisor,
    )  # fmt: skip


def _is_written(plan: FlatPlan) -> bool:
    return plan.sum_dtype == plan.out_dtype


def _results(
    plan: FlatPlan, outs: Sequence[Buffer], room: _Room, given: bool
) -> tuple[Buffer, ...] | None:
    """Flat buffers of the results; the outs themselves unless their dtype is another."""
    if given:
        return None
    if _is_written(plan):
        return tuple(outs)
    return tuple(room.take(plan, out.device, plan.out_dtype) for out in outs)


def fill(parts: Iterable[tuple[PackBuffers, int, int]]) -> None:
    """Moves tensors into ranges of flat buffers: one launch for each physical device and dtype.

    Args:
        parts: flat buffers, and the first and last but one element of a range of each.
    """
    moves: dict[float, list[_Move]] = {}
    for pack_buffers, start, stop in parts:
        if not any(tensors is not None for tensors in pack_buffers.filling):
            continue
        pieces = pack_buffers.plan.pieces(start, stop)
        begins = [at.begin for at in pieces]
        spans = [(at.end - at.begin,) for at in pieces]  # the gap behind a tensor is written too
        for flat, tensors in zip(pack_buffers.inputs, pack_buffers.filling, strict=True):
            if tensors is not None:
                move = (flat.device, flat.parts(begins, spans), _parts_of(tensors, pieces))
                moves.setdefault(pack_buffers.divisor, []).append(move)
    for divisor, each in moves.items():
        _move(each, divisor)


def unpack_into(parts: Iterable[tuple[PackBuffers, int, int]]) -> None:
    """Moves sums from ranges of the outs to where the results go; see ``fill``."""
    moves: list[_Move] = []
    for pack_buffers, start, stop in parts:
        for replica, out in enumerate(pack_buffers.outs):
            given = pack_buffers.given[replica]
            if given is not None:
                pieces = pack_buffers.plan.pieces(start, stop)
                begins = [at.begin for at in pieces]
                spans = [(at.stop - at.start,) for at in pieces]
                move = (out.device, _parts_of(given, pieces), out.parts(begins, spans))
                moves.append(move)
            elif pack_buffers.results is not None and pack_buffers.results[replica] is not out:
                whole = ([start], [(stop - start,)])
                moves.append(
                    (out.device, pack_buffers.results[replica].parts(*whole), out.parts(*whole))
                )
    _move(moves, 1)


def pack(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    *,
    consume: bool,
) -> list[PackBuffers]:
    """``lay_out``, and ``fill`` at once."""
    made = lay_out(plans, gradients, devices, Options(consume), [1] * len(plans))
    fill((pack_buffers, 0, pack_buffers.plan.layout.size) for pack_buffers in made)
    return made


def unpack(
    pack_buffers: Sequence[PackBuffers], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[Buffer, ...]]:
    """The reduced tensors: views of the flat results, ``[tensor][replica]`` in batch order."""
    found: list[tuple[Buffer, ...]] = [()] * len(shapes)
    for flat in pack_buffers:
        inside = [shapes[tensor] for tensor in flat.plan.tensors]
        if len(inside) == 1 and flat.results and inside[0] == flat.results[0].shape:
            found[flat.plan.tensors[0]] = flat.results
            continue
        offsets = flat.plan.layout.offsets
        columns = [result.parts(offsets, inside) for result in flat.results or ()]
        for tensor, replicas in zip(flat.plan.tensors, zip(*columns, strict=True), strict=True):
            found[tensor] = replicas
    return found


def _parts_of(tensors: Sequence[Buffer], pieces: Sequence[Piece]) -> list[Buffer]:
    """Of each tensor in a range the part that is in it."""
    found = []
    for index, _, _, first, last in pieces:
        tensor = tensors[index]
        whole = last - first == tensor.size
        found.append(tensor if whole else tensor.parts([first], [(last - first,)])[0])
    return found


def move_into(given: Sequence[tuple[Buffer, Buffer]]) -> None:
    """Copies each second into its first, on the same device: one launch for each physical one."""
    _move([(out.device, [out], [part]) for out, part in given], 1)


def _move(moves: Sequence[_Move], divisor: float) -> None:
    """One launch for each physical device and dtype."""
    devices = [device for device, _, _ in moves]
    for indices in by_physical(devices).values():
        leader = devices[indices[0]]
        sharing = [devices[index] for index in indices]
        join_streams(leader, sharing)
        ops.pack_unchecked(
            list(chain.from_iterable(moves[index][1] for index in indices)),
            list(chain.from_iterable(moves[index][2] for index in indices)),
            divisor=divisor,
            device=leader,
        )
        fork_streams(leader, sharing)


def _already_flat(
    plan: FlatPlan, tensors: Sequence[Buffer], owned_only: bool, *, written: bool = False
) -> Buffer | None:
    """The flat buffer in which the tensors lie just as planned; None if they do not.

    One that is written has no gaps, unless they are nobody's.
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
    """What travels alone is a flat buffer itself."""
    if tensor.size and owned_only and not tensor.block.owned:
        return None
    return tensor if len(tensor.shape) == 1 else tensor.parts((0,), ((tensor.size,),))[0]


def _in_gaps(plan: FlatPlan, tensors: Sequence[Buffer], block: Block) -> bool:
    """Whether all that lies behind the tensors, as planned, is nobody's: some may be cut short."""
    gaps = block.gaps or {}
    itemsize = tensors[0].dtype.itemsize
    return all(
        (span - tensor.size) * itemsize <= gaps.get(tensor.offset + tensor.nbytes, 0)
        for tensor, span in zip(tensors, plan.layout.spans, strict=True)
        if tensor.size
    )
