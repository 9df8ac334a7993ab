"""The backend interface: devices, their memory and queues; see README.md.

The folders above import from here, not from the modules of this folder.
"""

from __future__ import annotations

from .deadlines import deadline_scope
from .device import Device
from .failure.forks import ModuleLock, cached_property
from .failure.interrupts import DeferInterrupts
from .failure.pending_calls import (
    Label,
    PackInfo,
    PendingCall,
    WaitPolicy,
    as_deadline,
    names_of,
)
from .failure.process_end import check_running, inside_library
from .failure.waiting import Done, Waiters, call_under_lock, run_in_thread
from .grouping import group_by
from .log.op_log import (
    QUEUES,
    FlightEntry,
    Journal,
    ProfilerRanges,
    Record,
    flight_path,
    replace_file,
)
from .log.trace import TraceEvent, event_of, trace_path, trace_text
from .memory.buffer import (
    ALIGNMENT,
    Attached,
    Block,
    Buffer,
    FlatLayout,
    FreedBlock,
    Mark,
    Queue,
    Row,
    Stream,
    User,
    as_elements,
    by_template,
    compatible,
    flat_layout,
    handle_of,
    overlap,
    same_dtypes,
)
from .memory.dtypes import (
    BFLOAT16,
    C_TYPES,
    ELEMENT_OF,
    ELEMENTS,
    DType,
    accumulate_dtype,
    as_count,
    as_dtype,
    as_flag,
    as_index,
    as_positive,
    as_shape,
    is_number,
    mean_dtype,
)
from .memory.peers import by_physical, can_access, copy_to, ensure_accessible, to_local
from .mesh import Mesh
from .mesh_state import BackendKind, MeshState
from .order.order import RepeatedWork, Work
from .order.uses import DeviceQueue
from .processes import GpuMove, HostMove, Message, Parcel, Processes, StreamCall, bytes_of
from .run.backend import Event, HostCopy
from .run.capture import Capture, check_peers, no_collection
from .run.collective import (
    NOT_CAPTURED,
    Collective,
    CollectiveCall,
    GroupedCollective,
    Ranks,
    bytes_sent,
)
from .run.commands import Command, CommandList, Operation
from .run.inexact import warn_inexact
from .run.kernel import OPTIONS, Arrays, Kernel, Template, kernel_text
from .run.table import CHUNK_SIZE, TABLE, Tables
