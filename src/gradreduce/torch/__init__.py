"""PyTorch on our all-reduce: ``DataParallel``, and a hook for ``DistributedDataParallel``.

Imported only when asked for, as ``gr.torch``: ``import gradreduce`` does not import PyTorch.
"""

from __future__ import annotations

from gradreduce.torch.data_parallel import DataParallel
from gradreduce.torch.ddp_hook import comm_hook

__all__ = ["DataParallel", "comm_hook"]
