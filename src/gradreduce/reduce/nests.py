"""Nests of gradients, one for each device: dicts, lists, tuples, and modules of PyTorch.

The path of a tensor consists of the keys and indices that lead to it. Its name is the path joined
by dots, as in PyTorch's ``state_dict``: ``layers.0.weight``. A tensor in a flat list has only a
number.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, Literal

from gradreduce.arrays.convert import as_list, host_array, is_array, is_module, shape_and_dtype
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices
from gradreduce.device import Device, Mesh
from gradreduce.errors import brief, listed, short_name

Path = tuple[Any, ...]
Container = dict[Any, Any] | list[Any] | tuple[Any, ...]


class Nests:
    """Checked ``grads[device]``; all devices have the same structure.

    Args:
        grads: ``grads[device][…]``.
        mesh: the mesh of the devices.
        unread: the devices whose entries are not read, because they have weight 0. They may be
            anything, also None.

    Raises:
        ValueError: devices have different tensors, a tensor is None on some devices only, or two
            named parameters of a device have the same name.
        TypeError: an iterator is not the result of ``named_parameters()``.
    """

    def __init__(self, grads: Any, mesh: Mesh, unread: Collection[int] = ()) -> None:
        mesh.mesh_state.check_process()
        grads = as_list(grads)
        why = "; pass mesh= for another mesh"
        _check_entries("grads", grads, len(mesh.devices), lambda: f" of {mesh}{why}")
        self._unread = unread if len(unread) < len(grads) else ()
        if self._unread:
            read = next(each for index, each in enumerate(grads) if index not in unread)
            grads = [read if index in unread else each for index, each in enumerate(grads)]
        self._grads, self._mesh = grads, mesh
        self._dicts: dict[int, dict[str, Any]] = {}  # by id: iterators are read only once
        self._columns = self._alike(grads, [f"grads[{index}]" for index in range(len(grads))])

    @property
    def values(self) -> list[PerReplica]:
        """The tensors that are not None, on the devices of the mesh."""
        columns: list[Sequence[Any]] = []
        names: list[tuple[str | int, str]] = []
        for path, column in self._columns.items():
            if column[0] is not None:
                key, number = key_of(path), len(columns)
                name = key if isinstance(key, str) else "" if key == number else str(key)
                names.append((key, name))
                columns.append(column)
        if not columns:
            return []
        if not self._unread:
            return PerReplica.of_grads(columns, names, self._mesh)
        rows = [
            [
                like_on(device, each) if index in self._unread else each
                for index, (device, each) in enumerate(zip(self._mesh, column, strict=True))
            ]
            for column in columns
        ]
        values = PerReplica.of_grads(rows, names, self._mesh)
        for value, row in zip(values, columns, strict=True):
            value._look_at(tuple(row))  # its kind is that of the arrays that are read
        return values

    def outs_of(self, out: Any) -> list[list[Any]]:
        """Returns the arrays of ``out`` for each of ``values``, after checking its nesting."""
        out = as_list(out)
        _check_entries("out", out, len(self._grads), lambda: ", as grads has")
        names = ["grads[0]", *[f"out[{index}]" for index in range(len(out))]]
        found = self._alike([self._grads[0], *out], names, check_none=False)
        return [column[1:] for column in found.values() if column[0] is not None]

    def nest_results(self, results: Iterable[Sequence[Any]]) -> Any:
        """Nests the results of ``values``, ``[tensor][device]``, like the gradients."""
        found = iter(results)
        by_path = {
            path: column if column[0] is None else next(found)
            for path, column in self._columns.items()
        }
        made = [self._nest(entry, by_path, index, ()) for index, entry in enumerate(self._grads)]
        return _like(self._grads, made)

    def _nest(
        self, like: Any, results: Mapping[Path, Sequence[Any]], device: int, path: Path
    ) -> Any:
        container = self._open(like, "", is_entry=not path)
        assert container is not None
        parts = []
        for key, part in _items_of(container):
            inner = (*path, part)
            if inner in results:
                parts.append(results[inner][device])
            else:
                parts.append(self._nest(container[key], results, device, inner))
        return _like(container, parts)

    def _alike(
        self,
        entries: Sequence[Any],
        names: Sequence[str],
        path: Path = (),
        *,
        check_none: bool = True,
    ) -> dict[Path, list[Any]]:
        """Returns the tensors of entries by path, in the first one's order.

        Args:
            entries: containers that must have the same tensors.
            names: the names of the entries, for errors.
            path: the path of the entries.
            check_none: whether a tensor must be None in all entries or in none.
        """
        where = f"[{key_of(path)!r}]" if path else ""
        opened: list[Container] = []
        for entry, name in zip(entries, names, strict=True):
            container = self._open(entry, f"{name}{where}", is_entry=not path)
            if container is None:
                raise ValueError(
                    f"{name}{where} must be a list, tuple or dict of arrays, or a PyTorch module, "
                    f"not {type(entry).__name__}"
                )
            if opened:
                _check_alike(f"{name}{where}", container, f"{names[0]}{where}", opened[0])
            opened.append(container)
        columns: dict[Path, list[Any]] = {}
        for key, part in _items_of(opened[0]):
            column = [container[key] for container in opened]
            types = set(map(type, column))
            inner = (*path, part)
            if set(map(_form_of, types)) != {"array"}:
                where = f"[{key_of(inner)!r}]"
                pairs = zip(column, names, strict=True)
                if any([self._open(each, f"{name}{where}") is not None for each, name in pairs]):
                    columns |= self._alike(column, names, inner, check_none=check_none)
                    continue
            if check_none and NoneType in types and len(types) > 1:
                _raise_missing(column, names, inner)
            columns[inner] = column
        return columns

    def _open(self, value: Any, name: str, *, is_entry: bool = False) -> Container | None:
        """Returns a container (a dict for modules and iterators), or None for an array.

        Args:
            value: an entry of ``grads``, or a value in it.
            name: the name of the value, for errors.
            is_entry: whether it is an entry of ``grads``: then a list of numbers is a container of
                arrays, not an array.
        """
        form = _form_of(type(value))
        if form == "array" or (form == "list" and not is_entry and _is_numbers(value)):
            return None
        if form == "dict" or not _is_named(value):
            container: Container = value
            return container
        made = self._dicts.get(id(value))
        if made is None:
            made = self._dicts[id(value)] = _gradients_of(value, name)
        return made


def like_on(device: Device, value: Any) -> Any:
    """Returns memory like an array, with any content, or IndexedSlices like others without rows."""
    value = as_slices(value)
    if isinstance(value, IndexedSlices):
        (_, *row), dtype = shape_and_dtype(value.values)
        return IndexedSlices(device.empty((0, *row), dtype), (), value.dense_shape)
    return device.empty(*shape_and_dtype(value if is_array(value) else host_array(value)))


_NestForm = Literal["dict", "list", "module", "iterator", "array"]


def _find_form(cls: type) -> _NestForm:
    """Returns the form of a class's objects, as far as the class determines it."""
    if issubclass(cls, dict):
        return "dict"
    if issubclass(cls, list | tuple):
        return "list"
    if is_module(cls):
        return "module"
    return "iterator" if issubclass(cls, Iterator) else "array"


