"""Steps about values on several devices: reduce, batch_reduce, broadcast."""

from typing import Any

import gradreduce as gr

from .encoding import is_sparse
from .world import AbsentError, Doing, World


def _all_reduce_ops(world: World, step: dict[str, Any]) -> Any:
    kwargs = dict(step.get("kwargs", {}))
    if "accumulation_fn" in kwargs:
        kwargs["accumulation_fn"] = getattr(gr, kwargs["accumulation_fn"])
    if "reduce_to_device" in kwargs:
        kwargs["reduce_to_device"] = world.device(kwargs["reduce_to_device"])
    return getattr(gr, step["class"])(**kwargs)


def _per_replica(world: World, step: dict[str, Any]) -> Any:
    devices = [world.device(name) for name in step["devices"]]
    # An IndexedSlices names no device: its values must lie on one.
    values = [
        world.term(encoded, device if world.as_buffers or is_sparse(encoded) else None)
        for encoded, device in zip(step["values"], devices, strict=True)
    ]
    kind = gr.Mirrored if step.get("mirrored") else gr.PerReplica
    return kind(values, devices=devices)


def _tensor(world: World, step: dict[str, Any]) -> Any:
    return world.term(step["value"], world.device(step.get("device", "/cpu:0")))


def _variable(world: World, step: dict[str, Any]) -> Any:
    device = world.device(step.get("device", "/cpu:0"))
    return gr.Variable(world.term(step["value"], device), device=device)


def _as_reduce_op(written: Any) -> Any:
    known = isinstance(written, str) and written in gr.ReduceOp.__members__
    return gr.ReduceOp[written] if known else written


def _destination(world: World, written: Any) -> Any:
    """A device string names a device of the mesh; what is none is given as it is."""
    if isinstance(written, list):
        return [_destination(world, each) for each in written]
    is_device = isinstance(written, str) and written.startswith("/")
    return world.device(written) if is_device else world.named(written)


def _reduce(world: World, step: dict[str, Any]) -> Any:
    return world.names[step["on"]].reduce(
        _as_reduce_op(step["reduce_op"]),
        world.named(step["value"]),
        _destination(world, step["destinations"]),
    )


def _batch_reduce(world: World, step: dict[str, Any]) -> Any:
    pairs = step["pairs"]
    if pairs is not None:
        container = list if step.get("pairs_as_lists") else tuple
        pairs = [
            container((world.named(pair[0]), *(_destination(world, each) for each in pair[1:])))
            for pair in pairs
        ]
    return world.names[step["on"]].batch_reduce(_as_reduce_op(step["reduce_op"]), pairs)


def _broadcast(world: World, step: dict[str, Any]) -> Any:
    value = world.named(step["value"])
    return world.names[step["on"]].broadcast(value, _destination(world, step["destinations"]))


def _helper(world: World, step: dict[str, Any]) -> Any:
    raise AbsentError(f"{step['do']} is a helper of TensorFlow's distribution strategies")


STEPS: dict[str, Doing] = {
    "all_reduce_ops": _all_reduce_ops,
    "per_replica": _per_replica,
    "tensor": _tensor,
    "variable": _variable,
    "reduce": _reduce,
    "batch_reduce": _batch_reduce,
    "broadcast": _broadcast,
    "reduce_non_distributed_value": _helper,
    "reduce_op_from_variable_aggregation": _helper,
}
