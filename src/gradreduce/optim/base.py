"""How gradients reach variables: checks, slots and the launch; never differentiates.

Source: tf.train.Optimizer, as agn_optimizer.md lists its members.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradreduce.aggregate import AggregationMethod
from gradreduce.autodiff.gradients import Engine
from gradreduce.cross_device import AllReduceCrossDeviceOps
from gradreduce.cross_device_ops import CrossDeviceOps
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    as_deadline,
    by_physical,
    copy_over,
    due,
    gather,
    scatter,
)
from gradreduce.errors import InvalidVariableError
from gradreduce.indexed_slices import IndexedSlices
from gradreduce.interop import OneCall, kind_of, reading, to_buffer
from gradreduce.values import Mirrored, PerReplica, ReduceOp
from gradreduce.variables import Variable

from .gradients import checked_gradients

__all__ = ["Optimizer"]


class Optimizer:
    """Base class of the update rules; a subclass implements ``_update``.

    Attributes:
        GATE_NONE: gradients may be used as they come.
        GATE_OP: all gradients of an operation before any of them is used.
        GATE_GRAPH: all gradients before any is used. As in eager TensorFlow the three make no
            difference: an update is one launch over all variables.
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    #: names of the slots that the rule keeps for each variable
    _slot_names: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        if not name:
            raise ValueError("Must specify the optimizer name")
        self._name = name
        self._slots: dict[str, dict[Variable, Variable]] = {each: {} for each in self._slot_names}
        self._cross_device_ops: CrossDeviceOps | None = None

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Reduces ``PerReplica`` gradients, by MEAN; settable.

        Default: ``AllReduceCrossDeviceOps()``.
        """
        if self._cross_device_ops is None:
            self._cross_device_ops = AllReduceCrossDeviceOps()
        return self._cross_device_ops

    @cross_device_ops.setter
    def cross_device_ops(self, ops: CrossDeviceOps) -> None:
        self._cross_device_ops = ops

    def get_name(self) -> str:
        """The name given to the constructor."""
        return self._name

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """The slot ``name`` of ``var``; None if it was not created."""
        return self._slots.get(name, {}).get(var)

    def get_slot_names(self) -> list[str]:
        """Names of the slots that exist, sorted."""
        return sorted(name for name, slots in self._slots.items() if slots)

    def variables(self) -> list[Variable]:
        """Every slot, sorted by name."""
        slots = [slot for by_variable in self._slots.values() for slot in by_variable.values()]
        return sorted(slots, key=lambda slot: slot.name)

    @OneCall()
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        deadline: float | None = None,
    ) -> None:
        """Changes every variable by its gradient; one launch on each GPU serves all of them.

        Args:
            grads_and_vars: pairs. A gradient is None (the variable stays as it is), an array of
                the variable's shape and dtype, a ``Mirrored`` on its devices, or a
                ``PerReplica`` on them, which is reduced by MEAN first. Gradients are not written;
                when this returns their library's current stream may overwrite them.
            global_step: a Variable that goes up by one afterwards.
            name: ignored; TensorFlow's name of the operation.
            deadline: seconds from now in which the devices must be done, or their mesh dies.

        Raises:
            ValueError: no pair, None for every gradient, a variable twice, a gradient of another
                shape, dtype or device than its variable or in the memory of a variable that is
                written, a ``global_step`` that is no scalar, or a ``deadline`` that is no number
                above 0. Nothing was changed.
            TypeError: a gradient that is no array, or something else than a Variable.
            NotImplementedError: IndexedSlices.
        """
        seconds = as_deadline(deadline)
        present = _checked_pairs(grads_and_vars)
        _check_global_step(global_step)
        variables = [var for _, var in present]
        devices = [device for var in variables for device in var.devices]
        with due("apply_gradients", seconds, devices):
            gradients = self._near_gradients(present)
            self._check_apart(variables, gradients)
            self.prepare(variables)
            self._launch(variables, gradients)
            if global_step is not None:
                global_step.assign_add(1)

    def compute_gradients(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
        *,
        engine: Engine | None = None,
    ) -> list[tuple[Any, Variable]]:
        """Gradients of ``loss`` with respect to variables; the first half of ``minimize``.

        Args:
            loss: takes no argument, reads Variables, and returns the value to minimize (of an
                array: the sum of its elements). It is plain NumPy, on NumPy's and on CuPy's
                arrays; an operation that is not differentiated here raises
                ``NotImplementedError``. It may return a PyTorch tensor, which PyTorch
                differentiates (a Variable is a tensor in PyTorch's functions). It may be a
                generator of terms, such as the losses of micro-batches: each is differentiated
                and dropped before the next is made, and their gradients are terms like others.
                What another thread computes for it is a constant. On another GPU than CuPy's
                current one it computes inside ``with cupy.cuda.Device(...)``, as CuPy wants it;
                the way back finds its GPUs itself.
            var_list: Variables, or one; default the trainable ones that ``loss`` reads, in the
                order of first reading.
            gate_gradients: ``GATE_NONE``, ``GATE_OP`` or ``GATE_GRAPH``; no effect.
            aggregation_method: how the terms of a gradient are combined, one term for each use
                of a tensor; of what PyTorch and JAX have differentiated, one for each loss.
            colocate_gradients_with_ops: no effect.
            grad_loss: the gradient of ``loss`` itself, of its shape; default ones. Of a
                generator, of each term.
            engine: ``"jax"``: ``loss`` is one of JAX's, and goes through ``jax.value_and_grad``;
                it is called twice. A Variable is a JAX array in JAX's functions.

        Returns:
            A pair (gradient, variable) for each variable. A gradient is an array of the
            variable's shape and dtype; ``IndexedSlices``, if the variable was only looked up by
            ``gr.embedding_lookup`` or ``np.take(variable, rows, axis=0)``; or None, if the loss
            does not reach the variable. It is the caller's.

        Raises:
            ValueError: an invalid ``gate_gradients``, ``aggregation_method`` or ``engine``, a
                ``grad_loss`` of another shape than the loss, or no variable.
            InvalidVariableError: (a ``TypeError`` and a ``ValueError``) ``var_list`` holds
                something else than Variables of floats, or the loss returned no float.
            RuntimeError: ``loss`` is not callable.
        """
        return checked_gradients(
            loss, var_list, gate_gradients, aggregation_method, grad_loss, engine
        )

    def minimize(  # noqa: PLR0913  # the signature of the seed
        self,
        loss: Callable[[], Any],
        global_step: Variable | None = None,
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        """``compute_gradients`` and ``apply_gradients`` in one call, with their arguments.

        Args:
            loss: see ``compute_gradients``, as all that is not named here.
            global_step: a Variable that goes up by one afterwards.
            var_list: see there.
            gate_gradients: see there.
            aggregation_method: see there.
            colocate_gradients_with_ops: no effect.
            name: ignored.
            grad_loss: see there.
            engine: see there.

        Raises:
            ValueError: the loss reaches none of the variables; and what the two raise.
        """
        pairs = self.compute_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops,
            grad_loss, engine=engine,
        )  # fmt: skip
        self.apply_gradients(pairs, global_step, name)

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Compiles what an update of these variables launches, and makes their slots.

        ``apply_gradients`` does it too; a caller who may not fail half-way does it before.
        """
        for var in variables:
            for device in var.devices:
                self._prepare(device, var.dtype)
        for slot_name in self._slot_names:
            slots = self._slots[slot_name]
            for var in variables:
                if var not in slots:
                    slots[var] = Variable.zeros_like(var, f"{var.name}/{self._name}")

    def _prepare(self, device: Device, dtype: DType) -> None:
        """Compiles the rule for variables of a dtype."""

    def _update(
        self,
        variables: Sequence[Buffer],
        slots: Sequence[Sequence[Buffer]],
        gradients: Sequence[Buffer],
        device: Device,
    ) -> None:
        """Launches the rule: ``slots[name][tensor]`` in the order of ``_slot_names``."""
        raise NotImplementedError(f"{type(self).__name__} has no update rule")

    def _near_gradients(self, present: Sequence[tuple[Any, Variable]]) -> list[tuple[Buffer, ...]]:
        """For each variable its gradient on each of its devices; PerReplica ones reduced."""
        for grad, var in present:
            _check_gradient(grad, var)
        spread = [(grad, grad) for grad, _ in present if isinstance(grad, PerReplica)]
        reduced = iter(self.cross_device_ops.batch_reduce(ReduceOp.MEAN, spread) if spread else [])
        found = []
        for grad, var in present:
            if isinstance(grad, PerReplica):
                found.append(_in_order(next(reduced), var))
            elif isinstance(grad, Mirrored):
                found.append(_in_order(grad, var))
            else:
                found.append(_everywhere(grad, var))
        return found

    def _check_apart(
        self, variables: Sequence[Variable], gradients: Sequence[tuple[Buffer, ...]]
    ) -> None:
        """A launch reads all gradients while it writes all variables, in no order."""
        slots = [slots[var] for slots in self._slots.values() for var in variables if var in slots]
        written = sorted(
            (buffer.address, buffer.nbytes)
            for var in (*variables, *slots)
            for buffer in var.buffers
        )
        starts = [start for start, _ in written]
        for var, near in zip(variables, gradients, strict=True):
            if any(_touches(buffer, written, starts) for buffer in near):
                raise ValueError(
                    f"the gradient of {var!r} is the memory of a variable or slot that this call "
                    "writes; pass a copy"
                )

    def _launch(
        self, variables: Sequence[Variable], gradients: Sequence[tuple[Buffer, ...]]
    ) -> None:
        """The rule over all copies of all variables: one call for each physical device."""
        copies = [buffer for var in variables for buffer in var.buffers]
        near = [buffer for grads in gradients for buffer in grads]
        slots = [
            [buffer for var in variables for buffer in self._slots[name][var].buffers]
            for name in self._slot_names
        ]
        fabric, devices = copies[0].device.fabric, [copy.device for copy in copies]
        with fabric.launch_lock, fabric.whole_or_lost(devices):  # all, or another thread's turn
            self._launch_copies(copies, slots, near)

    def _launch_copies(
        self, copies: list[Buffer], slots: list[list[Buffer]], near: list[Buffer]
    ) -> None:
        for places in by_physical([buffer.device for buffer in copies]).values():
            chosen = [copies[place] for place in places]
            devices = [buffer.device for buffer in chosen]
            devices += [near[place].device for place in places]
            gather(devices[0], devices)
            self._update(
                chosen,
                [[by_name[place] for place in places] for by_name in slots],
                [near[place] for place in places],
                devices[0],
            )
            scatter(devices[0], devices)


def _touches(buffer: Buffer, written: list[tuple[int, int]], starts: list[int]) -> bool:
    """Whether a gradient shares a byte with one of the sorted ranges, which are disjoint."""
    place = bisect_left(starts, buffer.address + buffer.nbytes)
    return place > 0 and buffer.nbytes > 0 and buffer.address < sum(written[place - 1])


def _check_global_step(global_step: Any) -> None:
    if global_step is None:
        return
    if not isinstance(global_step, Variable):
        raise TypeError(f"global_step={global_step!r} is not a Variable")
    if global_step.shape:
        raise ValueError(f"global_step={global_step!r} must hold one number")


def _checked_pairs(grads_and_vars: Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
    """The pairs that have a gradient."""
    pairs = [_checked_pair(pair) for pair in grads_and_vars]
    if not pairs:
        raise ValueError("No variables provided.")
    if len({var for _, var in pairs}) != len(pairs):
        raise ValueError("a variable is named twice")
    present = [(grad, var) for grad, var in pairs if grad is not None]
    if not present:
        raise ValueError("No gradients provided for any variable")
    return present


def _checked_pair(pair: Any) -> tuple[Any, Variable]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"grads_and_vars holds {pair!r}, which is no (gradient, variable) pair")
    if not isinstance(pair[1], Variable):
        raise InvalidVariableError(f"{pair[1]!r} is not a Variable")
    return pair


def _check_gradient(grad: Any, var: Variable) -> None:
    if isinstance(grad, IndexedSlices):
        raise NotImplementedError("IndexedSlices (sparse gradients) are not implemented yet")
    if isinstance(grad, PerReplica | Mirrored):
        if set(grad.devices) != set(var.devices):
            raise ValueError(f"the gradient of {var!r} lies on {grad.devices}")
        buffers: Sequence[Buffer] = grad.buffers
    else:
        kind_of(grad)
        buffers = [to_buffer(grad, var.devices[0], dtype=var.dtype)]
    reading(buffers)
    for buffer in buffers:
        if (buffer.shape, buffer.dtype) != (var.shape, var.dtype):
            raise ValueError(f"the gradient of {var!r} is {buffer.dtype}{list(buffer.shape)}")


def _in_order(grad: Mirrored, var: Variable) -> tuple[Buffer, ...]:
    """The gradient's copies in the order of the variable's devices."""
    by_device = dict(zip(grad.devices, grad.buffers, strict=True))
    return tuple(by_device[device] for device in var.devices)


def _everywhere(grad: Any, var: Variable) -> tuple[Buffer, ...]:
    """A plain gradient within reach of each of the variable's devices, copied where it must be."""
    given = to_buffer(grad, var.devices[0], dtype=var.dtype)
    near: dict[int, Buffer] = {given.device.physical: given}
    for device in var.devices:
        if device.physical not in near:
            near[device.physical] = device.empty(given.shape, given.dtype)
            copy_over(device, near[device.physical], given)
    return tuple(near[device.physical] for device in var.devices)
