"""A mesh: the devices that were opened together, as one value."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike

from gradreduce.errors import BackendUnavailableError, CollectiveError, NotCopied, listed

from .device import Device
from .failure.forks import cached_property
from .failure.pending_calls import as_deadline
from .log.op_log import FlightEntry, Journal
from .log.trace import trace_path, write_trace
from .memory.dtypes import as_flag
from .memory.peers import by_physical
from .mesh_reset import reset
from .mesh_state import MeshState
from .run.collective import Collective

if TYPE_CHECKING:
    from gradreduce.reduce.flat_buffer import FlatBuffer

# How long closing a failed mesh waits for the thread that reports its failure.
_REPORT_SECONDS = 5.0


class Mesh(NotCopied):
    """An ordered tuple of logical devices that share collectives and a journal.

    Made by ``gr.open_mesh``. As a context manager it closes the mesh at the end of the block; then
    its Buffers raise ``BackendUnavailableError``. ``mesh[0]`` is a device. A part of a mesh
    (``mesh[0:2]``, ``mesh[[0, 3]]``) is a Mesh of the same devices; closing it closes the whole
    mesh.

    Attributes:
        devices: the logical devices of this process, in order. A ``PerReplica`` has one value for
            each of them.

    Example:
        >>> with gr.open_mesh(4, backend="sim") as mesh:
        ...     print(len(mesh), mesh[0].name, len(mesh[1:3]))
        4 sim:0 2
    """

    _copy_hint = "open one by gr.open_mesh where it is needed"

    def __init__(
        self,
        devices: Sequence[Device],
        mesh_state: MeshState,
        collective: Callable[[], Collective],
        on_close: Callable[[], None],
    ) -> None:
        self.devices = tuple(devices)
        for device in devices:
            vars(device).setdefault("mesh", self)  # the first mesh of a device is the whole mesh
        self.mesh_state = mesh_state
        self._make_collective = collective
        self._on_close = on_close

    @property
    def num_replicas(self) -> int:
        """The number of logical devices of all processes, or of a part's devices.

        ``ReduceOp.MEAN`` divides by it.
        """
        count, group = len(self.devices), self.mesh_state.processes
        return sum(group.counts) if count == group.counts[group.rank] else count

    @property
    def process_index(self) -> int:
        """The rank of this process; 0 if there is only one."""
        return self.mesh_state.processes.rank

    @property
    def num_processes(self) -> int:
        """The number of processes that share the work."""
        return self.mesh_state.processes.size

    @property
    def backend(self) -> str:
        """``"sim"`` or ``"cuda"``."""
        return self.mesh_state.backend

    @property
    def collective(self) -> Collective:
        """The collectives of the physical devices; made at the first use, shared by all parts.

        Raises:
            BackendUnavailableError: NCCL is missing.
        """
        self.mesh_state.check_process()
        return self._make_collective()

    @cached_property
    def by_physical(self) -> dict[int, tuple[int, ...]]:
        """Maps each physical device to the indices of its logical devices, in order."""
        return by_physical(self.devices)

    def journal(self) -> AbstractContextManager[Journal]:
        """Records launches, copies, bytes and waits of the devices while the block runs.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> gradients = [[np.ones(5)], [np.ones(5)]]
            >>> with mesh.journal() as journal:
            ...     _ = gr.all_reduce(gradients, mesh=mesh)
            >>> [(record.name, record.device) for record in journal.of("collective")]
            [('all_reduce', 0), ('all_reduce', 1)]
        """
        self.mesh_state.check_process()
        return self.mesh_state.log.journal()

    @contextmanager
    def trace(
        self, path: str | os.PathLike[str] | None = None, *, nvtx: bool = False
    ) -> Iterator[Journal]:
        """Writes a trace of what the devices do while the block runs, for Perfetto.

        The file has one complete event for each operation of the journal, by device and queue, in
        the Trace Event Format that ``ui.perfetto.dev`` and ``chrome://tracing`` open. Its times are
        host times: an event lasts while the host submits the operation. On simulated devices
        without ``schedule_seed=`` the operation runs in that time. For times of a GPU use
        ``nvtx=True`` with Nsight Systems. Uploads, fills and the host's waits last 0 microseconds.
        The file is written when the block ends, also after an error.

        Args:
            path: the file to write; an existing file is replaced. None: no file.
            nvtx: on GPUs, make an NVTX range around the calls that submit the work of each pack or
                tensor, named as in the flight record.

        Returns:
            A context manager that returns the ``Journal`` of the block.

        Raises:
            ValueError: ``path`` is a folder or a device, or in a folder that does not exist.
            TypeError: ``nvtx`` is not a boolean.
            OSError: the file cannot be written.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> with mesh.trace("step.json") as journal:
            ...     _ = gr.all_reduce([[np.ones(5)], [np.ones(5)]], mesh=mesh)
            >>> journal.launches > 0
            True
        """
        state = self.mesh_state
        state.check_process()
        ranges = state.nvtx if as_flag("nvtx", nvtx) else None
        target = None if path is None else trace_path(path)
        names = {device.index: device.name for device in self.devices[0].mesh.devices}
        before, state.log.ranges = state.log.ranges, ranges or state.log.ranges
        try:
            with write_trace(state.log, target, names) as journal:
                yield journal
        finally:
            state.log.ranges = before

    def flat_buffer(
        self, shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]], dtype: DTypeLike
    ) -> FlatBuffer:
        """Allocates one flat buffer of zeros on every device, for tensors of these shapes.

        Args:
            shapes: the shapes of the tensors, in the order in which they will be reduced. A dict
                also names the tensors, for errors and the log of ``prepare_all_reduce``.
            dtype: the dtype of all tensors.

        Raises:
            TypeError: ``shapes`` is not a list or dict, a shape is not a list of integers, or
                ``dtype`` cannot be added.
            ValueError: an extent is negative.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> flat = mesh.flat_buffer({"w": (2, 3), "b": (3,)}, "float32")
            >>> flat.names, [array.shape for array in flat.arrays()[0]]
            (['w', 'b'], [(2, 3), (3,)])
        """
        # The one import of a package above this one: users ask a mesh for its memory.
        from gradreduce.reduce.flat_buffer import FlatBuffer

        return FlatBuffer.on(self.devices, shapes, dtype)

    def synchronize(self, *, deadline: float | None = None) -> None:
        """Blocks the host until every queue of every device is empty.

        Args:
            deadline: seconds from now for all devices; if it passes first, the mesh fails.

        Raises:
            ValueError: ``deadline`` is not a number above 0.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> _ = mesh[0].zeros((4,), "float32")
            >>> mesh.synchronize(deadline=10)
        """
        seconds = as_deadline(deadline)
        end = None if seconds is None else time.monotonic() + seconds
        for device in self.devices:
            # After the deadline, a queue that is empty has still finished in time.
            rest = None if end is None else max(end - time.monotonic(), 1e-6)
            device.synchronize(deadline=rest)

    def flight_record(self) -> list[FlightEntry]:
        """Returns the last 1,000 operations of the whole mesh, oldest first.

        The record is always kept. This call finds out which operations are done; ``done`` is False
        if that is unknown. It waits for no device, and works on a failed or closed mesh.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> _ = mesh[1].zeros((4,), "float32")
            >>> entry = mesh.flight_record()[-1]
            >>> entry.kind, entry.device, entry.nbytes, entry.done
            ('fill', 1, 16, True)
        """
        mesh_state = self.mesh_state
        mesh_state.check_process()
        alive = mesh_state.reason is None and not mesh_state.is_closed
        return mesh_state.log.entries(self.devices[0].mesh.devices, fresh=alive)

    def reset(self, *, timeout: float | None = 30.0) -> None:
        """Makes the whole mesh usable again after a deadline has passed.

        Waits until the communicators are aborted and the queues are empty; the simulation drops
        queued work. Communicators are made again at their next use. **Memory that unfinished work
        would have written is undefined**: assign Buffers, Variables and results again before using
        them. Accumulators on these devices are empty afterwards and keep their global step.
        Prepared steps can be called again. Failed devices stay failed.

        Does nothing if the mesh has not failed. Calls of other threads raise when the mesh fails;
        reset after they have returned.

        Args:
            timeout: seconds to wait at most; None: no limit.

        Raises:
            CollectiveError: a device or communicator does not finish in time; reset the mesh again
                later. Or a mesh of several processes has failed: it cannot be reset.
            ValueError: ``timeout`` is not a number above 0.

        Example: see ``docs/debugging.md``.
        """
        reset(self.devices[0].mesh.devices, timeout)

    def trim(self) -> None:
        """Gives every device's unused memory back to the system; see ``Device.trim``."""
        for device in self.devices:
            device.trim()

    def close(self, *, deadline: float | None = None) -> None:
        """Closes the mesh and all its parts; may be called twice.

        GPU memory that was cached goes back to the driver at once, and that of living Buffers when
        they end. With several processes the host waits until the other processes close their mesh
        too, at most for the ``timeout`` of ``open_mesh``. A failed mesh does not wait.

        Args:
            deadline: seconds from now, if that is shorter than the ``timeout`` of ``open_mesh``.

        Raises:
            BackendUnavailableError: the mesh was opened before a fork; only the parent process can
                close it.
            CollectiveError: another process has not closed its mesh in time, or has ended without
                closing it; the mesh of this process is closed.
            ValueError: ``deadline`` is not a number above 0; the mesh is not closed.
        """
        seconds = as_deadline(deadline)
        end = None if seconds is None else time.monotonic() + seconds
        self.mesh_state.check_process()
        self._finish_exchanges(seconds)
        if self.mesh_state.reason is not None:  # then the memory of stuck queues is kept
            self.mesh_state.failure_reported.wait(_REPORT_SECONDS)
        self.mesh_state.close()
        try:
            rest = None if end is None else max(0.0, end - time.monotonic())
            self.mesh_state.processes.leave(self.mesh_state.reason, rest)
        finally:
            self._on_close()
            for device in self.devices[0].mesh.devices:
                device.drop_free_memory()

    def _finish_exchanges(self, seconds: float | None) -> None:
        """Waits for queued exchanges, before the other processes are told that this one leaves."""
        mesh_state = self.mesh_state
        group = mesh_state.processes
        if group.move_on_gpu is None or mesh_state.is_closed:
            return
        with suppress(CollectiveError, BackendUnavailableError):  # the mesh has failed
            deadline = group.timeout if seconds is None else min(seconds, group.timeout)
            self.devices[0].mesh.synchronize(deadline=deadline)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: object) -> None:
        if self.mesh_state.is_inherited:  # a forked child may leave the parent's block
            return
        state = self.mesh_state
        is_usable = not state.is_closed and state.reason is None
        if is_usable and isinstance(error[1], Exception | KeyboardInterrupt):
            # Do not wait: the other processes cannot continue without this one.
            state.fail_all(f"left its mesh by {error[1]!r}")
        self.close()

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    @overload
    def __getitem__(self, part: SupportsIndex) -> Device: ...
    @overload
    def __getitem__(self, part: slice | Sequence[int]) -> Mesh: ...

    def __getitem__(self, part: SupportsIndex | slice | Sequence[int]) -> Device | Mesh:
        """Returns the device at an index, or a sub-mesh for a slice or list.

        Raises:
            TypeError: ``part`` is something else. Booleans are not accepted: as a mask they would
                select other devices.
            IndexError: the mesh has no device of this index.
            ValueError: the part would have no device, or one twice.
        """
        indices = np.arange(len(self))[part] if isinstance(part, slice) else np.asarray(part)
        if indices.ndim > 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise TypeError(
                f"mesh[{reprlib.repr(part)}] must be an index, a slice or a list of indices"
            )
        try:
            chosen = tuple([self.devices[index] for index in indices.ravel().tolist()])
        except IndexError:
            raise IndexError(
                f"mesh[{reprlib.repr(part)}]: the mesh has {len(self)} devices"
            ) from None
        if indices.ndim == 0:
            return chosen[0]
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(
                f"mesh[{reprlib.repr(part)}] must name at least one device, and none twice"
            )
        return Mesh(chosen, self.mesh_state, self._make_collective, self._on_close)

    def __repr__(self) -> str:
        placement = listed([device.physical for device in self.devices], 8)
        return f"<Mesh {self.backend} [{placement}]>"
