"""Repeated launches that write the same operands, which are checked once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .buffer import Row
from .kernel import Kernel, Template
from .peer_access import check_accessible, check_all_accessible, check_writable

if TYPE_CHECKING:
    from .device import Device


class LaunchBatch:
    """The operands that a step writes, checked once for all its launches.

    Args:
        device: whose compute queue launches.
        rows: of each row what is written; it stays alive.

    Raises:
        DeviceMismatchError: an operand is out of reach.
        ValueError: an operand is read-only.
    """

    def __init__(self, device: Device, rows: Sequence[Row]) -> None:
        self._device = device
        self._operands = [operand for row in rows for operand in row]
        self._away = [operand for operand in self._operands if operand.device is not device]
        for operand in self._operands:
            check_accessible(device, operand)
            check_writable(operand)
        self._is_full = all([row[0].size for row in rows])
        self._read: Any = None  # the last copy that a writer had to wait for, when it was waited

    def launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
    ) -> None:
        """As ``Device.launch``, for rows of the constructor with one more operand each.

        Args:
            kernel: elementwise.
            template: which instantiation.
            rows: the same rows in the same order, each with an operand behind them that is read.
            scalars: as the kernel declares them.

        Raises:
            DeviceMismatchError: what is read is out of reach.
        """
        device = self._device
        mesh_state = device.mesh_state
        if not self._is_full:
            device.launch(kernel, template, rows, scalars)
            return
        mesh_state.check_usable(device)
        away = [*self._away, *[row[-1] for row in rows if row[-1].device is not device]]
        crossing = 0
        if away:
            crossing = check_all_accessible(device, {each.device for each in away}, [away])
            device._touch([each.block for each in away], "compute")
        self._fence()
        device._launch(kernel, template, rows, scalars, "compute", crossing)

    def _fence(self) -> None:
        """Makes the queue wait for copies that still read what is written."""
        # First: a copy that comes now is seen the next time.
        read = self._device.mesh_state.last_read
        if read is not self._read:
            for operand in self._operands:
                if operand.block.readers:
                    self._device._before_write(operand, "compute")
            self._read = read
