"""What a DataParallel does before a forward: compares parameters, and broadcasts buffers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from gradreduce.arrays.distributed import PerReplica

from .engine import is_faking
from .module_state import check_alike
from .reducer import Reducer


class BeforeForward:
    """Keeps the replicas of all processes alike; every process makes the same calls.

    Args:
        replicas: the modules of this process.
        reducer: counts the steps; has the mesh of the modules, and what broadcasts buffers.
        check_every: the number of steps between two comparisons of parameters. None: one
            comparison, after the first step.
        broadcast_buffers: whether to broadcast buffers.

    Attributes:
        broadcasts: whether there are buffers that are broadcast.
        handles: remove the hooks of the replicas.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        reducer: Reducer,
        *,
        check_every: int | None,
        broadcast_buffers: bool,
    ) -> None:
        self._replicas = replicas
        self._reducer = reducer
        self._check_every = check_every
        self.broadcasts = broadcast_buffers and any(True for _ in replicas[0].buffers())
        self.handles: list[Any] = []
        self._lock = Lock()  # replicas may run in threads
        self._compared_after = 0  # the number of steps at the last comparison
        self._prepared_after = 0  # and when a forward was last prepared
        self._follows_training = True

    def of_data_parallel(self) -> None:
        """Prepares a forward of a DataParallel with one device; broadcasts when DDP does.

        DDP broadcasts before a forward if the forward before it was one of training: with
        gradients, outside ``no_sync``.
        """
        if _is_left_out():
            return
        is_training = torch.is_grad_enabled()
        if (is_training or self._follows_training) and self._reducer.begins_again():
            return  # the other processes have exchanged before their forward
        if is_training:
            self._compare()
        if self._follows_training:
            self._broadcast()
        self._follows_training = is_training and not self._reducer.is_paused
        self._prepared_after = self._reducer.num_steps

    def of_replica(self, replica: Any) -> None:
        """Prepares the first training forward of a step, of whichever replica is first.

        Other forwards, such as an evaluation in one process, exchange nothing.
        """
        if not (torch.is_grad_enabled() and replica.training):
            return
        with self._lock:
            steps = self._reducer.num_steps
            if self._prepared_after == steps or _is_left_out():
                return
            if not self._reducer.begins_again():
                self._compare()
                self._broadcast()
                self._prepared_after = steps

    def _compare(self) -> None:
        """Compares the parameters, if that is due."""
        steps, last = self._reducer.num_steps, self._compared_after
        every = self._check_every
        if self._running is None and steps and (not last or (every and steps - last >= every)):
            check_alike(self._replicas, self._reducer.mesh)
            self._compared_after = steps
            if every is None and not self.broadcasts:  # the hooks have nothing left to do
                self.remove_hooks()

    @property
    def _running(self) -> Any:
        """What knows which processes run, if one has ended inside ``uneven``."""
        running = self._reducer.running
        return running if running is not None and running.has_ended else None

    @property
    def progress(self) -> tuple[int, int, bool]:
        """What was done when, which must be equal in all processes."""
        return self._compared_after, self._prepared_after, self._follows_training

    @progress.setter
    def progress(self, progress: tuple[int, int, bool]) -> None:
        self._compared_after, self._prepared_after, self._follows_training = progress

    def remove_hooks(self) -> None:
        """Removes the hooks of the replicas."""
        for handle in self.handles:
            handle.remove()

    @torch.no_grad()  # type: ignore[untyped-decorator]  # PyTorch need not be installed
    def _broadcast(self) -> None:
        """Copies the buffers of process 0's first replica to all, as one tensor of bytes.

        If a process has ended inside ``uneven``, those of the lowest process that runs.
        """
        if not self.broadcasts:
            return
        if self._running is not None:
            self._running.tell_broadcast()
            self.join_broadcast()
            return
        # The largest elements first, so that each buffer's place in the bytes is aligned.
        rows = [
            sorted(replica.buffers(), key=lambda each: -each.itemsize) for replica in self._replicas
        ]
        sources = [torch.cat([_bytes_of(each) for each in rows[0]])]
        copies: list[Any] = [
            sources[0],
            *[torch.empty_like(sources[0], device=row[0].device) for row in rows[1:]],
        ]
        mesh = self._reducer.mesh
        value = PerReplica(sources, devices=[mesh[0]], name="buffers")
        self._reducer.cross_device_ops.broadcast(value, mesh, out=copies)
        is_source = mesh.process_index == 0
        for row, found in list(zip(rows, copies, strict=True))[is_source:]:
            parts = found.split([each.nbytes for each in row])
            values = [
                part.view(each.dtype).view(each.shape)
                for part, each in zip(parts, row, strict=True)
            ]
            # As in DDP, a backward may follow that uses what the buffers were before.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(row)):
                torch._foreach_copy_(row, values)

    @torch.no_grad()  # type: ignore[untyped-decorator]  # PyTorch need not be installed
    def join_broadcast(self) -> None:
        """Copies the buffers of the lowest process that runs to all; the host waits."""
        rows = [list(replica.buffers()) for replica in self._replicas]
        running, content = self._running, io.BytesIO()
        if running.sends:
            torch.save([each.cpu() for each in rows[0]], content)
        sent = running.send(content.getvalue())
        values = torch.load(io.BytesIO(sent), weights_only=True)
        for row in rows:
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(row)):
                for buffer, value in zip(row, values, strict=True):
                    buffer.copy_(value)


def _is_left_out() -> bool:
    """Whether a forward must exchange nothing.

    A checkpoint that runs the forward again is inside a backward, and a thread may be reducing
    gradients. In FakeTensorMode nothing has values.
    """
    return bool(torch._C._current_graph_task_id() >= 0) or is_faking()


def _bytes_of(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
