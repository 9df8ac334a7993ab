"""PyTorch on our all-reduce: a communication hook for ``DistributedDataParallel``.

Imported only when asked for, as ``gr.torch``: ``import gradreduce`` does not import PyTorch.
"""

from __future__ import annotations

from gradreduce.torch.ddp_hook import comm_hook

__all__ = ["comm_hook"]
