"""Weights of the replicas of a reduction: agreed over all processes, applied one by one.

The pack of an all-reduce multiplies by the weights itself (``pack_buffers.py``). Here values are
multiplied in a pass of their own, for all other reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gradreduce.arrays.distributed import Part, ReduceOp, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, accumulate_dtype
from gradreduce.errors import brief
from gradreduce.weights import as_weight, bits_of, from_bits, from_units, sum_weights

from .arguments import Request, label_of
from .one_device import quotients
from .pack_buffers import Factor, PackMove, move
from .requests import rehearse_alone


class Weighting(NamedTuple):
    """The weights of a reduction, at least one of which is not 1.

    Attributes:
        own: the weight of each replica of this process.
        total: the sum of the weights of all replicas of all processes, rounded once.
    """

    own: tuple[float, ...]
    total: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``reduce_batch`` for a plan with weights."""
        return {"weights": self.own, "divisor": self.total}


def agree_on_weights(own: tuple[float, ...], devices: Sequence[Device]) -> Weighting | None:
    """Sends weights to the other processes; None if all weights are 1.

    With several processes the host waits for the others.

    Args:
        own: the weight of each replica of this process.
        devices: the devices of these replicas.

    Raises:
        ValueError: the sum of all weights is 0 or exceeds the largest float64.
    """
    replicas = Replicas(devices)
    of_all = list(own)
    if replicas.group.size > 1:
        found = replicas.compare_numbers("weights", list(map(bits_of, own)), replicas.counts)
        of_all = [from_bits(bits) for of_process in found for bits in of_process]
    if all([weight == 1 for weight in of_all]):
        return None
    return Weighting(own, divisor_of(sum_weights(of_all)))


def validate_weights(weights: Any, count: int, name: str = "weights") -> tuple[float, ...]:
    """Returns weights as float64.

    Args:
        weights: the argument of a caller.
        count: how many there must be.
        name: the name of the argument.

    Raises:
        ValueError: there are more or fewer weights than replicas, or a weight is negative, infinite
            or NaN.
        TypeError: ``weights`` is not a list or tuple, or a weight is not a number on the host.
    """
    if not isinstance(weights, list | tuple):
        raise TypeError(f"{name}={brief(weights)} must be a list with one number per replica")
    if len(weights) != count:
        raise ValueError(f"{name} has {len(weights)} entries; expected {count}, one per replica")
    return tuple([as_weight(f"{name}[{index}]", each) for index, each in enumerate(weights)])


def divisor_of(units: int) -> float:
    """Returns an exact sum of weights as a divisor of means.

    Raises:
        ValueError: it is 0 or exceeds the largest float64.
    """
    if not units:
        raise ValueError("the sum of all weights is 0: at least one gradient must have a weight")
    try:
        return from_units(units)
    except OverflowError:
        raise ValueError("the sum of all weights exceeds the largest float64") from None


def check_weighted(requests: Sequence[Request], reduce_op: ReduceOp, weighting: Weighting) -> None:
    """Raises ``ValueError`` if values cannot be reduced with these weights.

    Integers have no weighted mean, and whole weights below 2**63.
    """
    for index, request in enumerate(requests):
        value = request.value
        if value.parts[0].dtype.kind not in "iu":
            continue
        if reduce_op is ReduceOp.MEAN:
            raise ValueError(
                f"{value._name_of(index)} is {value.parts[0].dtype}: a mean of integers takes no "
                "weights; pass floats, or ReduceOp.SUM"
            )
        for replica, weight in enumerate(weighting.own):
            if not weight.is_integer() or weight >= 2**63:
                raise ValueError(
                    f"weights[{replica}]={weight} of integers must be a whole number below 2**63: "
                    f"{value._name_of(index)} is {value.parts[0].dtype}"
                )


def weights_for(requests: Sequence[Request], weights: Any) -> tuple[float, ...]:
    """Returns validated weights of values, which must have one replica for each weight."""
    own: tuple[float, ...] = ()
    for index, request in enumerate(requests):
        count = len(request.value.parts)
        own = own or validate_weights(weights, count)
        if count != len(own):
            raise ValueError(
                f"{request.value._name_of(index)} has {count} replicas, but weights has {len(own)} "
                "entries, one per replica: make a call for each number of replicas"
            )
    return own


