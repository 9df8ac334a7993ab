"""A mesh: the devices that were opened together, as one value."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike

from gradreduce.errors import BackendUnavailableError, CollectiveError, NotCopied, listed

from .collective import Collective
from .device import Device
from .dtypes import as_flag
from .exchange import fail
from .flat_buffer import FlatBuffer
from .mesh_reset import reset
from .mesh_state import MeshState
from .op_log import FlightEntry, Journal
from .pending_calls import as_deadline
from .stream_sync import by_physical
from .trace import trace_path, traced

# How long closing a failed mesh waits for the thread that reports its failure.
_REPORT_SECONDS = 5.0


class Mesh(NotCopied):
    """An ordered tuple of logical devices that share collectives and a journal.

    A context manager: leaving it closes the mesh, after which its Buffers raise
    ``BackendUnavailableError``. ``mesh[0]`` is a device. A part of a mesh (``mesh[0:2]``,
    ``mesh[[0, 3]]``) has the same devices and is taken wherever a mesh is; closing it closes the
    whole.

    Attributes:
        devices: this process's logical devices, in order; as many as a ``PerReplica`` has values.
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
            vars(device).setdefault("mesh", self)  # the first mesh that is made of it is the whole
        self.mesh_state = mesh_state
        self._make_collective = collective
        self._on_close = on_close

    @property
    def num_replicas(self) -> int:
        """Logical devices over all processes; what MEAN divides by. Of a part: its devices."""
        group = self.mesh_state.process_group
        if group is None or len(self.devices) < group.counts[group.rank]:
            return len(self.devices)
        return sum(group.counts)

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        group = self.mesh_state.process_group
        return 0 if group is None else group.rank

    @property
    def num_processes(self) -> int:
        """The number of processes that share the work."""
        group = self.mesh_state.process_group
        return 1 if group is None else group.size

    @property
    def backend(self) -> str:
        """``"sim"`` or ``"cuda"``."""
        return self.mesh_state.backend

    @property
    def collective(self) -> Collective:
        """Collectives over the physical devices; made at the first use, shared by all parts.

        Raises:
            BackendUnavailableError: NCCL is missing, or the mesh is from before a fork.
        """
        self.mesh_state.check_process()
        return self._make_collective()

    @cached_property
    def by_physical(self) -> dict[int, tuple[int, ...]]:
        """Maps each physical device to the indices of its logical devices, in order."""
        return by_physical(self.devices)

    def journal(self) -> AbstractContextManager[Journal]:
        """Records launches, copies, bytes and waits of the devices while the block runs."""
        self.mesh_state.check_process()
        return self.mesh_state.log.journal()

    @contextmanager
    def trace(
        self, path: str | os.PathLike[str] | None = None, *, nvtx: bool = False
    ) -> Iterator[Journal]:
        """Writes a trace of what the devices do while the block runs, for Perfetto.

        The file has one complete event for each operation of the journal, by device and queue, in
        the Trace Event Format that ``ui.perfetto.dev`` and ``chrome://tracing`` open. Its times are
        the host's: an event lasts while the host submits the operation. On simulated devices
        without ``schedule_seed=`` that is the time in which it runs; on GPUs use ``nvtx=True``
        under Nsight Systems for times of the GPU. Uploads, fills and the host's waits last
        0 microseconds. The file is written when the block ends, by an error too.

        Example::

            with mesh.trace("step.json"):
                step(terms)

        Args:
            path: of the file, which is replaced; None: none is written.
            nvtx: show an NVTX range for each pack or tensor, named as in the flight record, around
                the calls that submit its work. The simulation has none.

        Returns:
            A context manager, with the block's ``Journal``.

        Raises:
            ValueError: ``path`` is a folder or a device, or in a folder that does not exist.
            TypeError: ``nvtx`` is no boolean.
            OSError: the file cannot be written.
        """
        state = self.mesh_state
        state.check_process()
        ranges = state.nvtx if as_flag("nvtx", nvtx) else None
        target = None if path is None else trace_path(path)
        names = {device.index: device.name for device in self.devices[0].mesh.devices}
        before, state.log.ranges = state.log.ranges, ranges or state.log.ranges
        try:
            with traced(state.log, target, names) as journal:
                yield journal
        finally:
            state.log.ranges = before

    def flat_buffer(
        self, shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]], dtype: DTypeLike
    ) -> FlatBuffer:
        """Allocates zeros on every device for tensors of these shapes, laid out as a pack.

        Args:
            shapes: of the tensors, in the order in which they will be reduced; or by name, for
                errors and the log of ``prepare_all_reduce``.
            dtype: of all of them.

        Raises:
            TypeError: ``shapes`` is no list, or ``dtype`` cannot be added.
            ValueError: a shape is no list of integers from 0 up.
        """
        return FlatBuffer.on(self.devices, shapes, dtype)

    def synchronize(self, *, deadline: float | None = None) -> None:
        """Blocks the host until every queue of every device is empty.

        Args:
            deadline: seconds from now, for all of them; if they pass first, the mesh fails.

        Raises:
            CollectiveError: the deadline passed, or the mesh failed meanwhile.
            BackendUnavailableError: a device has failed, or the mesh closed.
        """
        seconds = as_deadline(deadline)
        end = None if seconds is None else time.monotonic() + seconds
        for device in self.devices:
            # A queue that is empty by then has come to its end in time.
            rest = None if end is None else max(end - time.monotonic(), 1e-6)
            device.synchronize(deadline=rest)

    def flight_record(self) -> list[FlightEntry]:
        """Returns the last 1,000 operations of the whole mesh, oldest first.

        Always kept. Which of them are done is worked out now: ``done`` is False for what is not
        known to be over. Waits for no device, and works on a failed or closed mesh.
        """
        mesh_state = self.mesh_state
        mesh_state.check_process()
        alive = mesh_state.reason is None and not mesh_state.is_closed
        return mesh_state.log.entries(self.devices[0].mesh.devices, fresh=alive)

    def reset(self, *, timeout: float | None = 30.0) -> None:
        """Makes the whole mesh usable again after a deadline has passed.

        Waits until the communicators are aborted and the queues empty. On the simulation what
        never ran is dropped. Communicators are made again at their next use. **What unfinished work
        would have written is undefined**: Buffers, Variables and results of the time before hold
        whatever they hold. Accumulators over these devices are empty afterwards, at the global
        step that they had. Prepared steps can be called again. Failed devices stay failed.

        A mesh that has not failed is left as it is. Calls of other threads should have come back
        (they raise) before.

        Args:
            timeout: seconds to wait at most; None for ever.

        Raises:
            CollectiveError: a device or communicator does not come to its end in time; named. The
                mesh cannot be used yet, and may be reset later. A failed mesh over several
                processes cannot be reset: they do not know how far each has come.
            BackendUnavailableError: the mesh is closed.
            ValueError: ``timeout`` is no number above 0.
        """
        reset(self.devices[0].mesh.devices, timeout)

    def trim(self) -> None:
        """Returns the free memory of every device's pool to the system."""
        for device in self.devices:
            device.trim()

    def close(self) -> None:
        """Closes the mesh and all its parts; may be called twice.

        Raises:
            BackendUnavailableError: the mesh is from before a fork: it is the parent's to close.
            CollectiveError: another process has not closed its mesh in time; this one is closed.

        Over several processes the host waits until the others close theirs too, at most for the
        ``timeout`` of ``open_mesh``. A mesh that has failed waits for nobody.
        """
        self.mesh_state.check_process()
        self._finish_exchanges()
        if self.mesh_state.reason is not None:  # memory of queues that are stuck is kept by then
            self.mesh_state.failure_reported.wait(_REPORT_SECONDS)
        self.mesh_state.close()
        try:
            if self.mesh_state.process_group is not None:
                self.mesh_state.process_group.leave(self.mesh_state.reason)
        finally:
            self._on_close()
            for device in self.devices[0].mesh.devices:
                device.drop_free_memory()

    def _finish_exchanges(self) -> None:
        """Waits for queued exchanges, before the others hear that this process leaves."""
        mesh_state = self.mesh_state
        group = mesh_state.process_group
        if group is None or group.move_on_gpu is None or mesh_state.is_closed:
            return
        with suppress(CollectiveError, BackendUnavailableError):  # the mesh has failed
            self.devices[0].mesh.synchronize(deadline=group.timeout)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: object) -> None:
        if self.mesh_state.is_inherited:  # a child that ends may leave the parent's block
            return
        state = self.mesh_state
        is_usable = not state.is_closed and state.reason is None
        several = state.process_group is not None and is_usable
        if several and isinstance(error[1], Exception | KeyboardInterrupt):
            # Nothing to wait for: the others cannot go on without this process.
            fail(self.mesh_state, f"left its mesh by {error[1]!r}")
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
            TypeError: anything else, booleans too, which as a mask would mean other places.
            IndexError: the mesh has no such place.
            ValueError: a part without a device, or with one twice.
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
