"""Packs tensors into flat buffers and unpacks them, according to a ``FlatPlan``.

If the tensors already form a flat buffer (``mesh.flat_buffer``), it is used in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradreduce import ops
from gradreduce.device import ALIGNMENT, Block, Buffer, Device, DType, Row, flat_layout

from .algorithm import Algorithm, Job
from .packing import FlatPlan, Pieces


class Factor(NamedTuple):
    """What a move multiplies and divides by; with weight 0 it writes zeros and reads nothing."""

    weight: float = 1
    divisor: float = 1


ONE = Factor()

# A device, a factor, and the buffers that are written and read, one for one.
PackMove = tuple[Device, Factor, Sequence[Buffer], Sequence[Buffer]]
# The tensors of one replica; None: they are in a flat buffer.
_Tensors = Sequence[Buffer] | None
_FlatBuffers = list[Any]  # the flat buffer of each replica; None until it is allocated


@dataclass
class PackBuffers:
    """The flat buffers of one plan while they are reduced.

    Each list has None for a device that does not send or receive a share.

    Attributes:
        plan: the layout.
        inputs: one for each replica.
        outs: one for each replica; the inputs themselves if those may be overwritten.
        results: one for each replica: the outs, or the memory to which they are cast; None if the
            results go into ``targets``.
        filling: for each replica the tensors that are moved into its input; None if they are there
            already.
        targets: for each replica the memory to which its sums are moved; None if they stay in
            ``results``.
        is_moved: whether tensors are packed into the inputs, or moved or cast out of the outs.
        views: the tensors in the results, ``[replica][tensor]``, if they can be packed through
            them: there are no gaps, and the results are the inputs.
    """

    plan: FlatPlan
    inputs: list[Buffer]
    outs: list[Buffer]
    results: list[Buffer] | None
    filling: list[_Tensors]
    targets: list[_Tensors]
    is_moved: bool
    views: list[list[Buffer]] | None = None

    def job(self, start: int, stop: int, divisor: float) -> Job:
        """Returns the reduction of a range; ``divisor`` divides the sums, unless packing did."""
        owner, senders, receivers = self.plan.share
        divisor = 1 if self.plan.divides_early else divisor
        return Job(self.inputs[senders], self.outs[receivers], divisor, owner).part(start, stop)


# Flat buffers, and the begin and end of a range of elements.
Pack = tuple[PackBuffers, int, int]


def lay_out(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    algorithm: Algorithm,
    *,
    targets: Sequence[Sequence[Buffer]] | None = None,
    consume: bool = False,
) -> list[PackBuffers]:
    """Allocates the flat buffers of each plan on every device; packs nothing yet.

    Tensors are not packed if they are in one flat buffer already, or if a tensor is reduced alone
    in its own dtype; unless peers have to access the memory and cannot.

    Args:
        plans: the result of ``plan_packing``.
        gradients: ``gradients[tensor][replica]``, one for each sender of its plan.
        algorithm: the algorithm that reduces them.
        targets: ``targets[tensor][replica]``, the memory for the results, one for each receiver.
            Default: new memory.
        consume: whether gradients, and the gaps between them in a flat buffer, may be overwritten.

    Returns:
        The flat buffers, in the order of ``plans``.
    """
    memory = _NewMemory(algorithm.senders)
    pack_buffers = []
    for plan in plans:
        tensors = _by_replica(plan, gradients)
        out_tensors = None if targets is None else _by_replica(plan, targets)
        pack_buffers.append(_lay_out_plan(plan, tensors, out_tensors, algorithm, consume, memory))
    memory.allocate()
    for packed in pack_buffers:
        if packed.outs == packed.inputs and not packed.plan.has_gaps and None not in packed.filling:
            shapes = [gradients[tensor][0].shape for tensor in packed.plan.tensors]
            layout = packed.plan.layout
            packed.views = [
                flat.parts(layout.offsets, layout.sizes, shapes) for flat in packed.inputs
            ]
    return pack_buffers


def _by_replica(plan: FlatPlan, rows: Sequence[Sequence[Buffer]]) -> list[tuple[Buffer, ...]]:
    """Returns the tensors of a plan, ``[replica][tensor]``."""
    return list(zip(*[rows[tensor] for tensor in plan.tensors], strict=True))


class _NewMemory:
    """New flat buffers for one call: one allocation for each device and dtype.

    Separate allocations would take longer than the rest of the call.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        # For each list of replicas and dtype: the shapes, and the lists that receive the buffers.
        self._missing: dict[
            tuple[tuple[int, ...], DType], list[tuple[tuple[int, ...], tuple[_FlatBuffers, ...]]]
        ] = {}

    def add(
        self, replicas: Sequence[int], dtype: DType, shape: tuple[int, ...], *into: _FlatBuffers
    ) -> None:
        """Requests a flat buffer for each replica; ``allocate`` puts them into these lists."""
        if replicas:
            self._missing.setdefault((tuple(replicas), dtype), []).append((shape, into))

    def add_missing(
        self, plan: FlatPlan, shape: tuple[int, ...], inputs: _FlatBuffers, outs: _FlatBuffers
    ) -> None:
        """Requests inputs and outs that are None; one buffer if dtypes are equal."""
        everyone = range(len(inputs))
        no_input = [replica for replica in everyone[plan.share.senders] if inputs[replica] is None]
        no_out = [replica for replica in everyone[plan.share.receivers] if outs[replica] is None]
        if plan.wire is plan.sum_dtype and no_input and no_out:
            shared = set(no_input).intersection(no_out)
            self.add(sorted(shared), plan.wire, shape, inputs, outs)
            no_input = [replica for replica in no_input if replica not in shared]
            no_out = [replica for replica in no_out if replica not in shared]
        self.add(no_input, plan.wire, shape, inputs)
        self.add(no_out, plan.sum_dtype, shape, outs)

    def allocate(self) -> None:
        """Allocates all requested buffers."""
        for (replicas, dtype), missing in self._missing.items():
            shapes = [shape for shape, _ in missing]
            layout = flat_layout(list(map(math.prod, shapes)), dtype.itemsize)
            for replica in replicas:
                if len(missing) == 1:
                    parts = [self._devices[replica].allocate(shapes[0], dtype)]
                else:
                    memory = self._devices[replica].allocate((layout.size,), dtype)
                    parts = memory.parts(layout.offsets, layout.sizes, shapes)
                for part, (_, into) in zip(parts, missing, strict=True):
                    for buffers in into:
                        buffers[replica] = part


