"""How a gradient changes a variable: ``kernels/update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, accumulate_dtype
from gradreduce.device.kernel import Arrays
from gradreduce.device.memory import Row

from ._check import check_rows, check_writable
from ._templates import FLOATS

__all__ = ["MOMENTUM", "NESTEROV", "SGD", "momentum", "nesterov", "prepare_update", "sgd"]


def _sgd_twin(table: Sequence[Arrays], rate: float) -> None:
    """``var -= rate * grad``."""
    for var, grad in table:
        wide = accumulate_dtype(var.dtype)
        step = np.multiply(grad, wide.type(rate), dtype=wide)
        var[...] = np.subtract(var, step, out=step, dtype=wide)


def _momentum_twin(table: Sequence[Arrays], rate: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= rate * mom``."""
    for var, mom, grad in table:
        wide = accumulate_dtype(var.dtype)
        moved = np.multiply(mom, wide.type(decay), dtype=wide)
        np.add(moved, grad, out=moved, dtype=wide)
        mom[...] = moved
        step = np.multiply(moved, wide.type(rate), out=moved)
        var[...] = np.subtract(var, step, out=step, dtype=wide)


def _nesterov_twin(table: Sequence[Arrays], rate: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= rate * grad + rate * decay * mom``."""
    for var, mom, grad in table:
        wide = accumulate_dtype(var.dtype)
        moved = np.multiply(mom, wide.type(decay), dtype=wide)
        np.add(moved, grad, out=moved, dtype=wide)
        mom[...] = moved
        ahead = np.multiply(moved, wide.type(rate) * wide.type(decay), out=moved)
        step = np.multiply(grad, wide.type(rate), dtype=wide)
        np.add(step, ahead, out=step)
        var[...] = np.subtract(var, step, out=step, dtype=wide)


_RULE = (("rate", "float64"), ("decay", "float64"))
_TEMPLATES = tuple((element,) for element in FLOATS)
SGD = Kernel("sgd", "update", _sgd_twin, (("rate", "float64"),), _TEMPLATES)
MOMENTUM = Kernel("momentum", "update", _momentum_twin, _RULE, _TEMPLATES, writes=2)
NESTEROV = Kernel("nesterov", "update", _nesterov_twin, _RULE, _TEMPLATES, writes=2)


def sgd(
    variables: Sequence[Buffer],
    grads: Sequence[Buffer],
    *,
    rate: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``variables[t] -= rate * grads[t]`` for every tensor t; one launch for each dtype.

    Args:
        variables: float tensors; overwritten.
        grads: of the same sizes and dtypes; only read.
        rate: the learning rate.
        device: whose queue launches; default that of ``variables[0]``. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: sizes or dtypes differ, or a variable overlaps its gradient.
    """
    _update(SGD, [[var] for var in variables], grads, (float(rate),), device, queue)


def momentum(
    variables: Sequence[Buffer],
    moments: Sequence[Buffer],
    grads: Sequence[Buffer],
    *,
    rate: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``moments = decay * moments + grads; variables -= rate * moments``.

    For every tensor; one launch for each dtype.

    Args:
        variables: float tensors; overwritten.
        moments: of the same sizes and dtypes; overwritten.
        grads: of the same sizes and dtypes; only read.
        rate: the learning rate.
        decay: how much of the moment stays.
        device: whose queue launches; default that of ``variables[0]``. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: sizes or dtypes differ, or two operands overlap.
    """
    written = [[var, mom] for var, mom in zip(variables, moments, strict=True)]
    _update(MOMENTUM, written, grads, (float(rate), float(decay)), device, queue)


def nesterov(
    variables: Sequence[Buffer],
    moments: Sequence[Buffer],
    grads: Sequence[Buffer],
    *,
    rate: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """As ``momentum``, but ``variables -= rate * grads + rate * decay * moments``.

    For every tensor; one launch for each dtype.

    Args:
        variables: float tensors; overwritten.
        moments: of the same sizes and dtypes; overwritten.
        grads: of the same sizes and dtypes; only read.
        rate: the learning rate.
        decay: how much of the moment stays.
        device: whose queue launches; default that of ``variables[0]``. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: sizes or dtypes differ, or two operands overlap.
    """
    written = [[var, mom] for var, mom in zip(variables, moments, strict=True)]
    _update(NESTEROV, written, grads, (float(rate), float(decay)), device, queue)


def prepare_update(rule: str, device: Device, dtype: np.dtype) -> None:
    """Compiles what ``sgd``, ``momentum`` or ``nesterov`` launches for variables of a dtype."""
    kernel = {"sgd": SGD, "momentum": MOMENTUM, "nesterov": NESTEROV}[rule]
    device.prepare(kernel, (dtype.name,))


def _update(
    kernel: Kernel,
    written: Sequence[list[Buffer]],
    grads: Sequence[Buffer],
    scalars: tuple[float, ...],
    device: Device | None,
    queue: Queue,
) -> None:
    rows: dict[str, list[Row]] = {}
    for operands, grad in zip(written, grads, strict=True):
        if grad.dtype.name not in FLOATS:
            raise ValueError(f"{kernel.name}: {grad} is not of a float dtype: {', '.join(FLOATS)}")
        rows.setdefault(grad.dtype.name, []).append((*operands, grad))
    for launched in rows.values():
        check_rows(kernel.name, launched, len(launched[0]))  # nothing may overlap, grads neither
    for operands in written:
        check_writable(kernel.name, operands)
    for element, launched in rows.items():
        chosen = device or launched[0][0].device
        chosen.launch(kernel, (element,), launched, scalars, queue=queue)
