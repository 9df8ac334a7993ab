"""What gradreduce runs on: devices, their memory and queues. Start with README.md, then base.py."""

from __future__ import annotations

from .base import Device
from .collective import Collective
from .colocated import bring, by_physical, gather, scatter
from .dtypes import DType, accumulate_dtype, as_dtype, element_of, mean_dtype
from .due import due
from .flight import FlightEntry
from .ghost import Ghosts, MeshOutline, Outline, mesh_outline, outline_of
from .journal import Journal, Record
from .kernel import Kernel, Template
from .memory import (
    ALIGNMENT,
    Block,
    Buffer,
    FlatLayout,
    Mark,
    Queue,
    compatible,
    flat_layout,
    overlap,
)
from .mesh import FlatBuffer, Mesh
from .names import device_named
from .opening import default_mesh, open_mesh
from .tape import Tape
from .watch import Travel, as_deadline

__all__ = [
    "ALIGNMENT",
    "Block",
    "Buffer",
    "Collective",
    "DType",
    "Device",
    "FlatBuffer",
    "FlatLayout",
    "FlightEntry",
    "Ghosts",
    "Journal",
    "Kernel",
    "Mark",
    "Mesh",
    "MeshOutline",
    "Outline",
    "Queue",
    "Record",
    "Tape",
    "Template",
    "Travel",
    "accumulate_dtype",
    "as_deadline",
    "as_dtype",
    "bring",
    "by_physical",
    "compatible",
    "default_mesh",
    "device_named",
    "due",
    "element_of",
    "flat_layout",
    "gather",
    "mean_dtype",
    "mesh_outline",
    "open_mesh",
    "outline_of",
    "overlap",
    "scatter",
]
