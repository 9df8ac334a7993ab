"""The accumulators of a training step, one for each variable."""

from __future__ import annotations

from typing import Any

from gradreduce.accumulator import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    SparseConditionalAccumulator,
)
from gradreduce.arrays.variable import Variable
from gradreduce.device import Mesh
from gradreduce.errors import about
from gradreduce.reduce.all_reduce_ops import is_exact
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .terms import rehearse_rows


class _StepAccumulator(ConditionalAccumulator):
    """An accumulator over all processes, to which each replica adds equally many gradients."""

    _spans_processes = True


class _SparseStepAccumulator(SparseConditionalAccumulator):
    """The same for sparse gradients."""

    _spans_processes = True


def make_accumulator(
    variable: Variable, mesh: Mesh, cross_device_ops: CrossDeviceOps, *, is_sparse: bool
) -> ConditionalAccumulatorBase:
    """Makes the accumulator of a variable; its mean divides by the number of all gradients.

    Raises:
        TypeError: accumulators do not support the variable's dtype.
        ValueError: ``wire_dtype`` would round the terms of exact sums.
    """
    options: dict[str, Any] = {
        "name": f"{variable.name}/grad_accum",
        "device": mesh,
        "cross_device_ops": cross_device_ops,
    }
    if is_exact(cross_device_ops):
        options |= {"exact": True, "words": cross_device_ops.words}
    made: ConditionalAccumulatorBase
    try:
        if is_sparse:
            rehearse_rows(variable)
            options["sparse_mean"] = "per_gradient"
            made = _SparseStepAccumulator(variable.dtype, variable.shape, **options)
        else:
            made = _StepAccumulator(variable.dtype, variable.shape, **options)
    except (TypeError, ValueError) as error:
        raise about(f"the gradient of {variable.name!r}", error) from None
    made.accumulator_ref.tensor = variable.name
    return made
