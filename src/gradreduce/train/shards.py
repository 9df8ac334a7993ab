"""Distributes the update of a ``SyncStep`` over the replicas (ZeRO stage 1).

All variables of a dtype, laid end to end, are cut into one part for each replica, of about equal
size. A *shard* is the piece of one variable in one part. It is a Variable that shares memory with
the copy on its replica. So the optimizer creates slots only for shards, and updates them like any
Variable::

    sums of all replicas ──reduce-scatter──► means of own shards ──optimize──► own shards
                                                ──all-gather──► all copies of the variables

A variable with sparse gradients is cut between rows. Every replica gets the merged rows of all
replicas, and updates those that are in its shards.

Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from gradreduce import ops
from gradreduce.accumulator.dense_storage import DenseStorage
from gradreduce.accumulator.multi import reduce_now
from gradreduce.accumulator.state import AccumulatorState
from gradreduce.arrays.distributed import Part, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable, begin_writes
from gradreduce.checkpoint import StateEntry, by_name, downloader
from gradreduce.comm.description import Description
from gradreduce.comm.replicas import Replicas, abort_others_on_error
from gradreduce.device import Buffer, DType, Parcel, accumulate_dtype, as_dtype
from gradreduce.errors import brief
from gradreduce.optim import Optimizer
from gradreduce.optim.checkpoint import ready_slots
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps, is_all_reduce
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.reduce.packing import plan_packing
from gradreduce.reduce.pipeline import (
    BatchPlan,
    CollectiveName,
    plan_shares,
    reduce_batch,
    rehearse_reduction,
)
from gradreduce.reduce.process_values import describe_batch
from gradreduce.weights import from_units

from .scaling import GradientScaling

_SUM = as_dtype("float64")  # the dtype of the sum of squares of a block
_MOST_PLANS = 64  # plans are kept for this many different sets of variables with a gradient


class VariableShard(NamedTuple):
    """A piece of a variable, which one replica updates.

    Attributes:
        variable: the index of the variable.
        owner: the number of the replica that updates it, counted over all processes.
        start: the first element.
        size: the number of elements.
    """

    variable: int
    owner: int
    start: int
    size: int

    def of(self, whole: Buffer) -> Buffer:
        """Returns this piece of a buffer of the variable's size."""
        (part,) = whole.parts([self.start], [self.size])
        return part


def plan_shards(
    variables: Sequence[Variable], num_replicas: int, blocks: Sequence[int]
) -> list[VariableShard]:
    """Cuts variables into shards of whole blocks; returns the shards in the order of owners.

    Args:
        variables: the variables to cut.
        num_replicas: the number of owners.
        blocks: for each variable the number of elements of a block, of which the first starts at
            the start of the variable.
    """
    sizes = tuple([variable.buffers[0].size for variable in variables])
    dtypes = tuple([(variable.dtype, variable.dtype) for variable in variables])
    shards = []
    for flat in plan_packing(sizes, dtypes, num_replicas, 0, 0):
        for owner, cut in enumerate(flat.packs):
            pieces = flat.pieces[cut]
            starts = dict(pieces.cut)
            for place, (tensor, size) in enumerate(zip(pieces.tensors, pieces.sizes, strict=True)):
                index, start = flat.tensors[tensor], starts.get(place, 0)
                first = _at_block(start, sizes[index], blocks[index])
                end = _at_block(start + size, sizes[index], blocks[index])
                if size > 0 and end > first:
                    shards.append(VariableShard(index, owner, first, end - first))
    return sorted(shards, key=lambda shard: shard.owner)


