"""Accumulators that several processes and machines share: each is an actor of Ray.

They have the calls of ``gr.ConditionalAccumulator``. The actor has such an accumulator, and calls
it.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from gradreduce.accumulator.checkpoint import ready_state
from gradreduce.accumulator.validate import DEFAULT_STEP, as_required, as_step
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import host_array, is_array, kind_of, numbers, to_buffer
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.indexed_slices import as_slices as slices_of
from gradreduce.arrays.types import ReductionType
from gradreduce.arrays.variable import Variable
from gradreduce.backends import Kernels, default_mesh
from gradreduce.checkpoint import anything, checked, downloader, equal, mapped
from gradreduce.device import Buffer, as_dtype, as_flag
from gradreduce.errors import about, brief

from .accumulator_state import AccumulatorSetState, AccumulatorSpec, SetSpec, as_slices
from .client import Client, SharedOptions, shards_for
from .lead import Origin, WorkerInfo
from .messages import Layout, specs_of

_FORMAT = "gradreduce ray accumulators 1"


class SharedAccumulator:
    """Base class: accumulators of one name; every call is about all of them.

    Args:
        names: of the accumulators.
        specs: of the accumulators.
        shared_name: of the actor.
        reduction_type: of all accumulators.
        options: ``num_shards``, ``num_gpus``, ``snapshots``, ``durability``, ``worker`` and
            ``timeout``; see ``AccumulatorSet``.
    """

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[AccumulatorSpec],
        shared_name: str,
        reduction_type: ReductionType,
        options: SharedOptions,
    ) -> None:
        settings = options.settings(shared_name)
        spec = SetSpec(tuple(names), tuple(specs), reduction_type, ())
        self._device = default_mesh().devices[0]
        # Accumulators in this process, which only check arguments before they are sent.
        own = [spec.accumulator(index, self._device) for index in range(len(specs))]
        self._states = [each.accumulator_ref for each in own]
        known = [(state.dtype.name, state.shape) for state in self._states]
        sizes = [
            _nbytes(state.shape, state.dtype.itemsize, settings.num_shards)
            for state in self._states
        ]
        self._spec = spec._replace(
            specs=tuple(
                AccumulatorSpec(*each, spec.is_sparse)
                for each, spec in zip(known, specs, strict=True)
            ),
            shards=shards_for(sizes, settings.num_shards),
        )
        self._worker = options.worker or f"{platform.node()}:{os.getpid()}"
        make_state = partial(AccumulatorSetState, spec=self._spec)
        self._client = Client(settings, make_state, self._spec.description(), options.timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {len(self._states)} tensors on Ray>"

    @property
    def name(self) -> str:
        """The ``shared_name``."""
        return self._client.name

    @property
    def global_step(self) -> int:
        """The current step: gradients of an earlier step are stale."""
        return self._counts()[0]

    @property
    def num_dropped(self) -> int:
        """The number of gradients that were dropped as stale."""
        return self._counts()[2]

    def num_accumulated(self) -> int:
        """Returns the number of gradients in the sum now."""
        return self._counts()[1]

    def _counts(self) -> tuple[int, int, int]:
        found: tuple[int, int, int] = self._client.ask("counts")
        return found

    def set_global_step(self, new_global_step: int | Variable) -> None:
        """Sets the step; see ``gr.ConditionalAccumulator.set_global_step``."""
        self._client.call("set_global_step", as_step("new_global_step", new_global_step))

    def workers(self) -> list[WorkerInfo]:
        """Returns a ``WorkerInfo`` of each worker that has applied a gradient, sorted by name.

        Empty after a restart of the actor, until the next gradients.
        """
        return self._client.workers()

    def leave(self) -> None:
        """Removes this worker from ``workers()``, until its next gradient."""
        self._client.leave(self._worker)

    def close(self) -> None:
        """Ends the actors and removes their snapshots; it may be called twice.

        Waiting takes and all later calls raise ``CancelledError``, in every process.
        """
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- gradients --------------------------------------------------------------------------------

    @StreamScope()
    def _apply(self, grads: Sequence[Any], local_step: int | Variable, cast: bool) -> bool:
        """Adds a gradient to each accumulator; adds all or drops all."""
        step, cast = as_step("local_step", local_step), as_flag("cast", cast)
        checked_grads = [self._checked(index, grad, cast) for index, grad in enumerate(grads)]
        messages = []
        for shard in range(1 + max(self._spec.shards)):
            buffers = [
                part for index in self._spec.of_shard(shard) for part in checked_grads[index]
            ]
            messages.append(Layout(specs_of(buffers)).pack(self._device, buffers))
        kept = self._client.call(
            "apply", step, messages=messages, origin=Origin(self._worker, step, step)
        )
        return bool(kept[0])

    def _checked(self, index: int, grad: Any, cast: bool) -> list[Buffer]:
        """Checks a gradient; returns the Buffers that represent it."""
        state = self._states[index]
        try:
            if isinstance(grad, PerReplica):
                raise TypeError("a PerReplica is not one gradient: apply the gradient of each")
            found = state.storage.checked(state, slices_of(grad), cast)
            if isinstance(found, IndexedSlices) and self._spec.specs[index].is_sparse:
                shape = numbers(list(found.dense_shape or ()), as_dtype("int64"))
                parts = [found.indices, found.values, shape]
                return [to_buffer(part, self._device) for part in parts]
            return [state.storage.converted(state, found).values]
        except (TypeError, ValueError) as error:
            what = f"accumulator {state.name!r}"
            several = f"grads[{index}], for " if len(self._states) > 1 else ""
            raise about(several + what, error) from None

    def _take(self, num_required: int | Variable, timeout: float | None) -> list[Any]:
        """Takes the gradient of each accumulator."""
        taken = self._client.take(as_required(num_required), timeout)
        found: dict[int, Any] = {}
        for shard, message in enumerate(taken):
            arrays = iter(Layout.of(message.form).arrays(message))
            for index in self._spec.of_shard(shard):
                if self._spec.specs[index].is_sparse:
                    found[index] = as_slices(next(arrays), next(arrays), next(arrays))
                else:
                    found[index] = next(arrays)
        return [found[index] for index in range(len(self._states))]

    # -- checkpoints ------------------------------------------------------------------------------

    def _saved(self, output_type: str) -> list[Any]:
        """Returns the state of each accumulator."""
        download = downloader(None, output_type)
        found: dict[int, Any] = {}
        for shard, states in enumerate(self._client.read("states")):
            found |= zip(self._spec.of_shard(shard), states, strict=True)
        made: list[Any] = download([found[index] for index in range(len(self._states))])
        return made

    def _load(self, states: Sequence[Any]) -> None:
        """Loads the state of each accumulator, after all were checked here."""
        for state, saved in zip(self._states, states, strict=True):
            ready_state(state, saved, f"state of accumulator {state.name!r}")
        self._client.call("load_states", [mapped(_on_host, saved) for saved in states])


class AccumulatorSet(SharedAccumulator):
    """The accumulators of a model, in actors of Ray that all processes of a cluster share.

    Every call is about all accumulators: it adds a gradient to each or to none, and takes the mean
    of each or of none. They have one step and one count of gradients. The first process that uses
    a name starts the actors. They end by ``close`` or with the cluster, not with that process. All
    methods are thread-safe. Objects can be arguments of Ray's tasks and actors, where they are
    other workers. Source: ``tf.ConditionalAccumulator`` with a ``shared_name``, and
    ``tf.SyncReplicasOptimizer``, which has one for each variable.

    Args:
        specs: for each accumulator its ``AccumulatorSpec``, or a tuple ``(dtype, shape)`` or
            ``(dtype, shape, is_sparse)``; a list, or a dict by name.
        shared_name: name of the actor: 1 to 128 ASCII letters, digits, ``_``, ``-`` and single
            ``.``. All sets of this name in the cluster share one state.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        num_shards: number of actors; the accumulators are distributed over them by bytes.
        num_gpus: 1: each actor has a GPU for its sums. 0: the sums are in host memory.
        kernels: of actors without a GPU: ``"numpy"``, or ``"compiled"``, which is faster for large
            tensors and needs g++ where the actors run.
        snapshots: a folder that all machines of the cluster share. Ray restarts an actor that has
            failed, from its last snapshot there. None: a failed actor is not restarted.
        durability: ``"push"``: a call that changes the state is answered after a snapshot with it
            was written, so no answered call is lost. A number N: every Nth such call writes a
            snapshot, so a failure loses at most N calls.
        worker: name of this worker in ``workers()``. Default: host name and process ID.
        timeout: seconds that a call waits for its answer. The constructor waits at least 60,
            because a new actor is a new process. None: wait as long as the actor lives.

    Raises:
        ValueError: the actor of this name has other specs, or an argument is invalid.
        TypeError: an argument has another type.
        BackendUnavailableError: the actor of this name has ended or cannot start, or this process
            is a fork of one that used Ray.
        DeadlineExceededError: the actor has not started in time.
        RuntimeError, ConnectionError: see ``gr.ray.init``.

    Example: see ``docs/ray.md``. In short::

        specs = {"kernel": ("float32", [64, 10]), "bias": ("float32", [10])}
        accumulators = gr.ray.AccumulatorSet(specs, "digits")
        accumulators.apply_grads([kernel_gradient, bias_gradient], local_step=0)
        kernel, bias = accumulators.take_grads(num_required=1)
    """

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        specs: Mapping[str, Any] | Sequence[Any],
        shared_name: str,
        reduction_type: ReductionType = "MEAN",
        *,
        num_shards: int = 1,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        options = SharedOptions(
            num_shards, num_gpus, kernels, snapshots, durability, worker, timeout
        )
        self._made_by = (specs, shared_name, reduction_type, options)
        by_name = specs if isinstance(specs, Mapping) else {str(i): x for i, x in enumerate(specs)}
        if not by_name:
            raise ValueError("specs is empty: pass a spec for each accumulator")
        found = [_as_spec(name, each) for name, each in by_name.items()]
        super().__init__(list(by_name), found, shared_name, reduction_type, options)

    def __reduce__(self) -> Any:
        *arguments, options = self._made_by
        return partial(type(self), **options.for_others()), tuple(arguments)

    def apply_grads(
        self,
        grads: Sequence[Any],
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
    ) -> bool:
        """Adds one gradient to each accumulator; adds all or drops all.

        Blocks until the actors have added them, so slow actors slow their workers.

        Args:
            grads: one for each accumulator, in the order of ``specs``: an array of NumPy, CuPy,
                PyTorch or JAX, a number, a nested list, or IndexedSlices. They may be changed as
                soon as this returns.
            local_step: see ``gr.ConditionalAccumulator.apply_grad``.
            cast: see there.

        Returns:
            True if all were added, False if all were dropped because the step is stale.

        Raises:
            ValueError: another number of gradients, or a wrong dtype or shape; nothing was added.
            TypeError: a gradient of another type, such as ``PerReplica``.
            DeadlineExceededError: no answer within ``timeout``; the gradients may still be added.
            CancelledError: the accumulators were closed.
            BackendUnavailableError: an actor has ended, and there are no snapshots.
            OSError: ``durability="push"``, and the snapshot cannot be written; nothing was added.
        """
        grads = list(grads)
        if len(grads) != len(self._states):
            raise ValueError(
                f"grads has {len(grads)} entries, the set has {len(self._states)}; pass one "
                "gradient for each accumulator"
            )
        return self._apply(grads, local_step, cast)

    def take_grads(
        self, num_required: int | Variable, *, timeout: float | None = None
    ) -> list[Any]:
        """Blocks until there are ``num_required`` gradients; takes the mean or sum of each tensor.

        Takes of all processes complete in the order of their calls, and do not block
        ``apply_grads``. The take of a process that has ended is dropped after five seconds.

        Args:
            num_required: see ``gr.ConditionalAccumulator.take_grad``.
            timeout: seconds to wait for gradients; None: no limit.

        Returns:
            For each accumulator a read-only NumPy array, or IndexedSlices of such arrays. Large
            arrays are in Ray's shared memory until they are deleted.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: there were not enough gradients in time; nothing was taken.
            CancelledError: the accumulators were closed.
            BackendUnavailableError: an actor has ended, and there are no snapshots.
        """
        return self._take(num_required, timeout)

    def state_dict(self, *, output_type: str = "numpy") -> dict[str, Any]:
        """Returns the state of all accumulators between two calls, as host data.

        Args:
            output_type: see ``gr.ConditionalAccumulator.state_dict``.

        Returns:
            A dict: ``"format"``, and ``"accumulators"`` with a state for each.
        """
        return {"format": _FORMAT, "accumulators": self._saved(output_type)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents of all accumulators; on error, they are unchanged.

        Args:
            state: of ``state_dict``, also with another number of shards.

        Raises:
            KeyError, TypeError, ValueError: see ``gr.ConditionalAccumulator.load_state_dict``.
        """
        schema = {"format": equal(_FORMAT), "accumulators": [anything] * len(self._states)}
        self._load(checked("state", state, schema)["accumulators"])


