"""``apply_grads`` and ``take_grads``, which use several accumulators in one call.

A call holds the locks of all its accumulators. A stale gradient launches nothing.
Source: own; in TensorFlow a call uses one accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from operator import attrgetter
from threading import current_thread
from typing import Any, TypeVar

from gradreduce.arrays.caller_streams import StreamScope, release_inputs
from gradreduce.arrays.convert import as_result_kind, from_buffer
from gradreduce.arrays.convert_gpu import Kind, wait_for_inputs
from gradreduce.arrays.distributed import Mirrored, Part
from gradreduce.arrays.types import OutputType
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DeferInterrupts, as_deadline, as_flag
from gradreduce.errors import DeviceMismatchError, InvalidArgumentError, about, brief, log_warning
from gradreduce.weights import is_too_large

from .base import ConditionalAccumulatorBase
from .state import (
    AccumulatorState,
    PendingGradient,
    PendingTake,
    Taken,
    additions_of,
    hold_locks,
)
from .take_queue import await_take, complete_ready, join, take_locked, withdraw
from .validate import (
    DEFAULT_STEP,
    as_required,
    as_step,
    as_timeout,
    as_weights,
    num_gradients,
    pending_gradient,
)

T = TypeVar("T")


def apply_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    grads: Sequence[Any],
    local_step: int | Variable = DEFAULT_STEP,
    *,
    cast: bool = False,
    weight: float | Sequence[float] = 1,
) -> bool:
    """Adds one gradient to each accumulator; adds all or drops all.

    All gradients are dropped if ``local_step`` is stale for one of the accumulators. On error,
    nothing was added. The host waits only to download the value of a Variable, or indices from a
    GPU. On each GPU, dense gradients of one dtype take at most two launches: one for those that are
    the first in their sum, one for the others. Sparse gradients of one dtype take one launch, or
    more if a sum gets several gradients (by a ``PerReplica``) or outgrows its memory.

    Args:
        accumulators: dense or sparse accumulators of one mesh, each at most once.
        grads: a gradient for each accumulator; see ``ConditionalAccumulator.apply_grad`` and
            ``SparseConditionalAccumulator.apply_indexed_slices_grad``.
        local_step: the step of all gradients; see ``ConditionalAccumulator.apply_grad``.
        cast: see ``ConditionalAccumulator.apply_grad``.
        weight: the weight of all gradients; see ``ConditionalAccumulator.apply_grad``.

    Returns:
        True if all gradients were added, False if all were dropped.

    Raises:
        ValueError: the numbers of accumulators and gradients differ, or an accumulator is passed
            twice.
        TypeError: ``accumulators`` is not a list of accumulators of this process.
        DeviceMismatchError: the accumulators are on devices of different meshes.
        Exception: any error of ``apply_grad``; the message names the gradient.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> weight = gr.ConditionalAccumulator("float32", [2], device=mesh.devices[0])
        >>> bias = gr.ConditionalAccumulator("float32", [], device=mesh.devices[0])
        >>> gr.apply_grads([weight, bias], [[1.0, 2.0], 3.0], local_step=0)
        True
        >>> gr.take_grads([weight, bias], 1)
        [array([1., 2.], dtype=float32), array(3., dtype=float32)]
        >>> gr.apply_grads([weight, bias], [[1.0, 2.0], 3.0], local_step=0)  # stale
        False
    """
    return add_all(_validate_accumulators(accumulators), grads, local_step, cast, weight)


def add_all(
    states: Sequence[AccumulatorState],
    grads: Sequence[Any],
    local_step: int | Variable,
    cast: bool,
    weight: Any = 1,
) -> bool:
    """Does what ``apply_grads`` does, for the states of accumulators of one mesh."""
    states[0].mesh_state.check_process()
    step = as_step("local_step", local_step)
    if cast is not False:
        cast = as_flag("cast", cast)
    grads = tuple(grads)
    if len(states) != len(grads):
        raise ValueError(
            f"grads has {len(grads)} entries, accumulators has {len(states)}; pass one gradient "
            "for each accumulator"
        )
    if type(weight) is not int or weight != 1:
        weight = as_weights(weight)
    count = len(states)
    calls = list(zip(states, grads, [cast] * count, [weight] * count, strict=True))
    dropped = is_stale(states, step)
    if dropped:  # gradients that will be dropped are not converted
        counts = _for_each(num_gradients, calls, states)
        with hold_locks(states):
            dropped = _drop_stale(states, counts, step)
    if not dropped:
        with StreamScope():
            pending_gradients = _for_each(pending_gradient, calls, states)
            if states[0].mesh_state.has_streams:
                parts = [part for pending in pending_gradients for part in pending.parts]
                wait_for_inputs([part.values for part in parts])
            dropped = not add_pending(pending_gradients, step)
    if dropped and local_step is DEFAULT_STEP:
        warn_of_default(states)
    return not dropped


def add_pending(pending_gradients: Sequence[PendingGradient], step: int) -> bool:
    """Adds validated gradients, or drops all as stale; then completes takes that have enough.

    Call it in a ``StreamScope``. Returns whether the gradients were added.
    """
    states, _, _, counts, _ = zip(*pending_gradients, strict=True)
    with DeferInterrupts():
        with hold_locks(states):
            dropped = _drop_stale(states, counts, step)
            if not dropped:
                _for_each(_check_sum_shape, zip(pending_gradients), states)
                _add(pending_gradients)
                complete_ready(states, held=True)
        complete_ready(states)
        release_inputs()
    return not dropped


_STEP = attrgetter("step")


def is_stale(states: Sequence[AccumulatorState], local_step: int) -> bool:
    """Returns whether gradients of this step are stale for any of the states."""
    latest: int = max(map(_STEP, states))
    return local_step < latest


def _drop_stale(states: Sequence[AccumulatorState], counts: Iterable[int], local_step: int) -> bool:
    """Returns whether gradients are stale, and counts stale ones. All locks must be held.

    Raises:
        CancelledError: an accumulator was closed.
    """
    for state in states:
        state.check_open()
    if not is_stale(states, local_step):
        return False
    for state in states:
        state.check_devices()
    for state, count in zip(states, counts, strict=True):
        state.num_dropped += count
    return True


def _for_each(
    function: Callable[..., T],
    arguments: Iterable[tuple[Any, ...]],
    states: Sequence[AccumulatorState],
) -> list[T]:
    """Calls the function for each state; error messages begin with the accumulator's name."""
    results = []
    for index, each in enumerate(arguments):
        try:
            results.append(function(*each))
        except (TypeError, ValueError) as error:
            several = f"grads[{index}], for " if len(states) > 1 else ""
            raise about(f"{several}accumulator {states[index].name!r}", error) from None
    return results