def _at_block(element: int, size: int, block: int) -> int:
    """Returns the start of the block nearest to an element, or the variable's end."""
    return size if element == size else min((element + block // 2) // block * block, size)


class ShardMeans(NamedTuple):
    """The mean gradients of an update, divided among the replicas.

    Attributes:
        indices: the indices of all variables with a gradient, ascending.
        of_shard: the means of dense gradients, for the shards of this process.
        rows: the merged rows of sparse gradients on each device, by the index of the variable.
    """

    indices: list[int]
    of_shard: dict[VariableShard, Buffer]
    rows: dict[int, Sequence[Part]]


class ShardedUpdate:
    """The last stages of a ``SyncStep``: each replica updates its shards, and copies them to all.

    Args:
        variables: the variables of the step.
        sparse: the indices of those with sparse gradients.
        optimizer: an optimizer with an elementwise rule.
        cross_device_ops: an ``AllReduceCrossDeviceOps``.
        scaling: scales the mean gradients.

    Attributes:
        variables: a Variable for each shard of this process.

    Raises:
        ValueError: the optimizer or ``cross_device_ops`` cannot be used, or the optimizer already
            has slots of these variables.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        sparse: Collection[int],
        optimizer: Optimizer,
        cross_device_ops: CrossDeviceOps,
        scaling: GradientScaling,
    ) -> None:
        if not isinstance(cross_device_ops, AllReduceCrossDeviceOps) or not is_all_reduce(
            cross_device_ops
        ):
            raise ValueError(
                "shard_optimizer=True needs an AllReduceCrossDeviceOps, or a subclass that keeps "
                f"its reduce_batch, not {brief(cross_device_ops)}"
            )
        if not optimizer._is_elementwise:
            raise ValueError(
                f"shard_optimizer=True needs an elementwise rule; the rule of {optimizer!r} is not "
                "elementwise"
            )
        self._optimizer = optimizer
        self._whole, self._devices = tuple(variables), variables[0].devices
        self._replicas = Replicas(self._devices)
        self._num_replicas, self._first = self._replicas.count, self._replicas.first
        self._scaling = scaling
        block = ops.BLOCK if scaling.acts else 1
        blocks = [
            max(1, math.prod(variable.shape[1:])) if index in sparse else block
            for index, variable in enumerate(variables)
        ]
        self._shards = plan_shards(variables, self._num_replicas, blocks)
        self._own: dict[VariableShard, Variable] = {}
        for shard in self._shards:
            if 0 <= shard.owner - self._first < len(self._devices):
                variable = variables[shard.variable]
                memory = shard.of(variable.buffers[shard.owner - self._first])
                if shard.variable in sparse:
                    num_rows = shard.size // blocks[shard.variable]
                    memory = memory.view(0, (num_rows, *variable.shape[1:]))
                name = f"{variable.name}/shard_{shard.owner}"
                self._own[shard] = Variable._on_buffers([memory], name, trainable=True)
        self._check_unused()
        self.variables = tuple(self._own.values())
        self._planned = lru_cache(_MOST_PLANS)(self._plan)
        optimizer._rehearse_update(
            [part for shard, part in self._own.items() if shard.variable in sparse], sparse=True
        )
        self._settings = cross_device_ops.settings._replace(
            num_words=cross_device_ops.words if cross_device_ops.exact else 1
        )
        for dtype in {variable.dtype: None for variable in variables}:
            rehearse_reduction(
                self._settings, self._devices, accumulate_dtype(dtype), dtype,
                call="reduce-scatter",
            )  # fmt: skip
            rehearse_reduction(self._settings, self._devices, dtype, dtype, call="all-gather")
        if scaling.acts:
            rehearse_reduction(self._settings, self._devices, _SUM, _SUM, call="all-gather")

    def _check_unused(self) -> None:
        """Raises if the optimizer has slots that this step would not use."""
        names = {variable.name for variable in (*self._whole, *self._own.values())}
        slots = self._optimizer._slots.by_name.values()
        used = [each.name for of_name in slots for each in of_name if each.name in names]
        if used:
            raise ValueError(
                f"{self._optimizer!r} already has slots of {used[0]!r}, and shard_optimizer=True "
                "cannot divide them: pass a new optimizer, and load a state of the SyncStep"
            )

    # -- reduce -----------------------------------------------------------------------------------

    def reduce(self, states: Sequence[AccumulatorState], num_required: int) -> ShardMeans | None:
        """See ``UpdateStages``."""
        index_of = {state: index for index, state in enumerate(states)}
        return reduce_now(states, num_required, partial(self._reduce, index_of))

    def _reduce(
        self,
        index_of: Mapping[AccumulatorState, int],
        states: Sequence[AccumulatorState],
        guard: ExitStack,
    ) -> ShardMeans:
        """Reduces the sums of these states; see ``take_locked``."""
        sparse = [state for state in states if state.storage.is_sparse]
        rows = sparse[0].storage.take(sparse, guard) if sparse else {}
        of_shard: dict[VariableShard, Buffer] = {}
        dense = [state for state in states if not state.storage.is_sparse]
        for count, excess in dict.fromkeys([(state.count, state.excess) for state in dense]):
            together = [state for state in dense if (state.count, state.excess) == (count, excess)]
            indices, storage = [index_of[state] for state in together], together[0].storage
            assert isinstance(storage, DenseStorage)
            sums = dict(zip(indices, storage.partial_sums(together), strict=True))
            chosen = [shard for shard in self._shards if shard.variable in sums]
            divisor: float | None = count * self._num_replicas / len(self._devices)
            weight = from_units(together[0].weight()) if excess else None
            plan = self._planned(
                "reduce-scatter", tuple(indices), divisor if weight is None else None
            )
            parts = [[shard.of(buffer) for buffer in sums[shard.variable]] for shard in chosen]
            results = reduce_batch(plan, parts, positions=indices, divisor=weight)
            storage.report_inexact(together)
            of_shard |= {
                shard: mean for shard, means in zip(chosen, results, strict=True) for mean in means
            }
        return ShardMeans(
            sorted([index_of[state] for state in states]),
            {shard: of_shard[shard] for shard in self._shards if shard in of_shard},
            {index_of[state]: parts for state, parts in rows.items()},
        )

    def _plan(
        self,
        call: CollectiveName,
        indices: tuple[int, ...],
        divisor: float | None = 1,
        *,
        of_sums: bool = False,
    ) -> BatchPlan:
        """Plans a call for shards of these variables, or for sums of their blocks."""
        variables = set(indices)
        shares: list[list[tuple[int, DType, DType]]] = [[] for _ in range(self._num_replicas)]
        for shard in self._shards:
            if shard.variable in variables:
                out_dtype = _SUM if of_sums else self._whole[shard.variable].dtype
                dtype = out_dtype
                if call == "reduce-scatter":
                    dtype = accumulate_dtype(out_dtype)
                size = ops.num_blocks(shard.size) if of_sums else shard.size
                shares[shard.owner].append((size, dtype, out_dtype))
        whole = [self._whole[index].buffers for index in indices]
        name = f"{call.replace('-', '_')} of {'norms of ' * of_sums}a SyncStep"
        names = tuple([self._whole[index].name for index in indices])
        what = describe_batch(
            self._settings, whole, divisor, None,
            counts=False, call=name, names=names,
        )  # fmt: skip
        return plan_shares(
            self._settings, self._devices, shares, what,
            call=call, divisor=divisor, names=names,
        )  # fmt: skip

    # -- scale and update -------------------------------------------------------------------------

    def scale(self, means: ShardMeans) -> bool:
        """See ``UpdateStages``."""
        rows = means.rows.values()
        gradients = [
            [mean for mean in means.of_shard.values() if mean.device is device]
            + [buffer_of(parts[index]) for parts in rows]
            for index, device in enumerate(self._devices)
        ]
        with abort_others_on_error(self._devices[0]):
            return self._scaling.apply(gradients, partial(self._sums_of_all, means))

    def apply(self, means: ShardMeans) -> None:
        """Updates the shards, and copies them to all replicas."""
        plan = self._planned("all-gather", tuple(means.indices))
        wanted = set(means.indices)
        chosen = [shard for shard in self._shards if shard.variable in wanted]
        own = [self._own[shard].buffers if shard in self._own else () for shard in chosen]
        out = [
            [shard.of(buffer) for buffer in self._whole[shard.variable].buffers] for shard in chosen
        ]
        pairs = [
            (self._mean_of(shard, means), self._own[shard])
            for shard in chosen
            if shard in self._own
        ]
        begin_writes(self._whole)
        first = self._devices[0]
        # If the update or the copies fail, the copies of a variable would differ.
        with (
            first.mesh_state.fail_on_partial_write(self._devices),
            abort_others_on_error(first),
        ):
            if pairs:
                self._optimizer._update(pairs)  # the means are those of all processes
            else:
                self._optimizer._count_update()
            reduce_batch(plan, own, out=out, positions=means.indices)

    def _mean_of(self, shard: VariableShard, means: ShardMeans) -> Part:
        """Returns the mean gradient of a shard of this process."""
        parts = means.rows.get(shard.variable)
        if parts is None:
            return means.of_shard[shard]
        part, shape = parts[shard.owner - self._first], self._own[shard].shape
        assert isinstance(part, IndexedSlices), "the gradients of the variable are sparse"
        row_size = shard.size // shape[0]
        first_row = shard.start // row_size
        start, stop = [bisect_left(part.indices, row) for row in (first_row, first_row + shape[0])]
        rows = part.values.view(start * row_size, (stop - start, *shape[1:]))
        return IndexedSlices.of(rows, part.indices[start:stop] - first_row, shape)

    def _sums_of_all(self, means: ShardMeans, own: Sequence[Buffer]) -> list[Buffer]:
        """Copies the sums of all blocks to all replicas, in the order of the variables.

        Args:
            means: the mean gradients.
            own: for each device the sums of the blocks of its shards and of all rows.

        Returns:
            For each device the sums of all blocks.
        """
        sizes = [
            buffer_of(means.rows[index][0]).size
            if index in means.rows
            else self._whole[index].buffers[0].size
            for index in means.indices
        ]
        *starts, total = accumulate(map(ops.num_blocks, sizes), initial=0)
        start_of = dict(zip(means.indices, starts, strict=True))
        dense = [index for index in means.indices if index not in means.rows]
        chosen = [shard for shard in self._shards if shard.variable in dense]
        places = [start_of[shard.variable] + shard.start // ops.BLOCK for shard in chosen]
        counts = [ops.num_blocks(shard.size) for shard in chosen]
        all_sums = [device.empty((total,), _SUM) for device in self._devices]
        out = zip(*[each.parts(places, counts) for each in all_sums], strict=True)
        sent: list[list[Buffer]] = [[] for _ in chosen]
        for owner, sums in enumerate(own, self._first):
            rows = [row for row, shard in enumerate(chosen) if shard.owner == owner]
            begins = accumulate([counts[row] for row in rows], initial=0)
            *starts_of, begin = begins
            parts = sums.parts(starts_of, [counts[row] for row in rows])
            for row, part in zip(rows, parts, strict=True):
                sent[row].append(part)
            self._place_row_sums(means, all_sums[owner - self._first], sums, begin, start_of)
        if chosen:
            plan = self._planned("all-gather", tuple(dense), of_sums=True)
            reduce_batch(plan, sent, out=list(out), positions=dense)
        return all_sums

    def _place_row_sums(
        self,
        means: ShardMeans,
        into: Buffer,
        sums: Buffer,
        begin: int,
        start_of: Mapping[int, int],
    ) -> None:
        """Copies the block sums of rows, which begin at ``begin`` of ``sums``, to their places."""
        counts = [ops.num_blocks(buffer_of(parts[0]).size) for parts in means.rows.values()]
        begins = list(accumulate(counts, initial=begin))[:-1]
        outs = into.parts([start_of[index] for index in means.rows], counts)
        if outs:
            ops.pack(outs, sums.parts(begins, counts), device=into.device)

    # -- checkpoint -------------------------------------------------------------------------------

    def slots_entry(self, entry: StateEntry) -> StateEntry:
        """Returns the entry of whole variables, from that of the optimizer, which has shards."""
        return entry._replace(save=self._save_slots, ready=self._ready_slots)

    def _save_slots(self) -> dict[str, Any]:
        """Joins the slots of one variable at a time on the first device: it takes little memory."""
        self._optimizer.prepare(self.variables)
        slots, download = self._optimizer._slots, downloader(None)
        saved: dict[str, dict[str, Any]] = {}
        for index, (name, variable) in enumerate(by_name(self._whole).items()):
            names = slots.names_for(variable)
            if names:
                wholes = self._join_slots(index, names, slots.state_dtype(variable))
                shaped = [whole.view(0, variable.shape) for whole in wholes]
                saved[name] = download(dict(zip(names, shaped, strict=True)))
        return saved

    def _join_slots(self, index: int, names: Sequence[str], dtype: DType) -> list[Buffer]:
        """Returns the slots of a variable, flat, on the first device."""
        first, variable = self._devices[0], self._whole[index]
        wholes = [first.empty((variable.buffers[0].size,), dtype) for _ in names]
        owned: list[Parcel] = []
        replicas = self._replicas
        for shard in [shard for shard in self._shards if shard.variable == index]:
            for name, whole in zip(names, wholes, strict=True):
                part = shard.of(whole)
                if shard in self._own:
                    slot = self._optimizer._slots.by_name[name][self._own[shard]]
                    first.copy(part, slot.buffers[0])
                owned.append((replicas.group.rank_of(shard.owner), part))
        what = {"call": "SyncStep.state_dict", "tensors": [f"{dtype}{list(variable.shape)}"]}
        with replicas.call(Description.of(what, [variable.name], compared=False)):
            replicas.send_to_all(owned)
        return wholes

    def _ready_slots(self, values: Mapping[str, Mapping[str, Any]]) -> Callable[[], None]:
        """Cuts saved slots into those of this process's shards, see ``StateEntry``."""
        of_shards = {
            part: {
                name: value.reshape(-1)[shard.start : shard.start + shard.size].reshape(part.shape)
                for name, value in values[self._whole[shard.variable].name].items()
            }
            for shard, part in self._own.items()
            if self._whole[shard.variable].name in values
        }
        return ready_slots(self._optimizer._slots, of_shards)