def weighting_of(
    requests: Sequence[Request], reduce_op: ReduceOp, weights: Any
) -> Weighting | None:
    """Returns the agreed weights of values; None if all weights are 1.

    Args:
        requests: the values.
        reduce_op: the operation.
        weights: the argument of a caller, one for each replica of this process; not checked.

    Raises:
        TypeError, ValueError: see ``validate_weights``, ``agree_on_weights``, ``check_weighted``.
    """
    own = weights_for(requests, weights)
    if not own:
        return None
    weighting = agree_on_weights(own, requests[0].value.devices)
    if weighting is not None:
        check_weighted(requests, reduce_op, weighting)
    return weighting


def own_weighting(
    requests: Sequence[Request], reduce_op: ReduceOp, weights: Any
) -> Weighting | None:
    """Does what ``weighting_of`` does, for a plan: does not ask other processes.

    Over processes ``total`` is 1.
    """
    own = weights_for(requests, weights)
    if not own or Replicas(requests[0].value.devices).group.size == 1:
        return weighting_of(requests, reduce_op, weights)
    if all([weight == 1 for weight in own]):
        return None
    weighting = Weighting(own, 1.0)
    check_weighted(requests, reduce_op, weighting)
    return weighting


def rehearse_weights(request: Request, weighting: Weighting) -> None:
    """Compiles the kernels that scale a value and divide its sum."""
    dtype = request.value.parts[0].dtype

    def reduce(dry: Request, home: Device) -> tuple[Part, ...]:
        scale_requests([dry], weighting)
        sums = [home.empty((1,), accumulate_dtype(dtype)) for _ in dry.devices]
        return tuple(quotients(sums, 2.0, [dtype] * len(sums)))

    scales = tuple([weight not in (0, 1) for weight in weighting.own])
    rehearse_alone(request, ("weights", scales), reduce)


def scale_requests(requests: Sequence[Request], weighting: Weighting) -> list[Request]:
    """Returns requests of the values times their weights, in the accumulate dtype.

    A replica with weight 0 is not read: it becomes zeros, or IndexedSlices without rows.
    """
    moves: list[PackMove] = []
    scaled = []
    for request in requests:
        pairs = zip(request.value.parts, weighting.own, strict=True)
        parts = tuple([_scale(part, weight, moves) for part, weight in pairs])
        value = request.value._replace(_own=parts, _form=None)
        scaled.append(Request(value, request.devices))
    with _logged_as("pack", requests):
        move(moves)
    return scaled


@contextmanager
def _logged_as(phase: str, requests: Sequence[Request]) -> Iterator[None]:
    """Labels the block's launches with all values."""
    mesh_state = requests[0].devices[0].mesh_state
    with mesh_state.pack_scope(label_of(requests, range(len(requests)))):
        mesh_state.thread.phase = phase
        yield


def _scale(part: Part, weight: float, moves: list[PackMove]) -> Part:
    """Returns memory for a part times its weight, and appends the move that fills it."""
    rows = buffer_of(part)
    dtype = accumulate_dtype(rows.dtype)
    if isinstance(part, IndexedSlices) and not weight:
        none = rows.device.empty((0, *rows.shape[1:]), dtype)
        return IndexedSlices.of(none, part.indices[:0], part.dense_shape)
    if weight == 1 and dtype is rows.dtype:
        return part
    out = rows.device.empty(rows.shape, dtype)
    moves.append((rows.device, Factor(weight), [out], [rows]))
    return out if isinstance(part, Buffer) else part._with_values(out)


def divide_sums(
    requests: Sequence[Request], sums: Sequence[tuple[Part, ...]], divisor: float
) -> list[tuple[Part, ...]]:
    """Divides sums of scaled requests, and rounds them to the dtypes of the values."""
    dtypes = [request.value.parts[0].dtype for request in requests for _ in request.devices]
    parts = [part for row in sums for part in row]
    buffers = list(map(buffer_of, parts))
    if divisor == 1 and all([each.dtype is to for each, to in zip(buffers, dtypes, strict=True)]):
        return list(sums)
    with _logged_as("unpack", requests):
        means = quotients(buffers, divisor, dtypes)
    made = [
        rows if isinstance(part, Buffer) else part._with_values(rows)
        for part, rows in zip(parts, means, strict=True)
    ]
    rest = iter(made)
    return [tuple([next(rest) for _ in row]) for row in sums]
