"""Sums the terms of one gradient on one device: add_n, accumulate_n, aggregate.

Sources: tf.AggregationMethod, tf.add_n, tf.accumulate_n (aggregation_method.md). TensorFlow does
not define the order of additions; here ADD_N and ACCUMULATE_N add left to right, TREE in pairs. If
all terms are IndexedSlices, the result has all their rows; if only some are, they are converted to
dense arrays first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, overload

from gradreduce import ops
from gradreduce.arrays.array_methods import traceable
from gradreduce.arrays.caller_streams import StreamScope, SuspendedScope
from gradreduce.arrays.convert import as_result_kind, from_buffer, is_array, kind_of
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import DistributedValues, Part, buffer_of
from gradreduce.arrays.indexed_slices import (
    IndexedSlices,
    as_slices,
)
from gradreduce.arrays.replica_context import current_device, on_current_devices
from gradreduce.arrays.trace_context import current_reader
from gradreduce.arrays.types import ArrayT, OutputType
from gradreduce.device import (
    Buffer,
    accumulate_dtype,
    as_dtype,
    as_shape,
    compatible,
)
from gradreduce.errors import brief, listed

from .aggregators import (
    MultiDeviceSum,
    OneBuffer,
    Tree,
    aggregate_buffers,
    round_to,
    scaled,
)
from .exact_terms import add_exactly, check_exact_term, check_exact_terms
from .methods import AGGREGATORS, AggregationMethod, as_aggregation_method
from .slices import (
    concatenate,
    concatenate_slices,
    dry_run_parts,
    rehearse_parts,
    require_shape,
    with_dense,
)
from .term_weights import check_whole, pairs_of, validate_weights

if TYPE_CHECKING:
    import numpy as np


def kind_of_term(term: Any) -> Kind:
    """Returns the kind of array of a term; for IndexedSlices, that of the values.

    Raises:
        TypeError: the term is neither IndexedSlices nor an array.
    """
    return term.kind if isinstance(term, IndexedSlices) else kind_of(term)


def all_sparse(terms: Sequence[Any]) -> TypeGuard[Sequence[IndexedSlices]]:
    """Whether all terms are IndexedSlices."""
    return all(isinstance(term, IndexedSlices) for term in terms)


_END = object()  # marks the end of an iterator


@overload
def add_n(
    inputs: Sequence[ArrayT],
    name: str | None = None,
    *,
    exact: bool = False,
    output_type: None = None,
) -> ArrayT: ...
@overload
def add_n(
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    exact: bool = False,
    output_type: Literal["numpy"],
) -> np.ndarray: ...
@overload
def add_n(
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    exact: bool = False,
    output_type: OutputType | None = None,
) -> Any: ...
@traceable
def add_n(
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    exact: bool = False,
    output_type: OutputType | None = None,
) -> Any:
    """Sums ``inputs`` left to right (tf.add_n).

    float16 and bfloat16 are added in float32 and rounded once. With ``exact=True`` the inputs are
    added as real numbers and the sum is rounded once, so that their order changes no bit.

    Args:
        inputs: a list or tuple of arrays of one shape and dtype (no broadcasting). A single input
            is returned itself, or a copy if ``output_type`` is another kind. Inputs on several
            devices are first added on each device. IndexedSlices are converted to dense arrays,
            also a single one.
        name: ignored; TensorFlow's name of the operation.
        exact: round the sum once, in the dtype of the inputs. An infinity or a NaN gives the sum of
            IEEE 754, a finite sum does not overflow on the way, and a sum of zero is -0.0 only if
            all inputs are. All inputs are added on the device of the first one. Integers are
            always exact, modulo 2**bits. Sums of float64 and complex128 are held by eight floats:
            ``gr.InexactSumWarning`` says that one did not fit. Not for IndexedSlices yet.
        output_type: the kind of the result: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or
            ``"buffer"``. Default: the kind of the first input.

    Returns:
        An array on the device of the first input: a new one, unless a single input is returned. No
        input is written.

    Raises:
        ValueError: ``inputs`` is not a list or tuple, is empty or contains None, shapes differ, a
            single IndexedSlices has no ``dense_shape``, there are IndexedSlices with
            ``exact=True``, or ``output_type`` is unknown or its library is not imported.
        TypeError: an input is not an array (``Mirrored`` and ``PerReplica`` are not), dtypes differ
            or cannot be added, or IndexedSlices among several inputs have no ``dense_shape``.
        DeviceMismatchError: inputs are on different meshes.

    Example:
        >>> gr.add_n([np.array([1, 2]), np.array([10, 20])])
        array([11, 22])
        >>> terms = [np.full(2, term, "float32") for term in (1e8, 0.1, -1e8)]
        >>> gr.add_n(terms), gr.add_n(terms, exact=True)
        (array([0., 0.], dtype=float32), array([0.1, 0.1], dtype=float32))
    """
    if exact:
        _check_inputs(inputs, "Tensor")
        return _aggregate_exactly(inputs, (), output_type, "add_n")
    if output_type is None and type(inputs) is list and inputs and type(inputs[0]) is Buffer:
        made = _sum_directly(inputs)
        if made is not None:
            return made
    _check_inputs(inputs, "Tensor/IndexedSlices")
    inputs = [as_slices(each) for each in inputs]
    if len(inputs) == 1 and not all_sparse(inputs):
        return _to_result_kind(inputs[0], output_type)
    kind = as_result_kind(output_type, kind_of_term(inputs[0]))
    return _aggregate(list(inputs), AggregationMethod.ADD_N, kind)


@overload
def accumulate_n(
    inputs: Sequence[ArrayT],
    shape: Sequence[int | None] | None = None,
    tensor_dtype: Any = None,
    name: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    output_type: None = None,
) -> ArrayT: ...
@overload
def accumulate_n(
    inputs: Sequence[Any],
    shape: Sequence[int | None] | None = None,
    tensor_dtype: Any = None,
    name: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    output_type: Literal["numpy"],
) -> np.ndarray: ...
@overload
def accumulate_n(
    inputs: Sequence[Any],
    shape: Sequence[int | None] | None = None,
    tensor_dtype: Any = None,
    name: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    output_type: OutputType | None = None,
) -> Any: ...
@traceable
def accumulate_n(
    inputs: Sequence[Any],
    shape: Sequence[int | None] | None = None,
    tensor_dtype: Any = None,
    name: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    output_type: OutputType | None = None,
) -> Any:
    """Sums ``inputs`` into one buffer, in the order of the list (tf.accumulate_n).

    Args:
        inputs: a list or tuple of arrays of one shape and dtype. A single input is returned itself,
            or a copy if ``output_type`` is another kind. Inputs on several devices are first added
            on each device.
        shape: the required shape, a list of integers; None entries match any extent. Default: any
            shape.
        tensor_dtype: the required dtype. Default: any.
        name: ignored; TensorFlow's name of the operation.
        weights: see ``aggregate``.
        output_type: the kind of the result: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or
            ``"buffer"``. Default: the kind of the first input.

    Returns:
        An array on the device of the first input: a new one, unless a single input is returned. No
        input is written.

    Raises:
        ValueError: ``inputs`` is not a list or tuple, is empty, or contains None or IndexedSlices;
            dtypes or shapes differ; a shape does not match ``shape``, or an extent of it is
            negative; or ``output_type`` is unknown or its library is not imported.
        TypeError: an input is not an array, the dtype is not ``tensor_dtype`` or cannot be added,
            or ``shape`` is not a list of integers.
        DeviceMismatchError: inputs are on different meshes.

    Example:
        >>> gr.accumulate_n([np.array([1, 2]), np.array([10, 20])], shape=[None])
        array([11, 22])
    """
    _check_inputs(inputs, "Tensor")
    if _any_sparse(inputs):
        raise ValueError(
            "accumulate_n does not accept IndexedSlices: use add_n, or pass .to_dense()"
        )
    kind = as_result_kind(output_type, kind_of_term(inputs[0]))
    terms = list(inputs)
    if shape is not None or tensor_dtype is not None:
        with StreamScope(reads=False):
            terms = on_current_devices(inputs)
        _check_promised(terms, shape, tensor_dtype)
    if weights is not None and (by := validate_weights(weights, len(terms))):
        method = AggregationMethod.EXPERIMENTAL_ACCUMULATE_N
        return _aggregate_weighted(terms, by, method, output_type)
    if len(inputs) == 1:
        return _to_result_kind(inputs[0], output_type)
    return _aggregate(terms, AggregationMethod.EXPERIMENTAL_ACCUMULATE_N, kind)


@overload
def aggregate(
    terms: Iterable[ArrayT | None],
    method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
    *,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    output_type: None = None,
) -> ArrayT | Any: ...  # None without a term
@overload
def aggregate(
    terms: Iterable[Any],
    method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
    *,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    output_type: Literal["numpy"],
) -> np.ndarray | Any: ...
@overload
def aggregate(
    terms: Iterable[Any],
    method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
    *,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    output_type: OutputType | None = None,
) -> Any: ...
@traceable
def aggregate(
    terms: Iterable[Any],
    method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
    *,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    output_type: OutputType | None = None,
) -> Any:
    """Sums the terms of one gradient by an aggregation method.

    Args:
        terms: an iterable of arrays of one shape and dtype; None is skipped. Terms on one device
            are added there, then the partial sums on the device of the first term. IndexedSlices
            among arrays are converted to dense arrays. The terms of a generator are read one by one
            and dropped as soon as the method has added them (the first one after the second has
            come); they must not change during the call.
        method: an ``AggregationMethod``, its number, or None for DEFAULT.
        weights: a list with a number of at least 0 for each term, also for those that are None. The
            result is then the sum of weight times term; a product is rounded once, to the
            accumulate dtype. A term with weight 0 is not read. Integers take whole weights.
            Default: all weights are 1.
        exact: as in ``add_n``, with any method: keep all terms until the last one has come, add
            them as real numbers, and round their sum once. Products are rounded before, to the
            accumulate dtype.
        output_type: the kind of the result; see ``add_n``. Default: the kind of the first term.

    Returns:
        A new array on the device of the first term. A single term is returned itself, or a copy if
        ``output_type`` is another kind. Without terms: None. If all terms are IndexedSlices: new
        IndexedSlices with the rows of all terms, one after the other, and the ``dense_shape`` of
        the first, whatever the method (call ``coalesce()`` to merge equal rows).

    Raises:
        ValueError: ``method`` or ``output_type`` is invalid, shapes differ, an index exceeds the
            ``dense_shape`` of the first term, there is not one weight for each term, a weight is
            negative or not finite, all weights are 0, or ``exact=True`` would round the rows of
            IndexedSlices: those among arrays, and products of 16-bit ones.
        TypeError: dtypes differ (for ACCUMULATE_N the error is also a ``ValueError``), a term is
            not an array, IndexedSlices among arrays have no ``dense_shape``, or ``terms`` is a
            ``PerReplica`` or ``Mirrored``, which must be reduced across devices.

    Example:
        >>> micro_batches = (np.full(2, scale) for scale in (1.0, 2.0, 4.0))
        >>> gr.aggregate(micro_batches, gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N)
        array([7., 7.])
    """
    method = as_aggregation_method(method)
    as_result_kind(output_type, "native")  # check it before a term is read
    if isinstance(terms, DistributedValues):  # replicas are not terms
        kind_of_term(terms)  # raises
    if isinstance(terms, list | tuple):
        if exact:
            by = () if weights is None else validate_weights(weights, len(terms))
            return _aggregate_exactly(terms, by, output_type, "aggregate")
        return _aggregate_list(terms, method, weights, output_type)
    if exact or current_reader() is not None:  # some may be traced values
        terms = list(terms)
        return aggregate(terms, method, weights=weights, exact=exact, output_type=output_type)
    if weights is not None:
        by = validate_weights(weights, None)
        return _aggregate_weighted(terms, by, method, output_type)
    return _aggregate_lazily(terms, method, output_type)


def _aggregate_list(
    terms: Sequence[Any],
    method: AggregationMethod,
    weights: Any,
    output_type: OutputType | None,
) -> Any:
    """Sums a list or tuple of terms; see ``aggregate``."""
    if weights is not None and (by := validate_weights(weights, len(terms))):
        return _aggregate_weighted(terms, by, method, output_type)
    present = [as_slices(term) for term in terms if term is not None]
    if not present:
        return None
    kinds = [kind_of_term(term) for term in present]
    if len(present) == 1:
        return _to_result_kind(present[0], output_type)
    if all_sparse(present):
        return concatenate(present, as_result_kind(output_type, kinds[0]))
    return _aggregate(present, method, as_result_kind(output_type, kinds[0]))


def _aggregate(terms: list[Any], method: AggregationMethod, kind: Kind) -> Any:
    """Sums a list of terms, checked before anything is launched."""
    tree = method is AggregationMethod.EXPERIMENTAL_TREE
    if method is AggregationMethod.EXPERIMENTAL_ACCUMULATE_N:
        tree = _any_sparse(terms)
    if not tree and kind == ("buffer" if type(terms[0]) is Buffer else "native"):
        made = _sum_directly(terms)
        if made is not None:
            return made
    with StreamScope():
        sparse = _any_sparse(terms)
        placed: Sequence[Part] = (
            [_on_current_device(term) for term in terms] if sparse else on_current_devices(terms)
        )
        homes = {buffer_of(term).device for term in placed}
        is_one_launch = len(homes) == 1 and not tree and not sparse
        if not is_one_launch and len({home.mesh_state for home in homes}) == 1:  # or it raises
            rehearse_parts(
                ("aggregate", method, tree),
                placed,
                lambda dry_run: _sum(dry_run_parts(dry_run, placed), method, tree=tree),
            )
        return from_buffer(_sum(placed, method, tree=tree), kind)


def _sum(terms: Sequence[Part], method: AggregationMethod, *, tree: bool) -> Buffer:
    """Checks that all terms agree, then sums them."""
    total = MultiDeviceSum(AGGREGATORS[method])
    for term in terms:
        total.check(require_shape(term, alone=len(terms) == 1), term.dtype)
    buffers = with_dense(terms)
    home = buffers[0].device
    if all([buffer.device is home for buffer in buffers]):
        return aggregate_buffers([buffers], home, tree=tree)[0]
    if tree:
        total.use_tree()
    for buffer in buffers:
        total.push(buffer)
    return total.result()


def _sum_directly(terms: Sequence[Any]) -> Any:
    """Sums terms that need no preparation, left to right; returns None for other terms.

    The terms must be small NumPy arrays, or Buffers of one shape and dtype in memory of one device.
    """
    first = terms[0]
    if type(first) is not Buffer:
        return ops.add_on_host(terms, current_device)
    device, shape, dtype = first.device, first.shape, first.dtype
    for term in terms:
        if type(term) is not Buffer or term.device is not device or term.array_owner is not None:
            return None
        if term.shape != shape or term.dtype is not dtype:
            return None
    return ops.add_into_new(terms, dtype) if len(terms) > 1 else None


@StreamScope()
def _aggregate_lazily(
    terms: Iterable[Any], method: AggregationMethod, output_type: OutputType | None
) -> Any:
    """Sums the terms of an iterator, keeping each only as long as needed."""
    total = MultiDeviceSum(AGGREGATORS[method])
    kind: Kind = "native"
    held: list[Any] = []  # the first term; or all terms, as long as all are sparse
    for term in _iterate_suspended(terms):
        if term is None:
            continue
        term = as_slices(term)
        found = kind_of_term(term)
        if not held and not total.count:
            kind = as_result_kind(output_type, found)
            held.append(term)
        elif held and all_sparse([held[0], term]):
            held.append(term)
        else:
            while held:
                _push(total, held.pop(0))
            _push(total, term)
        del term  # before the next term is made
    if len(held) == 1:
        return _to_result_kind(held[0], output_type)
    if held:
        return concatenate(held, kind)
    return from_buffer(total.result(), kind) if total.count else None


@StreamScope()
def _aggregate_weighted(
    terms: Iterable[Any],
    weights: Sequence[float],
    method: AggregationMethod,
    output_type: OutputType | None,
) -> Any:
    """Sums the products of terms and weights, keeping a term only as long as needed."""
    is_tree = method is AggregationMethod.EXPERIMENTAL_TREE
    total = MultiDeviceSum(Tree if is_tree else OneBuffer)
    held: list[tuple[IndexedSlices, float]] = []  # as long as all terms are sparse
    kind: Kind = "native"
    for term, weight in pairs_of(_iterate_suspended(terms), weights):
        if term is None or not weight:
            continue
        term = as_slices(term)
        if not held and not total.count:
            kind = as_result_kind(output_type, kind_of_term(term))
        placed = _on_current_device(term)
        check_whole(weight, placed.dtype)
        if isinstance(placed, IndexedSlices) and not total.count:
            held.append((placed, weight))
            continue
        while held:
            _push(total, *held.pop(0))
        _push(total, placed, weight)
        del term, placed  # before the next term is made
    if held:
        rows = [each._with_values(scaled(buffer_of(each), by)) for each, by in held]
        whole = concatenate_slices(rows, rows[0].values.device)
        return whole._with_values(round_to(buffer_of(whole), held[0][0].dtype))._as_result(kind)
    return from_buffer(total.result(), kind) if total.count else None


def _aggregate_exactly(
    terms: Sequence[Any], weights: Sequence[float], output_type: OutputType | None, name: str
) -> Any:
    """Sums terms as real numbers, all checked before anything is launched.

    Args:
        terms: any objects; None is skipped.
        weights: one for each term, or none.
        output_type: the kind of the result.
        name: the name of the call, for a warning.
    """
    pairs = pairs_of(terms, weights or [1.0] * len(terms))
    kept = [(as_slices(term), by) for term, by in pairs if term is not None and by]
    for term, _ in kept:
        kind_of_term(term)  # raises for what is no array
    if not kept:
        return None
    slices = [term for term, _ in kept]
    # Their rows are not added. The rows of a result have its dtype, which rounds 16-bit products.
    if (
        name == "aggregate"
        and all_sparse(slices)
        and not (weights and any([accumulate_dtype(each.dtype) != each.dtype for each in slices]))
    ):
        of_rows = [weight for _, weight in kept] if weights else None
        return _aggregate_list(slices, AggregationMethod.ADD_N, of_rows, output_type)
    for term in slices:
        check_exact_term(term)
    if len(kept) == 1 and not weights:
        return _to_result_kind(kept[0][0], output_type)
    kind = as_result_kind(output_type, kind_of_term(kept[0][0]))
    with StreamScope():
        placed = on_current_devices([term for term, _ in kept])
        by = [weight for _, weight in kept] if weights else []
        check_exact_terms(placed, by)
        if len({term.device.mesh_state for term in placed}) == 1:  # or it raises
            rehearse_parts(
                ("exact", bool(by)),
                placed,
                lambda dry_run: add_exactly([dry_run.buffer(term) for term in placed], by, name),
            )
        total = from_buffer(add_exactly(placed, by, name), kind)
    placed[0].device.mesh_state.inexact.warn()
    return total


def _iterate_suspended(terms: Iterable[Any]) -> Iterator[Any]:
    """Iterates over ``terms`` outside the ``StreamScope``, because the caller's code makes them."""
    left = iter(terms)
    while True:
        with SuspendedScope():
            term = next(left, _END)
        if term is _END:
            return
        yield term
        del term


