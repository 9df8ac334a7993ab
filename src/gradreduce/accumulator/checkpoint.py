"""Saves, validates and loads the state of an accumulator; see ``gradreduce.checkpoint``.

A state can be loaded on any backend with the same number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradreduce.arrays.convert import as_result_kind
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import UNKNOWN
from gradreduce.checkpoint import (
    StateEntry,
    StateTable,
    anything,
    attribute,
    constant,
    equal,
    integer,
    list_of,
    optional,
    plain,
    validate_state,
)
from gradreduce.errors import CollectiveError, about, brief
from gradreduce.weights import ONE, is_too_large, parts_of, sum_weights

from .state import AccumulatorState
from .take_queue import complete_ready

# The number of partial sums in a state; and a function that takes a validated state and returns the
# part of it that this process loads.
ReplicaSums = tuple[int, Callable[[dict[str, Any]], dict[str, Any]]]


def save_state(
    state: AccumulatorState, download: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Returns a snapshot of the state; see ``ConditionalAccumulatorBase.state_dict``.

    Copies are queued while the lock is held, because later additions overwrite the sums. The host
    releases the lock before it waits for the copies.

    Args:
        state: the accumulator.
        download: see ``checkpoint.downloader``.
    """
    with state.lock:
        state.check_open()
        state.check_devices()
        generation = state.mesh_state.generation
        copies = _table(state, has_weight=state.excess != 0).save()
        state.storage.report_inexact([state])
    snapshot = download(copies)
    # If the mesh failed and was reset before the download, the download has raised no error.
    if state.mesh_state.has_failed(generation):
        raise CollectiveError(
            "the mesh failed while the state of an accumulator was saved; load an older checkpoint"
        )
    return snapshot


def ready_state(
    state: AccumulatorState, saved: Any, where: str = "state", replicas: ReplicaSums | None = None
) -> Callable[[], None]:
    """Validates a saved state and uploads it; returns a function that loads it.

    That function replaces the contents of the accumulator while it holds the lock; see
    ``ConditionalAccumulatorBase.load_state_dict``.

    Args:
        state: the accumulator.
        saved: the saved state.
        where: the name of ``saved``, for error messages.
        replicas: None if ``saved`` has a partial sum for each of the devices.
    """
    generation = state.mesh_state.generation
    num_sums, own = replicas or (len(state.devices), dict)
    saved = _with_defaults(state, saved, where)
    is_empty = isinstance(saved, Mapping) and not (
        plain(f"{where}['weight']", saved["weight"]) and saved.get("num_accumulated")
    )
    table = _table(state, is_empty, num_sums)
    checked = validate_state(where, saved, table)
    values = own({**checked, "weight": checked["weight"] - checked["num_accumulated"] * ONE})
    count, shape = values["num_accumulated"], values["sum_shape"]
    load_sum = partial(state.storage.load, dtype=state.dtype, shape=shape, count=count)
    check_sums = list_of(optional(load_sum), len(state.devices))
    uploads = check_sums(f"{where}['partial_sums']", values["partial_sums"])
    filled = len(uploads) - uploads.count(None)
    if not min(count, not is_empty) <= filled <= count:
        raise ValueError(
            f"{where}['partial_sums'] has {filled} sums, but {where}['num_accumulated']={count}"
        )
    with state.lock:
        state.check_open()
    totals = [each and each(device) for each, device in zip(uploads, state.devices, strict=True)]
    load_values = table.ready({**values, "partial_sums": totals})

    def load() -> None:
        with state.lock:
            state.check_open()
            state.check_devices()
            # If the mesh failed and was reset, the uploads may be incomplete.
            if state.mesh_state.has_failed(generation):
                raise CollectiveError(
                    "the mesh failed while the state of an accumulator was loaded; load it again"
                )
            load_values()
            complete_ready([state], held=True)
        complete_ready([state])

    return load


