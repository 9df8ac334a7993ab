"""Trains with PyTorch's own classes over ``"gradreduce"`` and over gloo, and compares the results.

``backend_training.py FOLDER``; each case is a function that gets the name of a backend and the kind
of its data, small integers or random numbers, and returns tensors.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradreduce as gr
import gradreduce.torch.backend

OURS, GLOO = "gradreduce", "gloo"
FOLDER = Path(sys.argv[1])
groups: dict[str, Any] = {}


class Net(nn.Module):
    """Three layers; with ``skips`` every second call does not use the one in the middle."""

    def __init__(self, kind: str, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
        self.skips, self.calls = skips, 0
        if kind == "integers":
            for parameter in self.parameters():
                parameter.data.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.layers
        self.calls += 1
        x = torch.relu(first(x))
        if not self.skips or self.calls % 2:
            x = torch.relu(middle(x))
        return last(x)


def batch(kind: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if kind == "integers":
        return torch.randint(-1, 2, (4, 8), generator=generator).float()
    return torch.randn(4, 8, generator=generator)


def train(model: Callable[..., Any], kind: str, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps if kind == "random" else 1):  # later gradients are no integers
        optimizer.zero_grad()
        model(batch(kind, step)).sum().backward()
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=2**-6)


def weights(net: nn.Module) -> list[torch.Tensor]:
    """Values and gradients, whole."""
    found = [each for p in net.parameters() for each in (p.detach(), p.grad) if each is not None]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def ddp(
    backend: str, kind: str, *, skips: bool = False, hook: Any = None, **options: Any
) -> list[torch.Tensor]:
    net = Net(kind, skips)
    model = DistributedDataParallel(net, process_group=groups[backend], **options)
    if hook is not None:
        model.register_comm_hook(groups[backend], hook)
    train(model, kind, sgd(net))
    return weights(net)


def power_sgd(backend: str, kind: str) -> list[torch.Tensor]:
    """Its callbacks call the group. Over gloo two buckets may wait for each other for ever."""
    net = Net(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2**20)
        model = DistributedDataParallel(net, process_group=groups[backend])
    state = powerSGD_hook.PowerSGDState(
        groups[backend], start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, kind, sgd(net), 4)
    assert kind == "integers" or state.p_memory_dict, "nothing was compressed"
    return weights(net)


def joined(backend: str, kind: str) -> list[torch.Tensor]:
    """Rank r has r + 1 batches."""
    net = Net(kind)
    model = DistributedDataParallel(net, process_group=groups[backend])
    with model.join():
        train(model, kind, sgd(net), dist.get_rank() + 1)
    return weights(net)


def accumulated(backend: str, kind: str) -> list[torch.Tensor]:
    net = Net(kind)
    model = DistributedDataParallel(net, process_group=groups[backend])
    with model.no_sync():
        model(batch(kind, 1)).sum().backward()
    train(model, kind, sgd(net), 1)
    model(batch(kind, 2)).sum().backward()
    return weights(net)


def compiled(backend: str, kind: str) -> list[torch.Tensor]:
    net = Net(kind)
    model = DistributedDataParallel(net, process_group=groups[backend], bucket_cap_mb=2**-12)
    train(torch.compile(model, backend="aot_eager"), kind, sgd(net))
    return weights(net)


def device_mesh(backend: str, shape: tuple[int, ...]) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    backends = dict.fromkeys(names, backend)
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)


def fsdp(backend: str, kind: str, *, shape: Any = None, **options: Any) -> list[torch.Tensor]:
    net = sharded(Net(kind), backend, shape, **options)
    train(net, kind, sgd(net))
    return weights(net)


def sharded(net: nn.Module, backend: str, shape: Any = None, **options: Any) -> Any:
    mesh = device_mesh(backend, shape or (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def zero(backend: str, kind: str) -> list[torch.Tensor]:
    net = Net(kind)
    model = DistributedDataParallel(net, process_group=groups[backend])
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(),
        optimizer_class=torch.optim.SGD,
        process_group=groups[backend],
        lr=2**-6,
        momentum=0.5,
    )
    train(model, kind, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return weights(net)


def checkpointed(backend: str, kind: str) -> list[torch.Tensor]:
    """Saves a sharded module, and loads it into another."""
    net = sharded(Net(kind), backend)
    train(net, kind, sgd(net), 2)
    path = FOLDER / f"{backend}-{kind}"
    state = {"net": get_model_state_dict(net)}
    dcp.save(state, checkpoint_id=path, process_group=groups[backend])
    other = sharded(Net("other"), backend)
    state = {"net": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path, process_group=groups[backend])
    set_model_state_dict(other, state["net"])
    train(other, kind, sgd(other), 1)
    return weights(other)


def cases() -> Iterator[tuple[str, Callable[[str, str], list[torch.Tensor]]]]:
    tiny = 2**-12
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    yield "DDP", ddp
    yield "static graph", partial(ddp, static_graph=True, bucket_cap_mb=tiny)
    yield "unused", partial(ddp, skips=True, find_unused_parameters=True, bucket_cap_mb=tiny)
    yield "views", partial(ddp, gradient_as_bucket_view=True)
    yield "all-reduce hook", partial(ddp, hook=default_hooks.allreduce_hook)
    yield "float16 hook", partial(ddp, hook=default_hooks.fp16_compress_hook)
    yield "PowerSGD hook", power_sgd
    yield "join", joined
    yield "no_sync", accumulated
    yield "compile", compiled
    yield "FSDP2", partial(fsdp, reshard_after_forward=True)
    yield "FSDP2 unsharded", partial(fsdp, reshard_after_forward=False)
    yield "FSDP2 float32 sums", partial(fsdp, mp_policy=half)
    yield "FSDP2 bfloat16", partial(fsdp, mp_policy=bfloat16)
    if dist.get_world_size() == 4:
        yield "HSDP", partial(fsdp, shape=(2, 2))
    yield "ZeroRedundancyOptimizer", zero
    yield "checkpoint", checkpointed


def digest_of(net: nn.Module) -> str:
    values = b"".join(each.contiguous().numpy().tobytes() for each in weights(net))
    return hashlib.sha256(values).hexdigest()


def exact() -> None:
    """With exact sums DDP, FSDP2 and DataParallel have the same bits."""
    group = dist.new_group(pg_options=gr.torch.BackendOptions(exact=True))
    mesh = gr.open_mesh(1, backend="sim", process_group=dist.group.WORLD)
    found = {}
    for cap in (2**-12, 2**-10, 25):
        net = Net("random")
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap)
        train(model, "random", sgd(net), 20)
        found[f"DDP with buckets of {cap} MB"] = digest_of(net)
    for layers in (True, False):
        net = Net("random")
        shards = DeviceMesh.from_group(group, "cpu")
        for layer in net.layers if layers else ():
            fully_shard(layer, mesh=shards)
        net = fully_shard(net, mesh=shards)
        train(net, "random", sgd(net), 20)
        found[f"FSDP2 by layers: {layers}"] = digest_of(net)
    net = Net("random")
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
    train(gr.torch.DataParallel(net, mesh, ops=ops), "random", sgd(net), 20)
    found["DataParallel"] = digest_of(net)
    assert len(set(found.values())) == 1, found
    if dist.get_world_size() == 4:
        hybrid = [hybrid_digest(layers) for layers in (True, True, False)]
        assert len(set(hybrid)) == 1 and hybrid[0] not in found.values(), (hybrid, found)
    net = Net("random")
    train(DistributedDataParallel(net), "random", sgd(net), 20)
    if dist.get_world_size() > 2:  # of two terms the sum is always exact
        assert digest_of(net) != found["DataParallel"]
    mesh.close()


def hybrid_digest(layers: bool) -> str:
    """Returns the digest of HSDP with exact sums over two copies of two shards."""
    options = {"pg_options": gr.torch.BackendOptions(exact=True)}
    copies = [dist.new_group([each, each + 2], **options) for each in range(2)]
    shards = [dist.new_group([each, each + 1], **options) for each in (0, 2)]
    rank = dist.get_rank()
    mesh = DeviceMesh.from_group(
        [copies[rank % 2], shards[rank // 2]],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    net = Net("random")
    for layer in net.layers if layers else ():
        fully_shard(layer, mesh=mesh)
    train(fully_shard(net, mesh=mesh), "random", sgd(net), 20)
    return digest_of(net)


def compare(name: str, kind: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    tolerance = 1e-6
    if "16" in name:
        tolerance = 2 * torch.finfo(torch.bfloat16 if "b" in name else torch.float16).eps
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        if kind == "integers":
            assert torch.equal(one, other), (name, one, other)
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * scale)


def main() -> None:
    warnings.simplefilter("ignore")
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    dist.init_process_group(OURS)
    groups.update({OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)})
    assert isinstance(dist.group.WORLD, gradreduce.torch.backend.GradreduceGroup)
    for name, case in cases():
        for kind in ("integers", "random"):
            compare(name, kind, case(OURS, kind), case(GLOO, kind))
    exact()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
