"""Runs update rules that a subclass writes in Python (``Optimizer._apply``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope, SuspendedScope
from gradreduce.arrays.convert import from_buffer
from gradreduce.arrays.convert_gpu import on_gpu_of, wait_for_current_stream
from gradreduce.backends.dry_run import DryRunDevice
from gradreduce.device import Buffer, Device
from gradreduce.ops import Update

from .update_plan import Job

OnArrays = Callable[[Any, dict[str, Any], Any], object]  # should return None


def run_python_rule(apply: OnArrays, names: Sequence[str], job: Job) -> Callable[[], None]:
    """Runs a Python rule on copies; returns a function that copies the results back.

    Because it runs on copies, variables and slots are unchanged if it raises. No lock is held while
    it runs. This function also runs ``job.before``.

    Args:
        apply: ``apply(variable, slots, gradient)`` changes the first two in place. The arguments
            are NumPy or CuPy arrays. For a variable with a master, ``variable`` is the master.
            It is not called in a dry run.
        names: the names of the slots.
        job: the job of the update.
    """
    for launch in job.before:
        launch()
    job.before = []
    outs: list[Buffer] = []
    values: list[Buffer] = []
    for row in job.updates:
        copied = _copied(row, job.device)
        changed = copied[-len(names) - 1 :]  # the master if there is one, else the variable; slots
        if not isinstance(job.device, DryRunDevice):
            _call(apply, names, [*changed, row[-1]], job.device)
        if len(copied) > len(changed):
            copied[0] = changed[0]  # the copy below rounds the master to its variable
        outs += row[:-1]
        values += copied
    return partial(ops.pack, outs, values, device=job.device)


def _copied(row: Update, device: Device) -> list[Buffer]:
    """Copies the written operands; sets a master that does not round to its variable."""
    made = [device.empty(operand.shape, operand.dtype) for operand in row[:-1]]
    ops.pack(made, row[:-1], device=device)
    if len(row) > 2 and made[1].dtype != made[0].dtype:
        zeros = device.zeros(row[0].shape, row[0].dtype)
        sgd = ops.RULE_KERNELS[ops.RULES["sgd"], "plain"]
        ops.update_rows(sgd, [[made[0], made[1], zeros]], (0.0,), device)
    return made


def _call(apply: OnArrays, names: Sequence[str], buffers: Sequence[Buffer], device: Device) -> None:
    with SuspendedScope():
        with StreamScope():
            variable, *slots, gradient = [from_buffer(each, "native") for each in buffers]
        by_name = dict(zip(names, slots, strict=True))
        with on_gpu_of(device):  # CuPy computes on its current GPU
            made = apply(variable, by_name, _only_read(gradient, device))
    if made is not None:  # its author expects it to become the new value
        name = getattr(apply, "__qualname__", "_apply")
        raise ValueError(
            f"{name} returned {type(made).__name__}; it must return None and change variable and "
            "slots in place, as in variable -= 0.1 * gradient or variable[...] = new"
        )
    for name, slot in zip(names, slots, strict=True):
        if by_name.get(name) is not slot:  # otherwise the new value would be lost silently
            raise ValueError(
                f"_apply replaced the array slots[{name!r}]; change it in place, as in "
                f"slots[{name!r}][...] = new"
            )
    if device.mesh_state.backend != "sim":
        wait_for_current_stream(buffers[:1], "native")


def _only_read(gradient: Any, device: Device) -> Any:
    """Returns a gradient that the rule cannot overwrite: it may be the caller's memory."""
    if device.mesh_state.backend != "sim":
        return gradient.copy()  # CuPy has no read-only arrays
    view = gradient.view()
    view.flags.writeable = False
    return view
