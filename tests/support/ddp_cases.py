"""Trainings that must have the same bits with DistributedDataParallel as with our DataParallel."""

from collections.abc import Callable
from typing import Any

import torch

Note = Callable[[], None]


class Trained:
    """A module that is trained in one of two processes, and what it was after each backward.

    Args:
        make: makes the module.
        wrap: makes the DDP module or the DataParallel.
        rank: the rank of this process, which has other data than the other one.
    """

    def __init__(self, make: Callable[[], Any], wrap: Callable[[Any], Any], rank: int) -> None:
        torch.manual_seed(0)
        self.net = make()
        self.model = wrap(self.net)
        self.rank = rank
        self.seen: list[dict[str, Any]] = []
        self._random = torch.Generator().manual_seed(rank)

    def data(self) -> torch.Tensor:
        return torch.randn(4, 6, generator=self._random)

    def note(self) -> None:
        """Keeps the parameters, the buffers, and the gradients; a gradient may be None."""
        grads = {f"grad of {name}": each.grad for name, each in self.net.named_parameters()}
        copies = {**self.net.state_dict(), **grads}
        self.seen.append(
            {
                name: each if each is None else each.detach().to_dense().clone()
                for name, each in copies.items()
            }
        )


def normalized() -> Any:
    """A module with buffers of several dtypes, also ones that are not saved."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    net.register_buffer("calls", torch.zeros(3, dtype=torch.uint8), persistent=False)
    net.register_buffer("columns", torch.zeros(2, 6)[:, ::2])  # with gaps

    def count(module: Any, _: Any) -> None:
        module.calls += 1
        module.calls[0] += module.training
        module.columns += module[1].running_mean[:3]

    net.register_forward_pre_hook(count)
    return net


def buffers(case: Trained) -> None:
    """Forwards in all orders: of training, in no_sync, two before a backward, of evaluation."""
    model, optimizer = case.model, torch.optim.AdamW(case.net.parameters(), 0.1)

    def train(times: int = 1) -> None:
        sum(model(case.data()).square().mean() for _ in range(times)).backward()
        case.note()

    def evaluate(is_training: bool = False) -> None:
        with torch.no_grad():
            model.train(is_training)(case.data())
        model.train()
        case.note()

    for _ in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            train()
            train()
        train()
        optimizer.step()
        case.net.calls[2] = case.rank  # between two forwards
        evaluate()
        evaluate(is_training=True)
        train(2)
        evaluate(is_training=True)
        train()
        with torch.no_grad():
            if case.rank == 0:
                case.net(case.data())  # in one process
        case.note()


class Branches(torch.nn.ModuleDict):
    """Layers of which each forward uses some."""

    def __init__(self) -> None:
        names = ("always", "in turns", "never", "by process 1", "earlier", "at first")
        super().__init__({name: torch.nn.Linear(6, 3) for name in names})

    def forward(self, x: Any, *names: str) -> Any:
        return sum(self[name](x).square().mean() for name in names)


def unused_parameters(case: Trained) -> None:
    """Parameters that no process or one process uses, with gradients zeroed in every way."""
    model, optimizer = case.model, torch.optim.AdamW(case.net.parameters(), 0.1, weight_decay=0.5)
    ways: list[Callable[[], object]] = [
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=True),
        lambda: None,
    ]
    for step in range(2 * len(ways)):
        ways[step % len(ways)]()
        names = ["always"]
        if step % 2 and case.rank == step % 4 // 2:
            names.append("in turns")
        if case.rank:
            names.append("by process 1")
        if step == 0:
            names.append("at first")
        if step % 3 == 0:
            with model.no_sync():
                model(case.data(), "always", "earlier").backward()
        model(case.data(), *names).backward()
        case.note()
        optimizer.step()
        case.note()


class Embeddings(torch.nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(7, 3, sparse=True)
        self.bag = torch.nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        self.last = torch.nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        indices = (x * 8).long()
        y = self.rows(indices[:, :3] % 7).mean(1) + self.bag(indices[:, 3:] % 5)
        return self.last(y).square().mean()


def sparse_gradients(case: Trained) -> None:
    """Rows that one or several processes and micro-batches use."""
    model, optimizer = case.model, torch.optim.SGD(case.net.parameters(), 0.01)
    for step in range(6):
        if step % 3 == 0:
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        with model.no_sync():
            model(case.data()).backward()
        model(case.data()).backward()
        case.note()
        optimizer.step()
        case.note()


def same_as_ddp(ddp: Callable[..., Any], ours: Callable[[Any], Any], rank: int) -> None:
    """Compares every case, in this process of two."""
    for make, train, options in CASES:
        wanted = Trained(make, lambda net, more=options: ddp(net, **more), rank)
        found = Trained(make, ours, rank)
        for case in (wanted, found):
            train(case)
        assert len(wanted.seen) == len(found.seen) > 1
        for step, (one, other) in enumerate(zip(wanted.seen, found.seen, strict=True)):
            assert list(one) == list(other)
            for name, value in one.items():
                is_same = other[name] is value if value is None else value.equal(other[name])
                assert is_same, (train.__name__, step, name, value, other[name])


CASES: list[tuple[Callable[[], Any], Callable[[Trained], None], dict[str, Any]]] = [
    (normalized, buffers, {}),
    (Branches, unused_parameters, {"find_unused_parameters": True}),
    (Embeddings, sparse_gradients, {}),
]
