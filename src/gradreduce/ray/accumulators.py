"""Accumulators that several processes and machines share: each is an actor of Ray.

They have the calls of ``gr.ConditionalAccumulator``. The actor has such an accumulator, and calls
it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradreduce.accumulator.base import ConditionalAccumulatorBase
from gradreduce.accumulator.validate import DEFAULT_STEP
from gradreduce.arrays.convert import is_array, kind_of, numbers
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.indexed_slices import as_slices as slices_of
from gradreduce.arrays.types import OutputType, ReductionType
from gradreduce.arrays.variable import Variable
from gradreduce.backends import Kernels
from gradreduce.checkpoint import anything, checked, equal, list_of
from gradreduce.errors import brief, listed

from .accumulator_state import AccumulatorSpec
from .client import SharedOptions
from .shared_accumulator import SharedAccumulator

_FORMAT = "gradreduce ray accumulators 1"


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
            failed, from its last snapshot there; if all are damaged, it does not start, and keeps
            them. None: a failed actor is not restarted.
        durability: ``"push"``: a call that changes the state is answered after a snapshot with it
            was written, so no answered call is lost. A number N: every Nth such call writes a
            snapshot, so a failure loses at most N calls.
        worker: name of this worker in ``workers()``. Default: host name and process ID.
        timeout: seconds that a call waits for its answer. The constructor waits at least 60,
            because a new actor is a new process. None: wait as long as the actor lives.

    Raises:
        ValueError: the actor of this name has other specs, ``snapshots`` or ``durability``, or an
            argument is invalid.
        TypeError: an argument has another type.
        BackendUnavailableError: the actor of this name has ended or cannot start, or this process
            is a fork of one that used Ray.
        DeadlineExceededError: the actor has not started in time.
        RuntimeError, ConnectionError: see ``gr.ray.init``.

    Example: see ``docs/ray.md``. In short::

        specs = {"kernel": ("float32", [64, 10]), "bias": ("float32", [10])}
        accumulators = gr.ray.AccumulatorSet(specs, "digits")
        accumulators.apply_grads({"kernel": kernel_gradient, "bias": bias_gradient}, local_step=0)
        means = accumulators.take_grads(num_required=1)
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
        self._has_names = isinstance(specs, Mapping)
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
        grads: Mapping[str, Any] | Sequence[Any],
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
    ) -> bool:
        """Adds one gradient to each accumulator; adds all or drops all.

        Blocks until the actors have added them, so slow actors slow their workers.

        Args:
            grads: one for each accumulator, in the order of ``specs``, or a dict by name if
                ``specs`` is a dict. A gradient is an array of NumPy, CuPy, PyTorch or JAX, a
                number, a nested list, or IndexedSlices. They may be changed as soon as this
                returns.
            local_step: see ``gr.ConditionalAccumulator.apply_grad``.
            cast: see there.

        Returns:
            True if all were added, False if all were dropped because the step is stale.

        Raises:
            ValueError: another number of gradients, other names, or a wrong dtype or shape; nothing
                was added.
            TypeError: a gradient of another type, such as ``PerReplica``; or a dict, but ``specs``
                is a list.
            DeadlineExceededError: no answer within ``timeout``; the gradients may still be added.
            CancelledError: the accumulators were closed.
            BackendUnavailableError: an actor has ended, and there are no snapshots.
            OSError: ``durability="push"``, and the snapshot cannot be written; nothing was added.
        """
        return self._apply(self._in_order(grads), local_step, cast)

    def _in_order(self, grads: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """Returns the gradients in the order of ``specs``."""
        names = self._spec.names
        if isinstance(grads, Mapping):
            if not self._has_names:
                raise TypeError("grads is a dict, but the specs of the set are a list: pass a list")
            missing = [name for name in names if name not in grads]
            unknown = [name for name in grads if name not in names]
            if missing or unknown:
                raise ValueError(
                    f"grads lacks [{listed(missing)}] and has unknown [{listed(unknown)}]; pass "
                    "one gradient for each name of specs"
                )
            return [grads[name] for name in names]
        grads = list(grads)
        if len(grads) != len(names):
            raise ValueError(
                f"grads has {len(grads)} entries, the set has {len(names)}; pass one "
                "gradient for each accumulator"
            )
        return grads

    def take_grads(
        self,
        num_required: int | Variable,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
    ) -> Any:
        """Blocks until there are ``num_required`` gradients; takes the mean or sum of each tensor.

        Takes of all processes complete in the order of their calls, and do not block
        ``apply_grads``. The take of a process that has ended is dropped after five seconds.

        Args:
            num_required: see ``gr.ConditionalAccumulator.take_grad``.
            timeout: seconds to wait for gradients; None: no limit.
            output_type: the array type of the results: ``"numpy"``, ``"cupy"``, ``"torch"``,
                ``"jax"`` or ``"buffer"``. Default: PyTorch or JAX if the accumulator's first
                gradient was of that library, and this process has imported it; else NumPy.

        Returns:
            A list with an array or IndexedSlices for each accumulator; a dict of these by name if
            ``specs`` is a dict. NumPy arrays are read-only; large ones are in Ray's shared memory
            until they are deleted. Others are copies on the first device of ``gr.default_mesh()``.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            ValueError: ``output_type`` is unknown, or its library is not imported; nothing was
                taken.
            DeadlineExceededError: there were not enough gradients in time; nothing was taken.
            CancelledError: the accumulators were closed.
            BackendUnavailableError: an actor has ended, and there are no snapshots.
        """
        taken = self._take(num_required, timeout, output_type)
        return dict(zip(self._spec.names, taken, strict=True)) if self._has_names else taken

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
        schema = {"format": equal(_FORMAT), "accumulators": list_of(anything, len(self._states))}
        self._load(checked("state", state, schema)["accumulators"])


class ConditionalAccumulator(SharedAccumulator, ConditionalAccumulatorBase):
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        *arguments, options = self._made_by
        others = options.for_others()
        del others["num_shards"]  # is always 1
        return partial(type(self), **others), tuple(arguments)

    @property
    def accumulator_ref(self) -> Any:
        """The handle of the actor. Those of accumulators with the same name are equal."""
        return self._client.actor

    @property
    def dtype(self) -> Any:
        """The dtype of the gradients."""
        return self._states[0].dtype

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The shape of the gradients, as passed to the constructor."""
        return self._states[0].shape

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, *, cast: bool = False
    ) -> bool:
        """Adds a gradient unless it is stale; see ``AccumulatorSet.apply_grads``."""
        return self._apply([grad], local_step, cast)

    def take_grad(
        self,
        num_required: int | Variable,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
    ) -> Any:
        """Blocks until there are ``num_required`` gradients; see ``AccumulatorSet.take_grads``."""
        return self._take(num_required, timeout, output_type)[0]

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns the state, which ``gr.ConditionalAccumulator`` can load too.

        Args:
            deadline: no effect, because this process waits for no device.
            output_type: see ``gr.ConditionalAccumulator.state_dict``.
        """
        state: dict[str, Any] = self._saved(output_type)[0]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, also of a ``gr.ConditionalAccumulator``; on error, state is unchanged."""
        self._load([state])