def _lay_out_plan(
    plan: FlatPlan,
    tensors: Sequence[tuple[Buffer, ...]],
    out_tensors: Sequence[tuple[Buffer, ...]] | None,
    algorithm: Algorithm,
    consume: bool,
    memory: _NewMemory,
) -> PackBuffers:
    """Lays out one plan: tensors of each sender, results in ``out_tensors`` of each receiver."""
    shape = tensors[0][0].shape if tensors and not plan.together else (plan.layout.size,)
    count, share = len(algorithm.senders), plan.share
    nothing: list[Any] = [None] * count
    inputs, outs, filling, targets = [nothing.copy() for _ in range(4)]
    if plan.wire is plan.dtype and not (plan.divides_early or plan.is_weighted):
        inputs[share.senders] = [_already_flat(plan, each, algorithm) for each in tensors]
    filling[share.senders] = [
        None if flat else each for each, flat in zip(tensors, inputs[share.senders], strict=True)
    ]
    if out_tensors is not None:
        writes_targets = algorithm.in_place or algorithm.writes_targets or share.owner is not None
        if writes_targets and plan.sum_dtype is plan.out_dtype:
            outs[share.receivers] = [
                _already_flat(plan, each, algorithm, written=True) for each in out_tensors
            ]
        targets[share.receivers] = [
            None if out else each
            for each, out in zip(out_tensors, outs[share.receivers], strict=True)
        ]
    if consume and plan.wire is plan.sum_dtype:
        pairs = zip(inputs[share.receivers], outs[share.receivers], strict=True)
        outs[share.receivers] = [out or flat for flat, out in pairs]
    memory.add_missing(plan, shape, inputs, outs)
    results = outs if out_tensors is None else None
    is_cast = out_tensors is None and plan.sum_dtype is not plan.out_dtype
    if is_cast:
        results = nothing.copy()
        memory.add(range(count)[share.receivers], plan.out_dtype, shape, results)
    is_moved = is_cast or any(filling) or any(targets)
    return PackBuffers(plan, inputs, outs, results, filling, targets, is_moved)


def moves_in(
    packs: Iterable[Pack],
    divisor: float,
    weights: Sequence[float] | None = None,
    *,
    exact: bool = False,
) -> list[PackMove]:
    """Returns the moves that pack tensors into their flat buffers.

    Args:
        packs: the packs.
        divisor: divides the terms of plans that divide early.
        weights: the weight of each replica; None: all are 1.
        exact: whether a replica with weight 0 becomes -0.0, which changes no sum. (+0.0 changes a
            sum of -0.0.)
    """
    moves: list[PackMove] = []
    for packed, start, stop in packs:
        pieces = packed.plan.pieces[start, stop]
        over = divisor if packed.plan.divides_early else 1
        for replica, tensors in enumerate(packed.filling):
            if tensors is not None:
                flat = packed.inputs[replica]
                factor = ONE
                if weights is not None or over != 1:
                    factor = Factor(1 if weights is None else weights[replica], over)
                if not factor.weight:
                    zeros = flat.parts([start], [stop - start])
                    moves.append((flat.device, factor, zeros, []))
                    if exact and flat.dtype.kind not in "iu":
                        moves.append((flat.device, Factor(divisor=-1), zeros, zeros))
                    continue
                if packed.views is None:
                    into = flat.parts(pieces.begins, pieces.spans)  # gaps are written too
                else:
                    into = _parts_of(packed.views[replica], pieces)
                moves.append((flat.device, factor, into, _parts_of(tensors, pieces)))
    return moves