def _check_sum_shape(pending: PendingGradient) -> None:
    """Checks that gradients fit the sum; ``validate`` has compared them with the constructor.

    Raises:
        InvalidArgumentError: a shape differs, an index is too large, or the sum of weights is.
    """
    state, sum_shape = pending.state, pending.state.sum_shape
    if pending.excess and is_too_large(state.weight() + pending.excess):
        raise InvalidArgumentError("the sum of all weights exceeds the largest float64")
    for part in pending.parts:
        sum_shape = part.shape if sum_shape is None else sum_shape
        state.storage.check_sum_shape(part, sum_shape)


def _add(pending_gradients: Sequence[PendingGradient]) -> None:
    """Launches the additions, and updates the sums and counts.

    If anything fails between the first launch in place and the update of the counts, the contents
    of the sums are undefined, and their devices are marked as failed.
    """
    sums, out_of_place, in_place = additions_of(pending_gradients)
    for launch in out_of_place:
        launch()
    kept = [each.device for each in sums if each.in_place]
    with kept[0].mesh_state.fail_on_partial_write(kept) if kept else nullcontext():
        for launch in in_place:
            launch()
        totals: dict[AccumulatorState, list[Any]] = {}
        for each in sums:
            totals.setdefault(each.owner, [*each.owner.totals])[each.device_index] = each.total
        thread = current_thread().name
        for state, parts, kind, count, excess in pending_gradients:
            is_first = bool(parts) and state.sum_shape is None
            state.update(
                totals=totals.get(state, state.totals),
                count=state.count + count,
                excess=state.excess + excess,
                sources={**state.sources, thread: state.sources.get(thread, 0) + count},
                kind=kind if is_first else state.kind,
                sum_shape=parts[0].shape if is_first else state.sum_shape,
            )


def warn_of_default(states: Sequence[AccumulatorState]) -> None:
    """Logs a warning, once for each accumulator, about a gradient without ``local_step``."""
    untold = [state for state in states if state.step > DEFAULT_STEP and not state.has_warned]
    for state in untold:
        state.has_warned = True
    if untold:  # no lock is held, because a log handler may use accumulators
        log_warning(
            __name__,
            "accumulator %r is at step %d and dropped a gradient without local_step, which "
            "defaults to 0: pass local_step=accumulator.global_step, read before the gradient was "
            "computed",
            untold[0].name, untold[0].step,
        )  # fmt: skip


def _validate_accumulators(accumulators: Any) -> tuple[AccumulatorState, ...]:
    """Checks that one call can use all the accumulators; returns their states.

    Raises:
        TypeError: ``accumulators`` is not a list of accumulators.
        ValueError: the list is empty, or an accumulator is passed twice.
        DeviceMismatchError: the accumulators are on devices of different meshes.
    """
    if isinstance(accumulators, ConditionalAccumulatorBase):
        raise TypeError(
            f"accumulators={brief(accumulators)} must be a list of accumulators: pass [accumulator]"
        )
    seen: dict[AccumulatorState, int] = {}
    for index, accumulator in enumerate(accumulators):
        state = getattr(accumulator, "accumulator_ref", None)
        if not isinstance(state, AccumulatorState):
            raise TypeError(
                f"accumulators[{index}]={brief(accumulator)} must be an accumulator of this "
                "process; for those of gr.ray use an AccumulatorSet"
            )
        if state in seen:
            raise ValueError(
                f"accumulators[{index}] is the same as accumulators[{seen[state]}]; pass each at "
                "most once"
            )
        seen[state] = index
    if not seen:
        raise ValueError("accumulators is empty; pass at least one")
    states = tuple(seen)
    for index, state in enumerate(states):
        if state.mesh_state is not states[0].mesh_state:
            raise DeviceMismatchError(
                f"accumulators[{index}] is on another mesh than accumulators[0]; make one call "
                "for each mesh"
            )
    return states


