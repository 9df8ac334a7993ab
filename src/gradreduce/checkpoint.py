"""Checkpoints: schemas of states, their validator, and ``split`` and ``join`` for file formats.

A state is a dict of numbers, strings, None, lists, dicts and arrays, in host memory. Arrays are
float32 (also for float16 and bfloat16) or float64; indices are int64. Every class with a
``state_dict`` declares it once, in a ``StateTable``, which saves it, is the schema of saved states,
and loads them. A schema is:

- a dict: the state has exactly these keys, and each entry fits the schema of its key;
- a function: is called with the name (for errors) and value of an entry, validates the entry, and
  returns its value.

The entry ``"format"`` names the class and the version of the table. A load validates everything and
allocates memory before it changes anything. A state may come from a file of someone else: sizes,
ranks and depths are checked before anything of their size is made or printed.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from numpy.lib.npyio import NpzFile

from gradreduce.arrays.convert import (
    as_result_kind,
    cast_array,
    check_memory,
    host_array,
    is_array,
    kind_of,
    shape_and_dtype,
)
from gradreduce.arrays.convert_gpu import as_tensor
from gradreduce.arrays.trace_context import check_unread
from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    DType,
    accumulate_dtype,
    as_flag,
    as_index,
    copy_to,
)
from gradreduce.errors import about, brief, listed
from gradreduce.npz_file import check_disjoint, read_array

__all__ = ["join", "split"]

Check = Callable[[str, Any], Any]
_OUTPUT_TYPES = ("numpy", "torch")
_METADATA = "gradreduce"  # the key of the metadata
_DEEPEST = 32  # dicts and lists inside each other; states have up to 6
_MOST_ENTRIES = 64  # of a list of numbers: a shape has at most so many extents
NUMBERED = "; Variables without a name are numbered as they are made: give each a name"


# ---- files ---------------------------------------------------------------------------------------


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Splits a state into its arrays and one string, as safetensors stores them.

    Args:
        state: the result of any ``state_dict``.

    Returns:
        The arrays, not copied, by names such as ``"variables.w"``; and metadata with everything
        else.

    Raises:
        TypeError: the state contains a value that ``state_dict`` does not return.

    Example:
        >>> optimizer = gr.MomentumOptimizer(0.1, 0.9)
        >>> w = gr.Variable([1.0, 2.0], "w", device=gr.open_mesh(1, backend="sim"))
        >>> optimizer.prepare([w])
        >>> tensors, metadata = gr.checkpoint.split(optimizer.state_dict())
        >>> list(tensors), list(metadata)
        (['slots.w.momentum'], ['gradreduce'])
    """
    tensors: dict[str, Any] = {}

    def without_arrays(path: str, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        while path in tensors:  # names of variables may contain dots
            path += "_"
        tensors[path] = leaf
        return {"tensor": path}

    return tensors, {_METADATA: json.dumps(map_leaves(without_arrays, state))}


def join(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Joins the results of ``split`` to a state for ``load_state_dict``.

    Args:
        tensors: arrays of any library, by name; for example an open ``.npz`` file, whose arrays
            are then read.
        metadata: the metadata of ``split``; may have other keys too. For an ``.npz`` file that
            contains the metadata, pass the file again.

    Raises:
        KeyError: an array is missing.
        ValueError: the metadata is not from ``split``, or names an array twice; or an array of an
            ``.npz`` file cannot be read, or is larger than the file.

    Example:
        >>> state = {"format": "example 1", "sums": [np.zeros(2)]}
        >>> gr.checkpoint.join(*gr.checkpoint.split(state))
        {'format': 'example 1', 'sums': [array([0., 0.])]}
    """
    if metadata is None or _METADATA not in metadata:
        raise ValueError(f"metadata={brief(metadata)} has no {_METADATA!r}: pass that of split()")

    check_disjoint(tensors)
    named: set[str] = set()

    def with_arrays(entry: dict[str, Any]) -> Any:
        name = entry.get("tensor")
        if len(entry) != 1 or not isinstance(name, str):
            return entry
        if name not in tensors:
            raise KeyError(f"tensors has no {name!r}, which the metadata names")
        if name in named:  # an open .npz file reads it again, into new memory
            raise ValueError(f"the metadata names {name!r} twice; split() names each array once")
        named.add(name)
        return _read_entry(tensors, name)

    text = plain(f"metadata[{_METADATA!r}]", _read_entry(metadata, _METADATA))  # of .npz: an array
    if not isinstance(text, str):
        raise ValueError(f"metadata[{_METADATA!r}] is {brief(text)}: pass the metadata of split()")
    try:
        state: dict[str, Any] = json.loads(text, object_hook=with_arrays)
    except RecursionError:
        raise ValueError(
            f"metadata[{_METADATA!r}] is nested too deeply: pass the metadata of split()"
        ) from None
    return state


def _read_entry(store: Any, name: str) -> Any:
    """Returns an entry of a mapping, or an array of an open ``.npz`` file."""
    return read_array(store, name) if isinstance(store, NpzFile) else store[name]


def map_leaves(
    function: Callable[[str, Any], Any], value: Any, path: str = "", depth: int = _DEEPEST
) -> Any:
    """Applies a function to the paths and leaves of nested dicts and lists.

    Raises:
        ValueError: they are nested more than ``depth`` levels deep.
    """
    inside = f"{path}." if path else ""
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        return function(path, value)
    if not depth:
        raise ValueError(
            f"{path} has more than {_DEEPEST} levels of dicts and lists; states have fewer"
        )
    results = {
        key: map_leaves(function, each, f"{inside}{key}", depth - 1) for key, each in entries
    }
    return results if isinstance(value, Mapping) else list(results.values())


# ---- tables --------------------------------------------------------------------------------------


class StateEntry(NamedTuple):
    """How one entry of a state is saved, validated and loaded.

    Attributes:
        save: returns what the state has: a value, or what ``downloader`` replaces.
        schema: the schema of the saved entry.
        ready: takes the validated value and allocates memory for it; returns a function that loads
            it. Default: it is not loaded, or the class loads it together with other entries.
        is_constant: whether states with another value are those of other objects. Then it is
            validated before other entries and before the keys, which may differ.
    """

    save: Callable[[], Any]
    schema: Any
    ready: Callable[[Any], Callable[[], Any]] = lambda _: tuple  # which does nothing
    is_constant: bool = False

    def __call__(self, where: str, saved: Any) -> Any:
        """Validates the saved entry."""
        return validate_state(where, saved, self.schema)


def constant(value: Any) -> StateEntry:
    """An entry that every state of an object has, such as its format."""
    return StateEntry(lambda: value, equal(value), is_constant=True)


def attribute(owner: Any, name: str, schema: Any) -> StateEntry:
    """The value of an attribute, which a load sets."""
    return StateEntry(
        partial(getattr, owner, name), schema, lambda value: partial(setattr, owner, name, value)
    )


class StateTable(dict[str, Any]):
    """Declares a state, or a dict in one: a StateEntry or a StateTable for each key, in order."""

    def save(self) -> dict[str, Any]:
        """Returns what the state has, see ``StateEntry``."""
        return {key: entry.save() for key, entry in self.items()}

    def ready(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Allocates memory for all validated values; returns a function that loads them."""
        return partial(load_all, [entry.ready(values[key]) for key, entry in self.items()])


def load_all(loads: Iterable[Callable[[], object]]) -> None:
    """Calls functions that load parts of a state; Ctrl-C takes effect after the last one."""
    with DeferInterrupts():
        for load in loads:
            load()


def value_entry(variable: Variable) -> StateEntry:
    """The value of a variable. A load raises ``RuntimeError`` if it cannot be written now."""

    def ready(value: Any) -> Callable[[], Any]:
        check_unread([variable])
        variable._check_memory()
        return partial(variable.assign, upload_like(value, variable))

    return StateEntry(
        lambda: queue_copy(variable.buffers[0]), array(variable.shape, variable.dtype), ready
    )


def values_of(variables: Mapping[str, Variable]) -> StateTable:
    """The values of variables, by name."""
    return StateTable({name: value_entry(variable) for name, variable in variables.items()})


# ---- save ----------------------------------------------------------------------------------------


def queue_copy(buffer: Buffer) -> Buffer:
    """Queues a copy on the device: all of a state is from one time."""
    return copy_to(buffer.device, buffer)


def downloader(
    deadline: float | None, output_type: str = "numpy"
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function that replaces the Buffers in a state by downloaded arrays.

    An entry may also be a function; it is called with a function that downloads a Buffer.

    Args:
        deadline: seconds from now for all downloads together; None: no limit.
        output_type: the kind of the arrays: ``"numpy"`` or ``"torch"`` (on the CPU).

    Raises:
        ValueError: ``output_type`` is unknown, or PyTorch is not imported.
    """
    if output_type not in _OUTPUT_TYPES:
        raise ValueError(f"output_type={brief(output_type)} is not one of {_OUTPUT_TYPES}")
    as_result_kind(output_type, "native")
    end = None if deadline is None else time.monotonic() + deadline

    def download(buffer: Buffer) -> Any:
        seconds = None if end is None else max(end - time.monotonic(), 1e-6)
        array, dtype = buffer.numpy(deadline=seconds), accumulate_dtype(buffer.dtype)
        return array if array.dtype == dtype else cast_array(array, dtype)

    def as_output(_: str, leaf: Any) -> Any:
        if callable(leaf):
            leaf = leaf(download)
        elif isinstance(leaf, Buffer):
            leaf = download(leaf)
        if output_type == "torch" and is_array(leaf):
            own = leaf if leaf.flags.writeable else leaf.copy()  # PyTorch has no read-only tensors
            return as_tensor(own, sys.modules["torch"].from_numpy)
        return leaf

    return partial(map_leaves, as_output)


def by_name(variables: Iterable[Variable]) -> dict[str, Variable]:
    """Maps names to variables; ``ValueError`` if two have the same name."""
    owners: dict[str, Variable] = {}
    for var in variables:
        if owners.setdefault(var.name, var) is not var:
            raise ValueError(f"two variables have the name {var.name!r}; states need unique names")
    return owners


# ---- load ----------------------------------------------------------------------------------------


def validate_state(where: str, saved: Any, schema: Any) -> Any:
    """Validates a part of a state; returns its values, with arrays in host memory.

    Args:
        where: the name of the part, for errors.
        saved: the part, from ``state_dict`` or from a file format, which may return tuples or
            arrays for lists, 0-d arrays for numbers and strings, and tensors for arrays.
        schema: see the module's docstring.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value has another type.
        ValueError: a value has another format, shape or dtype, or is out of range.
    """
    if isinstance(schema, Mapping):
        if not isinstance(saved, Mapping):
            raise TypeError(f"{where} is a {type(saved).__name__}; expected a dict")
        for key, each in schema.items():
            if isinstance(each, StateEntry) and each.is_constant and key in saved:
                each(f"{where}[{key!r}]", saved[key])
        _check_keys(where, saved, schema)
        return {
            key: validate_state(f"{where}[{key!r}]", saved[key], each)
            for key, each in schema.items()
        }
    return schema(where, saved)


def list_of(schema: Any, length: int) -> Check:
    """Returns a check for a list of this length, whose entries fit a schema."""

    def check(where: str, saved: Any) -> list[Any]:
        if not isinstance(saved, list | tuple):
            raise TypeError(f"{where} is a {type(saved).__name__}; expected a list")
        if len(saved) != length:
            raise ValueError(f"{where} has {len(saved)} entries; expected {length}")
        return [
            validate_state(f"{where}[{index}]", each, schema) for index, each in enumerate(saved)
        ]

    return check


def _check_keys(where: str, saved: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    missing = [key for key in schema if key not in saved]
    unknown = [key for key in saved if key not in schema]
    wrong = {"missing": missing, "unknown": unknown}
    texts = [f"{listed(map(repr, keys))} {kind}" for kind, keys in wrong.items() if keys]
    if texts:
        hint = NUMBERED if select_numbered([*missing, *unknown]) else ""
        raise KeyError(f"{where} has wrong keys: {', '.join(texts)}{hint}")


def select_numbered(names: Iterable[Any]) -> list[str]:
    """Returns the generated names, which Variables without a name have."""
    return [name for name in names if re.fullmatch(r"Variable(_\d+)?", str(name))]


def check_order(where: str, saved: Iterable[str], names: Iterable[str]) -> None:
    """Raises ``KeyError`` if unnamed Variables are in another order than in the state."""
    saved_numbered, numbered = select_numbered(saved), select_numbered(names)
    if saved_numbered != numbered:
        raise KeyError(
            f"{where} has {listed(saved_numbered)} in this order; expected "
            f"{listed(numbered)}{NUMBERED}"
        )


def plain(where: str, saved: Any, most: int = _MOST_ENTRIES) -> Any:
    """Returns the Python value of a number, string or None, or a flat list of them.

    Arrays are accepted too; a list has at most ``most`` entries.

    Raises:
        TypeError: it is a dict, or of a class that looks like an array.
        ValueError: it is nested, an array of a higher rank, or too long.
    """
    shape: tuple[int, ...] = ()
    is_list = isinstance(saved, list | tuple)
    if isinstance(saved, Mapping):
        raise TypeError(f"{where} is a dict; expected a number, a string or a list of them")
    if is_list:
        shape = (len(saved),)
    elif is_array(saved):
        shape = shape_of(where, saved)
    if len(shape) > (1 if most else 0) or math.prod(shape) > max(most, 1):
        what = "a number or string" + f", or a flat list of at most {most} of them" * bool(most)
        raise ValueError(f"{where} has the shape {brief(shape)}; expected {what}")
    if is_list:
        return [plain(f"{where}[{index}]", each, 0) for index, each in enumerate(saved)]
    return _of_array(where, host_array, saved).tolist() if is_array(saved) else saved


def shape_of(where: str, saved: Any) -> tuple[int, ...]:
    """Returns the shape of an array of any library, whose values may be strings."""

    def read(array: Any) -> tuple[int, ...]:
        if kind_of(array) == "native" and array.dtype.names is not None:
            raise TypeError("a structured array has no values of one type")
        return tuple(array.shape)

    shape: tuple[int, ...] = _of_array(where, read, saved)
    return shape


def _of_array(where: str, read: Callable[[Any], Any], saved: Any) -> Any:
    """Reads an array of a state; its library's errors become errors about ``where``."""
    try:
        return read(saved)
    except (TypeError, ValueError) as error:
        raise about(where, error) from None
    except RuntimeError as error:  # a tensor without memory, or with another layout
        raise TypeError(f"{where}: {str(error).partition(chr(10))[0]}") from None


def on_host(where: str, leaf: Any) -> Any:
    """Returns an array of a state as a NumPy array, other values unchanged.

    Raises:
        TypeError: its memory cannot be read.
        ValueError: its memory does not hold each of its elements.
    """
    if is_array(leaf):
        _of_array(where, check_memory, leaf)
        return _of_array(where, host_array, leaf)
    return leaf


def anything(_: str, saved: Any) -> Any:
    """Accepts every value."""
    return saved


def equal(required: Any) -> Check:
    """Returns a check for one string, list or None."""

    def check(where: str, saved: Any) -> Any:
        value = plain(where, saved)
        if type(value) is not type(required) or value != required:
            raise ValueError(f"{where} is {brief(value)}; expected {brief(required)}")
        return value

    return check


def integer(least: int, most: int = 2**63 - 1) -> Callable[[str, Any], int]:
    """Returns a check for an integer of this range."""

    def check(where: str, saved: Any) -> int:
        value = plain(where, saved)
        try:
            number = as_index(value)
        except TypeError:
            raise TypeError(f"{where}={brief(saved)} must be an integer") from None
        if not least <= number <= most:
            bound = f"at least {least}" if number < least else f"at most {most}"
            raise ValueError(f"{where}={number} must be {bound}")
        return number

    return check


def flag(where: str, saved: Any) -> bool:
    """Checks a bool."""
    return as_flag(where, plain(where, saved))


def array(shape: tuple[int, ...], dtype: DType) -> Check:
    """Returns a check for the array of a Buffer with this shape and dtype."""
    required = shape, accumulate_dtype(dtype)

    def check(where: str, saved: Any) -> Any:
        if not is_array(saved):
            raise TypeError(f"{where} is a {type(saved).__name__}; expected an array")
        actual = _of_array(where, shape_and_dtype, saved)
        if actual != required:
            raise ValueError(
                f"{where} is {actual[1]}{actual[0]}; expected {required[1]}{required[0]}"
            )
        return on_host(where, saved)

    return check


def optional(schema: Any) -> Check:
    """Returns a check for None, or a value that fits a schema."""
    return lambda where, saved: None if saved is None else validate_state(where, saved, schema)


def some_of(schemas: Mapping[str, Any]) -> Check:
    """Returns a check for a dict with any of these keys."""

    def check(where: str, saved: Any) -> Any:
        keys = saved if isinstance(saved, Mapping) else ()
        return validate_state(where, saved, {key: schemas[key] for key in keys if key in schemas})

    return check


def upload_like(value: Any, variable: Variable, dtype: DType | None = None) -> Buffer:
    """Uploads a validated host array to the first device of a variable, by default in its dtype."""
    return variable.devices[0].upload(cast_array(value, dtype or variable.dtype))