def moves_out(packs: Iterable[Pack]) -> list[PackMove]:
    """Returns the moves that unpack sums from the outs to the results."""
    moves: list[PackMove] = []
    for packed, start, stop in packs:
        whole = ([start], [stop - start])
        for replica, out in enumerate(packed.outs):
            if out is None:
                continue
            targets = packed.targets[replica]
            if targets is not None:
                pieces = packed.plan.pieces[start, stop]
                if packed.views is None:
                    sums = out.parts(pieces.begins, pieces.sizes)
                else:
                    sums = _parts_of(packed.views[replica], pieces)
                moves.append((out.device, ONE, _parts_of(targets, pieces), sums))
            elif packed.results is not None and packed.results[replica] is not out:
                moves.append(
                    (out.device, ONE, packed.results[replica].parts(*whole), out.parts(*whole))
                )
    return moves


def unpack(
    pack_buffers: Sequence[PackBuffers], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[Buffer, ...]]:
    """Returns the reduced tensors, views of the flat results: ``[tensor][receiver]``."""
    reduced: list[tuple[Buffer, ...]] = [()] * len(shapes)
    for flat in pack_buffers:
        inside = [shapes[tensor] for tensor in flat.plan.tensors]
        assert flat.results is not None
        results = flat.results[flat.plan.share.receivers]
        if not results:  # another process receives the result
            continue

        layout = flat.plan.layout
        columns = flat.views
        if columns is None or flat.results is not flat.outs:
            columns = [result.parts(layout.offsets, layout.sizes, inside) for result in results]
        for tensor, replicas in zip(flat.plan.tensors, zip(*columns, strict=True), strict=True):
            reduced[tensor] = replicas
    return reduced


def _parts_of(tensors: Sequence[Buffer], pieces: Pieces) -> list[Buffer]:
    """Returns the part of each tensor that is in a range."""
    found = [tensors[index] for index in pieces.tensors]
    for place, start in pieces.cut:
        (found[place],) = found[place].parts([start], [pieces.sizes[place]])
    return found


def move(moves: Iterable[PackMove]) -> None:
    """Copies, scales and divides buffers: one launch per physical device, dtype and factor."""
    groups: dict[tuple[int, Factor], tuple[Device, list[list[Row]]]] = {}
    for device, factor, outs, inputs in moves:
        if not factor.weight:
            for out in outs:
                device.fill_zero(out)
            continue
        _, rows = groups.setdefault((device.physical, factor), (device, []))
        if outs:
            rows.append(list(zip(outs, inputs, strict=True)))
    for (_, factor), (device, rows) in groups.items():
        if factor.weight == 1:
            ops.pack_rows(rows, divisor=factor.divisor, device=device)
        else:
            ops.scale_rows(rows, factor.weight, divisor=factor.divisor, device=device)


def _already_flat(
    plan: FlatPlan, tensors: Sequence[Buffer], algorithm: Algorithm, *, written: bool = False
) -> Buffer | None:
    """Returns the flat buffer in which the tensors already are as planned, or None.

    If it is written, its gaps must not belong to other tensors.
    """
    if not plan.together:
        return tensors[0] if not algorithm.reads_peers or tensors[0].block.peer_mapped else None
    first = None  # the first non-empty tensor, and the address of the flat buffer
    for tensor, offset in zip(tensors, plan.layout.offsets, strict=True):
        if tensor.size:
            begin = tensor.address - offset * tensor.dtype.itemsize
            if first is None:
                first, start = tensor, begin
            elif tensor.block is not first.block or begin != start:
                return None
    if first is None:
        return tensors[0]
    block, size = first.block, plan.layout.size
    aligned = start % ALIGNMENT == 0
    start -= block.address
    inside = start >= 0 and start + size * first.dtype.itemsize <= block.nbytes
    accessible = not algorithm.reads_peers or block.peer_mapped
    free = not written or not plan.has_gaps or _in_gaps(plan, tensors, block)
    if not (aligned and inside and accessible and free):
        return None
    return first if first.shape == (size,) else Buffer(block, start, (size,), first.dtype)


def _in_gaps(plan: FlatPlan, tensors: Sequence[Buffer], block: Block) -> bool:
    """Whether the planned gaps after the tensors belong to no other tensor."""
    gaps = block.gaps or {}
    itemsize = tensors[0].dtype.itemsize
    return all(
        (span - tensor.size) * itemsize <= gaps.get(tensor.offset + tensor.nbytes, 0)
        for tensor, span in zip(tensors, plan.layout.spans, strict=True)
        if tensor.size
    )
