"""Arithmetic on one device: one file per kernel, its launcher and its NumPy twin side by side."""

from __future__ import annotations

from ._segments import Indices, Segments, joined_indices, plan_segments
from ._slots import Slots, alike, merged_slots
from .accumulate_n import ACCUMULATE_N, accumulate_fitted, accumulate_n, prepare_accumulate_n
from .add_n import ADD_N, add_n, added, added_on_host, cast_fitted, prepare_add_n
from .all_sum import ALL_SUM, all_sum, prepare_all_sum
from .divide import DIVIDE, divide, prepare_divide
from .pack import PACK, pack, pack_fitted, prepare_pack
from .segment_sum import (
    SEGMENT_SUM,
    Divisor,
    prepare_segment_sum,
    ready_segment_sum,
    segment_sum,
)
from .update import MOMENTUM, NESTEROV, SGD, momentum, nesterov, prepare_update, sgd

__all__ = [
    "KERNELS",
    "Divisor",
    "Indices",
    "Segments",
    "Slots",
    "accumulate_fitted",
    "accumulate_n",
    "add_n",
    "added",
    "added_on_host",
    "alike",
    "all_sum",
    "cast_fitted",
    "divide",
    "joined_indices",
    "merged_slots",
    "momentum",
    "nesterov",
    "pack",
    "pack_fitted",
    "plan_segments",
    "prepare_accumulate_n",
    "prepare_add_n",
    "prepare_all_sum",
    "prepare_divide",
    "prepare_pack",
    "prepare_segment_sum",
    "prepare_update",
    "ready_segment_sum",
    "segment_sum",
    "sgd",
]

KERNELS = (ADD_N, ACCUMULATE_N, ALL_SUM, PACK, DIVIDE, SEGMENT_SUM, SGD, MOMENTUM, NESTEROV)
