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
from .command_list import CommandList
from .deadlines import deadline_scope
from .device import Device
from .dtypes import (
    ELEMENT_OF,
    DType,
    accumulate_dtype,
    as_count,
    as_dtype,
    as_flag,
    as_index,
    mean_dtype,
)
from .forks import ModuleLock
from .graph_capture import Capture, check_peers, no_collection
from .interrupts import DeferInterrupts
from .kernel import Kernel, Template
from .launch_batch import LaunchBatch
from .mesh import Mesh
from .op_log import FlightEntry, Journal, Record
from .order import RepeatedWork
from .peer_access import by_physical, can_access, copied_to, ensure_accessible, to_local
from .pending_calls import PackInfo, as_deadline
from .waiting import Done, Waiters
