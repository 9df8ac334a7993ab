"""Sums of all terms of a gradient as real numbers, on the device of the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradreduce import ops
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.device import (
    ELEMENT_OF,
    Buffer,
    Device,
    DType,
    Queue,
    as_dtype,
    ensure_accessible,
    flat_layout,
)
from gradreduce.ops import Divisor, Segments

from .aggregators import AddN, MultiDeviceSum, round_to, scaled
from .term_weights import check_whole

_FLAG = as_dtype("int32")


def check_exact_term(term: Any) -> None:
    """Raises ``ValueError`` for a term that cannot be added exactly.

    Args:
        term: an array of any library, a Buffer, IndexedSlices, or a list.
    """
    if isinstance(term, IndexedSlices):
        raise ValueError(
            "exact=True does not support IndexedSlices in this call: pass .to_dense() if no index "
            "is repeated, or use a SparseConditionalAccumulator with exact=True"
        )


def check_exact_terms(terms: Sequence[Buffer], weights: Sequence[float]) -> None:
    """Raises unless all terms have one shape and dtype, and integers have whole weights."""
    like = MultiDeviceSum(AddN)
    for term in terms:
        like.check(term.shape, term.dtype)
    for weight in weights:
        check_whole(weight, terms[0].dtype)


def add_exactly(terms: Sequence[Buffer], weights: Sequence[float], name: str) -> Buffer:
    """Returns the sum of the terms, rounded once, in new memory on the device of the first one.

    Terms that this device cannot read are copied to it.

    Args:
        terms: at least one, or two without weights; checked.
        weights: one for each term, or none; products are rounded to the accumulate dtype.
        name: what an ``InexactSumWarning`` calls the sum.
    """
    shape, dtype, home = terms[0].shape, terms[0].dtype, terms[0].device
    if weights:
        terms = [scaled(term, weight) for term, weight in zip(terms, weights, strict=True)]
    if len(terms) == 1:
        return round_to(terms[0], dtype)
    read = [ensure_accessible(home, term) for term in terms]
    total = home.empty(shape, dtype)
    sum_exactly([[total]], [read], device=home, names=[name])
    return total


def sum_exactly(
    outs: Sequence[Sequence[Buffer]],
    inputs: Sequence[Sequence[Buffer]],
    *,
    divisor: float = 1,
    device: Device,
    queue: Queue = "compute",
    names: Sequence[str] = (),
) -> None:
    """Calls ``ops.exact_sum``; if a float64 or complex128 sum does not fit, a later call warns.

    The arguments are those of ``ops.exact_sum``; and ``names``, the name of each sum in the
    warning, by default the label of this thread's work.
    """
    command = exact_sum_command(
        outs, inputs, divisor=divisor, device=device, queue=queue, names=names
    )
    command()


def exact_sum_command(
    outs: Sequence[Sequence[Buffer]],
    inputs: Sequence[Sequence[Buffer]],
    *,
    names: Sequence[str] = (),
    **options: Any,
) -> Callable[[], None]:
    """Allocates flags, and returns a function that does what ``sum_exactly`` does.

    So a caller can allocate the memory of several launches before the first launch.
    """
    flags: Sequence[Buffer] = ()
    if any([needs_flag(terms[0].dtype) for terms in inputs]):
        flags = new_flags([options["device"]] * len(inputs))

    def launch() -> None:
        ops.exact_sum(outs, inputs, flags=flags, **options)
        if flags:
            report_flags(flags, names)

    return launch


def sum_rows_exactly(
    out: Buffer, rows: Sequence[Buffer], segments: Segments, divisor: Divisor, name: str
) -> None:
    """Calls ``ops.sum_rows``; if a float64 sum does not fit, a later call warns, with this name."""
    flags = new_flags([out.device]) if needs_flag(rows[0].dtype) else [None]
    ops.sum_rows(out, rows, segments, divisor, *flags)
    if flags[0] is not None:
        report_flags(flags, [name])


def needs_flag(dtype: DType) -> bool:
    """Whether words hold all exact sums of this dtype, and may be too few: float64, complex128."""
    return ELEMENT_OF[dtype].name == "float64"


def new_flags(devices: Sequence[Device]) -> list[Buffer]:
    """Allocates flags that are 0, back to back on each device: one copy downloads them all."""
    flags: dict[int, Buffer] = {}
    places: dict[Device, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device, []).append(place)
    for device, here in places.items():
        layout = flat_layout([1] * len(here), _FLAG.itemsize)
        whole = device.zeros((layout.size,), _FLAG)
        flags.update(zip(here, whole.parts(layout.offsets, layout.sizes), strict=True))
    return [flags[place] for place in range(len(devices))]


def report_flags(flags: Sequence[Buffer], names: Sequence[str] = ()) -> None:
    """Queues warnings about sums whose flags are set, also in each call of a prepared step.

    Args:
        flags: the flag of each sum.
        names: the name of each sum. Default: the label of this thread's work.
    """
    mesh_state = flags[0].device.mesh_state
    names = names or [str(mesh_state.thread.label)] * len(flags)
    report = partial(mesh_state.inexact.add, list(zip(names, flags, strict=True)))
    report()
    command_list = mesh_state.thread.command_list
    if command_list is not None:
        command_list.add(report)
