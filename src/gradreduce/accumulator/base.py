"""Base class of the accumulators: creation, step, count, closing, and checkpoints.

Source: tf.ConditionalAccumulatorBase (conditional_accumulator.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from gradreduce.arrays.types import SparseMean
from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.checkpoint import downloader
from gradreduce.comm.process_group import check_one_process
from gradreduce.device import (
    Device,
    DType,
    Mesh,
    ModuleLock,
    accumulate_dtype,
    as_deadline,
    as_dtype,
    as_shape,
    names_of,
)
from gradreduce.errors import NotCopied, brief, listed
from gradreduce.reduce.algorithms import check_wire
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps, is_all_reduce, is_exact
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.reduce.presets import default_ops

from .checkpoint import ready_state, save_state
from .state import AccumulatorState, Storage
from .take_queue import cancel_waiting, close, discard_sums
from .validate import DTYPES, as_step

# Weak references, so that the device memory is freed with the last accumulator of a name.
_shared: weakref.WeakValueDictionary[str, AccumulatorState] = weakref.WeakValueDictionary()
_lock = ModuleLock()


class ConditionalAccumulatorBase(NotCopied):
    """Base class of dense and sparse accumulators (tf.ConditionalAccumulatorBase).

    An accumulator is a context manager: leaving it closes the accumulator. Any thread may call its
    methods. A signal handler may not, because it may interrupt a call of the same accumulator: set
    a flag in the handler instead.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> with gr.ConditionalAccumulator("float32", device=mesh) as accumulator:
        ...     accumulator.set_global_step(3)
        ...     accumulator.apply_grad([1.0], local_step=2)  # stale
        ...     accumulator.apply_grad([1.0], local_step=3)
        False
        True
        >>> accumulator.num_dropped
        1
        >>> accumulator.num_accumulated()
        Traceback (most recent call last):
            ...
        gradreduce.errors.CancelledError: the accumulator 'conditional_accumulator' was closed
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    _spans_processes = False

    def __init__(self, state: AccumulatorState, name: str) -> None:
        if state.over_mesh and not self._spans_processes:
            check_one_process(state.devices[0], f"{type(self).__name__} over a mesh")
        self._state = state
        self._name = str(name).rpartition("/")[2]
        state.name = state.name or self._name

    def __repr__(self) -> str:
        state = self._state  # read without its lock: a repr must not wait
        shape = "[?]" if state.shape is None else str(list(state.shape)).replace("None", "?")
        return (
            f"<{type(self).__name__} {self._name!r} {state.dtype}{shape} {state.reduction_type} on "
            f"{names_of(state.devices)}, global_step {state.step}, {state.count} accumulated, "
            f"{state.num_dropped} dropped{', closed' * state.closed}>"
        )

    @property
    def accumulator_ref(self) -> AccumulatorState:
        """The state. Accumulators with the same ``shared_name`` return the same object."""
        return self._state

    @property
    def name(self) -> str:
        """The last component of the name passed to the constructor: ``"y"`` for ``"Q/x/y"``."""
        return self._name

    @property
    def dtype(self) -> Any:
        """The dtype of the gradients."""
        return self._state.dtype

    @property
    def global_step(self) -> int:
        """The current step: gradients of an earlier step are stale."""
        with self._state.lock:
            return self._state.step

    @property
    def num_dropped(self) -> int:
        """The number of gradients that were dropped as stale."""
        with self._state.lock:
            return self._state.num_dropped

    def num_accumulated(self, name: str | None = None) -> int:
        """Returns the number of gradients in the sum now.

        Args:
            name: ignored; TensorFlow's name of the operation.

        Raises:
            CancelledError: the accumulator was closed.
        """
        with self._state.lock:
            self._state.check_open()
            return self._state.count

    def set_global_step(self, new_global_step: int | Variable, name: str | None = None) -> None:
        """Sets the step; logs a warning if it is smaller than before.

        Gradients in the sum stay. Waiting takes are not affected. The host waits only if it must
        download the value of a Variable.

        Args:
            new_global_step: an integer, which may be negative, or a Variable on any device that
                holds one.
            name: ignored; TensorFlow's name of the operation.

        Raises:
            TypeError: ``new_global_step`` is neither an integer nor a Variable.
            InvalidArgumentError: ``new_global_step`` does not fit in int64.
            CancelledError: the accumulator was closed.
        """
        self._state.set_step(as_step("new_global_step", new_global_step))

    def close(self) -> None:
        """Frees the sum; waiting takes and later calls of methods raise ``CancelledError``.

        Properties such as ``global_step`` can still be read. A second ``close`` does nothing. The
        host does not wait for a device.
        """
        close(self._state)

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns a snapshot of the accumulator in host memory, for a checkpoint.

        The call copies each partial sum on its device and waits until the host has the copies.
        Other threads may apply and take during that wait. Waiting takes are not saved.

        Args:
            deadline: seconds from now for the copies to reach the host; after that the mesh fails.
            output_type: the type of the arrays: ``"numpy"``, or ``"torch"`` for CPU tensors, which
                ``torch.load`` can read with ``weights_only=True``.

        Returns:
            A dict of new objects. It can be pickled; all of it except the arrays fits into JSON.

            - ``"format"``: the kind of accumulator and the version of these keys.
            - ``"dtype"``, ``"reduction_type"``, ``"shape"``: the constructor's arguments, the shape
              as a list. A sparse accumulator also has ``"sparse_mean"``.
            - ``"global_step"``, ``"num_accumulated"``, ``"num_dropped"``: integers.
            - ``"weight"``, only if it is not ``"num_accumulated"``: the sum of the weights of all
              gradients in the sum: a list of numbers whose exact sum it is, usually one.
            - ``"sum_shape"``: the shape of the gradients in the sum, as a list. None if the sum is
              empty.
            - ``"kind"``: the array type that the next take returns, which is the type of the first
              gradient in the sum. None if the sum is empty.
            - ``"partial_sums"``: a list with an array for each device, in mesh order, or None for a
              device without gradients. Arrays have the accumulate dtype (float32 for float16 and
              bfloat16), so that nothing is rounded. A sparse accumulator has a dict instead of each
              array: ``"indices"`` (int64, ascending), ``"num_touches"`` (int64, the number of
              gradients that touched each index) and ``"values"`` (the rows). With ``exact=True`` an
              array has the words of each sum, ``(words, …)``, and rows ``(rows, words, …)``.

        Raises:
            CancelledError: the accumulator was closed.
            ValueError: ``deadline`` is not a number above 0, ``output_type`` is unknown, or it is
                ``"torch"`` and PyTorch is not imported.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> accumulator = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
            >>> accumulator.apply_grad([1.0, 2.0])
            True
            >>> state = accumulator.state_dict()
            >>> state["num_accumulated"], state["partial_sums"]
            (1, [array([1., 2.], dtype=float32)])
            >>> other = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
            >>> other.load_state_dict(state)
            >>> other.take_grad(1)
            array([1., 2.], dtype=float32)
        """
        self._state.mesh_state.check_process()
        return save_state(self._state, downloader(as_deadline(deadline), output_type))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents of the accumulator with a saved ``state_dict``.

        On error, the accumulator is unchanged. The state may come from another backend, but must
        have the same number of devices. The step is set without a warning, even if it is smaller
        than before. The next take returns the same bits as the accumulator that was saved.
        Waiting takes keep their place in the queue. Those that now have enough gradients complete
        before this method returns. A state of an older version, without ``"sparse_mean"``, is
        loaded as ``"per_row"``. Example: see ``state_dict``.

        Args:
            state: from ``state_dict``. It is copied. Other types that checkpoint formats return are
                accepted: tuples or arrays for lists, zero-dimensional arrays for numbers and
                strings, tensors for arrays. On simulated devices, the ``"kind"`` ``"cupy"`` is read
                as NumPy.

        Raises:
            KeyError: a key is missing or unknown. The messages of this error and of the next two
                name the key.
            TypeError: a value has a wrong type.
            ValueError: the state belongs to an accumulator with another class, ``dtype``,
                ``reduction_type``, ``sparse_mean``, ``shape`` or number of devices; its numbers
                contradict each other; or its ``"kind"`` belongs to a library that is not imported.
            CancelledError: the accumulator was closed.
        """
        self._state.mesh_state.check_process()
        ready_state(self._state, state)()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        # In a forked child, the sum still belongs to the parent process.
        if not self._state.mesh_state.is_inherited:
            self.close()


