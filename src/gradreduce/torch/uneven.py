"""``uneven``: loops over batches of which some processes have fewer than others.

While all processes have batches, they exchange one call before each batch. When some have ended,
the others tell them before each call that they must join: a broadcast of buffers, or the reductions
of a step. Each call is told by one exchange, in which the processes that have ended answer.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from gradreduce.comm.process_group import group_of
from gradreduce.comm.replicas import Replicas
from gradreduce.errors import CollectiveError, brief
from gradreduce.weights import from_numbers, to_numbers

from .data_parallel import DataParallel
from .module_state import load_tensors, tensors_of

T = TypeVar("T")
_ENDED, _NEXT, _BROADCAST, _REDUCE = range(4)
_CALLS = ("end", "begin a batch", "broadcast buffers", "reduce gradients")
_NO_BATCH = object()


class Running:
    """Which processes of a DataParallel still have batches.

    Attributes:
        ranks: these processes. After the last batch, those that have had it.
        has_ended: whether a process has ended.
    """

    def __init__(self, mesh: Any) -> None:
        self._replicas = Replicas(mesh.devices)
        self.ranks = list(range(mesh.num_processes))
        self.has_ended = False

    def tell(self, call: int, units: int = 0) -> tuple[int, int]:
        """Tells the other processes this one's next call; the host waits for theirs.

        Args:
            call: one of the calls above.
            units: for ``_REDUCE``, the exact sum of the weights of this process.

        Returns:
            The call of the processes that run, and the exact sum of the weights of all.

        Raises:
            CollectiveError: two processes that run make different calls.
        """
        rows = self._replicas.compare_numbers("uneven", [call, *to_numbers(units)])
        calls = {rank: row[0] for rank, row in enumerate(rows) if row[0] != _ENDED}
        self.has_ended = len(calls) < len(rows)
        if not calls:
            return _ENDED, 0
        self.ranks = list(calls)
        if len(set(calls.values())) > 1:
            made = ", ".join([f"{_CALLS[each]} in process {rank}" for rank, each in calls.items()])
            raise CollectiveError(f"the processes make different calls inside uneven: {made}")
        return calls[self.ranks[0]], sum([from_numbers(row[1:]) for row in rows])

    def sum_units(self, units: int) -> int:
        """Tells that gradients are reduced; returns the exact sum of the weights."""
        return self.tell(_REDUCE, units)[1]

    def tell_broadcast(self) -> None:
        """Tells that buffers are broadcast."""
        self.tell(_BROADCAST)

    def send(self, content: bytes) -> bytes:
        """Sends bytes of the lowest process that runs to all others, which get them."""
        return self._replicas.send_bytes("uneven: a state", self.ranks[0], content)

    @property
    def sends(self) -> bool:
        """Whether this process is the lowest that runs."""
        return self._replicas.group.rank == self.ranks[0]

    @property
    def is_here(self) -> bool:
        """Whether this process runs, or has had the last batch."""
        return self._replicas.group.rank in self.ranks


def uneven(loader: Iterable[T], dp: DataParallel[Any], optimizer: Any) -> Iterator[T]:
    """Iterates over the batches of this process, while other processes may have more or fewer.

    Without it, a process that has no batch left would not take part in the reductions of the
    others, which would wait for it until they time out::

        for x in gr.torch.uneven(loader, dp, optimizer):
            dp.zero_grad()
            dp(x).mean().backward()
            optimizer.step()

    Example: see ``docs/pytorch.md``.

    It ends when all processes have ended. A process that has ended joins the reductions of the
    others with weight 0: a step without ``dp.weight`` is divided by the number of replicas that
    still run, and one with weights by the sum of their weights. Buffers (``broadcast_buffers``)
    then come from the lowest process that runs, and replicas are not compared. At the end, the
    parameters, buffers and state of the optimizer are copied from the lowest process that has had
    the last batch.

    All processes make the same loop. In it only ``dp`` may make calls over processes: other
    collectives of your code, also in the ``forward`` (``SyncBatchNorm``), would wait for processes
    that have ended. Step a learning rate scheduler after the loop; if it is stepped inside, load
    its state from a process that has had the last batch.

    With several processes, the host waits for the others before each batch.

    Args:
        loader: the batches of this process, maybe none.
        dp: the DataParallel that the loop trains. Each process has the same number of replicas.
        optimizer: the optimizer of ``dp.parameters()``, of PyTorch or ``gr.torch.Optimizer``.

    Yields:
        The batches of ``loader``.

    Raises:
        TypeError: ``dp`` is not a DataParallel, or ``optimizer`` not an optimizer of PyTorch.
        ValueError: ``dp`` contains a ``SyncBatchNorm``, or the processes have different numbers of
            replicas.
        RuntimeError: another loop over ``uneven`` uses ``dp``.
        CollectiveError: the loops of two processes differ, or a process has left its loop.
    """
    if not isinstance(dp, DataParallel):
        raise TypeError(f"dp={brief(dp)} is not a gr.torch.DataParallel")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer={brief(optimizer)} is not a torch.optim.Optimizer")
    if any([isinstance(each, torch.nn.SyncBatchNorm) for each in dp.modules()]):
        raise ValueError(
            "dp contains a SyncBatchNorm, whose forward would wait for processes that have ended: "
            "use BatchNorm"
        )
    mesh = dp._reducer.mesh
    counts = group_of(mesh[0]).counts
    if len(set(counts)) > 1:
        raise ValueError(f"the processes have {list(counts)} replicas; uneven needs equal numbers")
    if mesh.num_processes == 1:
        return iter(loader)
    return _batches(loader, dp, optimizer, Running(mesh))


def _batches(
    loader: Iterable[T], dp: DataParallel[Any], optimizer: Any, running: Running
) -> Iterator[T]:
    """Yields the batches of this process, then joins the other processes; see ``uneven``."""
    reducer, batches = dp._reducer, iter(loader)
    if reducer.running is not None:
        raise RuntimeError("another loop over uneven uses this DataParallel: end it before")
    reducer.running = running
    try:
        while (batch := next(batches, _NO_BATCH)) is not _NO_BATCH:
            running.tell(_NEXT)
            yield batch  # type: ignore[misc]  # it is not _NO_BATCH
        _join(dp, running)
        _copy_state(dp, optimizer, running)
    finally:
        reducer.running = None


def _join(dp: DataParallel[Any], running: Running) -> None:
    """Joins the calls of the processes that run, until all have ended."""
    call = _NEXT
    while call != _ENDED:
        dp._reducer.await_round()
        call, total = running.tell(_ENDED)
        if call == _REDUCE:
            dp._reducer.join(total)
        elif call == _BROADCAST and dp._before_forward is not None:
            dp._before_forward.join_broadcast()


def _copy_state(dp: DataParallel[Any], optimizer: Any, running: Running) -> None:
    """Copies the state of the lowest process that has had the last batch to those without it."""
    if len(running.ranks) == dp._reducer.mesh.num_processes:
        return
    before, content = dp._before_forward, io.BytesIO()
    assert before is not None
    if running.sends:
        state = [*tensors_of(dp.module)], optimizer.state_dict(), before.progress
        torch.save(state, content)
    sent = running.send(content.getvalue())
    if not running.is_here:
        state = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=True)
        load_tensors(dp.replicas, state[0])
        optimizer.load_state_dict(state[1])
        before.progress = state[2]
