"""How arrivals of one gradient over time become one gradient: the public dense accumulator.

Source: tf.ConditionalAccumulator (conditional_accumulator.md, conditional_accumulator_summary.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from gradreduce.cross_device import AllReduceCrossDeviceOps
from gradreduce.device import (
    Device,
    Mesh,
    accumulate_dtype,
    as_deadline,
    as_dtype,
    default_mesh,
)
from gradreduce.interop import OneCall, as_result_kind, from_buffer, reading
from gradreduce.ops import prepare_all_sum
from gradreduce.presets import shared_ops
from gradreduce.values import Mirrored
from gradreduce.variables import Variable

from .apply import apply_arrivals, prepare_arrivals
from .door import (
    DTYPES,
    arrival,
    as_required,
    as_shape,
    as_step,
    as_timeout,
    check_together,
)
from .registry import shared_state
from .serve import await_ticket, cancel_waiting, close, forget, join, serve_joint, take_held
from .state import AccumulatorState, Ticket, locked

__all__ = [
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "apply_grads",
    "take_grads",
]


class ConditionalAccumulatorBase:
    """What dense and sparse accumulators share (tf.ConditionalAccumulatorBase).

    A context manager: leaving it closes the accumulator. All methods may be called from any
    thread.
    """

    def __init__(self, state: AccumulatorState, name: str) -> None:
        self._state = state
        self._name = str(name).rpartition("/")[2]

    @property
    def accumulator_ref(self) -> AccumulatorState:
        """The shared state: the same object for equal ``shared_name``."""
        return self._state

    @property
    def name(self) -> str:
        """The last component of the name that was given: ``"y"`` for ``"Q/x/y"``."""
        return self._name

    @property
    def dtype(self) -> Any:
        """Of the gradients."""
        return self._state.dtype

    @property
    def global_step(self) -> int:
        """Gradients of an earlier step than this are stale."""
        with self._state.lock:
            return self._state.step

    @property
    def num_dropped(self) -> int:
        """How many gradients were dropped as stale."""
        with self._state.lock:
            return self._state.num_dropped

    def num_accumulated(self, name: str | None = None) -> int:
        """How many gradients are in the sum now.

        Args:
            name: ignored; TensorFlow's name of the operation.

        Raises:
            CancelledError: the accumulator was closed.
        """
        with self._state.lock:
            self._state.check_open()
            return self._state.count

    def set_global_step(self, new_global_step: int | Variable, name: str | None = None) -> None:
        """Sets the step; a smaller one than before is logged as a warning and takes effect.

        Gradients in the sum stay, waiting takes are not looked at.

        Args:
            new_global_step: an integer, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.

        Raises:
            TypeError: neither.
            CancelledError: the accumulator was closed.
        """
        self._state.set_step(as_step("new_global_step", new_global_step))

    def close(self) -> None:
        """Frees the sum; waiting takes and all later calls raise ``CancelledError``.

        Calling it twice is fine.
        """
        close(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Step, count, dropped and partial sum.

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError("state_dict of an accumulator is not implemented yet")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a ``state_dict`` back.

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError("load_state_dict of an accumulator is not implemented yet")

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """Adds gradients that are not stale, and hands out their mean when enough have come.

    Args:
        dtype: float16, bfloat16, float32 or float64; halves are summed in float32.
        shape: of the gradients; None for any, None entries for any extent. The first gradient
            after a take fixes what is open, until the next take.
        shared_name: if not empty, all accumulators of this name in the process are one.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides by all that arrived, or ``"SUM"``.
        device: a device, or a whole mesh: then a partial sum is kept on each of its devices and
            all-reduced once, at the take. Default: device 0 of ``gr.default_mesh()``.
        cross_device_ops: reduces the partial sums of a mesh; those of accumulators with the same
            one travel together at a joint take. Default: one ``AllReduceCrossDeviceOps`` for all.

    Raises:
        TypeError: another dtype, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is of another class.
        ValueError: an unknown ``reduction_type``, a negative extent, or another definition of
            the same ``shared_name``.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        device: Device | Mesh | None = None,
        cross_device_ops: AllReduceCrossDeviceOps | None = None,
    ) -> None:  # fmt: skip
        found = as_dtype(dtype)
        if found.name not in DTYPES:
            raise TypeError(f"dtype {found} is not one of {', '.join(DTYPES)}")
        if reduction_type not in ("MEAN", "SUM"):
            raise ValueError(f'reduction_type {reduction_type!r} not in: "MEAN", "SUM"')
        wanted = None if shape is None else as_shape(shape)
        device = default_mesh().devices[0] if device is None else device
        if not isinstance(device, Device | Mesh):
            raise TypeError(f"device={device!r} is neither a Device nor a Mesh")
        reducer = shared_ops() if cross_device_ops is None else cross_device_ops
        if not isinstance(reducer, AllReduceCrossDeviceOps):
            raise TypeError(f"cross_device_ops={reducer!r} is no AllReduceCrossDeviceOps")
        over_mesh = isinstance(device, Mesh)
        devices = device.devices if isinstance(device, Mesh) else (device,)
        prepare_arrivals(devices, found, found)
        for each in devices:
            prepare_all_sum(each, found, accumulate_dtype(found))
        if over_mesh:
            reducer.compile_for(devices, accumulate_dtype(found), found)
        state = AccumulatorState(found, wanted, reduction_type, devices, over_mesh, reducer)
        devices[0].fabric.on_close[state] = cancel_waiting
        devices[0].fabric.on_reset[state] = forget
        super().__init__(shared_state(shared_name, state), name)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = 0, name: str | None = None, *,
        cast: bool = False,
    ) -> bool:  # fmt: skip
        """Adds a gradient, unless it is stale: ``local_step`` less than the accumulator's step.

        A later step than the accumulator's is not stale. Never blocks for a device; may serve
        takes that wait.

        Args:
            grad: an array, number or nested list; or a ``PerReplica`` on the accumulator's mesh,
                each replica of which counts as one gradient. Not written, not kept: when this
                returns its library's current stream may overwrite it. A host array
                goes to the device of the enclosing ``gr.replica``, else to the first.
            local_step: the step at which it was computed.
            name: ignored; TensorFlow's name of the operation.
            cast: convert an array of another float dtype instead of refusing it.

        Returns:
            True if it was added, False if it was dropped.

        Raises:
            ValueError: an array of another dtype, or a shape other than the constructor's.
            InvalidArgumentError: another shape than the gradients in the sum.
            CancelledError: the accumulator was closed.
        """
        return apply_grads([self], [grad], local_step, cast=cast)

    def take_grad(
        self,
        num_required: int,
        name: str | None = None,
        *,
        timeout: float | None = None,
        as_kind: str | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Blocks until ``num_required`` gradients are in, then hands out their mean or sum.

        All that arrived are included, and MEAN divides by their number. Takes are served in the
        order of the calls. Afterwards the sum is gone, the count 0, the step one further.

        Args:
            num_required: at least 1.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait; None for ever.
            as_kind: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: what the
                result is instead of the kind of the first gradient.
            deadline: seconds that the devices may take for the gradient, counted from when enough
                have come; when they are over first, the mesh dies. ``timeout`` harms nothing.

        Returns:
            An array of the kind of the first gradient in it, on the accumulator's device; over a
            mesh a ``Mirrored``. It is the caller's and never written again.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: the time ran out; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh died while this waited.
            CollectiveError: the mesh is dead.
            ValueError: ``deadline`` is no number above 0.
        """
        return take_grads(
            [self], num_required, timeout=timeout, as_kind=as_kind, deadline=deadline
        )[0]


@OneCall()
def apply_grads(
    accumulators: Sequence[ConditionalAccumulator],
    grads: Sequence[Any],
    local_step: int | Variable = 0,
    *,
    cast: bool = False,
) -> bool:
    """Adds one gradient to each accumulator, all or none: one decision under all locks.

    One launch on each physical device serves all of them.

    Args:
        accumulators: each at most once.
        grads: one for each; see ``ConditionalAccumulator.apply_grad``.
        local_step: of all of them.
        cast: as there.

    Returns:
        True if all were added, False if all were dropped, because the step is stale for one.

    Raises:
        ValueError: other numbers of accumulators and gradients, an accumulator twice, or what
            ``apply_grad`` raises. Nothing was added.
    """
    step = as_step("local_step", local_step)
    accumulators, grads = tuple(accumulators), tuple(grads)
    check_together([each.accumulator_ref for each in accumulators])
    if len(accumulators) != len(grads):
        raise ValueError(f"{len(accumulators)} accumulators and {len(grads)} gradients")
    arrivals = [
        arrival(accumulator.accumulator_ref, grad, cast)
        for accumulator, grad in zip(accumulators, grads, strict=True)
    ]
    reading(buffer for each in arrivals for _, buffer in each.parts)
    kept, joint = apply_arrivals(arrivals, step)
    serve_joint(joint)
    return kept


def take_grads(
    accumulators: Sequence[ConditionalAccumulator],
    num_required: int,
    *,
    timeout: float | None = None,
    as_kind: str | None = None,
    deadline: float | None = None,
) -> list[Any]:
    """Takes from all accumulators together, when each holds ``num_required`` gradients.

    Blocks. One place in every queue, taken at once, so that two joint takes never wait for each
    other; the gradients of a mesh travel in one batch.

    Args:
        accumulators: each at most once.
        num_required: of each, at least 1.
        timeout: seconds to wait; None for ever.
        as_kind: as there.
        deadline: see ``ConditionalAccumulator.take_grad``.

    Returns:
        One gradient for each accumulator, as ``ConditionalAccumulator.take_grad`` gives it.

    Raises:
        InvalidArgumentError: ``num_required`` is less than 1.
        ValueError: no accumulator, or one twice.
        DeadlineExceededError: the time ran out; nothing was taken.
        CancelledError: an accumulator was closed, or the mesh died while this waited.
        CollectiveError: the mesh is dead.
    """
    required, limit, seconds = as_required(num_required), as_timeout(timeout), as_deadline(deadline)
    accumulators = tuple(accumulators)
    as_result_kind(as_kind, "native")  # a wrong name must not cost a gradient
    check_together([each.accumulator_ref for each in accumulators])
    ticket = Ticket(tuple(each.accumulator_ref for each in accumulators), required, seconds)
    join(ticket)
    await_ticket(ticket, limit)
    return _handed_out(ticket, as_kind)


def take_now(accumulators: Sequence[ConditionalAccumulator], num_required: int) -> list[Any] | None:
    """As ``take_grads``, but never blocks, and an accumulator that holds nothing gives None.

    Takes when the fullest holds ``num_required`` and no other take waits; otherwise returns None
    and takes nothing. Every accumulator's step goes one further, the empty ones' too.
    """
    states = [each.accumulator_ref for each in accumulators]
    with locked(states):
        for state in states:
            state.check_open()
        if any(state.queue for state in states):
            return None
        if max(state.count for state in states) < num_required:
            return None
        ticket = Ticket(tuple(states), num_required, kinds=[state.kind for state in states])
        ticket.taken = take_held(states)
    return _handed_out(ticket)


def _handed_out(ticket: Ticket, as_kind: str | None = None) -> list[Any]:
    """The taken Buffers as what callers get."""
    given: list[Any] = []
    with OneCall():
        for state, buffers, first in zip(ticket.states, ticket.taken, ticket.kinds, strict=True):
            kind = as_result_kind(as_kind, first)
            if not buffers:
                given.append(None)
            elif state.over_mesh:
                given.append(Mirrored.of(buffers, kind))
            else:
                given.append(from_buffer(buffers[0], kind))
    return given
