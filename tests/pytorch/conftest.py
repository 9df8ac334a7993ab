from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.libraries import torch
from support.meshes import mesh_of
from support.torch_layers import TINY_MB, layers

import gradreduce as gr

mesh = mesh_of(2)


@pytest.fixture
def dp(mesh: gr.Mesh) -> gr.torch.DataParallel:
    """Two replicas, with a bucket for each of the four layers."""
    return gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default process group of this process, which the DDP of every thread uses.

    The first bucket of a DDP is as small as the others. The forwards of several threads can leave
    PyTorch's mark for the active DDP, which changes what ``torch.compile`` does.
    """
    dist = torch.distributed
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
