"""What gradreduce runs on: devices, their memory and queues. Start with README.md, then base.py."""

from __future__ import annotations

from .base import Device
from .capture import Capture
from .collective import NOT_CAPTURED, Collective
from .colocated import bring, by_physical, copy_over, fetch, gather, gather_all, pull, scatter
from .dtypes import DType, accumulate_dtype, as_dtype, as_flag, as_index, element_of, mean_dtype
from .due import due
from .fences import follow, precede
from .flat_buffer import FlatBuffer, Step, attach_again, clear
from .flight import FlightEntry
from .forks import ModuleLock
from .ghost import Ghosts, MeshOutline, Outline, Touched, mesh_outline, outline_of
from .interrupts import DeferInterrupts
from .journal import Journal, Record
from .kernel import Kernel, Template
from .memory import (
    ALIGNMENT,
    Attached,
    Block,
    Buffer,
    Dead,
    FlatLayout,
    Mark,
    Queue,
    Stream,
    compatible,
    flat_layout,
    handle_of,
    overlap,
)
from .mesh import Mesh
from .names import DeviceLike, as_device, as_devices, is_device_like
from .opening import default_mesh, open_mesh
from .rates import CopyRates, copy_rates
from .reach import reaches
from .tape import Tape, behind_readers, spans_of
from .waiting import Done, Waiters
from .watch import Travel, as_deadline
from .writer import Writer

__all__ = [
    "ALIGNMENT",
    "NOT_CAPTURED",
    "Attached",
    "Block",
    "Buffer",
    "Capture",
    "Collective",
    "CopyRates",
    "DType",
    "Dead",
    "DeferInterrupts",
    "Device",
    "DeviceLike",
    "Done",
    "FlatBuffer",
    "FlatLayout",
    "FlightEntry",
    "Ghosts",
    "Journal",
    "Kernel",
    "Mark",
    "Mesh",
    "MeshOutline",
    "ModuleLock",
    "Outline",
    "Queue",
    "Record",
    "Step",
    "Stream",
    "Tape",
    "Template",
    "Touched",
    "Travel",
    "Waiters",
    "Writer",
    "accumulate_dtype",
    "as_deadline",
    "as_device",
    "as_devices",
    "as_dtype",
    "as_flag",
    "as_index",
    "attach_again",
    "behind_readers",
    "bring",
    "by_physical",
    "clear",
    "compatible",
    "copy_over",
    "copy_rates",
    "default_mesh",
    "due",
    "element_of",
    "fetch",
    "flat_layout",
    "follow",
    "gather",
    "gather_all",
    "handle_of",
    "is_device_like",
    "mean_dtype",
    "mesh_outline",
    "open_mesh",
    "outline_of",
    "overlap",
    "precede",
    "pull",
    "reaches",
    "scatter",
    "spans_of",
]
