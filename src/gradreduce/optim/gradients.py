"""What ``Optimizer.compute_gradients`` may be asked, and in which way it differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradreduce.aggregate import AggregationMethod, as_aggregation_method
from gradreduce.autodiff.gradients import ENGINES, Engine, gradients_of
from gradreduce.errors import InvalidVariableError
from gradreduce.variables import Variable

from .arrivals import check_float

__all__ = ["checked_gradients"]


def checked_gradients(
    loss: Callable[[], Any],
    var_list: Any,
    gate_gradients: int,
    aggregation_method: AggregationMethod | int | None,
    colocate: bool,
    grad_loss: Any,
    engine: Engine | None,
) -> list[tuple[Any, Variable]]:
    """See ``Optimizer.compute_gradients``."""
    if isinstance(gate_gradients, bool) or gate_gradients not in (0, 1, 2):
        raise ValueError(
            "gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH. Not {gate_gradients!r}"
        )
    method = as_aggregation_method(aggregation_method)
    if not isinstance(colocate, bool):
        raise ValueError(f"colocate_gradients_with_ops={colocate!r} must be True or False")
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is not one of {ENGINES}, or None")
    if not callable(loss):
        raise RuntimeError(
            "`loss` passed to Optimizer.compute_gradients should be a function when eager "
            f"execution is enabled: it is a {type(loss).__name__}"
        )
    return gradients_of(loss, _checked_variables(var_list), method, grad_loss, engine)


def _checked_variables(var_list: Any) -> Sequence[Variable] | None:
    """The Variables of ``var_list``; a single one is a list of one."""
    if var_list is None:
        return None
    try:
        variables = [var_list] if isinstance(var_list, Variable) else list(var_list)
    except TypeError:
        raise InvalidVariableError(f"var_list={var_list!r} is no list of Variables") from None
    if not variables:
        raise ValueError("No variables to optimize.")
    for variable in variables:
        if not isinstance(variable, Variable):
            raise InvalidVariableError(f"Argument is not a gr.Variable: {variable!r}")
        check_float(variable)
    return variables
