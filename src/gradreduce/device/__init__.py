"""What gradreduce runs on: devices, their memory and queues. Start with README.md, then base.py."""

from __future__ import annotations

from .buffer import (
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
from .collective import NOT_CAPTURED, Collective
from .command_list import Tape, behind_readers, spans_of
from .deadlines import due
from .device import Device
from .dtypes import DType, accumulate_dtype, as_dtype, as_flag, as_index, element_of, mean_dtype
from .flat_buffer import FlatBuffer, Step, attach_again, clear
from .forks import ModuleLock
from .graph_capture import Capture
from .interrupts import DeferInterrupts
from .kernel import Kernel, Template
from .launch_batch import Writer
from .mesh import Mesh
from .op_log import FlightEntry, Journal, Record
from .peer_access import reaches
from .pending_calls import Travel, as_deadline
from .queue_waits import follow, precede
from .stream_sync import bring, by_physical, copy_over, fetch, gather, gather_all, pull, scatter
from .waiting import Done, Waiters

__all__ = [
    "ALIGNMENT",
    "NOT_CAPTURED",
    "Attached",
    "Block",
    "Buffer",
    "Capture",
    "Collective",
    "DType",
    "Dead",
    "DeferInterrupts",
    "Device",
    "Done",
    "FlatBuffer",
    "FlatLayout",
    "FlightEntry",
    "Journal",
    "Kernel",
    "Mark",
    "Mesh",
    "ModuleLock",
    "Queue",
    "Record",
    "Step",
    "Stream",
    "Tape",
    "Template",
    "Travel",
    "Waiters",
    "Writer",
    "accumulate_dtype",
    "as_deadline",
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
    "due",
    "element_of",
    "fetch",
    "flat_layout",
    "follow",
    "gather",
    "gather_all",
    "handle_of",
    "mean_dtype",
    "overlap",
    "precede",
    "pull",
    "reaches",
    "scatter",
    "spans_of",
]