def _to_result_kind(term: Any, output_type: str | None) -> Any:
    """Returns a single term itself, or a copy if ``output_type`` is another kind."""
    kind = kind_of_term(term)
    result_kind = as_result_kind(output_type, kind)
    if result_kind == kind or (kind == "native" and result_kind == "numpy" and is_array(term)):
        return term._as_coo() if kind == "coo" else term
    if isinstance(term, IndexedSlices):
        return concatenate([term], result_kind)
    with StreamScope():
        (buffer,) = on_current_devices([term])
        copy = buffer.device.empty(buffer.shape, buffer.dtype)
        buffer.device.copy(copy, buffer)
        return from_buffer(copy, result_kind)


def _push(total: MultiDeviceSum, term: Any, weight: float | None = None) -> None:
    """Checks one term, then adds it, times its weight if it has one."""
    placed = _on_current_device(term)
    total.check(require_shape(placed), placed.dtype)
    if isinstance(placed, IndexedSlices):
        total.use_tree()
    total.push(with_dense([placed])[0], weight)


def _any_sparse(terms: Sequence[Any]) -> bool:
    return any([isinstance(term, IndexedSlices) for term in terms])


def _on_current_device(term: Any) -> Buffer | IndexedSlices:
    """Puts a term on its device: a Buffer, or IndexedSlices of a Buffer."""
    return term._in_buffer() if isinstance(term, IndexedSlices) else on_current_devices([term])[0]


def _check_promised(
    terms: Sequence[Buffer], shape: Sequence[int | None] | None, dtype: Any
) -> None:
    """Raises unless all shapes match ``shape`` and the dtype of the first term is ``dtype``."""
    wanted = None if shape is None else as_shape("shape", shape, known=False)
    for term in terms:
        if wanted is not None and not compatible(term.shape, wanted):
            raise ValueError(f"Shapes {term.shape} and {brief(wanted)} are not compatible")
    if dtype is not None and terms[0].dtype != as_dtype(dtype):
        raise TypeError(f"tensor_dtype is {dtype}, but the inputs are {terms[0].dtype}")


def _check_inputs(inputs: Any, what: str) -> None:
    """Raises ``ValueError`` unless this is a list of terms without None."""
    if not isinstance(inputs, list | tuple):
        actual = f"one {type(inputs).__name__}{getattr(inputs, '_hint', '')}"
    elif not inputs:
        actual = "none"
    elif missing := [index for index, term in enumerate(inputs) if term is None]:
        actual = f"None at {listed(missing)}"
    else:
        return
    raise ValueError(
        f"inputs must be a list of at least one {what} with the same dtype and shape, got {actual}"
    )
