"""Base class of the accumulators in actors: checks and sends gradients, converts results."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from gradreduce.accumulator.checkpoint import ready_state
from gradreduce.accumulator.multi import as_result, warn_of_default
from gradreduce.accumulator.validate import DEFAULT_STEP, as_required, as_step, check_sparse_mean
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import as_result_kind, kind_of, numbers, to_buffer
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.indexed_slices import as_slices as slices_of
from gradreduce.arrays.types import OutputType
from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.checkpoint import downloader, map_leaves, on_host
from gradreduce.device import Buffer, as_dtype, as_flag, warn_inexact
from gradreduce.errors import about, brief
from gradreduce.ops import as_num_words
from gradreduce.weights import as_weight

from .accumulator_state import AccumulatorSetState, AccumulatorSpec, SetSpec
from .client import SharedObject, shards_for
from .commands import Apply, Counts, LoadStates, Origin, SetGlobalStep, States
from .messages import Layout, TensorMessage, specs_of
from .shard_state import ActorSettings

_KEPT_KINDS = ("torch", "coo", "jax")  # results of other gradients are NumPy arrays


class SharedAccumulator(SharedObject):
    """Base class: one or more accumulators of one name; each call is atomic over all of them.

    Args:
        spec: the definition of the set, as passed by the caller, without ``shards``.
        settings: settings of shard 0, without a definition.
        worker: see ``AccumulatorSet``.
        timeout: see ``AccumulatorSet``.

    Example: see ``docs/ray.md``.
    """

    _has_names = False  # whether gradients are dicts by name

    def __init__(
        self,
        spec: SetSpec,
        settings: ActorSettings,
        worker: str | None,
        timeout: float | None,
    ) -> None:
        # Also for a set without sparse accumulators.
        check_sparse_mean(spec.sparse_mean, spec.reduction_type)
        spec = spec._replace(exact=as_flag("exact", spec.exact), words=as_num_words(spec.words))
        self._device = default_mesh().devices[0]
        # Accumulators in this process, which only check arguments before they are sent.
        self._states = [
            spec.accumulator(index, self._device).accumulator_ref
            for index in range(len(spec.specs))
        ]
        sizes = [
            _nbytes(state.shape, state.dtype.itemsize, settings.num_shards)
            for state in self._states
        ]
        self._spec = spec._replace(
            specs=tuple(
                AccumulatorSpec(state.dtype.name, state.shape, each.is_sparse)
                for state, each in zip(self._states, spec.specs, strict=True)
            ),
            shards=shards_for(sizes, settings.num_shards),
        )
        settings = settings._replace(definition={"kind": "accumulators", **self._spec._asdict()})
        super().__init__(settings, partial(AccumulatorSetState, spec=self._spec), worker, timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {len(self._states)} tensors on Ray>"

    @property
    def global_step(self) -> int:
        """The current step, fetched from the actor; gradients of an earlier step are stale."""
        return self._client.ask(Counts())[0]

    @property
    def num_dropped(self) -> int:
        """The number of gradients that were dropped as stale, fetched from the actor."""
        return self._client.ask(Counts())[2]

    def num_accumulated(self, name: str | None = None) -> int:
        """Returns the number of gradients in the sum, fetched from the actor.

        Args:
            name: ignored; TensorFlow's name of the operation.
        """
        return self._client.ask(Counts())[1]

    def set_global_step(self, new_global_step: int | Variable, name: str | None = None) -> None:
        """Sets the step of all accumulators; see ``gr.ConditionalAccumulator.set_global_step``."""
        self._client.call(SetGlobalStep(as_step("new_global_step", new_global_step)))

    def leave(self) -> None:
        """Removes this worker from ``workers()``; its next gradient adds it again."""
        self._client.leave(self._worker)

    # -- gradients --------------------------------------------------------------------------------

    @StreamScope()
    def _apply(
        self, grads: Sequence[Any], local_step: int | Variable, cast: bool, weight: float
    ) -> bool:
        """Adds one gradient to each accumulator; adds all or drops all."""
        step, cast = as_step("local_step", local_step), as_flag("cast", cast)
        weight = as_weight("weight", weight)
        kinds, messages = self._messages(grads, cast) if weight else ([], [])
        command, origin = Apply(step, kinds, weight), Origin(self._worker, step, step)
        answer = self._client.call(command, messages, origin)[0]
        if answer is not True and local_step is DEFAULT_STEP:
            for state in self._states:
                state.step = answer
            warn_of_default(self._states)
        return answer is True

    def _messages(self, grads: Sequence[Any], cast: bool) -> tuple[list[Kind], list[TensorMessage]]:
        """Checks the gradients; returns their array types, and the message for each shard."""
        checked_grads = [
            self._validate_gradient(index, grad, cast) for index, grad in enumerate(grads)
        ]
        parts_of_shards = [
            [part for index in self._spec.of_shard(shard) for part in checked_grads[index][1]]
            for shard in range(1 + max(self._spec.shards))
        ]
        messages = [Layout(specs_of(each)).pack(self._device, each) for each in parts_of_shards]
        return [kind for kind, _ in checked_grads], messages

    def _validate_gradient(self, index: int, grad: Any, cast: bool) -> tuple[Kind, list[Buffer]]:
        """Checks a gradient; returns its array type, and the Buffers to send."""
        state = self._states[index]
        try:
            if isinstance(grad, PerReplica):
                raise TypeError("a PerReplica is not one gradient: apply the gradient of each")
            grad = slices_of(grad)
            kind = grad.kind if isinstance(grad, IndexedSlices) else kind_of(grad)
            kind = kind if kind in _KEPT_KINDS else "native"
            gradient = state.storage.validate(state, grad, cast)
            if isinstance(gradient, IndexedSlices) and self._spec.specs[index].is_sparse:
                shape = numbers(list(gradient.dense_shape or ()), as_dtype("int64"))
                parts = [gradient.indices, gradient.values, shape]
                return kind, [to_buffer(part, self._device) for part in parts]
            return kind, [state.storage.to_addend(state, gradient).values]
        except (TypeError, ValueError) as error:
            key = brief(self._spec.names[index]) if self._has_names else index
            several = f"grads[{key}], for " if len(self._states) > 1 else ""
            raise about(f"{several}accumulator {state.name!r}", error) from None

    def _take(
        self, num_required: int | Variable, timeout: float | None, output_type: OutputType | None
    ) -> list[Any]:
        """Takes the gradient of each accumulator."""
        as_result_kind(output_type, "native", self._device)  # checked before anything is taken
        taken = self._client.take(as_required(num_required), timeout)
        grads = self._spec.in_order(
            self._spec.gradients(shard, message) for shard, message in enumerate(taken)
        )
        kinds = self._spec.in_order(message.value[0] for message in taken)
        with StreamScope():
            results = [
                self._to_result(grad, kind, output_type)
                for grad, kind in zip(grads, kinds, strict=True)
            ]
        warn_inexact([name for message in taken for name in message.value[1]])
        return results

    def _to_result(self, grad: Any, first: Kind, output_type: OutputType | None) -> Any:
        """Converts NumPy arrays of an actor; the default is the type of the first gradient."""
        library = "torch" if first == "coo" else first
        is_kept = first in _KEPT_KINDS and library in sys.modules
        kind = as_result_kind(output_type, first if is_kept else "native")
        if kind in ("native", "numpy"):
            return grad
        if not isinstance(grad, IndexedSlices):
            return as_result(to_buffer(grad, self._device), kind)
        values = to_buffer(grad.values, self._device)
        return as_result(IndexedSlices.of(values, grad.indices, grad.dense_shape), kind)

    # -- checkpoints ------------------------------------------------------------------------------

    def _save_states(self, output_type: str) -> list[Any]:
        """Returns the state of each accumulator."""
        download = downloader(None, output_type)
        states, inexact = zip(*self._client.read(States()), strict=True)
        saved = [download(each) for each in self._spec.in_order(states)]
        warn_inexact([name for names in inexact for name in names])
        return saved

    def _load(self, states: Sequence[Any]) -> None:
        """Loads the state of each accumulator; checks all of them here before it sends any."""
        for state, saved in zip(self._states, states, strict=True):
            ready_state(state, saved, f"state of accumulator {state.name!r}")
        self._client.call(LoadStates([map_leaves(on_host, saved) for saved in states]))


def _nbytes(shape: Sequence[int | None] | None, itemsize: int, num_shards: int) -> int:
    """Returns the bytes of a tensor; 0 if its shape is unknown.

    Raises:
        ValueError: the shape is unknown, and there are several shards.
    """
    if shape is None or None in shape:
        if num_shards > 1:
            raise ValueError(f"shape={shape} must be known to distribute over several shards")
        return 0
    return math.prod([extent or 0 for extent in shape]) * itemsize
