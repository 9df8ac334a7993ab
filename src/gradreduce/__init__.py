"""Sums gradients across micro-batches, devices and time, on GPUs or simulated devices.

Names and behaviour follow TensorFlow's AggregationMethod, ConditionalAccumulator,
AllReduceCrossDeviceOps and AGNOptimizer. TensorFlow is not needed, and calls run eagerly. Start
with ``gr.SyncStep``, which runs one data-parallel training step.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradreduce import autodiff, checkpoint, errors
from gradreduce.accumulator import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    SparseConditionalAccumulator,
    apply_grads,
    take_grads,
)
from gradreduce.arrays.assert_mirrored import assert_mirrored
from gradreduce.arrays.distributed import Mirrored, PerReplica, ReduceOp
from gradreduce.arrays.get_variable import get_variable
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.replica_context import replica
from gradreduce.arrays.variable import Variable
from gradreduce.autodiff import embedding_lookup
from gradreduce.backends import default_mesh, open_mesh
from gradreduce.cli.system_info import show_versions
from gradreduce.device import Buffer, Device, Mesh
from gradreduce.errors import (
    BackendUnavailableError,
    CancelledError,
    CaptureError,
    CollectiveError,
    DeadlineExceededError,
    DeviceMismatchError,
    InexactSumWarning,
    InvalidArgumentError,
    InvalidVariableError,
    MixedDtypesError,
    install_hint,
)
from gradreduce.hide_from_torch_compile import hide_from_compiler
from gradreduce.optim import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    AGNCenter,
    AGNCustomGetter,
    AGNOptimizer,
    CenterFaults,
    GradientDescentOptimizer,
    LionOptimizer,
    MomentumOptimizer,
    Optimizer,
    RMSPropOptimizer,
    center_rules,
    clip_by_global_norm,
    simulate_center,
)
from gradreduce.reduce import flat_buffer as _flat_buffer  # noqa: F401  # Mesh imports it late
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from gradreduce.reduce.presets import HierarchicalCopyAllReduce, NcclAllReduce, all_reduce
from gradreduce.sums.aggregation import accumulate_n, add_n, aggregate
from gradreduce.sums.methods import AggregationMethod
from gradreduce.train.scaling import DynamicLossScale
from gradreduce.train.sync_step import SyncStep

if TYPE_CHECKING:  # see __getattr__
    from gradreduce import jax as jax
    from gradreduce import ray as ray
    from gradreduce import torch as torch

__version__ = "0.1.0"

__all__ = [
    "AGNCenter",
    "AGNCustomGetter",
    "AGNOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "AggregationMethod",
    "AllReduceCrossDeviceOps",
    "BackendUnavailableError",
    "Buffer",
    "CancelledError",
    "CaptureError",
    "CenterFaults",
    "CollectiveError",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "CrossDeviceOps",
    "DeadlineExceededError",
    "Device",
    "DeviceMismatchError",
    "DynamicLossScale",
    "GradientDescentOptimizer",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InexactSumWarning",
    "InvalidArgumentError",
    "InvalidVariableError",
    "LionOptimizer",
    "Mesh",
    "Mirrored",
    "MixedDtypesError",
    "MomentumOptimizer",
    "NcclAllReduce",
    "Optimizer",
    "PerReplica",
    "RMSPropOptimizer",
    "ReduceOp",
    "ReductionToOneDevice",
    "SparseConditionalAccumulator",
    "SyncStep",
    "Variable",
    "accumulate_n",
    "add_n",
    "aggregate",
    "all_reduce",
    "apply_grads",
    "assert_mirrored",
    "autodiff",
    "center_rules",
    "checkpoint",
    "clip_by_global_norm",
    "default_mesh",
    "embedding_lookup",
    "errors",
    "get_variable",
    "open_mesh",
    "replica",
    "show_versions",
    "simulate_center",
    "take_grads",
]


hide_from_compiler()


def __dir__() -> list[str]:
    """The public names, and the submodules meant for users."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports ``gr.torch``, ``gr.jax`` or ``gr.ray`` and their library at the first use."""
    if name not in ("torch", "jax", "ray"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"gradreduce.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        text = f"gr.{name} needs {name}, which is not installed: {install_hint(name)}"
        raise ModuleNotFoundError(text, name=name) from None