def take_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    num_required: int | Variable,
    *,
    timeout: float | None = None,
    output_type: OutputType | None = None,
    deadline: float | None = None,
) -> list[Any]:
    """Blocks until each accumulator has ``num_required`` gradients, then takes from all.

    Two such calls cannot deadlock, because a call joins the queues of all its accumulators at once.
    Dense accumulators over a mesh are reduced in one batch if they have the same
    ``cross_device_ops`` and divisor. Gradients that were added or taken together may share one
    block of memory, which is freed when none of them is used any more. Ctrl-C during the wait takes
    nothing. Ctrl-C at the moment when the take completes discards the result.

    Args:
        accumulators: dense or sparse accumulators of one mesh, each at most once.
        num_required: the number of gradients that each must have: an integer of at least 1, or a
            Variable that holds one.
        timeout: seconds to wait for gradients; None waits without limit.
        output_type: see ``ConditionalAccumulator.take_grad``.
        deadline: see ``ConditionalAccumulator.take_grad``.

    Returns:
        One gradient for each accumulator: what ``ConditionalAccumulator.take_grad`` or
        ``SparseConditionalAccumulator.take_indexed_slices_grad`` returns.

    Raises:
        InvalidArgumentError: ``num_required`` is less than 1, or the step is 2**63 - 1.
        TypeError: ``accumulators`` is not a list of accumulators of this process,
            ``num_required`` is not an integer or a Variable, or ``timeout`` is not a number.
        ValueError: ``accumulators`` is empty, or has an accumulator twice; ``deadline`` is not a
            number above 0; or ``output_type`` is unknown or its library is not imported.
        DeviceMismatchError: the accumulators are on devices of different meshes.
        DeadlineExceededError: the timeout expired; nothing was taken.
        CancelledError: an accumulator was closed, or the mesh failed during the wait.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> weight = gr.ConditionalAccumulator("float32", [2], device=mesh.devices[0])
        >>> table = gr.SparseConditionalAccumulator("float32", [9, 1], device=mesh.devices[0])
        >>> rows = gr.IndexedSlices(np.float32([[4]]), [8], (9, 1))
        >>> gr.apply_grads([weight, table], [[1.0, 2.0], rows])
        True
        >>> grad, rows = gr.take_grads([weight, table], num_required=1, timeout=60)
        >>> grad, rows.indices
        (array([1., 2.], dtype=float32), array([8]))
    """
    states = _validate_accumulators(accumulators)
    return take_all(states, num_required, timeout, output_type, deadline)


def take_all(
    states: tuple[AccumulatorState, ...],
    num_required: int | Variable,
    timeout: float | None,
    output_type: OutputType | None,
    deadline: float | None,
) -> list[Any]:
    """Does what ``take_grads`` does, for the states of accumulators of one mesh."""
    states[0].mesh_state.check_process()
    required, limit, seconds = as_required(num_required), as_timeout(timeout), as_deadline(deadline)
    as_result_kind(output_type, "native")  # checked before anything is taken
    pending_take = PendingTake(states, required, seconds)
    try:
        with pending_take.in_call:  # released by C code, which no Ctrl-C can prevent
            join(pending_take)
            await_take(pending_take, limit)
    except BaseException:
        withdraw(pending_take)
        raise
    results = _results_of(states, pending_take.taken, output_type)
    states[0].mesh_state.inexact.warn()
    return results


def reduce_now(
    states: Sequence[AccumulatorState],
    num_required: int,
    reduce: Callable[[Sequence[AccumulatorState], ExitStack], T],
) -> T | None:
    """Reduces the sums of all states and resets them without waiting; returns None if it cannot.

    It can if at least one state has ``num_required`` gradients and no take waits. The step of every
    state then increases by one, even if it is empty.

    Args:
        states: the states of accumulators of one mesh.
        num_required: see above.
        reduce: see ``take_locked``.
    """
    with hold_locks(states):
        for state in states:
            state.check_open()
        if max(state.count for state in states) < num_required or any(
            state.queue and state.first_take() for state in states
        ):
            return None
        return take_locked(states, reduce)


def _results_of(
    states: Sequence[AccumulatorState],
    taken: Mapping[AccumulatorState, Taken],
    output_type: OutputType | None,
) -> list[Any]:
    """Converts the taken Buffers to the arrays that the call returns."""
    results: list[Any] = []
    with StreamScope():
        for state in states:
            parts, first = taken[state]
            kind = as_result_kind(output_type, first)
            result = Mirrored.of(parts, kind) if state.over_mesh else as_result(parts[0], kind)
            results.append(result)
    return results


def as_result(part: Part, kind: Kind) -> Any:
    """Converts a taken gradient of one device to the array that a call returns."""
    return from_buffer(part, kind) if isinstance(part, Buffer) else part._as_result(kind)
