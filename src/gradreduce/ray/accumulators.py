"""Accumulators that several processes and machines share, held by actors of Ray.

Their methods are those of ``gr.ConditionalAccumulator``. An actor holds such accumulators and runs
the calls of all processes on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradreduce.accumulator.base import ConditionalAccumulatorBase
from gradreduce.accumulator.validate import DEFAULT_STEP, as_rows
from gradreduce.arrays.indexed_slices import as_slices as slices_of
from gradreduce.arrays.types import OutputType, ReductionType, SparseMean
from gradreduce.arrays.variable import Variable
from gradreduce.backends import Kernels
from gradreduce.checkpoint import anything, constant, list_of, validate_state
from gradreduce.errors import brief, listed
from gradreduce.ops import NUM_WORDS

from .accumulator_state import AccumulatorSpec, SetSpec
from .client import settings_of
from .shared_accumulator import SharedAccumulator

_FORMAT = "gradreduce ray accumulators 1"


class AccumulatorSet(SharedAccumulator):
    """The accumulators of a model, in actors of Ray that all processes of a cluster share.

    Each call is atomic over the set: it adds a gradient to every accumulator, or to none; it takes
    the mean of every accumulator, or of none. The set has one step and one count of gradients. The
    first process that uses a name starts the actors. They run until ``close`` or until the cluster
    ends, even if that process ends earlier. All methods are thread-safe and block until the actors
    answer. They can also raise the errors of actors that ``docs/debugging.md`` lists. A set can be
    an argument of Ray tasks and actors; the object there counts as another worker. Source:
    ``tf.ConditionalAccumulator`` with a ``shared_name``, and ``tf.SyncReplicasOptimizer``, which
    has one for each variable.

    Args:
        specs: a list, or a dict by name, with one entry for each accumulator: its
            ``AccumulatorSpec``, or a tuple ``(dtype, shape)`` or ``(dtype, shape, is_sparse)``.
        shared_name: name of the actor: 1 to 128 ASCII letters, digits, ``_``, ``-`` and single
            ``.``. All sets of this name in the cluster share one state.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        sparse_mean: the option of all sparse accumulators; see
            ``gr.SparseConditionalAccumulator``.
        exact: True adds the gradients as real numbers, so that their order does not change a bit;
            see ``gr.ConditionalAccumulator``.
        words: how many floats hold an element of an exact sum; see ``gr.ConditionalAccumulator``.
            The process that takes or saves a sum that does not fit is warned.
        num_shards: number of actors; the accumulators are distributed over them by bytes.
        num_gpus: 1: each actor reserves a GPU and keeps its sums there. 0: the sums are in host
            memory.
        kernels: how actors without a GPU compute: ``"numpy"``, or ``"compiled"``, which is faster
            for large tensors and needs g++ where the actors run.
        snapshots: a folder that all machines of the cluster share. Ray restarts an actor that has
            failed, and the actor loads a snapshot from this folder. If all its snapshots are
            damaged, it does not start, and keeps the files. None: a failed actor is not restarted.
        durability: how often the actors write snapshots. ``"push"``: each call that changes the
            state is answered after a snapshot that includes it is on the disk, so no answered call
            is lost. A number N: every Nth such call writes a snapshot, so a failure loses at most N
            calls.
        worker: name of this worker in ``workers()``. Default: host name and process ID.
        timeout: seconds that a call waits for its answer. The constructor waits at least 60,
            because a new actor is a new process. None: wait as long as the actor lives.

    Raises:
        ValueError: the actor of this name has other specs, ``snapshots`` or ``durability``; or an
            argument is invalid.
        TypeError: an argument has a wrong type.
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
        sparse_mean: SparseMean = "per_row",
        exact: bool = False,
        words: int = NUM_WORDS,
        num_shards: int = 1,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._has_names = isinstance(specs, Mapping)
        by_name = specs if isinstance(specs, Mapping) else {str(i): x for i, x in enumerate(specs)}
        if not by_name:
            raise ValueError("specs is empty: pass a spec for each accumulator")
        found = tuple([_as_spec(name, each) for name, each in by_name.items()])
        spec = SetSpec(tuple(by_name), found, reduction_type, sparse_mean, exact, words)
        settings = settings_of(shared_name, num_shards, num_gpus, kernels, snapshots, durability)
        super().__init__(spec, settings, worker, timeout)

    def apply_grads(
        self,
        grads: Mapping[str, Any] | Sequence[Any],
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
        weight: float = 1,
    ) -> bool:
        """Adds one gradient to each accumulator; adds all or drops all.

        Blocks until every actor has added its gradients, so a slow actor slows the workers.

        Args:
            grads: one gradient for each accumulator, with its dtype and shape: a list in the order
                of ``specs``, or a dict by name if ``specs`` is a dict. A gradient is an array of
                NumPy, CuPy, PyTorch or JAX, a number, a nested list, or IndexedSlices. The caller
                may overwrite the gradients when this returns.
            local_step: see ``gr.ConditionalAccumulator.apply_grad``.
            cast: convert arrays of another float dtype instead of raising ``ValueError``.
            weight: the weight of all gradients, a number; see
                ``gr.ConditionalAccumulator.apply_grad``. Gradients with weight 0 are not sent.

        Returns:
            True if all were added, False if all were dropped because the step is stale.

        Raises:
            ValueError: the number, a name, a dtype or a shape of the gradients is wrong, or
                ``weight`` is negative, infinite or NaN; nothing was added.
            InvalidArgumentError: the sum of all weights exceeds the largest float64; nothing was
                added.
            TypeError: a gradient has a wrong type, such as ``PerReplica``; or ``grads`` is a dict,
                but ``specs`` is a list; or ``weight`` is not a number on the host. Nothing was
                added.
            DeadlineExceededError: no answer within ``timeout``; the actors may still add the
                gradients.
            OSError: ``durability="push"``, and the snapshot cannot be written; nothing was added.
        """
        return self._apply(self._in_order(grads), local_step, cast, weight)

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

        Takes of all processes complete in the order of their calls. Other calls continue while a
        take waits. If the process of a waiting take ends, the take is dropped five seconds later.

        Args:
            num_required: see ``gr.ConditionalAccumulator.take_grad``.
            timeout: seconds to wait for gradients; None: no limit.
            output_type: the array type of the results: ``"numpy"``, ``"cupy"``, ``"torch"``,
                ``"jax"`` or ``"buffer"``. Default: PyTorch or JAX if the accumulator's first
                gradient was of that library, and this process has imported it; else NumPy.

        Returns:
            A list with an array or IndexedSlices for each accumulator, with its dtype and the shape
            of the gradients; a dict of these by name if ``specs`` is a dict. NumPy arrays are
            read-only; large ones occupy Ray's object store until they are deleted. Arrays of other
            types are copies on the first device of ``gr.default_mesh()``.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1, or all gradients have weight 0;
                nothing was taken.
            ValueError: ``output_type`` is unknown, or its library is not imported; nothing was
                taken.
            DeadlineExceededError: there were not enough gradients in time; nothing was taken.
        """
        taken = self._take(num_required, timeout, output_type)
        return dict(zip(self._spec.names, taken, strict=True)) if self._has_names else taken

    def state_dict(self, *, output_type: str = "numpy") -> dict[str, Any]:
        """Returns the state of all accumulators at one moment, between two calls, as host data.

        Args:
            output_type: see ``gr.ConditionalAccumulator.state_dict``.

        Returns:
            A dict: ``"format"``, and ``"accumulators"``, a list with a state for each accumulator.
            NumPy arrays are read-only.
        """
        return {"format": _FORMAT, "accumulators": self._save_states(output_type)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents of all accumulators; on error, they are unchanged.

        Args:
            state: a result of ``state_dict``; the number of shards may have been another.

        Raises:
            KeyError, TypeError, ValueError: see ``gr.ConditionalAccumulator.load_state_dict``.
        """
        schema = {"format": constant(_FORMAT), "accumulators": list_of(anything, len(self._states))}
        self._load(validate_state("state", state, schema)["accumulators"])


