"""The terms of a training step: checks them, and puts them on their devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from gradreduce.arrays.convert import as_list, is_coo, of_one_type, to_buffer, to_buffers
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import Part, buffer_of, part_on
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.device import Buffer, Device
from gradreduce.errors import about, brief
from gradreduce.optim.gradient_inputs import check_rows
from gradreduce.reduce.nests import in_order
from gradreduce.sums.slices import concatenate_rows

from .weights import TermWeights


def place_terms(
    terms: Any,
    variables: Sequence[Variable],
    sparse: Collection[int],
    devices: Sequence[Device],
    weights: TermWeights | None = None,
    begun: Sequence[int] = (),
) -> dict[int, list[Sequence[Part]]]:
    """Returns the terms ``[replica][term]`` of each variable that has any, by its index.

    Args:
        terms: the argument of ``SyncStep``.
        variables: the variables of the step.
        sparse: the indices of those whose terms are IndexedSlices.
        devices: the device of each replica.
        weights: the weights of the terms; those with weight 0 are left out. None: all are 1.
        begun: the indices of the variables whose gradients wait for an update.
    """
    unread: Collection[int] = ()
    if weights is not None:
        unread = weights.unread
    terms = _in_order_of(variables, terms, len(devices), unread)
    if weights is not None:
        terms = weights.read(terms, variables)
    rows = [list(map(_without_none, of_variable)) for of_variable in zip(*terms, strict=True)]
    used = list(begun) or list(range(len(variables)))
    if len(unread) < len(devices):
        used = [index for index, row in enumerate(rows) if any([x is not None for x in row])]
    if not used:
        raise ValueError("No gradients provided for any variable: all terms are None")
    placed: dict[int, list[Sequence[Part]]] = {index: [] for index in used}
    are_sparse = [index in sparse for index in used]
    for replica, device in enumerate(devices):
        pairs = [(variables[index], rows[index][replica]) for index in used]
        place = _place_nothing if replica in unread else _place_replica
        of_replica = place(device, pairs, replica, are_sparse)
        for index, parts in zip(used, of_replica, strict=True):
            placed[index].append(parts)
    wait_for_inputs(
        [buffer_of(part) for of_one in placed.values() for row in of_one for part in row]
    )
    return placed


def _place_replica(
    device: Device, pairs: Sequence[tuple[Variable, Any]], replica: int, sparse: Sequence[bool]
) -> list[Sequence[Part]]:
    """Checks and converts the terms of one replica for each variable.

    Args:
        device: the device of the replica.
        pairs: the variables, and their terms.
        replica: the number of the replica.
        sparse: whether the terms of each variable are IndexedSlices.
    """
    for (variable, terms), is_sparse in zip(pairs, sparse, strict=True):
        _check_list(terms, variable, replica, is_sparse)
    if not any(sparse):
        return list(_place_dense(device, pairs, replica))
    dense = [pair for pair, is_sparse in zip(pairs, sparse, strict=True) if not is_sparse]
    of_dense = iter(_place_dense(device, dense, replica))
    return [
        _place_sparse(device, *pair, replica) if is_sparse else next(of_dense)
        for pair, is_sparse in zip(pairs, sparse, strict=True)
    ]


def _in_order_of(
    variables: Sequence[Variable], terms: Any, num_replicas: int, unread: Collection[int]
) -> list[Any]:
    """Returns ``terms[replica][variable]`` of all replicas; None for those that are not read."""
    terms = as_list(terms)
    _check_length("terms", terms, num_replicas, "device")
    names = [variable.name for variable in variables]
    ordered = [
        [None] * len(variables) if index in unread else in_order(each, names, f"terms[{index}]")
        for index, each in enumerate(terms)
    ]
    for replica, of_replica in enumerate(ordered):
        _check_length(f"terms[{replica}]", of_replica, len(variables), "variable")
    return ordered


def find_sparse(sparse_variables: Any, variables: Sequence[Variable]) -> tuple[int, ...]:
    """Returns the indices of the variables with sparse gradients, ascending."""
    if isinstance(sparse_variables, Variable) or not isinstance(sparse_variables, Iterable):
        raise TypeError(
            f"sparse_variables={brief(sparse_variables)} must be a list of Variables; pass () for "
            "none"
        )
    sparse = tuple(sparse_variables)
    index_of = {variable: index for index, variable in enumerate(variables)}
    for each in sparse:
        if not isinstance(each, Variable) or each not in index_of:
            raise ValueError(f"sparse_variables= has {brief(each)}, which is not in variables")
        if not each.shape:
            raise ValueError(f"sparse_variables= has {each!r}, a scalar, which has no rows")
    return tuple(sorted({index_of[each] for each in sparse}))


def _place_dense(
    device: Device, pairs: Sequence[tuple[Variable, Any]], replica: int
) -> list[list[Buffer]]:
    """Converts the terms of one replica for each variable; those of one type together."""
    flat = [term for _, terms in pairs for term in terms]
    together: Iterator[Buffer] | None = None
    if of_one_type(flat):
        with suppress(TypeError, ValueError):  # the error below names its variable
            together = iter(to_buffers(flat, device))
    placed = []
    for variable, terms in pairs:
        try:
            if together is None:
                dtype = variable._buffers[0].dtype
                buffers = [to_buffer(term, device, dtype=dtype) for term in terms]
            else:
                buffers = [next(together) for _ in terms]
            _check_buffers(buffers, variable._buffers[0], device)
        except (TypeError, ValueError) as error:
            raise about(_where(variable, replica), error) from None
        placed.append(buffers)
    return placed


def _check_buffers(buffers: Sequence[Buffer], like: Buffer, device: Device) -> None:
    """Raises ``ValueError`` unless Buffers are on a device and have the shape and dtype of one."""
    for buffer in buffers:
        if buffer.dtype is not like.dtype or buffer.shape != like.shape:
            raise ValueError(
                f"got {buffer.dtype}{list(buffer.shape)}, expected {like.dtype}{list(like.shape)} "
                "as of the variable"
            )
        if buffer.device is not device:
            raise ValueError(f"{buffer} is not on {device.name}")


def rehearse_rows(variable: Variable) -> None:
    """Compiles the kernels that concatenate the rows of several micro-batches."""
    compile_rows(
        "rows of micro-batches",
        lambda rows, at: [concatenate_rows(at, [row, row]) for (row,) in rows],
        {(variable.dtype,)},
        variable.devices[0],
    )


def _place_sparse(
    device: Device, variable: Variable, terms: Sequence[Any], replica: int
) -> list[Part]:
    """Converts the IndexedSlices of one replica for a variable."""
    placed: list[Part] = []
    for term in terms:
        try:
            part = part_on(device, term)
            assert isinstance(part, IndexedSlices), "the terms are sparse"
            check_rows(part, variable)
            if part.device is not device:
                raise ValueError(f"{buffer_of(part)} is not on {device.name}")
        except (TypeError, ValueError) as error:
            raise about(_where(variable, replica), error) from None
        placed.append(part)
    return placed


def _place_nothing(
    device: Device, pairs: Sequence[tuple[Variable, Any]], replica: int, sparse: Sequence[bool]
) -> list[Sequence[Part]]:
    """Returns the terms of a replica that is not read: none, or IndexedSlices without rows."""
    return [
        [IndexedSlices(device.empty((0, *each.shape[1:]), each.dtype), (), each.shape)]
        if is_sparse
        else []
        for (each, _), is_sparse in zip(pairs, sparse, strict=True)
    ]


def _check_list(terms: Any, variable: Variable, replica: int, is_sparse: bool) -> None:
    """Raises unless the terms of a variable are a list of gradients, which are sparse or not."""
    if not isinstance(terms, list | tuple) or not terms:
        raise ValueError(
            f"{_where(variable, replica)}: expected a list of at least one gradient (or None on "
            f"every replica), got {brief(terms)}"
        )
    if is_sparse:
        for term in terms:
            if not (isinstance(term, IndexedSlices) or is_coo(term)):
                raise TypeError(
                    f"{_where(variable, replica)}: the variable is in sparse_variables=, so its "
                    f"terms must be IndexedSlices, not {type(term).__name__}"
                )
    elif any([isinstance(term, IndexedSlices) for term in terms]):
        raise TypeError(
            f"{_where(variable, replica)}: IndexedSlices are not supported; pass .to_dense(), or "
            "name the variable in sparse_variables="
        )


def _where(variable: Variable, replica: int) -> str:
    """Returns the name of a list of terms in errors."""
    return f"terms of replica {replica} for {variable.name!r}"


def _check_length(name: str, value: Any, length: int, of: str) -> None:
    if not isinstance(value, list | tuple | Sequence):  # an abstract class is slower to test
        raise TypeError(f"{name}={brief(value)} must be a list with one entry per {of}")
    if len(value) != length:
        raise ValueError(f"{name} has {len(value)} entries; expected {length}, one per {of}")


def _without_none(terms: Sequence[Any] | None) -> Sequence[Any] | None:
    """Removes None from a list of terms; returns None if nothing is left."""
    if not isinstance(terms, list | tuple) or not any([term is None for term in terms]):
        return terms
    return [term for term in terms if term is not None] or None
