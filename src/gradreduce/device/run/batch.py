"""Checks operands once for several launches that write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradreduce.device.memory.buffer import Row
from gradreduce.device.memory.peers import check_accessible, check_all_accessible, check_writable
from gradreduce.device.order.order import Work

from .kernel import Kernel, Template

if TYPE_CHECKING:
    from gradreduce.device.device import Device


class LaunchBatch:
    """The operands that a step writes, checked once for all its launches.

    Args:
        device: the device whose compute queue launches.
        rows: the operands that are written, by row; they stay alive.

    Raises:
        DeviceMismatchError: the device cannot access an operand.
        ValueError: an operand is read-only.
    """

    def __init__(self, device: Device, rows: Sequence[Row]) -> None:
        self._device = device
        operands = [operand for row in rows for operand in row]
        self._away = [operand for operand in operands if operand.device is not device]
        for operand in operands:
            check_accessible(device, operand)
            check_writable(operand)
        self._is_full = all([row[0].size for row in rows])

    def launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
    ) -> None:
        """Like ``Device.launch``, for the constructor's rows with one more operand each.

        Args:
            kernel: an elementwise kernel.
            template: the template arguments.
            rows: the constructor's rows in the same order, each with one input at its end.
            scalars: the scalar arguments, in the order in which the kernel declares them.

        Raises:
            DeviceMismatchError: the device cannot access an input.
        """
        device = self._device
        mesh_state = device.mesh_state
        if not self._is_full:
            device.launch(kernel, template, rows, scalars)
            return
        mesh_state.check_usable(device)
        away = [*self._away, *[row[-1] for row in rows if row[-1].device is not device]]
        crossing = check_all_accessible(device, {each.block for each in away}, [away])
        work = Work(device.compute, rows, kernel.num_written(scalars))
        device._launch(kernel, template, work, scalars, crossing)
