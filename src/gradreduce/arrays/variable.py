"""Variables: named arrays that are trained, on one device or mirrored on several.

Arithmetic with a Variable is that of its value, see ``variable_operators.py``.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradreduce import ops
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    DType,
    Mesh,
    as_dtype,
    as_flag,
    copied_to,
    copy_over,
    overlap,
)
from gradreduce.errors import NotCopied, about, brief, listed

from .caller_streams import StreamScope, release_inputs
from .convert import (
    as_result_kind,
    as_view_kind,
    converted,
    from_buffer,
    is_array,
    numbers,
    shape_and_dtype,
    to_buffer,
)
from .convert_gpu import on_gpu_of, wait_for_inputs
from .outputs import count_writes
from .replica_context import current_replica
from .trace_context import check_unread, current_reader, make_like
from .types import OutputType
from .variable_operators import Readable

if TYPE_CHECKING:
    import numpy as np

_numbers = itertools.count()


class Variable(NotCopied, Readable):
    """A named array that is changed in place, with an equal copy on each device.

    ``variable == 1.0`` compares identity, since Variables are keys of dictionaries; to compare the
    numbers write ``variable.read() == 1.0`` or ``np.equal(variable, 1.0)``.

    Args:
        initial_value: an array, number or nested list; copied.
        name: default ``"Variable"``, or ``"Variable_1"`` and so on.
        trainable: whether optimizers change it; if so it must be float16, bfloat16, float32 or
            float64. A counter such as a global step is not.
        dtype: default that of an array; float32 for numbers with a point, int64 for integers.
        device: a device, its name (``"gpu:1"``), a ``torch.device`` or a whole mesh (one copy on
            each of its devices). Names are looked up in the mesh of an ``initial_value`` that is a
            Buffer, else in ``gr.default_mesh()``. Default: the device of such a Buffer, else device
            0 of the default mesh.

    Raises:
        TypeError: a dtype that cannot be added, ``initial_value`` is not an array, ``device`` is
            not a device, or ``name`` is not a string.
        ValueError: ``trainable`` with a dtype that is not a float, or a device outside the mesh.
    """

    _copy_hint = "pass variable.numpy(), and make a new Variable of it"

    _parameters: tuple[Any, ...] = ()  # tensors of PyTorch whose memory this is too

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
        wanted = _wanted_dtype(initial_value, dtype, devices[0])
        trainable = as_flag("trainable", trainable)
        if trainable and wanted.kind not in "fV":  # bfloat16 is of kind V in ml_dtypes
            raise ValueError(
                f"Invalid type {wanted} of a trainable variable: allowed are float16, bfloat16, "
                "float32 and float64; trainable=False takes any"
            )
        if name is not None and not isinstance(name, str):  # TensorFlow's second is trainable
            raise TypeError(f"name={brief(name)} must be a string")
        number = next(_numbers)
        self.name = name or ("Variable" if number == 0 else f"Variable_{number}")
        self.trainable = trainable
        self._buffers = tuple(_copied(initial_value, device, wanted) for device in devices)

    @classmethod
    def _filled_like(
        cls, variable: Variable, name: str, value: float = 0.0, *, dtype: DType | None = None
    ) -> Variable:
        """Makes a slot: a non-trainable Variable like another one, filled with one number.

        Args:
            variable: whose shape and devices.
            name: of the new one.
            value: the number.
            dtype: default that of ``variable``.
        """
        dtype = variable.dtype if dtype is None else dtype
        buffers = [_filled(device, variable.shape, dtype, value) for device in variable.devices]
        return cls._on_buffers(buffers, name, trainable=False)

    @classmethod
    def _on_buffers(cls, buffers: Sequence[Buffer], name: str, *, trainable: bool) -> Variable:
        """Makes a Variable of memory that another one may own too."""
        made = cls.__new__(cls)
        made.name, made.trainable, made._buffers = name, trainable, tuple(buffers)
        return made

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The copy on each device, which optimizers write. Do not keep it across an update."""
        return self._buffers

    def _check_memory(self) -> None:
        """Raises ``RuntimeError`` if the memory was another owner's and is not any more."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The logical devices that hold a copy."""
        return tuple(buffer.device for buffer in self._buffers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each copy."""
        return self._buffers[0].shape

    @property
    def dtype(self) -> DType:
        """NumPy dtype of each copy."""
        return self._buffers[0].dtype

    def numpy(self, *, deadline: float | None = None) -> np.ndarray:
        """Copies the value of the current ``gr.replica``, else the first copy, to the host.

        Waits for the device, ``deadline`` seconds or for ever; see ``Device.download``, which
        raises. Later updates do not change it.
        """
        return self._current().numpy(deadline=deadline)

    @StreamScope()
    def array(self, output_type: OutputType | None = None) -> Any:
        """Returns a view of the memory of the current ``gr.replica``, else of the first copy.

        Nothing is copied. The stream that is current in the library waits for our queue; later
        updates write the same memory, after what that stream held when their gradients were
        passed. To read what they wrote on a GPU, ask for a view again. Only to be read: change a
        variable by ``assign``.

        Args:
            output_type: ``"numpy"`` (on the simulation), ``"cupy"`` (on GPUs), ``"torch"`` or
                ``"buffer"``. Default: NumPy's or CuPy's, where the variable lies.

        Raises:
            ValueError: another word, a library that is not imported or cannot see that memory, or
                JAX's, whose arrays never change.
        """
        buffer = self._current()
        return from_buffer(buffer, as_view_kind(output_type, buffer.device, "views of a Variable"))

    def read(self, output_type: OutputType | None = None) -> Any:
        """Returns the value to compute with, of the current ``gr.replica``, else the first copy.

        NumPy's functions and operators read a Variable by themselves, and so do PyTorch's
        functions. Inside a loss that is being differentiated the value is traced, on the memory of
        the Variable; elsewhere it is a new array, which later updates do not change. (So a function
        of ``jax.jit`` that reads it outside a loss computes with the first value for ever: pass it
        in.)

        Args:
            output_type: kind of the array returned. ``"torch"``: a tensor, with which PyTorch
                differentiates a loss that returns a tensor. Default: NumPy, on GPUs CuPy. Outside a
                loss also ``"numpy"``, ``"cupy"``, ``"jax"`` or ``"buffer"``.

        Raises:
            ValueError: an unknown ``output_type``, or a library that is not imported.
        """
        current = self._current()
        kind = as_result_kind(output_type, "native", current.device)
        reader = current_reader()
        if reader is not None:
            return reader.read(self, current, output_type)
        with StreamScope():
            return from_buffer(copied_to(current.device, current), kind)

    def _make_like(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        current = self._current()
        with StreamScope(), on_gpu_of(current.device):
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
            value: of the variable's shape; a number, a list, an array of its dtype, or another
                Variable.

        Raises:
            ValueError: another shape or dtype; nothing is changed.
            RuntimeError: inside a loss that has read this Variable, or its memory was that of a
                parameter of PyTorch and is not any more; likewise.
        """
        separate = self._sources(value)
        with self._all_copies():
            for buffer, source in zip(self._buffers, separate, strict=True):
                copy_over(buffer.device, buffer, source)
        return self

    @StreamScope()
    def assign_add(self, delta: Any) -> Variable:
        """Adds ``delta`` to every copy; otherwise like ``assign``."""
        self._ready_add(delta)()
        return self

    def _ready_add(self, delta: Any) -> Callable[[], None]:
        """Checks, copies and compiles for ``assign_add``; returns a function that launches it."""
        accessible = [
            source if source.device is buffer.device else copied_to(buffer.device, source)
            for buffer, source in zip(self._buffers, self._sources(delta), strict=True)
        ]
        for buffer in self._buffers:
            ops.prepare_accumulate_n(buffer.device, self.dtype, self.dtype)

        def add() -> None:
            with self._all_copies():
                for buffer, source in zip(self._buffers, accessible, strict=True):
                    ops.accumulate_n([buffer], [[source]])

        return add

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return f"<Variable {self.name!r} {self.dtype}{list(self.shape)} on {names}>"

    @contextmanager
    def _all_copies(self) -> Iterator[None]:
        """Context that writes all copies or none, under the launch lock."""
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
        sources = [self._checked(value, buffer) for buffer in self._buffers]
        return [
            copied_to(source.device, source)
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

    def _checked(self, value: Any, buffer: Buffer) -> Buffer:
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


def begin_writes(variables: Sequence[Variable]) -> None:
    """Makes the memory of Variables ready to be written; that which nobody else has always is.

    Our queues wait for the current streams of PyTorch, and autograd notices the writes.

    Raises:
        RuntimeError: it is not the memory of a Variable's parameters any more.
    """
    for variable in variables:
        variable._check_memory()
    shared = [variable for variable in variables if variable._parameters]
    if shared:
        wait_for_inputs([buffer for variable in shared for buffer in variable._buffers])
        count_writes([tensor for variable in shared for tensor in variable._parameters])


def get_variable(
    name: str,
    initial_value: Any = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    trainable: bool = True,
    reuse: bool = False,
    custom_getter: Callable[..., Variable] | None = None,
) -> Variable:
    """Makes a Variable, or finds one by name; calls a custom getter if given (tf.get_variable).

    Args:
        name: of the variable.
        initial_value: see ``Variable``; or a callable: an initializer, called as
            ``initial_value(shape, dtype=dtype)``, where ``shape`` is given, such as ``np.zeros``;
            else without arguments. Not needed with ``reuse``.
        shape: what an initializer is asked for; with ``reuse`` what the variable must have.
        dtype: of the variable, see ``Variable``; default float32 for an initializer.
        trainable: see ``Variable``.
        reuse: give the variable of this name that ``get_variable`` has made last and that still
            lives, and make none. Without it a new one is made, whatever its name. (TensorFlow
            refuses a second one.)
        custom_getter: called as ``custom_getter(getter, name, initial_value, trainable=trainable)``
            and returns the Variable; ``shape``, ``dtype`` and ``reuse`` are added where they are
            given. ``getter`` makes one, or finds it: it takes the same, and ``device`` as
            ``Variable`` does. An ``AGNCustomGetter``, say.

    Raises:
        TypeError: ``name`` is no string, ``reuse`` no bool, or ``custom_getter`` is no callable or
            returns no Variable.
        ValueError: an empty ``name``; ``shape`` without an initializer, no ``initial_value``, or
            an initializer that gives another shape; with ``reuse``, no variable of this name, or
            one of another shape or dtype than ``shape``, ``dtype`` or an array ``initial_value``.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={brief(name)} must be a string")
    if not name:
        raise ValueError("name is empty; a variable must have a name")
    reuse = as_flag("reuse", reuse)
    options = {"shape": shape, "dtype": dtype, "reuse": reuse or None}
    others = {name: value for name, value in options.items() if value is not None}
    if custom_getter is None:
        return _make_or_find(name, initial_value, trainable=trainable, **others)
    if not callable(custom_getter):
        raise TypeError(f"custom_getter={brief(custom_getter)} is not callable")
    made = custom_getter(_make_or_find, name, initial_value, trainable=trainable, **others)
    if not isinstance(made, Variable):
        raise TypeError(
            f"custom_getter={brief(custom_getter)} returned {brief(made)}; return a Variable"
        )
    return made


_by_name: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()


def _make_or_find(
    name: str,
    initial_value: Any = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    trainable: bool = True,
    reuse: bool = False,
    device: DeviceLike | Mesh | None = None,
) -> Variable:
    """Makes a Variable, or finds it with ``reuse``; see ``get_variable``."""
    if reuse:
        return reused(_by_name.get(name), name, initial_value, shape, dtype)
    if shape is not None:
        if not callable(initial_value):
            raise ValueError(
                f"shape={brief(shape)} of {name!r}: initial_value must be an initializer, which is "
                "called with the shape"
            )
        shape = tuple(shape)
        dtype = as_dtype("float32" if dtype is None else dtype)
        initial_value = initial_value(shape, dtype=dtype)
    elif callable(initial_value):
        initial_value = initial_value()
    elif initial_value is None:
        raise ValueError(f"initial_value of {name!r} is missing: pass an array or a callable")
    made = Variable(initial_value, name, trainable=trainable, dtype=dtype, device=device)
    if shape is not None and made.shape != shape:
        raise ValueError(
            f"the initializer of {name!r} returned shape {made.shape}; expected shape={shape}"
        )
    _by_name[name] = made
    return made


def reused(
    found: Variable | None, name: str, initial_value: Any, shape: Any, dtype: Any
) -> Variable:
    """Returns ``found``, the variable to reuse, after checking its shape and dtype."""
    if found is None:
        raise ValueError(f"reuse=True: get_variable has made no {name!r} that still exists")
    if is_array(initial_value):
        initial = shape_and_dtype(initial_value)
        shape = initial[0] if shape is None else shape
        dtype = initial[1] if dtype is None else dtype
    if shape is not None and tuple(shape) != found.shape:
        raise ValueError(f"reuse=True: {brief(found)} has shape {found.shape}, not {tuple(shape)}")
    if dtype is not None and as_dtype(dtype) != found.dtype:
        raise ValueError(
            f"reuse=True: {brief(found)} has dtype {found.dtype}, not {as_dtype(dtype)}"
        )
    return found


def _devices(device: DeviceLike | Mesh | None, initial_value: Any) -> Sequence[Device]:
    own = initial_value.device if isinstance(initial_value, Buffer) else None
    if device is not None:
        return as_devices(device, "device=", None if own is None else own.mesh)
    return default_mesh().devices[:1] if own is None else (own,)


def _wanted_dtype(initial_value: Any, dtype: Any, device: Device) -> DType:
    if dtype is not None:
        return as_dtype(dtype)
    found = to_buffer(initial_value, device).dtype
    return as_dtype("float32") if found.kind == "f" and not is_array(initial_value) else found


def _filled(device: Device, shape: tuple[int, ...], dtype: DType, value: float) -> Buffer:
    if not value:
        return device.zeros(shape, dtype)
    one = numbers(value, dtype)
    return device.upload(one.repeat(math.prod(shape)).reshape(shape))


def _copied(value: Any, device: Device, dtype: DType) -> Buffer:
    """Copies ``value``, cast to ``dtype``, into a new Buffer."""
    source = to_buffer(value, device, dtype=dtype)
    wait_for_inputs([source])
    if source.dtype != dtype:
        source = device.upload(converted(source.numpy(), dtype))
    return copied_to(device, source)
