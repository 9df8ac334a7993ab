"""Arithmetic on one device: one file per kernel, its launcher and its NumPy twin side by side."""

from __future__ import annotations

from .accumulate_n import ACCUMULATE_N, accumulate_n, prepare_accumulate_n
from .add_n import ADD_N, add_n, prepare_add_n
from .all_sum import ALL_SUM, all_sum, prepare_all_sum
from .pack import PACK, pack, prepare_pack
from .update import MOMENTUM, NESTEROV, SGD, momentum, nesterov, prepare_update, sgd

__all__ = [
    "KERNELS",
    "accumulate_n",
    "add_n",
    "all_sum",
    "momentum",
    "nesterov",
    "pack",
    "prepare_accumulate_n",
    "prepare_add_n",
    "prepare_all_sum",
    "prepare_pack",
    "prepare_update",
    "sgd",
]

KERNELS = (ADD_N, ACCUMULATE_N, ALL_SUM, PACK, SGD, MOMENTUM, NESTEROV)
