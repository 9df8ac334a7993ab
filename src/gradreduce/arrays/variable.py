"""Variables: named arrays that are trained, on one device or mirrored on several.

Arithmetic with a Variable reads it first, then uses its value: inside a loss a traced value,
elsewhere a plain array.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from gradreduce import ops
from gradreduce.backends import default_mesh
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    DType,
    Mesh,
    as_dtype,
    as_flag,
    copy_to,
    names_of,
    overlap,
)
from gradreduce.errors import NotCopied, about, brief

from .array_methods import Traceable, holds_traceable
from .caller_streams import StreamScope, release_inputs
from .convert import (
    as_result_kind,
    as_view_kind,
    cast_array,
    from_buffer,
    is_array,
    kind_of,
    numbers,
    to_buffer,
)
from .convert_gpu import on_gpu_of, wait_for_inputs
from .outputs import count_writes
from .replica_context import current_replica
from .trace_context import bind_arguments, check_unread, current_reader, make_like
from .types import OutputType

if TYPE_CHECKING:
    import numpy as np

_numbers = itertools.count()
# NumPy's functions that write their first argument.
_WRITING = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
# The module of a library that has functions with NumPy's names.
_FUNCTIONS = {"torch": "torch", "jax": "jax.numpy"}


class Variable(NotCopied, Traceable):
    """A named array that is changed in place, with an equal copy on each device.

    ``variable == 1.0`` compares identity, because Variables are keys of dictionaries. To compare
    values write ``variable.read() == 1.0`` or ``np.equal(variable, 1.0)``. Operators, array methods
    and NumPy functions return new arrays: of NumPy in the simulation, of CuPy on GPUs.

    Args:
        initial_value: an array, number or nested list; copied.
        name: the name. Default: ``"Variable"``, then ``"Variable_1"`` and so on.
        trainable: whether optimizers change it; then the dtype must be float16, bfloat16, float32
            or float64. False for a counter such as a global step.
        dtype: the dtype. Default: that of an array; float32 for Python floats, int64 for Python
            integers.
        device: a Device, a device name (``"gpu:1"``), a ``torch.device``, or a mesh for one copy on
            each of its devices. Names are looked up in the mesh of ``initial_value`` if that is a
            Buffer, else in ``gr.default_mesh()``. Default: the device of such a Buffer, else device
            0 of the default mesh.

    Raises:
        TypeError: the dtype cannot be added, ``initial_value`` is not an array, ``device`` is not a
            device, or ``name`` is not a string.
        ValueError: ``trainable`` is True and the dtype is not a float, or the device is outside the
            mesh.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> w = gr.Variable([1.0, 2.0], "w", device=mesh)
        >>> w
        <Variable 'w' float32[2] on sim:0, sim:1>
        >>> w * 10
        array([10., 20.], dtype=float32)
    """

    _copy_hint = "pass variable.numpy(), and make a new Variable of it"

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    _parameters: tuple[Any, ...] = ()  # PyTorch tensors that share its memory

    @StreamScope()
    def __init__(
        self,
        initial_value: Any,
        name: str | None = None,
        *,
        trainable: bool = True,
        dtype: Any = None,
        device: DeviceLike | Mesh | None = None,
    ) -> None:
        devices = _devices(device, initial_value)
        own_dtype = _choose_dtype(initial_value, dtype, devices[0])
        trainable = as_flag("trainable", trainable)
        if trainable and own_dtype.kind not in "fV":  # bfloat16 is of kind V in ml_dtypes
            raise ValueError(
                f"Invalid type {own_dtype} of a trainable variable: allowed are float16, bfloat16, "
                "float32 and float64; trainable=False takes any"
            )
        if name is not None and not isinstance(name, str):  # TensorFlow's second is trainable
            raise TypeError(f"name={brief(name)} must be a string")
        number = next(_numbers)
        self.name = name or ("Variable" if number == 0 else f"Variable_{number}")
        self.trainable = trainable
        self._buffers = tuple(_copy_to_new(initial_value, device, own_dtype) for device in devices)

    @classmethod
    def _full_like(
        cls, variable: Variable, name: str, value: float = 0.0, *, dtype: DType | None = None
    ) -> Variable:
        """Makes a slot: a non-trainable Variable like another one, filled with one number.

        Args:
            variable: the Variable whose shape and devices are used.
            name: the name of the slot.
            value: the number.
            dtype: the dtype. Default: that of ``variable``.
        """
        dtype = variable.dtype if dtype is None else dtype
        return cls._on_buffers(
            [_full(device, variable.shape, dtype, value) for device in variable.devices],
            name,
            trainable=False,
        )

    @classmethod
    def _on_buffers(cls, buffers: Sequence[Buffer], name: str, *, trainable: bool) -> Variable:
        """Makes a Variable on memory that others may share."""
        made = cls.__new__(cls)
        made.name, made.trainable, made._buffers = name, trainable, tuple(buffers)
        return made

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The copy on each device, which optimizers write. Do not use it after an update."""
        return self._buffers

    def _check_memory(self) -> None:
        """Raises ``RuntimeError`` if the memory was shared with parameters and is not any more."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The logical devices that hold a copy."""
        return tuple(buffer.device for buffer in self._buffers)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each copy."""
        return self._buffers[0].shape

    @property
    def dtype(self) -> DType:
        """The NumPy dtype of each copy."""
        return self._buffers[0].dtype

    def numpy(self, *, deadline: float | None = None) -> np.ndarray:
        """Returns a host copy of the value of the current ``gr.replica``, else of the first.

        Waits for the device, at most ``deadline`` seconds; raises what ``Device.download`` raises.
        Later updates do not change the result.
        """
        return self._current().numpy(deadline=deadline)

    def array(self, output_type: OutputType | None = None) -> Any:
        """Returns a view of the memory of the current ``gr.replica``, else of the first copy.

        Nothing is copied. The library's current stream waits for our queue. Later updates write the
        same memory, after the work that this stream had when their gradients were passed. To read
        new values on a GPU, call ``array`` again. Do not write the view: change a Variable by
        ``assign``.

        Args:
            output_type: ``"numpy"`` (on the simulation), ``"cupy"`` (on GPUs), ``"torch"`` or
                ``"buffer"``. Default: NumPy on the simulation, CuPy on GPUs.

        Raises:
            ValueError: ``output_type`` is unknown, its library is not imported or cannot access the
                memory, or it is ``"jax"``, whose arrays are immutable.

        Example:
            >>> w = gr.Variable([1.0, 2.0], device=gr.open_mesh(1, backend="sim"))
            >>> view = w.array("numpy")
            >>> _ = w.assign([3.0, 4.0])
            >>> view
            array([3., 4.], dtype=float32)
        """
        buffer = self._current()
        return from_buffer(buffer, as_view_kind(output_type, buffer.device, "views of a Variable"))

    def read(self, output_type: OutputType | None = None) -> Any:
        """Returns the value of the current ``gr.replica``, else of the first copy, to compute with.

        NumPy's functions and operators and PyTorch's functions read a Variable by themselves.
        Inside a loss that is differentiated, the result is a traced value on the memory of the
        Variable. Elsewhere it is a new array, which later updates do not change. (A ``jax.jit``
        function that reads a Variable outside a loss always uses the first value: pass the value as
        an argument.)

        Args:
            output_type: the kind of the result outside a loss: ``"numpy"``, ``"cupy"``,
                ``"torch"``, ``"jax"`` or ``"buffer"``. Default: NumPy on the simulation, CuPy on
                GPUs. Only NumPy arrays of a GPU's values make the host wait. Inside a loss:
                ``"torch"`` for a tensor that PyTorch differentiates, ``"jax"`` for an array of
                ``engine="jax"``; the other kinds have no effect.

        Raises:
            ValueError: ``output_type`` is unknown, its library is not imported, it is ``"cupy"``
                and the device is simulated, or it is ``"jax"`` in a loss of another engine.
            RuntimeError: a loss reads the Variable inside a function that JAX caches, such as one
                of ``jax.jit``.
        """
        current = self._current()
        kind = as_result_kind(output_type, "native", current.device)
        reader = current_reader()
        if reader is not None:
            return reader.read(self, current, output_type)
        return from_buffer(copy_to(current.device, current), kind)

    def _make_like(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        current = self._current()
        with on_gpu_of(current.device):
            return make_like(function, args, kwargs, from_buffer(current, "native"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("copy=False is not possible: a Variable is copied to the host")
        if current_reader() is not None and self.dtype.kind in "fV":
            raise TypeError(
                f"{brief(self)} cannot become a plain array or number inside a loss, because its "
                "gradient would be lost; use variable.numpy() for a constant"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __int__(self) -> int:
        return int(self.__array__())

    def __float__(self) -> float:
        return float(self.__array__())

    @StreamScope()
    def assign(self, value: Any) -> Variable:
        """Overwrites every copy with ``value``.

        Args:
            value: an array or Variable with the shape and dtype of this one; or a list of numbers
                with its shape, which is converted to its dtype. A number only if the shape is
                ``()``: it is not broadcast.

        Returns:
            The Variable itself. The host does not wait for a device.

        Raises:
            ValueError: the shape or dtype differs. Nothing was changed.
            TypeError: ``value`` is not an array. Nothing was changed.
            RuntimeError: the call is inside a loss that has read this Variable, or its memory was
                shared with a PyTorch parameter and is not any more. Nothing was changed.

        Example:
            >>> w = gr.Variable([1.0, 2.0], device=gr.open_mesh(2, backend="sim"))
            >>> w.assign([3.0, 4.0]).numpy()
            array([3., 4.], dtype=float32)
        """
        separate = self._sources(value)
        with self._all_copies():
            for buffer, source in zip(self._buffers, separate, strict=True):
                buffer.device.copy(buffer, source)
        return self

    @StreamScope()
    def assign_add(self, delta: Any) -> Variable:
        """Adds ``delta`` to every copy and returns the Variable.

        ``delta`` has the types that ``assign`` accepts, and the same errors are raised.
        """
        self._ready_add(delta)()
        return self

    def _ready_add(self, delta: Any) -> Callable[[], None]:
        """Checks, copies and compiles for ``assign_add``; returns a function that launches."""
        accessible = [
            source if source.device is buffer.device else copy_to(buffer.device, source)
            for buffer, source in zip(self._buffers, self._sources(delta), strict=True)
        ]
        compile_rows("sums", ops.add_to_rows, {(self.dtype, self.dtype)}, self.devices[0])

        def add() -> None:
            with self._all_copies():
                for buffer, source in zip(self._buffers, accessible, strict=True):
                    ops.add_to_rows([[buffer, source]], buffer.device)

        return add

    def __repr__(self) -> str:
        return (
            f"<Variable {self.name!r} {self.dtype}{list(self.shape)} on {names_of(self.devices)}>"
        )

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else "; use variable.read() or variable.numpy()"
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_written(self)

    def __bool__(self) -> bool:
        """Returns True for every value, like objects without a truth value."""
        return True

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        _check_written(kwargs.get("out"), *(inputs[:1] if method == "at" else ()))
        return _call(ufunc if method == "__call__" else getattr(ufunc, method), inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if not any(holds_traceable(each) for each in (*args, *kwargs.values())):
            return self._make_like(function, args, kwargs)
        named = bind_arguments(function, args, kwargs)
        in_place = function.__name__ in _WRITING or named.get("copy") is False  # of nan_to_num
        _check_written([*args, *kwargs.values()][0] if in_place else named.get("out"))
        return _call(function, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs CuPy's own kernels, which do not use NumPy's protocols, on the value."""
        _check_written(kwargs.get("out"), *args[getattr(kernel, "nin", len(args)) :])
        return _call(kernel, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs PyTorch functions on the value as a tensor."""
        kwargs = kwargs or {}
        _check_written(_find_output(function, args, kwargs))
        named = {name: _read(each, "torch") for name, each in kwargs.items()}
        return function(*[_read(each, "torch") for each in args], **named)

    def __jax_array__(self) -> Any:
        return self.read("jax")

    @contextmanager
    def _all_copies(self) -> Iterator[None]:
        """Context manager: writes all copies or none, under the launch lock."""
        mesh_state = self._buffers[0].device.mesh_state
        with (
            DeferInterrupts(),
            mesh_state.launch_lock,
            mesh_state.fail_on_partial_write(self.devices),
        ):
            yield
            release_inputs()

    def _sources(self, value: Any) -> list[Buffer]:
        """Returns ``value`` for each copy; copied if it overlaps this variable's memory."""
        check_unread([self])
        begin_writes([self])
        sources = [self._to_source(value, buffer) for buffer in self._buffers]
        return [
            copy_to(source.device, source)
            if any(overlap(source, buffer) for buffer in self._buffers)
            else source
            for source in sources
        ]

    def _current(self) -> Buffer:
        index, buffers = current_replica(), self.buffers
        if index is None or len(buffers) == 1:
            return buffers[0]
        if index >= len(buffers):
            raise ValueError(
                f"there is no replica {index} of {brief(self)}, which has {len(buffers)} copies"
            )
        return buffers[index]

    def _to_source(self, value: Any, buffer: Buffer) -> Buffer:
        if isinstance(value, Variable):
            value = next((b for b in value.buffers if b.device is buffer.device), value.buffers[0])
        try:
            source = to_buffer(value, buffer.device, dtype=self.dtype)
        except (TypeError, ValueError) as error:
            raise about(f"the value for the variable {brief(self.name)}", error) from None
        wait_for_inputs([source])
        if (source.shape, source.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"the value is {source.dtype}{list(source.shape)}, but the variable "
                f"{brief(self.name)} is {self.dtype}{list(self.shape)}"
            )
        return source


def _check_written(*written: Any) -> None:
    """Raises ``TypeError`` if a call would write a Variable, or one in a list or tuple."""
    if any(holds_traceable(each, Variable) for each in written):
        raise TypeError("a Variable cannot be changed in place: use assign or assign_add")


def _call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a NumPy function with the values of Variables.

    With an array of PyTorch or JAX, and in a loss of JAX, calls their function of this name.
    """
    library = _library(args)
    named = {name: _read(each, library) for name, each in kwargs.items()}
    values = [_read(each, library) for each in args]
    library = library or _library(values)
    if library is not None:
        name = "pow" if function.__name__ == "power" else function.__name__
        function = getattr(sys.modules[_FUNCTIONS[library]], name, function)
    return function(*values, **named)


def _library(values: Any) -> str | None:
    """Returns the library of a PyTorch or JAX array among the values; None without one."""
    for value in values:
        if isinstance(value, Traceable):
            continue
        try:
            kind = kind_of(value)
        except TypeError:  # for example a slice
            continue
        if kind in _FUNCTIONS:
            return kind
    return None


def _read(value: Any, output_type: Any) -> Any:
    """Replaces Variables in an argument, list or tuple by their values."""
    if isinstance(value, Variable):
        return value.read(output_type)
    if isinstance(value, list | tuple) and holds_traceable(value, Variable):
        within = [_read(each, output_type) for each in value]
        return tuple(within) if isinstance(value, tuple) else within
    return value


def _find_output(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns what a PyTorch function writes: its first argument if its name ends in ``_``."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or kwargs.get("inplace"):
        return args[0] if args else next(iter(kwargs.values()))
    return kwargs.get("out")


def begin_writes(variables: Sequence[Variable]) -> None:
    """Prepares writes to Variables that share memory with PyTorch parameters.

    Our queues wait for PyTorch's current streams, and autograd counts the writes. Other Variables
    need nothing.

    Raises:
        RuntimeError: a Variable does not share its parameters' memory any more.
    """
    for variable in variables:
        variable._check_memory()
    shared = [variable for variable in variables if variable._parameters]
    if shared:
        wait_for_inputs([buffer for variable in shared for buffer in variable._buffers])
        count_writes([tensor for variable in shared for tensor in variable._parameters])


def _devices(device: DeviceLike | Mesh | None, initial_value: Any) -> Sequence[Device]:
    own = initial_value.device if isinstance(initial_value, Buffer) else None
    if device is not None:
        return as_devices(device, "device=", None if own is None else own.mesh)
    return default_mesh().devices[:1] if own is None else (own,)


def _choose_dtype(initial_value: Any, dtype: Any, device: Device) -> DType:
    if dtype is not None:
        return as_dtype(dtype)
    found = to_buffer(initial_value, device).dtype
    return as_dtype("float32") if found.kind == "f" and not is_array(initial_value) else found


def _full(device: Device, shape: tuple[int, ...], dtype: DType, value: float) -> Buffer:
    if not value:
        return device.zeros(shape, dtype)
    one = numbers(value, dtype)
    return device.upload(one.repeat(math.prod(shape)).reshape(shape))


def _copy_to_new(value: Any, device: Device, dtype: DType) -> Buffer:
    """Copies ``value``, cast to ``dtype``, into a new Buffer."""
    source = to_buffer(value, device, dtype=dtype)
    wait_for_inputs([source])
    if source.dtype != dtype:
        source = device.upload(cast_array(source.numpy(), dtype))
    return copy_to(device, source)