def create_state(  # noqa: PLR0913  # options of one call
    dtype: Any,
    shape: Sequence[int | None] | None,
    shared_name: str | None,
    reduction_type: str,
    device: DeviceLike | Mesh | None,
    cross_device_ops: CrossDeviceOps | None,
    storage: Storage,
    sparse_mean: SparseMean | None = None,
) -> AccumulatorState:
    """Returns the state of a new accumulator, or the one registered as ``shared_name``.

    A registered state that was closed, or inherited by a fork, is replaced, even if accumulators
    still refer to it. See ``ConditionalAccumulator`` for arguments and errors.
    """
    grad_dtype = as_dtype(dtype)
    if grad_dtype.name not in DTYPES:
        raise TypeError(f"dtype={grad_dtype} must be one of {', '.join(DTYPES)}")
    if reduction_type not in ("MEAN", "SUM"):
        raise ValueError(f'reduction_type {brief(reduction_type)} not in: "MEAN", "SUM"')
    grad_shape = None if shape is None else as_shape("shape", shape, known=False)
    reducer = _as_reducer(cross_device_ops, storage)
    devices, over_mesh = _choose_devices(device, shared_name or "", reducer.mesh)
    if shared_name:
        check_one_process(
            devices[0],
            f"shared_name={brief(shared_name)}",
            "use the accumulators of gradreduce.ray, which several processes share by name",
        )
    if over_mesh:
        _check_alike(storage, reducer, grad_dtype)
    state = AccumulatorState(
        grad_dtype, grad_shape, reduction_type, devices, over_mesh, reducer, storage, sparse_mean
    )
    storage.rehearse(state, grad_dtype)
    if over_mesh and not storage.is_sparse:
        reducer._rehearse_sums(devices, accumulate_dtype(grad_dtype), grad_dtype, storage.num_words)
    state.mesh_state.add_listener(state, cancel_waiting, discard_sums)
    return _find_or_register(shared_name, state, cross_device_ops) if shared_name else state


