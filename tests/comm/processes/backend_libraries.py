"""Trains with a library over gloo and ``"gradreduce"``: ``backend_libraries.py LIBRARY``.

Two processes make one addition for each element, so both backends give the same weights.
"""

import logging
import sys
import warnings

import torch
import torch.distributed as dist

import gradreduce.torch.backend  # noqa: F401  # registers it

DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def lightning(backend: str, net: torch.nn.Module, loader: torch.utils.data.DataLoader) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning").setLevel(logging.ERROR)
    Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


def accelerate(backend: str, net: torch.nn.Module, loader: torch.utils.data.DataLoader) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    dist.init_process_group(backend)  # otherwise it takes gloo on the CPU
    AcceleratorState._reset_state(reset_partial_state=True)  # of the other backend
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()


def weights(library: str, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    {"lightning": lightning, "accelerate": accelerate}[library](backend, net, loader)
    assert dist.get_backend() == backend
    dist.destroy_process_group()
    return list(net.parameters())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ours, theirs = (weights(sys.argv[1], backend) for backend in ("gradreduce", "gloo"))
    assert all(map(torch.equal, ours, theirs))
    print("done", flush=True)
