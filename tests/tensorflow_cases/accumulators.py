"""Steps about conditional accumulators, dense and sparse, and the threads that wait for them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

import gradreduce as gr

from .encoding import decoded
from .world import AbsentError, Doing, World

LIMIT_S = 30.0  # for what takes milliseconds: only a deadlock needs so long
OPTIONS = ("shared_name", "name", "reduction_type")

_runs = itertools.count()


class Call:
    """A call in a thread of its own; ``ticket`` is the place of a take in the queue, if any."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ticket: Any = None
        self._future = ThreadPoolExecutor(1).submit(call)

    def queued_in(self, state: Any, before: int) -> None:
        """Returns when the take stands in the queue of the accumulator, or has ended."""
        end = time.monotonic() + LIMIT_S
        while not wait([self._future], 0.001).done:
            with state.lock:
                if len(state.queue) > before:
                    self.ticket = state.queue[-1]
                    return
            assert time.monotonic() < end, "deadlock: a take did not even queue"

    @property
    def pending(self) -> bool:
        """Whether it still waits: a take that is served leaves the queue before the apply returns.

        TensorFlow's runner waited 0.3 s to be sure; here there is nothing to wait for.
        """
        return not (self._future.done() if self.ticket is None else self.ticket.done.is_set())

    def result(self) -> Any:
        """What it returns or raises; it must end in time."""
        assert wait([self._future], LIMIT_S).done, "deadlock: a call did not end"
        return self._future.result()


class Accumulators:
    """The accumulators of a case: one definition each, and a state of its own in every session."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run = next(_runs)  # a shared_name must not reach the next case
        self._steps: dict[str, dict[str, Any]] = {}
        self._made: dict[tuple[Any, str], Any] = {}
        world.cleanup.callback(self.close)

    @classmethod
    def of(cls, world: World) -> Accumulators:
        if "accumulators" not in world.names:
            world.names["accumulators"] = cls(world)
        return world.names["accumulators"]

    def create(self, step: dict[str, Any]) -> Any:
        self._steps[step["as"]] = step
        return self.get({"on": step["as"]})

    def get(self, step: dict[str, Any]) -> Any:
        """The accumulator that a step is about, in the step's session."""
        key = (step.get("session"), step["on"])
        if key not in self._made:
            made_by = self._steps[step["on"]]
            options = {each: made_by[each] for each in OPTIONS if each in made_by}
            if options.get("shared_name"):
                options["shared_name"] = f"{options['shared_name']} of run {self._run}"
            is_sparse, device = made_by.get("sparse"), self._world.mesh.devices[1]
            kind = gr.SparseConditionalAccumulator if is_sparse else gr.ConditionalAccumulator
            self._made[key] = kind(self.dtype(step), made_by.get("shape"), device=device, **options)
        return self._made[key]

    def dtype(self, step: dict[str, Any]) -> str:
        return self._steps[step["on"]].get("dtype", "float32")

    def close(self, session: Any = None, *, everywhere: bool = True) -> None:
        """Closes all of a session, which ends their waiting takes; by default of every one."""
        for (its, _), accumulator in self._made.items():
            if everywhere or its == session:
                accumulator.close()


def _accumulator(world: World, step: dict[str, Any]) -> Any:
    return Accumulators.of(world).get(step)


def _local_step(step: dict[str, Any]) -> dict[str, Any]:
    return {"local_step": step["local_step"]} if "local_step" in step else {}


def _given(world: World, step: dict[str, Any], encoded: Any) -> Any:
    """A gradient. Plain lists may stay lists: they have no dtype but the accumulator's."""
    if not isinstance(encoded, dict) and not world.as_buffers:
        return encoded
    return world.given(decoded(encoded, Accumulators.of(world).dtype(step)))


def _apply(world: World, step: dict[str, Any], call: Callable[[], Any]) -> Any:
    if "thread" not in step:
        return call()
    world.names[f"thread {step['thread']}"] = Call(call)
    return None


def _apply_grad(world: World, step: dict[str, Any]) -> Any:
    accumulator, grad = _accumulator(world, step), _given(world, step, step["grad"])
    options = {**_local_step(step), **({"cast": True} if step.get("cast") else {})}
    return _apply(world, step, lambda: accumulator.apply_grad(grad, **options))


def _apply_sparse(world: World, step: dict[str, Any]) -> Any:
    accumulator, values = _accumulator(world, step), _given(world, step, step["values"])
    indices = np.array(step["indices"], step.get("indices_dtype", "int64"))
    options, shape = _local_step(step), step.get("dense_shape")
    if step.get("via") == "indexed_slices":  # whose values have a dtype of their own
        if isinstance(values, list):
            values = decoded(values, Accumulators.of(world).dtype(step))
        slices = gr.IndexedSlices(values, indices, shape)
        return _apply(world, step, lambda: accumulator.apply_indexed_slices_grad(slices, **options))
    return _apply(world, step, lambda: accumulator.apply_grad(indices, values, shape, **options))


def _take(world: World, step: dict[str, Any], method: str) -> Any:
    if step.get("static"):
        raise AbsentError("static shapes do not exist outside a graph")
    accumulator = _accumulator(world, step)
    seconds = step["timeout_ms"] / 1000 if "timeout_ms" in step else None
    take = getattr(accumulator, method)
    if "thread" not in step:
        return take(step["num_required"], timeout=LIMIT_S if seconds is None else seconds)
    state = accumulator.accumulator_ref
    before = len(state.queue)
    call = Call(lambda: take(step["num_required"], timeout=seconds))
    call.queued_in(state, before)
    world.names[f"thread {step['thread']}"] = call
    return None


def _take_sparse(world: World, step: dict[str, Any]) -> Any:
    method = "take_grad" if step.get("via") == "tuple" else "take_indexed_slices_grad"
    return _take(world, step, method)


def _set_global_step(world: World, step: dict[str, Any]) -> None:
    _accumulator(world, step).set_global_step(step["value"])


def _close_session(world: World, step: dict[str, Any]) -> None:
    Accumulators.of(world).close(step.get("session"), everywhere=False)


STEPS: dict[str, Doing] = {
    "create_accumulator": lambda world, step: Accumulators.of(world).create(step),
    "apply_grad": _apply_grad,
    "apply_sparse": _apply_sparse,
    "take_grad": lambda world, step: _take(world, step, "take_grad"),
    "take_sparse": _take_sparse,
    "num_accumulated": lambda world, step: _accumulator(world, step).num_accumulated(),
    "set_global_step": _set_global_step,
    "get_name": lambda world, step: _accumulator(world, step).name,
    "get_dtype": lambda world, step: _accumulator(world, step).dtype.name,
    "new_session": lambda world, step: step["as"],
    "close_session": _close_session,
    "is_pending": lambda world, step: world.names[f"thread {step['thread']}"].pending,
    "join": lambda world, step: world.names[f"thread {step['thread']}"].result(),
}
