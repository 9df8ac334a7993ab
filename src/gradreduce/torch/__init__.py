"""PyTorch modules and optimizers that use gradreduce, and hooks for DDP and FSDP2.

Use it as ``gr.torch``, which imports PyTorch. ``import gradreduce`` does not import PyTorch.
"""

from __future__ import annotations

from gradreduce.hide_from_torch_compile import hide_from_compiler
from gradreduce.torch.backend_options import BackendOptions
from gradreduce.torch.data_parallel import DataParallel
from gradreduce.torch.ddp_hook import comm_hook
from gradreduce.torch.fsdp import ReduceScatter
from gradreduce.torch.functional import functional
from gradreduce.torch.optimizer import Optimizer
from gradreduce.torch.uneven import uneven
from gradreduce.torch.variables import variables
from gradreduce.torch.weighted import weighted

__all__ = [
    "BackendOptions",
    "DataParallel",
    "Optimizer",
    "ReduceScatter",
    "comm_hook",
    "functional",
    "uneven",
    "variables",
    "weighted",
]

hide_from_compiler()
