"""Steps about the terms of one gradient: add_n, accumulate_n, aggregate."""

from typing import Any

import gradreduce as gr

from .encoding import host
from .world import Doing, World


def as_method(written: Any) -> Any:
    """A name is a member of ``AggregationMethod``; anything else is given as it is."""
    return gr.AggregationMethod[written] if isinstance(written, str) else written


def _inputs(world: World, step: dict[str, Any]) -> Any:
    terms = [world.term(encoded) for encoded in step["inputs"]]
    return tuple(terms) if step.get("container") == "tuple" else terms


def _shaped(made: Any, step: dict[str, Any]) -> Any:
    return list(host(made).shape) if step.get("static") else made


def _add_n(world: World, step: dict[str, Any]) -> Any:
    return _shaped(gr.add_n(_inputs(world, step)), step)


def _accumulate_n(world: World, step: dict[str, Any]) -> Any:
    shape, dtype = step.get("shape"), step.get("tensor_dtype")
    return _shaped(gr.accumulate_n(_inputs(world, step), shape, dtype), step)


def _aggregate(world: World, step: dict[str, Any]) -> Any:
    terms = [world.term(encoded) for encoded in step["grads"]]
    return gr.aggregate(terms, as_method(step["method"]))


STEPS: dict[str, Doing] = {"add_n": _add_n, "accumulate_n": _accumulate_n, "aggregate": _aggregate}