_form_of: Callable[[type], _NestForm] = lru_cache(maxsize=256)(_find_form)  # called for each tensor


def _is_numbers(value: Sequence[Any]) -> bool:
    """Whether a list counts as an array: it contains numbers, or lists of numbers."""
    return bool(value) and not any(
        [
            each is None
            or is_array(each)
            or _form_of(type(each)) in ("dict", "module", "iterator")
            or (_form_of(type(each)) == "list" and not _is_numbers(each))
            for each in value
        ]
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _is_named(value: Any) -> bool:
    """Whether this is a module, an iterator, or a list of names and parameters."""
    form = _form_of(type(value))
    return form in ("module", "iterator") or (form == "list" and _is_pair(next(iter(value), None)))


def _gradients_of(value: Any, name: str) -> dict[str, Any]:
    """Returns the gradients of a module or of named parameters, by name."""
    nn = getattr(sys.modules.get("torch"), "nn", None)
    gradients = {}
    for entry in value.named_parameters() if _form_of(type(value)) == "module" else value:
        if nn is None or not _is_pair(entry) or not isinstance(entry[1], nn.Parameter):
            raise TypeError(
                f"{name} is an iterator or list of {brief(entry)}: pass a PyTorch module or its "
                "named_parameters(), whose gradients are reduced, or a list or dict of arrays"
            )
        if entry[0] in gradients:
            raise ValueError(
                f"{name} has two parameters named {entry[0]!r}: pass a dict of the modules that "
                "they belong to"
            )
        gradients[entry[0]] = entry[1].grad
    return gradients


def in_order(terms: Any, names: Sequence[str], where: str) -> Any:
    """Returns terms passed by name in the order of the names; other terms unchanged.

    Args:
        terms: a dict with a list of terms for each name; or a module or its named parameters, each
            with its gradient as the only term.
        names: the names of the Variables.
        where: the name of ``terms`` in errors.

    Raises:
        ValueError: the names differ, or one is repeated.
        TypeError: an iterator is not the result of ``named_parameters()``.
    """
    by_name = terms
    if _is_named(terms):
        pairs = _gradients_of(terms, where).items()
        by_name = {name: None if each is None else [each] for name, each in pairs}
        for name in [name for name, each in by_name.items() if each is None and name not in names]:
            del by_name[name]  # a frozen parameter
    if isinstance(by_name, dict):
        _check_alike(where, dict(by_name), "the variables", dict.fromkeys(names))
        return [by_name[name] for name in names]
    return terms


def key_of(path: Sequence[Any]) -> str | int:
    """Returns the name of the tensor at a path; its number in a flat list."""
    if len(path) == 1 and isinstance(path[0], int):
        return path[0]
    return short_name(".".join([key if isinstance(key, str) else brief(key) for key in path]))


def _items_of(entry: Container) -> Iterable[tuple[Any, Any]]:
    """Returns keys of a dict or indices of a list, with their parts of a path."""
    if isinstance(entry, dict):
        return zip(entry, entry, strict=True)
    return zip(range(len(entry)), getattr(entry, "_fields", range(len(entry))), strict=True)


def _like(like: Container, parts: list[Any]) -> Any:
    """Puts ``parts`` into a container like ``like``: list, tuple, named tuple or dict."""
    if isinstance(like, dict):
        made = copy.copy(like)
        made.update(zip(like, parts, strict=True))
        return made
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    return type(like)(parts)


def _check_entries(name: str, entries: Any, count: int, why: Callable[[], str]) -> None:
    if not isinstance(entries, list | tuple):
        hint = getattr(entries, "_hint", "") if name == "grads" else ""
        raise ValueError(
            f"{name} must be a list or tuple with one entry for each of {count} devices, not "
            f"{type(entries).__name__}{hint}"
        )
    if len(entries) != count:
        raise ValueError(
            f"{name} has {len(entries)} entries; it must have one entry for each of {count} "
            f"devices{why()}"
        )


def _check_alike(name: str, entry: Container, other: str, like: Container) -> None:
    """Raises ``ValueError`` unless two containers have the same type and keys."""
    differs = f"{name} has other tensors than {other}"
    if type(entry) is not type(like):
        raise ValueError(f"{differs}: it is a {type(entry).__name__}, not a {type(like).__name__}")
    if isinstance(entry, dict):
        if entry.keys() == like.keys():  # type: ignore[union-attr]
            return
        missing = [repr(key) for key in like if key not in entry]
        extra = [repr(key) for key in entry if key not in like]
        how = [f"it lacks {listed(missing)}"] * bool(missing)
        how += [f"it has also {listed(extra)}"] * bool(extra)
        raise ValueError(f"{differs}: {' and '.join(how)}")
    if len(entry) != len(like):
        raise ValueError(f"{differs}: it has {len(entry)}, {other} has {len(like)}")


def _raise_missing(column: Sequence[Any], names: Sequence[str], path: Path) -> None:
    where = f"[{key_of(path)!r}]"
    missing = [index for index, each in enumerate(column) if each is None]
    there = next(index for index in range(len(column)) if index not in missing)
    raise ValueError(
        f"grads[{listed(missing)}]{where} is None, but {names[there]}{where} is not: pass zeros "
        "where a replica has no gradient, or None on every replica"
    )