class ConditionalAccumulator(SharedAccumulator, ConditionalAccumulatorBase):
    """A ``gr.ConditionalAccumulator`` in an actor that all processes of a Ray cluster share.

    It behaves as an ``AccumulatorSet`` of one tensor: see there for blocking, errors, and the
    memory of results. Source: ``tf.ConditionalAccumulator`` with a ``shared_name``.

    Args:
        dtype: dtype of gradients and results: float16, bfloat16, float32 or float64.
        shape: shape of the gradients; see ``gr.ConditionalAccumulator``.
        shared_name: name of the actor, required; see ``AccumulatorSet``.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        exact: see ``AccumulatorSet``.
        words: see ``AccumulatorSet``.
        num_gpus: see ``AccumulatorSet``.
        kernels: see ``AccumulatorSet``.
        snapshots: see ``AccumulatorSet``.
        durability: see ``AccumulatorSet``.
        worker: see ``AccumulatorSet``.
        timeout: see ``AccumulatorSet``.

    Raises:
        ValueError: see ``AccumulatorSet``.
        TypeError: see ``AccumulatorSet``.
        DeadlineExceededError: see ``AccumulatorSet``.
        RuntimeError, ConnectionError: see ``gr.ray.init``.

    Example: see ``docs/ray.md``. In short::

        accumulator = gr.ray.ConditionalAccumulator("float32", [10], "bias")
        accumulator.apply_grad(np.ones(10, np.float32), local_step=accumulator.global_step)
        mean = accumulator.take_grad(num_required=1, timeout=60)
    """

    _is_sparse = False
    _sparse_mean: SparseMean = "per_row"

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str = "",
        reduction_type: ReductionType = "MEAN",
        *,
        exact: bool = False,
        words: int = NUM_WORDS,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        settings = settings_of(shared_name, 1, num_gpus, kernels, snapshots, durability)
        specs = (AccumulatorSpec(dtype, shape, self._is_sparse),)
        of_set = (shared_name,), specs, reduction_type, self._sparse_mean, exact, words
        super().__init__(SetSpec(*of_set), settings, worker, timeout)

    @property
    def accumulator_ref(self) -> Any:
        """The handle of the actor. Accumulators of the same name have equal handles."""
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
        self,
        grad: Any,
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
        weight: float = 1,
    ) -> bool:
        """Adds a gradient unless it is stale; see ``AccumulatorSet.apply_grads``."""
        return self._apply([grad], local_step, cast, weight)

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
        """Returns the state as host data; ``gr.ConditionalAccumulator`` can load it too.

        Args:
            deadline: has no effect, because this process waits for no device.
            output_type: see ``gr.ConditionalAccumulator.state_dict``.
        """
        return dict(self._save_states(output_type)[0])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, also that of a ``gr.ConditionalAccumulator``.

        See ``AccumulatorSet.load_state_dict``. On error, state is unchanged.
        """
        self._load([state])


class SparseConditionalAccumulator(ConditionalAccumulator):
    """A ``gr.SparseConditionalAccumulator`` in an actor that all processes of a cluster share.

    A gradient consists of rows of a larger array, and of their indices. Arguments and errors are
    those of ``ConditionalAccumulator``, but ``sparse_mean`` is that of
    ``gr.SparseConditionalAccumulator``; ``shape`` is that of the larger array, ``(rows, ...)``.
    Source: ``tf.SparseConditionalAccumulator``.

    Example: see ``docs/ray.md``. In short::

        rows = gr.ray.SparseConditionalAccumulator("float32", [1000, 8], "embedding")
        rows.apply_grad(grad_indices=[3, 7], grad_values=np.ones((2, 8), np.float32))
        indices, values, shape = rows.take_grad(num_required=1)
    """

    _is_sparse = True

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str = "",
        reduction_type: ReductionType = "MEAN",
        *,
        sparse_mean: SparseMean = "per_row",
        exact: bool = False,
        words: int = NUM_WORDS,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._sparse_mean = sparse_mean
        super().__init__(
            dtype,
            shape,
            shared_name,
            reduction_type,
            exact=exact,
            words=words,
            num_gpus=num_gpus,
            kernels=kernels,
            snapshots=snapshots,
            durability=durability,
            worker=worker,
            timeout=timeout,
        )

    def apply_grad(  # type: ignore[override]  # TensorFlow's signature
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Sequence[int] | None = None,
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
        weight: float = 1,
    ) -> bool:
        """Adds rows unless they are stale; see ``gr.SparseConditionalAccumulator.apply_grad``."""
        slices = as_rows(grad_values, grad_indices, grad_shape, self._states[0].dtype, weight)
        return self._apply([slices], local_step, cast, weight)

    def apply_indexed_slices_grad(
        self,
        grad: Any,
        local_step: int | Variable = DEFAULT_STEP,
        *,
        cast: bool = False,
        weight: float = 1,
    ) -> bool:
        """Adds IndexedSlices, or a ``torch.sparse_coo`` tensor, unless they are stale.

        See ``AccumulatorSet.apply_grads``.
        """
        return self._apply([grad], local_step, cast, weight)

    def take_grad(
        self,
        num_required: int | Variable,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
    ) -> tuple[np.ndarray, Any, tuple[int, ...] | None]:
        """Returns indices, values and dense shape of what ``take_indexed_slices_grad`` takes."""
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
