"""What gradreduce runs on: devices, their memory and queues. Start with README.md, then base.py."""

from __future__ import annotations

from .base import Device
from .collective import Collective
from .colocated import bring, by_physical, gather, scatter
from .dtypes import DType, accumulate_dtype, as_dtype, element_of, mean_dtype
from .fences import behind_readers, follow, precede
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
from .mesh import FlatBuffer, Mesh, default_mesh, open_mesh
from .names import device_named
from .tape import Tape

__all__ = [
    "ALIGNMENT",
    "Block",
    "Buffer",
    "Collective",
    "DType",
    "Device",
    "FlatBuffer",
    "FlatLayout",
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
    "accumulate_dtype",
    "as_dtype",
    "behind_readers",
    "bring",
    "by_physical",
    "compatible",
    "default_mesh",
    "device_named",
    "element_of",
    "flat_layout",
    "follow",
    "gather",
    "mean_dtype",
    "mesh_outline",
    "open_mesh",
    "outline_of",
    "overlap",
    "precede",
    "scatter",
]
