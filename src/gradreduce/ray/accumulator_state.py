"""The accumulators that one shard holds, and the commands on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradreduce.accumulator.base import ConditionalAccumulatorBase
from gradreduce.accumulator.checkpoint import ready_state
from gradreduce.accumulator.conditional import (
    ConditionalAccumulator,
    SparseConditionalAccumulator,
)
from gradreduce.accumulator.multi import apply_grads, take_grads
from gradreduce.accumulator.state import LAST_STEP, AccumulatorState
from gradreduce.accumulator.take_queue import missing
from gradreduce.arrays.convert import cast_array
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.types import ReductionType, SparseMean
from gradreduce.checkpoint import load_all, plain
from gradreduce.device import Device, accumulate_dtype, as_dtype
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops import NUM_WORDS

from .commands import Apply, CallKey, Counts, LastTake, LoadStates, SetGlobalStep, States, Take
from .messages import Layout, TensorMessage, specs_of
from .shard_state import ActorSettings, ShardState, set_last

MAX_TAKEN = 16  # unconfirmed results that are kept; a killed caller never confirms its own


class AccumulatorSpec(NamedTuple):
    """The arguments of one accumulator of an ``AccumulatorSet``.

    Attributes:
        dtype: dtype of gradients and results: float16, bfloat16, float32 or float64.
        shape: shape of the gradients. None: any shape. A None entry: any extent.
        is_sparse: whether gradients and results are IndexedSlices, whose dense shape is ``shape``.

    Example: see ``docs/ray.md``.
    """

    dtype: Any
    shape: Sequence[int | None] | None = None
    is_sparse: bool = False


class SetSpec(NamedTuple):
    """The definition of a set of accumulators, equal for all its clients.

    Attributes:
        names: name of each accumulator.
        specs: spec of each accumulator.
        reduction_type: ``"MEAN"`` or ``"SUM"``, for all accumulators.
        sparse_mean: the option of all sparse accumulators.
        exact: whether the accumulators add gradients as real numbers.
        words: how many floats hold an element of an exact sum.
        shards: number of the shard of each accumulator.
    """

    names: tuple[str, ...]
    specs: tuple[AccumulatorSpec, ...]
    reduction_type: ReductionType
    sparse_mean: SparseMean = "per_row"
    exact: bool = False
    words: int = NUM_WORDS
    shards: tuple[int, ...] = ()

    def accumulator(self, index: int, device: Device) -> ConditionalAccumulatorBase:
        """Returns a new accumulator in this process, with the arguments of the set."""
        dtype, shape, is_sparse = self.specs[index]
        options: dict[str, Any] = {
            "name": self.names[index],
            "reduction_type": self.reduction_type,
            "device": device,
            "exact": self.exact,
            "words": self.words,
        }
        made: ConditionalAccumulatorBase
        if is_sparse:
            options["sparse_mean"] = self.sparse_mean
            made = SparseConditionalAccumulator(dtype, shape, **options)
        else:
            made = ConditionalAccumulator(dtype, shape, **options)
        made.accumulator_ref.tensor = self.names[index]
        return made

    def of_shard(self, index: int) -> list[int]:
        """Returns the indices of the accumulators of a shard."""
        return [number for number, shard in enumerate(self.shards) if shard == index]

    def in_order(self, of_shards: Iterable[list[Any]]) -> list[Any]:
        """Returns one value for each accumulator, given those of each shard."""
        by_index: dict[int, Any] = {}
        for shard, values in enumerate(of_shards):
            by_index |= zip(self.of_shard(shard), values, strict=True)
        return [by_index[index] for index in range(len(self.shards))]

    def gradients(self, shard: int, message: TensorMessage) -> list[Any]:
        """Returns the gradients or results of a shard, as views of the memory of a message."""
        arrays = iter(Layout.of(message.form).arrays(message))
        return [
            _as_slices(next(arrays), next(arrays), next(arrays))
            if self.specs[index].is_sparse
            else next(arrays)
            for index in self.of_shard(shard)
        ]


class AccumulatorSetState(ShardState):
    """The accumulators of a shard, with one step; each command is atomic over all of them.

    Args:
        settings: settings of the shard.
        spec: the definition of the whole set, over all shards.
    """

    def __init__(self, settings: ActorSettings, spec: SetSpec) -> None:
        super().__init__(settings)
        self._spec = spec
        self._indices = spec.of_shard(settings.shard)
        self._accumulators: list[ConditionalAccumulatorBase] = []
        # Names of the tensors whose sum did not fit into its words, for the next take.
        self._inexact: set[str] = set()
        self._device.mesh_state.inexact.report = self._inexact.update
        self.load(None)

    def load(self, state: dict[str, Any] | None) -> None:
        """See ``ShardState``."""
        for each in self._accumulators:
            each.close()
        self._accumulators = [
            self._spec.accumulator(index, self._device) for index in self._indices
        ]
        # caller -> number of its last take, kinds and arrays of the results, and names of those
        # that are inexact. An entry is removed when the caller confirms that they have arrived.
        self._taken: dict[str, tuple[int, list[Kind], list[np.ndarray], list[str]]] = {}
        self._inexact.clear()
        if state is None:
            return
        self._inexact.update(state.get("inexact", ()))  # absent in older snapshots
        for each, saved in zip(self._accumulators, state["accumulators"], strict=True):
            _ready(each.accumulator_ref, saved, "state")()
        for caller, saved in state["taken"].items():
            pairs = zip(saved["arrays"], saved["dtypes"], strict=True)
            arrays = [cast_array(array, as_dtype(name)) for array, name in pairs]
            inexact = saved.get("inexact", [])
            self._taken[caller] = (saved["number"], saved["kinds"], arrays, inexact)

    # -- commands ---------------------------------------------------------------------------------

    @Apply.handler
    def apply(self, command: Apply, message: TensorMessage | None = None) -> bool | int:
        """See ``Apply``."""
        grads, is_first = [None] * len(self._accumulators), False
        if message is not None:
            grads = self._spec.gradients(self._settings.shard, message)
            is_first = self._accumulators[0].accumulator_ref.sum_shape is None
        if not apply_grads(
            self._accumulators, grads, command.local_step, cast=True, weight=command.weight
        ):
            return self.clock
        if is_first:
            for index, each in zip(self._indices, self._accumulators, strict=True):
                each.accumulator_ref.kind = command.kinds[index]
        return True

    @Take.handler
    def take(self, command: Take) -> TensorMessage:
        """See ``Take``; called if ``can_take`` returns True."""
        kinds = [each.accumulator_ref.kind for each in self._accumulators]
        taken = take_grads(self._accumulators, command.num_required, timeout=0, output_type="numpy")
        arrays = [array for gradient in taken for array in _arrays_of(gradient)]
        results = command.key[1], kinds, arrays, sorted(self._inexact)
        self._inexact.clear()
        set_last(self._taken, command.key[0], results, MAX_TAKEN)
        return self.last_take(LastTake(command.key[0]))

    @SetGlobalStep.handler
    def set_global_step(self, command: SetGlobalStep) -> None:
        """See ``SetGlobalStep``."""
        for each in self._accumulators:
            each.set_global_step(command.step)

    @LoadStates.handler
    def load_states(self, command: LoadStates) -> None:
        """See ``LoadStates``."""
        loads = [
            _ready(each.accumulator_ref, command.states[index], f"state['accumulators'][{index}]")
            for index, each in zip(self._indices, self._accumulators, strict=True)
        ]
        load_all(loads)
        self._inexact.clear()

    # -- reads ------------------------------------------------------------------------------------

    @LastTake.handler
    def last_take(self, command: LastTake) -> TensorMessage:
        """See ``LastTake``."""
        if command.caller not in self._taken:
            raise BackendUnavailableError("the gradients of this take are lost: take again")
        _, kinds, arrays, inexact = self._taken[command.caller]
        return Layout(specs_of(arrays)).message(arrays)._replace(value=(kinds, inexact))

    def forget(self, key: CallKey) -> None:
        """See ``ShardState``."""
        if key[0] in self._taken and self._taken[key[0]][0] == key[1]:
            del self._taken[key[0]]

    @States.handler
    def states(self, command: States) -> tuple[list[Any], list[str]]:
        """See ``States``."""
        return [each.state_dict() for each in self._accumulators], sorted(self._inexact)

    @Counts.handler
    def counts(self, command: Counts) -> tuple[int, int, int]:
        """See ``Counts``."""
        first = self._accumulators[0]
        return first.global_step, first.num_accumulated(), first.num_dropped

    @property
    def clock(self) -> int:
        """The step."""
        return self._accumulators[0].global_step

    def can_take(self, num_required: int) -> bool:
        """See ``ShardState``."""
        first = self._accumulators[0].accumulator_ref
        return first.count >= num_required or first.step >= LAST_STEP  # then the take raises

    def missing(self, num_required: int) -> str:
        """See ``ShardState``."""
        return missing(self._accumulators[0].accumulator_ref, num_required)

    # -- snapshots --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """See ``ShardState``; includes unconfirmed results, because their answers may be lost."""
        taken = {
            caller: {
                "number": number,
                "kinds": kinds,
                "dtypes": [array.dtype.name for array in arrays],
                "arrays": [cast_array(each, accumulate_dtype(each.dtype)) for each in arrays],
                "inexact": inexact,
            }
            for caller, (number, kinds, arrays, inexact) in self._taken.items()
        }
        accumulators, inexact = self.states(States())
        return {"accumulators": accumulators, "inexact": inexact, "taken": taken}


def _ready(state: AccumulatorState, saved: Any, where: str) -> Callable[[], None]:
    """Validates a state and returns a function that loads it, as ``ready_state`` does.

    The library of the state's array type need not be imported in this process.
    """
    kind = plain(f"{where}['kind']", saved["kind"])
    load_native = ready_state(state, {**saved, "kind": kind and "native"}, where)
    return partial(load_all, [load_native, partial(setattr, state, "kind", kind or "native")])


def _arrays_of(gradient: Any) -> list[np.ndarray]:
    """Returns the arrays of a host gradient: one of a dense gradient, three of a sparse one."""
    if not isinstance(gradient, IndexedSlices):
        return [gradient]
    shape = np.array(gradient.dense_shape or (), np.int64)
    return [gradient.indices, gradient.values, shape]


def _as_slices(indices: np.ndarray, values: np.ndarray, shape: np.ndarray) -> IndexedSlices:
    """Returns IndexedSlices; an empty ``shape`` stands for None."""
    return IndexedSlices(values, indices, shape.tolist() or None)
