"""Validates the arguments of ``compute_gradients``, and differentiates each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gradreduce.arrays.convert_gpu import on_gpu_of
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.replica_context import current_replica, replica_on
from gradreduce.arrays.variable import Variable
from gradreduce.autodiff.gradients import ENGINES, Engine, Pairs, gradients_of
from gradreduce.device import Device, as_index
from gradreduce.errors import InvalidVariableError, brief
from gradreduce.sums.methods import AggregationMethod, as_aggregation_method

from .gradient_inputs import check_float


def ready_gradients(  # the arguments of compute_gradients
    loss: Callable[[], Any],
    var_list: Any,
    gate_gradients: int,
    aggregation_method: AggregationMethod | int | None,
    colocate: bool,
    grad_loss: Any,
    engine: Engine | None,
) -> Callable[[], tuple[Any, Pairs]]:
    """Validates the arguments of ``compute_gradients``.

    Returns:
        A function that differentiates the loss. It returns the value of the loss and a list of
        pairs (gradient, variable).
    """
    try:
        gate = as_index(gate_gradients)
    except TypeError:
        gate = -1
    if gate not in (0, 1, 2):
        raise ValueError(
            "gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH. Not {brief(gate_gradients)}"
        )
    method = as_aggregation_method(aggregation_method)
    if not isinstance(colocate, bool):
        raise ValueError(f"colocate_gradients_with_ops={brief(colocate)} must be True or False")
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine={brief(engine)} is not one of {ENGINES}, or None")
    if not callable(loss):
        raise RuntimeError(
            "`loss` passed to Optimizer.compute_gradients should be a function when eager "
            f"execution is enabled: it is a {type(loss).__name__}"
        )
    return partial(gradients_of, loss, _validate_variables(var_list), method, grad_loss, engine)


def check_outside_replica(call: str) -> None:
    """Raises ``RuntimeError`` inside a ``gr.replica``."""
    index = current_replica()
    if index is not None:
        raise RuntimeError(
            f"{call} is called inside gr.replica({index}), but calls the loss inside the "
            "gr.replica of each replica, and averages the gradients: call it outside, or call "
            "compute_gradients for the gradients of one replica"
        )


def gradients_to_apply(
    compute: Callable[..., Pairs],
    devices: Sequence[Device] | None,
    loss: Callable[[], Any],
    var_list: Any,
    *options: Any,
) -> Pairs:
    """Computes the gradients of all replicas for ``minimize``.

    Args:
        compute: ``compute_gradients`` of the optimizer.
        devices: see ``gradients_of_replicas``.
        loss: see ``minimize``.
        var_list: see ``minimize``.
        options: the further arguments of ``compute``.
    """
    check_outside_replica("minimize")
    if isinstance(var_list, Iterator):  # used once for each replica
        var_list = list(var_list)
    return gradients_of_replicas(lambda: (None, compute(loss, var_list, *options)), devices)[1]


def gradients_of_replicas(
    gradients: Callable[[], tuple[Any, Pairs]], devices: Sequence[Device] | None = None
) -> tuple[Any, Pairs]:
    """Computes the gradients of each replica, one after the other.

    Args:
        gradients: returns the value of the loss, and pairs (gradient, variable). It is called once
            per replica, inside its ``gr.replica`` and on its GPU.
        devices: the devices of the replicas. Default: those of the variables, which are known after
            the first call; it runs on the caller's GPU.

    Returns:
        The value of the loss of each replica, and for each variable a pair (gradient, variable).
        The gradient is a ``PerReplica``, or None if no replica has one. With one replica: the
        result of ``gradients``.

    Raises:
        ValueError: a variable has a gradient on some replicas but not on all, or variables are
            mirrored on different devices.
    """
    first = devices[0] if devices else None
    with replica_on(first, 0), on_gpu_of(first):
        results = [gradients()]
    if devices is None:
        devices = _common_devices([variable for _, variable in results[0][1]])
    if len(devices) == 1:
        return results[0]
    for index, device in enumerate(devices[1:], 1):
        with replica_on(device, index), on_gpu_of(device):
            results.append(gradients())
    by_variable = [{variable: gradient for gradient, variable in pairs} for _, pairs in results]
    variables = dict.fromkeys(variable for each in by_variable for variable in each)
    return [value for value, _ in results], [
        (_of_replicas([each.get(variable) for each in by_variable], variable, devices), variable)
        for variable in variables
    ]


def _common_devices(variables: Sequence[Variable]) -> Sequence[Device]:
    """Returns the devices of variables; one device if no variable has several.

    Raises:
        ValueError: variables are mirrored on different devices.
    """
    first = max(variables, key=lambda variable: len(variable.devices))
    devices = first.devices
    for variable in variables if len(devices) > 1 else ():
        if variable.devices != devices:
            raise ValueError(
                f"{variable!r} and {first!r} are on different devices; create all variables on the "
                "same devices"
            )
    return devices


def _of_replicas(
    gradients: Sequence[Any], variable: Variable, devices: Sequence[Device]
) -> PerReplica | None:
    without = [index for index, gradient in enumerate(gradients) if gradient is None]
    if len(without) == len(gradients):
        return None
    if without:
        raise ValueError(
            f"the loss does not use {variable!r} on replica {without[0]}, but does on others: "
            "use the variable on every replica, or leave it out of var_list"
        )
    return PerReplica(gradients, devices=devices)


def _validate_variables(var_list: Any) -> Sequence[Variable] | None:
    """Returns the Variables of ``var_list``, which may be a single one."""
    if var_list is None:
        return None
    try:
        variables = [var_list] if isinstance(var_list, Variable) else list(var_list)
    except TypeError:
        raise InvalidVariableError(
            f"var_list={brief(var_list)} must be a Variable or a list of Variables"
        ) from None
    if not variables:
        raise ValueError("No variables to optimize: var_list is empty")
    for index, variable in enumerate(variables):
        if not isinstance(variable, Variable):
            raise InvalidVariableError(
                f"Argument is not a gr.Variable: var_list[{index}] is {brief(variable)}"
            )
        check_float(variable)
    return variables
