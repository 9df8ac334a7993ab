"""Validates the arguments of ``compute_gradients``, and differentiates each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gradreduce.arrays.convert_gpu import on_gpu_of
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.replica_context import replica_on
from gradreduce.arrays.variable import Variable
from gradreduce.autodiff.gradients import ENGINES, Engine, Pairs, gradients_of
from gradreduce.device import Device, as_index
from gradreduce.errors import InvalidVariableError, brief
from gradreduce.reduce.aggregation import AggregationMethod, as_aggregation_method

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
    gate = -1
    with suppress(TypeError):
        gate = as_index(gate_gradients)
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
    variables = _checked_variables(var_list)
    return partial(gradients_of, loss, variables, method, grad_loss, engine)


def gradients_of_replicas(
    gradients: Callable[[], tuple[Any, Pairs]], devices: Sequence[Device]
) -> tuple[list[Any], Pairs]:
    """Computes the gradients of each replica of a worker, one after the other.

    Args:
        gradients: a function of ``ready_gradients``, which is called once per replica, inside its
            ``gr.replica`` and on its GPU.
        devices: the devices of the replicas.

    Returns:
        The value of the loss of each replica, and for each variable a pair (gradient, variable).
        The gradient is a ``PerReplica``, or None if no replica has one.

    Raises:
        ValueError: a variable has a gradient on some replicas but not on all.
    """
    values: list[Any] = []
    found: list[dict[Variable, Any]] = []
    for index, device in enumerate(devices):
        with replica_on(device, index), on_gpu_of(device):
            value, pairs = gradients()
        values.append(value)
        found.append({variable: gradient for gradient, variable in pairs})
    variables = dict.fromkeys(variable for each in found for variable in each)
    return values, [
        (_of_replicas([each.get(variable) for each in found], variable, devices), variable)
        for variable in variables
    ]


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


def _checked_variables(var_list: Any) -> Sequence[Variable] | None:
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
