"""The backend interface: devices, their memory and queues; see README.md."""

from __future__ import annotations

from .deadlines import deadline_scope
from .device import Device
from .failure.forks import ModuleLock
from .failure.interrupts import DeferInterrupts
from .failure.pending_calls import PackInfo, as_deadline
from .failure.waiting import Done, Waiters
from .log.op_log import FlightEntry, Journal, Record
from .memory.buffer import (
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
from .memory.dtypes import (
    ELEMENT_OF,
    DType,
    accumulate_dtype,
    as_count,
    as_dtype,
    as_flag,
    as_index,
    mean_dtype,
)
from .memory.peers import by_physical, can_access, copy_to, ensure_accessible, to_local
from .mesh import Mesh
from .order.order import RepeatedWork
from .run.batch import LaunchBatch
from .run.capture import Capture, check_peers, no_collection
from .run.collective import NOT_CAPTURED, Collective
from .run.commands import CommandList
from .run.kernel import Kernel, Template