def _with_defaults(state: AccumulatorState, saved: Any, where: str) -> Any:
    """Returns a state with the entries that states of older versions do not have."""
    if not isinstance(saved, Mapping):
        return saved
    count = plain(f"{where}['num_accumulated']", saved.get("num_accumulated"))
    weight = [count] if type(count) is int and count else []
    of_rows = {"sparse_mean": "per_row"} if state.sparse_mean else {}
    return {"weight": weight, **of_rows, **saved}


def _table(
    state: AccumulatorState, is_empty: bool = False, num_sums: int = 0, *, has_weight: bool = True
) -> StateTable:
    """Returns the table of an accumulator.

    Args:
        state: the accumulator.
        is_empty: whether the state to load has no gradients, or only of weight 0.
        num_sums: the number of partial sums in the state to load.
        has_weight: whether the state has the sum of weights.
    """
    weight = StateEntry(
        lambda: parts_of(state.weight()),
        partial(sum_of_weights, is_empty),
        lambda excess: partial(state.update, excess=excess),
    )
    return StateTable(
        format=constant(state.storage.format),
        dtype=constant(str(state.dtype)),
        reduction_type=constant(state.reduction_type),
        **({} if state.sparse_mean is None else {"sparse_mean": constant(state.sparse_mean)}),
        shape=constant(None if state.shape is None else list(state.shape)),
        global_step=attribute(state, "step", integer(-(2**63))),
        num_accumulated=attribute(state, "count", integer(0)),
        **({"weight": weight} if has_weight else {}),
        num_dropped=attribute(state, "num_dropped", integer(0)),
        sum_shape=attribute(
            state, "sum_shape", equal(None) if is_empty else partial(_sum_shape, state)
        ),
        kind=StateEntry(
            lambda: state.kind if state.sum_shape is not None else None,
            equal(None) if is_empty else partial(_kind, state),
            lambda kind: partial(setattr, state, "kind", kind or "native"),
        ),
        partial_sums=StateEntry(
            lambda: [
                total if total is None else state.storage.save(total) for total in state.totals
            ],
            list_of(equal(None) if is_empty else anything, num_sums),
            lambda totals: partial(state.update, totals=totals, sources={}),
        ),
    )


def sum_of_weights(is_empty: bool, where: str, saved: Any) -> int:
    """Validates the saved sum of weights, a list of numbers; returns it in exact units."""
    found = plain(where, saved)
    if not isinstance(found, list) or not all([type(each) in (int, float) for each in found]):
        raise TypeError(f"{where}={brief(found)} must be a list of numbers")
    try:
        total = sum_weights(map(float, found))
    except (OverflowError, ValueError):
        total = -1
    if total < 0 or is_too_large(total) or (is_empty and total):
        wanted = "empty" if is_empty else "finite numbers, whose sum is at least 0 and finite"
        raise ValueError(f"{where}={brief(found)} must be {wanted}")
    return total


def _sum_shape(state: AccumulatorState, where: str, saved: Any) -> tuple[int, ...]:
    """Validates the saved shape of the sums, whose first entry may be -1."""
    found = plain(where, saved)
    check_extents = list_of(integer(UNKNOWN), len(found) if isinstance(found, list) else 0)
    shape = tuple(check_extents(where, found))
    if not state.storage.fits(shape, state.shape):
        raise ValueError(
            f"{where} is {list(shape)}, which does not fit the accumulator's shape "
            f"{None if state.shape is None else list(state.shape)}"
        )
    return shape


def _kind(state: AccumulatorState, where: str, saved: Any) -> Kind:
    """Validates the saved array type of the next take."""
    kind = plain(where, saved)
    if kind == "cupy" and state.mesh_state.shares_host_memory:
        return "native"  # simulated devices return NumPy arrays
    named = {"native": None, "coo": "torch"}.get(str(kind), kind)
    try:
        as_result_kind(named, "native")
    except ValueError as error:
        raise about(where, error) from None
    return kind  # type: ignore[no-any-return]  # one of the literals
