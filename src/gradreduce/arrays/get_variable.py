"""Creates Variables, or finds those that exist, like tf.get_variable."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import (
    Mesh,
    as_dtype,
    as_flag,
)
from gradreduce.errors import brief

from .convert import (
    is_array,
    shape_and_dtype,
)
from .variable import Variable

_by_name: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()


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
    """Makes a Variable, or finds one by name, also by a custom getter (tf.get_variable).

    Args:
        name: the name of the Variable.
        initial_value: see ``Variable``; or an initializer: a callable such as ``np.zeros``, which
            is called as ``initial_value(shape, dtype=dtype)`` if ``shape`` is passed, else without
            arguments. Not needed with ``reuse``.
        shape: the shape for an initializer; with ``reuse`` the required shape.
        dtype: the dtype, see ``Variable``; default float32 for an initializer.
        trainable: see ``Variable``.
        reuse: return the Variable of this name that ``get_variable`` has made last, if it still
            exists, and make none. Otherwise a new one is made, even if the name exists. (TensorFlow
            raises an error then.)
        custom_getter: a callable such as an ``AGNCustomGetter``, which returns the Variable. It is
            called as ``custom_getter(getter, name, initial_value, trainable=trainable)``, with
            ``shape``, ``dtype`` and ``reuse`` if they were passed. ``getter`` makes or finds a
            Variable: it takes the same arguments, and ``device`` as for ``Variable``.

    Raises:
        TypeError: ``name`` is not a string, ``reuse`` not a bool, or ``custom_getter`` is not
            callable or does not return a Variable.
        ValueError: ``name`` is empty; ``shape`` is passed without an initializer; there is no
            ``initial_value``; or an initializer returns another shape. With ``reuse``: there is no
            Variable of this name, or its shape or dtype is not that of ``shape``, ``dtype`` or an
            array ``initial_value``.

    Example:
        >>> w = gr.get_variable("w_of_example", np.zeros, shape=(2, 3))
        >>> w.shape, w is gr.get_variable("w_of_example", reuse=True)
        ((2, 3), True)
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
    variable = custom_getter(_make_or_find, name, initial_value, trainable=trainable, **others)
    if not isinstance(variable, Variable):
        raise TypeError(
            f"custom_getter={brief(custom_getter)} returned {brief(variable)}; return a Variable"
        )
    return variable


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
        return validate_reuse(_by_name.get(name), name, initial_value, shape, dtype)
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
    variable = Variable(initial_value, name, trainable=trainable, dtype=dtype, device=device)
    if shape is not None and variable.shape != shape:
        raise ValueError(
            f"the initializer of {name!r} returned shape {variable.shape}; expected shape={shape}"
        )
    _by_name[name] = variable
    return variable


def validate_reuse(
    variable: Variable | None, name: str, initial_value: Any, shape: Any, dtype: Any
) -> Variable:
    """Checks shape and dtype of the Variable to reuse, and returns it."""
    if variable is None:
        raise ValueError(
            f"reuse=True: get_variable has made no {name!r} that still exists; create it first"
        )
    if is_array(initial_value):
        initial = shape_and_dtype(initial_value)
        shape = initial[0] if shape is None else shape
        dtype = initial[1] if dtype is None else dtype
    if shape is not None and tuple(shape) != variable.shape:
        raise ValueError(
            f"reuse=True: {brief(variable)} has shape {variable.shape}, not {tuple(shape)}"
        )
    if dtype is not None and as_dtype(dtype) != variable.dtype:
        raise ValueError(
            f"reuse=True: {brief(variable)} has dtype {variable.dtype}, not {as_dtype(dtype)}"
        )
    return variable
