"""Steps that differentiate: the terms of a gradient come from a loss."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gradreduce as gr

from .aggregation import as_method
from .encoding import decoded
from .world import Doing, World


def _value(x: gr.Variable, term: dict[str, Any]) -> Any:
    """One term of the sum that is differentiated."""
    if "weights" in term:
        return np.sum(decoded(term["weights"]) * x)
    if "square" in term:
        return np.sum(np.square(x))
    return np.sum(np.take(x, term["gather"], axis=0))


def _derivatives(
    loss: Callable[[], Any], variables: Sequence[gr.Variable], method: Any = None
) -> list[Any]:
    """Of the loss with respect to each variable."""
    optimizer = gr.GradientDescentOptimizer(1.0)
    pairs = optimizer.compute_gradients(loss, variables, aggregation_method=method)
    return [gradient for gradient, _ in pairs]


def _gradients(world: World, step: dict[str, Any]) -> Any:
    x = gr.Variable(decoded(step["x"]), device=world.mesh.devices[0])
    return _derivatives(
        lambda: sum(_value(x, term) for term in step["terms"]), [x], as_method(step.get("method"))
    )[0]


def _accumulate_n_grad(world: World, step: dict[str, Any]) -> Any:
    inputs = [gr.Variable(decoded(each), device=world.mesh.devices[0]) for each in step["inputs"]]
    return _derivatives(lambda: np.sum(gr.accumulate_n(inputs)), inputs)


STEPS: dict[str, Doing] = {"gradients": _gradients, "accumulate_n_grad": _accumulate_n_grad}