class SparseConditionalAccumulator(ConditionalAccumulator):
    """A ``gr.SparseConditionalAccumulator`` in an actor that all processes of a cluster share.

    A gradient is rows of a larger array, with their indices. The arguments are those of
    ``ConditionalAccumulator``; ``shape`` is that of the larger array, ``(rows, ...)``.
    Source: ``tf.SparseConditionalAccumulator``.

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

    def take_grad(
        self,
        num_required: int | Variable,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
    ) -> tuple[np.ndarray, Any, tuple[int, ...] | None]:
        """Takes as ``take_indexed_slices_grad``; returns indices, values and dense shape."""
        taken = slices_of(
            self.take_indexed_slices_grad(num_required, timeout=timeout, output_type=output_type)
        )
        return taken.indices, taken.values, taken.dense_shape

    def take_indexed_slices_grad(
        self,
        num_required: int | Variable,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
    ) -> Any:
        """Blocks until there are ``num_required`` gradients; see ``AccumulatorSet.take_grads``.

        Returns:
            IndexedSlices; a ``torch.sparse_coo`` tensor if the first gradient was one.
        """
        return self._take(num_required, timeout, output_type)[0]


def _as_spec(name: str, spec: Any) -> AccumulatorSpec:
    if not isinstance(spec, (tuple, list)) or not 1 <= len(spec) <= 3:
        raise TypeError(
            f"specs[{name!r}]={brief(spec)} must be (dtype, shape) or (dtype, shape, is_sparse)"
        )
    return AccumulatorSpec(*spec)
