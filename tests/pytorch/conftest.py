from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default process group of this process, which the DDP of every thread uses.

    The first bucket of a DDP is as small as the others. The forwards of several threads can leave
    PyTorch's mark for the active DDP, which changes what ``torch.compile`` does.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
