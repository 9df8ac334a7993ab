"""Validates gradients and copies them to the devices of their variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gradreduce import ops
from gradreduce.arrays.convert import shape_and_dtype
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import (
    Mirrored,
    Part,
    PerReplica,
    ReduceOp,
    buffer_of,
    part_on,
    with_buffer,
)
from gradreduce.arrays.indexed_slices import IndexedSlices, check_indices, to_dense_n
from gradreduce.arrays.trace_context import check_unread
from gradreduce.arrays.variable import Variable
from gradreduce.comm.process_group import group_of
from gradreduce.device import Device, copy_to, names_of
from gradreduce.errors import InvalidVariableError, about, brief, listed, repeated
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

_FLOATS = ("float16", "bfloat16", "float32", "float64")

GradientValue = Part | PerReplica | Mirrored
# For each copy of a variable, a gradient on the same physical device.
Colocated = tuple[Part, ...]


def check_float(variable: Variable) -> None:
    """Raises unless a variable has a float dtype.

    Raises:
        InvalidVariableError: it has another dtype.
    """
    if variable.dtype.kind not in "fV":  # bfloat16 is of kind V in ml_dtypes
        raise InvalidVariableError(
            f"Invalid type {variable.dtype} of {variable!r}: allowed are {', '.join(_FLOATS)}"
        )


def check_global_step(global_step: Any) -> None:
    """Raises unless ``global_step`` is None or a scalar Variable."""
    if global_step is None:
        return
    if not isinstance(global_step, Variable):
        hint = "; pass a list as var_list=" if isinstance(global_step, list | tuple) else ""
        raise TypeError(f"global_step={brief(global_step)} is not a Variable{hint}")
    if global_step.shape:
        raise ValueError(f"global_step={brief(global_step)} must hold one number")


def ready_count(global_step: Variable | None) -> Callable[[], None]:
    """Prepares everything that can fail; returns a function that adds one to ``global_step``."""
    return (lambda: None) if global_step is None else global_step._ready_add(1)


def validate_pairs(
    grads_and_vars: Iterable[tuple[Any, Variable]], *, is_read: bool = True
) -> tuple[list[Any], list[Variable]]:
    """Validates pairs; returns the gradients that are not None, and their variables.

    Args:
        grads_and_vars: the pairs.
        is_read: False: returns no gradients, which may all be None, and all variables.

    Raises:
        ValueError: there is no pair, a variable is in two pairs, or all gradients are None.
        TypeError: an item is not a pair of a gradient and a Variable.
        InvalidVariableError: a variable with a gradient does not have a float dtype.
        RuntimeError: the call is made inside a loss that has read one of the variables.
    """
    try:
        pairs = list(grads_and_vars)
    except TypeError:
        raise TypeError(
            f"grads_and_vars={brief(grads_and_vars)} must be a list of (gradient, variable) pairs"
        ) from None
    _check_pairs(pairs)
    if not pairs:
        raise ValueError("No variables provided.")
    variables = [var for _, var in pairs]
    variables[0].buffers[0].device.mesh_state.check_process()
    if len(set(variables)) != len(pairs):
        raise ValueError(
            f"grads_and_vars contains {listed(repeated(variables))} more than once; pass each "
            "variable once"
        )
    if not is_read:
        return [], variables
    gradients = [grad for grad, _ in pairs if grad is not None]
    if not gradients:
        raise ValueError(
            "No gradients provided for any variable: each one is None, as of a loss that does not "
            "read the variables"
        )
    if len(gradients) < len(pairs):
        variables = [var for grad, var in pairs if grad is not None]
    check_unread(variables)
    return gradients, variables


def _check_pairs(pairs: Sequence[Any]) -> None:
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"grads_and_vars[{index}] is {brief(pair)}, not a (gradient, variable) pair"
            )
        _, var = pair
        if not isinstance(var, Variable):
            raise InvalidVariableError(f"grads_and_vars[{index}]: {brief(var)} is not a Variable")


def to_variables(
    gradients: Sequence[Any],
    variables: Sequence[Variable],
    cross_device_ops: CrossDeviceOps,
    *,
    over_processes: bool = False,
    weights: Sequence[float] | None = None,
) -> list[Colocated]:
    """Returns, for each variable, a gradient colocated with each of its copies.

    ``PerReplica`` gradients are reduced by MEAN.

    Args:
        gradients: one for each variable.
        variables: the variables of the gradients.
        cross_device_ops: reduces ``PerReplica`` gradients.
        over_processes: whether an array or IndexedSlices is the gradient of this process, which is
            averaged over the processes of the mesh. False: it is reduced already.
        weights: the weight of each replica of ``PerReplica`` gradients; None: all are 1.

    Raises:
        ValueError: a gradient has another shape, dtype or device than its variable, or rows that
            the variable does not have; or a gradient must be averaged over processes, and its
            variable is not on all devices of this process's mesh.
        TypeError: a gradient is not an array.
    """
    placed = [_to_gradient_value(grad, var) for grad, var in zip(gradients, variables, strict=True)]
    wait_for_inputs([buffer_of(part) for grad in placed for part in _parts(grad)])
    if over_processes:
        placed = [_of_replicas(grad, var) for grad, var in zip(placed, variables, strict=True)]
    per_replica = [
        # With a key, processes compare the names: their gradients must be of the same variables.
        (value := grad._replace(_name=var.name, _key="" if over_processes else None), value)
        for grad, var in zip(placed, variables, strict=True)
        if isinstance(grad, PerReplica)
    ]
    mean = partial(cross_device_ops.batch_reduce, ReduceOp.MEAN)
    if weights is not None:  # subclasses of callers may take none
        mean = partial(mean, weights=weights)
    reduced = iter(mean(per_replica) if per_replica else ())
    return [
        _colocate(next(reduced) if isinstance(grad, PerReplica) else grad, var)
        for grad, var in zip(placed, variables, strict=True)
    ]


def device_over_processes(variables: Iterable[Variable]) -> Device | None:
    """Returns a device of a variable on a mesh of several processes; None if there is none."""
    first = [each._buffers[0].device for each in variables]
    return next((device for device in first if group_of(device).size > 1), None)


def _of_replicas(grad: GradientValue, var: Variable) -> GradientValue:
    """Returns a gradient of this process as an equal one for each of its replicas.

    Raises:
        ValueError: it is not reduced, and its variable is on a part of the devices of the mesh.
    """
    group, count = group_of(var._buffers[0].device), len(var.devices)
    if group.size == 1 or isinstance(grad, Mirrored):
        return grad
    if count != group.counts[group.rank]:
        raise ValueError(
            f"the gradient of {var!r} cannot be averaged over the processes: the variable is on "
            f"{count} of the {group.counts[group.rank]} devices of this process's mesh; create it "
            "with device=mesh"
        )
    if not isinstance(grad, Part):
        return grad
    home = buffer_of(grad).device
    return PerReplica.of(
        [grad if home is device else _copy_to_device(grad, device) for device in var.devices],
        devices=var.devices,
    )


def _copy_to_device(grad: Part, device: Device) -> Part:
    return with_buffer(grad, copy_to(device, buffer_of(grad)))


def _parts(grad: GradientValue) -> Sequence[Part]:
    return (grad,) if isinstance(grad, Part) else grad.parts


def _to_gradient_value(grad: Any, var: Variable) -> GradientValue:
    """Validates a gradient; converts it to Buffers unless it is distributed."""
    if isinstance(grad, PerReplica | Mirrored):
        grad._discard_copies()
        if set(grad.devices) != set(var.devices):
            raise ValueError(
                f"the gradient of {var!r} is on {names_of(grad.devices)}; "
                "it must be on the variable's devices"
            )
        placed: GradientValue = grad
    else:
        placed = _to_part(grad, var)
    for part in _parts(placed):
        if isinstance(part, IndexedSlices):
            check_rows(part, var)
        elif part.shape != var.shape or part.dtype != var.dtype:
            raise ValueError(
                f"the gradient of {var!r} is {part.dtype}{list(part.shape)}; it must have the "
                "shape and dtype of the variable"
            )
    return placed


def _to_part(grad: Any, var: Variable) -> Part:
    first = var._buffers[0]  # a write is checked later, by ``begin_writes``
    try:
        return part_on(first.device, grad, dtype=first.dtype)
    except (TypeError, ValueError) as error:
        raise about(f"the gradient of {var!r}", error) from None


def check_rows(slices: IndexedSlices, var: Variable) -> None:
    """Raises ``ValueError`` unless the slices are rows of the variable."""
    shape, dtype = shape_and_dtype(slices.values)
    if not var.shape or shape[1:] != var.shape[1:] or dtype != var.dtype:
        raise ValueError(
            f"the gradient of {var!r} has rows {dtype}{list(shape)}; they must have the shape and "
            "dtype of the variable's rows"
        )
    if slices.is_known and slices.dense_shape != var.shape:
        raise ValueError(
            f"the gradient of {var!r} has dense_shape {slices.dense_shape}; expected the "
            f"variable's shape {var.shape}, or None"
        )
    try:
        check_indices(slices.indices, var.shape)
    except ValueError as error:
        raise ValueError(f"the gradient of {var!r}: {error}") from None


def _colocate(grad: Part | Mirrored, var: Variable) -> Colocated:
    """Returns a gradient for each copy of a variable; one array for each physical device."""
    if isinstance(grad, Mirrored):
        by_device = dict(zip(grad.devices, grad.parts, strict=True))
        return tuple([by_device[device] for device in var.devices])
    by_gpu: dict[int, Part] = {buffer_of(grad).device.physical: grad}
    for device in var.devices:
        if device.physical not in by_gpu:
            by_gpu[device.physical] = _copy_to_device(grad, device)
    return tuple([by_gpu[device.physical] for device in var.devices])


def make_dense(gradients: Sequence[Colocated], variables: Sequence[Variable]) -> list[Colocated]:
    """Converts sparse gradients to dense ones, with one array on each physical device."""
    sparse = {  # by id, because the copies on one physical device share a gradient
        id(part): IndexedSlices.of(part.values, part.indices, var.shape)
        for parts, var in zip(gradients, variables, strict=True)
        for part in parts
        if isinstance(part, IndexedSlices)
    }
    dense = dict(zip(sparse, to_dense_n(list(sparse.values())), strict=True))
    return [tuple([dense.get(id(part), part) for part in parts]) for parts in gradients]


def check_no_overlap(
    variables: Sequence[Variable], gradients: Sequence[Colocated], written: ops.Ranges
) -> None:
    """Raises ``ValueError`` if a gradient shares memory with what the update writes.

    A launch reads gradients and writes variables in any order.

    Args:
        variables: one for each gradient, for the message.
        gradients: the gradients that are read.
        written: the memory that is written.

    Raises:
        ValueError: they overlap.
    """
    index = written.find_overlap([buffer_of(part) for parts in gradients for part in parts])
    if index is not None:
        owners = [var for var, parts in zip(variables, gradients, strict=True) for _ in parts]
        raise ValueError(
            f"the gradient of {owners[index]!r} shares memory with a variable or slot that this "
            "call writes; pass a copy"
        )