def _as_reducer(cross_device_ops: CrossDeviceOps | None, storage: Storage) -> CrossDeviceOps:
    """Returns what reduces the partial sums of a storage; checks the type."""
    if cross_device_ops is None:
        return default_ops(exact=storage.num_words > 1)
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(f"cross_device_ops={brief(cross_device_ops)} must be a CrossDeviceOps")
    return cross_device_ops


def _check_alike(storage: Storage, cross_device_ops: CrossDeviceOps, dtype: DType) -> None:
    """Raises unless ``cross_device_ops`` can add the partial sums of this storage.

    Raises:
        TypeError: it does not merge rows.
        ValueError: only one of the two is exact, ``cross_device_ops`` cannot add words, or exact
            terms would be rounded.
    """
    if storage.is_sparse and not is_all_reduce(cross_device_ops):
        raise TypeError(
            f"cross_device_ops={brief(cross_device_ops)} must be an AllReduceCrossDeviceOps: a "
            "SparseConditionalAccumulator merges rows on its first device"
        )
    exact = is_exact(cross_device_ops)
    if exact is not (storage.num_words > 1):
        raise ValueError(
            f"cross_device_ops={brief(cross_device_ops)} adds partial sums with exact={exact}, "
            f"but the accumulator has exact={not exact}"
        )
    if isinstance(cross_device_ops, AllReduceCrossDeviceOps) and exact:
        if not is_all_reduce(cross_device_ops):
            raise ValueError(
                f"cross_device_ops={brief(cross_device_ops)} overrides reduce_batch, which cannot "
                "add exact partial sums: override another method, or pass exact=False"
            )
        check_wire(cross_device_ops.settings, dtype)


def _choose_devices(
    device: DeviceLike | Mesh | None, shared_name: str, mesh: Mesh | None
) -> tuple[tuple[Device, ...], bool]:
    """Returns the devices of an accumulator, and whether its results are ``Mirrored``."""
    with _lock.lock:
        shared = _shared.get(shared_name)
    if shared is not None and not shared.closed:
        mesh = shared.devices[0].mesh
        if device is None:
            return shared.devices, shared.over_mesh
    if device is None:
        return default_mesh().devices[:1], False
    return as_devices(device, "device=", mesh), isinstance(device, Mesh)


def _find_or_register(
    shared_name: str, state: AccumulatorState, cross_device_ops: CrossDeviceOps | None
) -> AccumulatorState:
    """Returns the state registered as ``shared_name``; registers ``state`` if there is none.

    Args:
        shared_name: the constructor's argument.
        state: created from the constructor's other arguments.
        cross_device_ops: the constructor's argument.

    Raises:
        ValueError: the name is registered with other arguments.
    """
    with _lock.lock:
        shared = _shared.setdefault(shared_name, state)
        if shared.closed or shared.mesh_state.is_inherited:
            shared = _shared[shared_name] = state
    differing: list[tuple[str, Any, Any]] = [
        (name, registered, requested)
        for name, registered, requested in (
            ("format", shared.storage.format, state.storage.format),
            ("words", shared.storage.num_words, state.storage.num_words),
            ("dtype", shared.dtype, state.dtype),
            ("shape", shared.shape, state.shape),
            ("reduction_type", shared.reduction_type, state.reduction_type),
            ("sparse_mean", shared.sparse_mean, state.sparse_mean),
        )
        if registered != requested
    ]
    if (shared.devices, shared.over_mesh) != (state.devices, state.over_mesh):
        registered, requested = (
            f"{'mesh of ' * each.over_mesh}{listed(device.name for device in each.devices)}"
            for each in (shared, state)
        )
        same_mesh = shared.mesh_state is state.mesh_state
        differing.append(
            ("device", registered, requested if same_mesh else f"{requested} of another mesh")
        )
    if (
        cross_device_ops is not None
        and shared.over_mesh
        and _settings_of(shared.cross_device_ops) != _settings_of(cross_device_ops)
    ):
        differing.append(("cross_device_ops", shared.cross_device_ops, cross_device_ops))
    if differing:
        name, registered, requested = differing[0]
        raise ValueError(
            f"shared_name={brief(shared_name)} has {name} {registered}, not {requested}"
        )
    return shared


def _settings_of(cross_device_ops: CrossDeviceOps) -> object:
    """Returns a key that is equal for CrossDeviceOps that reduce in the same way."""
    settings = getattr(cross_device_ops, "settings", cross_device_ops)
    return type(cross_device_ops).reduce_batch, settings
