"""The AGN center: shared variables and slots, and the threads of its workers.

Its lock is held while a push is launched and while variables and slots are created, but not while a
kernel is compiled or the host waits for a device.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradreduce import ops
from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.checkpoint import downloader
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    Mesh,
    ModuleLock,
    Waiters,
    as_deadline,
)
from gradreduce.device.process_group import check_one_process
from gradreduce.errors import (
    CollectiveError,
    DeadlineExceededError,
    NotCopied,
    listed,
)
from gradreduce.optim.hyperparameters import as_count
from gradreduce.optim.optimizer import Optimizer
from gradreduce.optim.slots import Slots

from .checkpoint import queued_center, ready_center


class WorkerThread(threading.Thread):
    """A thread whose ``join`` raises the exception that ended it.

    After it has ended it holds no reference to objects of the training.

    Args:
        task_index: of the worker.
        work: function to run.
        mark_failed: called with the task index and the exception if ``work`` raises.
    """

    def __init__(
        self,
        task_index: int,
        work: Callable[[], object],
        mark_failed: Callable[[int, BaseException], None],
    ) -> None:
        super().__init__(target=work, name=f"agn-worker-{task_index}", daemon=True)
        self._task, self._mark_failed = task_index, mark_failed
        self._error: BaseException | None = None
        self._said = ""  # text of the error that join() has raised

    def run(self) -> None:
        """Runs the worker's function."""
        try:
            super().run()
        except BaseException as error:  # raised by join()
            self._error = error
            self._mark_failed(self._task, error)
            _clear_frames(error)
        finally:
            del self._mark_failed

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker has ended, and raises the exception that ended it.

        The first call raises that exception and drops it, because its traceback refers to frames of
        the caller. Later calls raise a ``RuntimeError`` with its text.

        Args:
            timeout: seconds; afterwards ``is_alive()`` says whether it has ended.
        """
        super().join(timeout)
        if self.is_alive():
            return
        error, self._error = self._error, None
        if error is not None:
            self._said = f"{type(error).__name__}: {error}"
            try:
                raise error
            finally:
                del error
        if self._said:
            raise RuntimeError(
                f"{self.name} failed with {self._said}; an earlier join() raised that exception"
            )


def _clear_frames(error: BaseException) -> None:
    """Clears the frames in the tracebacks of an error, its causes and contexts."""
    left: list[BaseException | None] = [error]
    known = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


_log = logging.getLogger("gradreduce.agn")


class StalePushError(Exception):
    """A push was planned for slots that a checkpoint has replaced; state is unchanged."""


class AGNCenter(NotCopied):
    """Center variables and their slots, shared by the workers of one training.

    A center variable is created when the first worker creates its variable of that name, with the
    same value; slots are created by the first push. Variables are distributed over the devices:
    each goes to the device with the fewest bytes, so that pushes of many workers do not queue on
    one GPU. All methods are thread-safe.

    Args:
        mesh: devices of the variables: a mesh, a part of one, or a device, its name (``"gpu:1"``)
            or a ``torch.device``, in ``gr.default_mesh()``. Default: all devices of that mesh.

    Attributes:
        devices: of the variables.

    Raises:
        TypeError: ``mesh`` is something else.
        ValueError: a name of a device that the default mesh does not have.
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    def __init__(self, mesh: Mesh | DeviceLike | None = None) -> None:
        location = default_mesh() if mesh is None else mesh
        self.devices: tuple[Device, ...] = as_devices(location, "mesh=")
        check_one_process(self.devices[0], "AGNCenter")
        self._version = 0  # how often a checkpoint has replaced the slots
        self._mutex = threading.RLock()
        self._variables: dict[str, Variable] = {}
        self._slots: Slots | None = None
        self._fault: str | None = None
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._getters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiters = Waiters(self._mutex)
        self._failed: list[int] = []

    # Check before each use: in a forked child the thread that holds the lock may not exist.

    @property
    def _lock(self) -> threading.RLock:
        self.devices[0].mesh_state.check_process()
        return self._mutex

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return f"<AGNCenter of {len(self._variables)} variables on {names}>"

    # -- members ----------------------------------------------------------------------------------

    def variables(self) -> list[Variable]:
        """Returns center variables and their slots, sorted by name."""
        with self._lock:
            found = [*self._variables.values(), *self._slot_variables()]
            return sorted(found, key=lambda each: each.name)

    @property
    def failed_workers(self) -> tuple[int, ...]:
        """Task indices of the workers that an exception ended, in that order."""
        with self._lock:
            return tuple(self._failed)

    def start_worker(self, task_index: int, work: Callable[[], object]) -> threading.Thread:
        """Runs a worker in its own thread.

        Args:
            task_index: of the worker.
            work: function to run, called without arguments.

        Returns:
            The running daemon thread; call its ``join``, which raises the exception that ended the
            worker, if any. Other workers continue, and ``failed_workers`` contains the task index.

        Raises:
            TypeError: a ``task_index`` that is not an integer, or ``work`` is not callable.
            ValueError: a negative ``task_index``.
        """
        if not callable(work):
            raise TypeError(f"work={work!r} is not callable")
        number = as_count("task_index", task_index, least=0)
        self._clear_failure(number)
        worker = WorkerThread(number, work, self._mark_failed)
        worker.start()
        return worker

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns the state of center variables and slots as host data.

        Float16 and bfloat16 are returned as float32. If all workers lock, the state is consistent:
        it contains each push completely or not at all. Without locking, a variable and its slots
        are consistent, and another variable may be one push behind. Waits for the devices.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh has failed.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Raises:
            ValueError: another ``output_type``, or PyTorch is not imported.
            CollectiveError: the mesh has failed, or a push failed part-way.
        """
        download = downloader(as_deadline(deadline), output_type)
        with (
            self._lock,
            self.devices[0].mesh_state.launch_lock,
        ):  # each push holds the second, at least
            self._check_usable()
            copies = queued_center(self._variables, self._slots)
        state: dict[str, Any] = download(copies)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        r"""Restores a ``state_dict``, also of another process or backend.

        A center that rejects pushes, because one failed part-way, is usable again. If the state is
        invalid, nothing changes; if a device fails part-way, the center rejects pushes. Concurrent
        pushes of workers run before or after the load.

        Args:
            state: of a center with variables of the same names. Workers must have created these
                variables, and their ``AGNOptimizer``\ s if there are slots. Load the workers
                afterwards.

        Raises:
            KeyError: a key is missing or unknown, or a variable that no worker has created.
            TypeError: a value of another type.
            ValueError: another format or rule, slots although no worker has an
                ``AGNOptimizer``, or an array of another shape or dtype.
        """
        with DeferInterrupts(), self._lock:
            load = ready_center(self._variables, self._slots, state)
            with self.devices[0].mesh_state.launch_lock:  # each push holds it, at least
                self._version += 1
                self._fault = "a load_state_dict failed part-way"
                load()
                self._fault = None

    # -- what getters and optimizers ask ----------------------------------------------------------

    def _variable_for(self, name: str, local: Variable) -> Variable:
        """Returns the center variable of a name; the first call creates it from ``local``.

        Raises:
            ValueError: it has another shape or dtype.
        """
        with self._lock:
            found = self._variables.get(name)
            if found is None:
                held = dict.fromkeys(self.devices, 0)
                for variable in self._variables.values():
                    held[variable.devices[0]] += variable.buffers[0].nbytes
                device = min(self.devices, key=held.__getitem__)
                full_name = f"global_center_variable/{name}"
                found = Variable(local.buffers[0], full_name, trainable=False, device=device)
                self._variables[name] = found
            elif (found.shape, found.dtype) != (local.shape, local.dtype):
                raise ValueError(
                    f"{name!r} is {local.dtype}{list(local.shape)} at this worker, but "
                    f"{found.dtype}{list(found.shape)} at the center, as another worker created it"
                )
            return found

    def _join(self, optimizer: Optimizer) -> Slots:
        """Returns the center's slots; the first optimizer defines the rule.

        Raises:
            ValueError: an optimizer of another class, or with other slots or masters.
        """
        with self._lock:
            own, slots = optimizer._slots, self._slots
            if slots is None:
                dtype = "float32" if own.has_masters else None
                slots = self._slots = Slots(own.kind, own.owner, own.names, dtype)
            elif own.rule != slots.rule:
                mine, theirs = own.kind.__name__, slots.kind.__name__
                raise ValueError(
                    f"the center uses {theirs} with slots {list(slots.names)}"
                    f"{' and masters' if slots.has_masters else ''}; this worker uses "
                    f"{'another ' if mine == theirs and own.kind is not slots.kind else ''}{mine} "
                    f"with {list(own.names)}{' and masters' if own.has_masters else ''}; all "
                    "workers must use the same rule"
                )
            return slots

    def _prepare(
        self, optimizer: Optimizer, variables: Sequence[Variable]
    ) -> dict[Variable, list[Buffer]]:
        """Creates missing slots of center variables.

        Returns:
            For each variable the buffers that its update writes; see ``Slots.rows``.
        """
        for variable in variables:
            if optimizer._slots.wants_master(variable):
                ops.prepare_pack(
                    variable.devices[0], optimizer._slots.state_dtype(variable), variable.dtype
                )
        with self._lock:
            self._check_usable()
            slots = self._join(optimizer)
            slots.make(variables, optimizer._slot_start)
            return {variable: slots.rows(variable)[0] for variable in variables}

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """Returns a slot of a center variable, or None."""
        with self._lock:
            return self._slots.by_name.get(name, {}).get(variable) if self._slots else None

    def _slots_of(self, variable: Variable) -> list[Variable]:
        """Returns the existing slots of a center variable."""
        with self._lock:
            return self._slots.of(variable) if self._slots else []

    def _slot_variables(self) -> list[Variable]:
        """Returns every slot of every center variable."""
        with self._lock:
            return self._slots.all() if self._slots else []

    def _pushing(self, *, use_locking: bool) -> AbstractContextManager[object]:
        """Context manager around a push: with locking, no other push and no load meanwhile.

        Without, a load may come between the launches of a push, which is then made again.
        """
        return self._lock if use_locking else nullcontext()

    def _check_version(self, version: int) -> None:
        """Raises ``StalePushError`` if the center was loaded after a push was planned."""
        if version != self._version:
            raise StalePushError("the center was loaded after the push was planned")

    def _check_usable(self) -> None:
        """Raises ``CollectiveError`` if a push failed part-way."""
        if self._fault is not None:
            raise CollectiveError(
                f"the center is only partly updated: {self._fault}; restore it with load_state_dict"
            )

    def _mark_push_failed(self, task: str, error: BaseException) -> None:
        """Records that a push failed part-way; later pushes raise."""
        if isinstance(error, StalePushError):  # the load has replaced what it wrote
            return
        self._fault = f"a push failed part-way: {task}: {error!r}"
        error.add_note(
            "A push failed part-way: the center rejects pushes until load_state_dict restores it."
        )

    # -- registration of workers -------------------------------------------------------------------

    def _begin(self, task_index: int) -> None:
        """Registers a worker, which is no longer among ``failed_workers``."""
        with self._lock:
            self._begun.add(task_index)
            self._ended.discard(task_index)
            self._clear_failure(task_index)
            self._waiters.notify()

    def _end(self, task_index: int) -> None:
        """Unregisters a worker. After all have ended, workers that begin form a new round."""
        with self._lock:
            self._ended.add(task_index)
            if self._ended >= self._begun:  # waiters still hold the old sets
                self._begun, self._ended = set(), set()

    def _clear_failure(self, task_index: int) -> None:
        with self._lock:
            if task_index in self._failed:
                self._failed.remove(task_index)

    def _wait_for(self, num_worker: int, timeout: float) -> None:
        """Blocks until ``num_worker`` workers have begun, including those that failed since.

        Raises:
            DeadlineExceededError: some are missing; the message lists them.
        """
        with self._lock:
            here = self._begun
        end = time.monotonic() + timeout

        def over() -> bool:
            return len(here) >= num_worker or time.monotonic() >= end

        self._waiters.until(over, lambda: max(0.0, end - time.monotonic()))
        with self._lock:
            begun = sorted(here)
        if len(begun) < num_worker:
            missing = [task for task in range(num_worker) if task not in begun]
            raise DeadlineExceededError(
                f"after {timeout} s {len(begun)} of {num_worker} workers have started, "
                f"[{listed(begun)}]; {num_worker - len(begun)} of [{listed(missing)}] are missing"
            )

    def _mark_failed(self, task_index: int, error: BaseException) -> None:
        """Records that an exception ended a worker, and logs one warning."""
        with self._lock:
            if task_index in self._failed:
                return
            self._failed.append(task_index)
            self._end(task_index)
        _log.warning(
            "worker %d failed, the other workers continue: %s: %s",
            task_index, type(error).__name__, str(error),  # as text: a handler may store the record
        )  # fmt: skip


_latest: weakref.ref[AGNCenter] | None = None
_latest_lock = ModuleLock()


def process_wide(device: Device, getter: object) -> AGNCenter:
    """Returns the process-wide center, which exists as long as one of its getters.

    Args:
        device: its mesh has the variables if the center is created now.
        getter: registered with the center.
    """
    global _latest
    with _latest_lock.lock:
        center = None if _latest is None else _latest()
        mesh_state = None if center is None else center.devices[0].mesh_state
        gone = mesh_state is None or mesh_state.is_closed or mesh_state.is_inherited
        if center is None or gone or not center._getters:
            center = AGNCenter(device.mesh)
            _latest = weakref.ref(center)
        center._getters.add(getter)
        return center
