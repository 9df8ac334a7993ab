"""The backend interface: devices, their memory and queues; see README.md."""

from __future__ import annotations

from .buffer import (
    ALIGNMENT,
    Attached,
    Block,
    Buffer,
    FlatLayout,
    FreedBlock,
    Mark,
    Queue,
    Stream,
    compatible,
    flat_layout,
    handle_of,
    overlap,
)
from .collective import NOT_CAPTURED, Collective
from .command_list import CommandList, WrittenSpans
from .deadlines import deadline_scope
from .device import Device
from .dtypes import DType, accumulate_dtype, as_dtype, as_flag, as_index, element_of, mean_dtype
from .flat_buffer import FlatBuffer, attach_again
from .forks import ModuleLock
from .graph_capture import Capture
from .interrupts import DeferInterrupts
from .kernel import Kernel, Template
from .mesh import Mesh
from .op_log import FlightEntry, Journal, Record
from .peer_access import can_access
from .pending_calls import PackInfo, as_deadline
from .stream_sync import (
    by_physical,
    copied_to,
    copy_over,
    ensure_accessible,
    fork_streams,
    join_streams,
    join_streams_each,
    to_accessible,
    to_local,
)
from .waiting import Done, Waiters

__all__ = [
    "ALIGNMENT",
    "NOT_CAPTURED",
    "Attached",
    "Block",
    "Buffer",
    "Capture",
    "Collective",
    "CommandList",
    "DType",
    "DeferInterrupts",
    "Device",
    "Done",
    "FlatBuffer",
    "FlatLayout",
    "FlightEntry",
    "FreedBlock",
    "Journal",
    "Kernel",
    "Mark",
    "Mesh",
    "ModuleLock",
    "PackInfo",
    "Queue",
    "Record",
    "Stream",
    "Template",
    "Waiters",
    "WrittenSpans",
    "accumulate_dtype",
    "as_deadline",
    "as_dtype",
    "as_flag",
    "as_index",
    "attach_again",
    "by_physical",
    "can_access",
    "compatible",
    "copied_to",
    "copy_over",
    "deadline_scope",
    "element_of",
    "ensure_accessible",
    "flat_layout",
    "fork_streams",
    "handle_of",
    "join_streams",
    "join_streams_each",
    "mean_dtype",
    "overlap",
    "to_accessible",
    "to_local",
]