class ConditionalAccumulator(SharedAccumulator):
    """A ``gr.ConditionalAccumulator`` in an actor that all processes of a Ray cluster share.

    An ``AccumulatorSet`` of one tensor: see there for blocking, errors and what calls return.
    Source: ``tf.ConditionalAccumulator`` with a ``shared_name``.

    Args:
        dtype: dtype of gradients and results: float16, bfloat16, float32 or float64.
        shape: shape of the gradients; see ``gr.ConditionalAccumulator``.
        shared_name: name of the actor, required; see ``AccumulatorSet``.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        num_gpus: see ``AccumulatorSet``.
        kernels: see ``AccumulatorSet``.
        snapshots: see ``AccumulatorSet``.
        durability: see ``AccumulatorSet``.
        worker: see ``AccumulatorSet``.
        timeout: see ``AccumulatorSet``.

    Raises:
        ValueError: see ``AccumulatorSet``.
        TypeError: see ``AccumulatorSet``.
        BackendUnavailableError: see ``AccumulatorSet``.
        RuntimeError, ConnectionError: see ``gr.ray.init``.

    Example: see ``docs/ray.md``. In short::

        accumulator = gr.ray.ConditionalAccumulator("float32", [10], "bias")
        accumulator.apply_grad(np.ones(10, np.float32), local_step=accumulator.global_step)
        mean = accumulator.take_grad(num_required=1, timeout=60)
    """

    _is_sparse = False

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str = "",
        reduction_type: ReductionType = "MEAN",
        *,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        options = SharedOptions(1, num_gpus, kernels, snapshots, durability, worker, timeout)
        self._made_by = (dtype, shape, shared_name, reduction_type, options)
        spec = AccumulatorSpec(dtype, shape, self._is_sparse)
        super().__init__([shared_name], [spec], shared_name, reduction_type, options)

    def __reduce__(self) -> Any:
        *arguments, options = self._made_by
        others = options.for_others()
        del others["num_shards"]  # is always 1
        return partial(type(self), **others), tuple(arguments)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, *, cast: bool = False
    ) -> bool:
        """Adds a gradient unless it is stale; see ``AccumulatorSet.apply_grads``."""
        return self._apply([grad], local_step, cast)

    def take_grad(
        self, num_required: int | Variable, *, timeout: float | None = None
    ) -> np.ndarray:
        """Blocks until there are ``num_required`` gradients; see ``AccumulatorSet.take_grads``."""
        taken: np.ndarray = self._take(num_required, timeout)[0]
        return taken

    def state_dict(self, *, output_type: str = "numpy") -> dict[str, Any]:
        """Returns the state, which ``gr.ConditionalAccumulator`` can load too."""
        state: dict[str, Any] = self._saved(output_type)[0]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, also of a ``gr.ConditionalAccumulator``; on error, state is unchanged."""
        self._load([state])


class SparseConditionalAccumulator(ConditionalAccumulator):
    """A ``gr.SparseConditionalAccumulator`` in an actor that all processes of a cluster share.

    A gradient is rows of a larger array, with their indices. The arguments are those of
    ``ConditionalAccumulator``; ``shape`` is that of the larger array, ``(rows, ...)``. Results are
    read-only NumPy arrays. Source: ``tf.SparseConditionalAccumulator``.

    Example: see ``docs/ray.md``. In short::

        rows = gr.ray.SparseConditionalAccumulator("float32", [1000, 8], "embedding")
        rows.apply_grad(grad_indices=[3, 7], grad_values=np.ones((2, 8), np.float32))
        indices, values, shape = rows.take_grad(num_required=1)
    """

    _is_sparse = True

    def apply_grad(  # type: ignore[override]  # TensorFlow's signature
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Sequence[int] | None = None,
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
    ) -> bool:
        """Adds rows unless they are stale; see ``gr.SparseConditionalAccumulator.apply_grad``."""
        if kind_of(grad_values) == "native" and not is_array(grad_values):
            grad_values = numbers(grad_values, self._states[0].dtype)
        slices = IndexedSlices(grad_values, grad_indices, grad_shape)
        return self._apply([slices], local_step, cast)

    def apply_indexed_slices_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, *, cast: bool = False
    ) -> bool:
        """Adds IndexedSlices, or a ``torch.sparse_coo`` tensor, unless they are stale."""
        return self._apply([grad], local_step, cast)

    def take_grad(  # type: ignore[override]
        self, num_required: int | Variable, *, timeout: float | None = None
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...] | None]:
        """Takes as ``take_indexed_slices_grad``; returns indices, values and dense shape."""
        taken = self.take_indexed_slices_grad(num_required, timeout=timeout)
        return taken.indices, taken.values, taken.dense_shape

    def take_indexed_slices_grad(
        self, num_required: int | Variable, *, timeout: float | None = None
    ) -> IndexedSlices:
        """Blocks until there are ``num_required`` gradients; see ``AccumulatorSet.take_grads``."""
        taken: IndexedSlices = self._take(num_required, timeout)[0]
        return taken


def _as_spec(name: str, spec: Any) -> AccumulatorSpec:
    if not isinstance(spec, (tuple, list)) or not 1 <= len(spec) <= 3:
        raise TypeError(
            f"specs[{name!r}]={brief(spec)} must be (dtype, shape) or (dtype, shape, is_sparse)"
        )
    return AccumulatorSpec(*spec)


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


def _on_host(_: str, leaf: Any) -> Any:
    return host_array(leaf) if is_array(leaf) else leaf
