"""The AGN centre: variables and slots that all workers push to and pull from; worker threads.

Its lock is held while a push is launched and while variables and slots are made; never while a
kernel is compiled, nor while the host waits for a device.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gradreduce import ops
from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    Mesh,
    ModuleLock,
    Waiters,
    as_deadline,
)
from gradreduce.errors import (
    CollectiveError,
    DeadlineExceededError,
    DeviceMismatchError,
    NotCopied,
    listed,
)
from gradreduce.optim.hyperparameters import as_count
from gradreduce.optim.optimizer import Optimizer
from gradreduce.optim.slots import Slots

from .checkpoint import ready_center, saved_center

__all__ = ["PREFIX", "AGNCenter", "StalePushError", "WorkerThread", "process_wide"]


class WorkerThread(threading.Thread):
    """A thread whose ``join`` raises what ended it; whoever keeps it keeps nothing of the training.

    Args:
        task_index: of the worker.
        work: what it does.
        lose: told that, with the task index.
    """

    def __init__(
        self,
        task_index: int,
        work: Callable[[], object],
        lose: Callable[[int, BaseException], None],
    ) -> None:
        super().__init__(name=f"agn-worker-{task_index}", daemon=True)
        self._task, self._work, self._lose = task_index, work, lose
        self._error: BaseException | None = None
        self._said = ""  # of it, when it was raised

    def run(self) -> None:
        """The work."""
        try:
            self._work()
        except BaseException as error:  # whoever joins gets it
            self._error = error
            self._lose(self._task, error)
            _let_go(error)
        finally:
            del self._work, self._lose

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker has ended, and raises the exception that ended it.

        The first time that one itself, which is not kept then: it holds the frames of whoever got
        it, and so all that these hold. Later a ``RuntimeError`` that names it.

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


def _let_go(error: BaseException) -> None:
    """Of the locals in the frames that it, and what it came behind, has passed."""
    left: list[BaseException | None] = [error]
    known = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


PREFIX = "global_center_variable"

_log = logging.getLogger("gradreduce.agn")


class StalePushError(Exception):
    """A push was planned for slots that a checkpoint has replaced; nothing was changed."""


class AGNCenter(NotCopied):
    """Centre variables and their slots, for the workers of one training.

    A variable is made when the first worker makes its own of that name, with that one's value; the
    slots of a rule when its first push comes. Whole variables are spread over the devices: each
    goes to that which holds the fewest bytes, so that pushes of many workers do not queue at one
    GPU. All methods may be called from any thread.

    Args:
        mesh: where they lie: a mesh, a part of one, or a device, its name (``"gpu:1"``) or a
            ``torch.device``, in ``gr.default_mesh()``. Default: all of that.

    Attributes:
        devices: those.
        version: how often its slots were replaced by those of a checkpoint.
        getters: of its workers, as long as they live.

    Raises:
        TypeError: ``mesh`` is something else.
        ValueError: a name of a device that the default mesh has not.
    """

    _copied_as = "pass its state_dict(), and load that into a new one"

    def __init__(self, mesh: Mesh | DeviceLike | None = None) -> None:
        given = default_mesh() if mesh is None else mesh
        self.devices: tuple[Device, ...] = as_devices(given, "mesh=")
        self.version = 0
        self._mutex = threading.RLock()
        self._variables: dict[str, Variable] = {}
        self._slots: Slots | None = None
        self._rule = ""
        self._kind: type[Optimizer] | None = None
        self._fault: str | None = None
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._unlocked = 0  # pushes that run without locking
        self._loading: object = None  # who loads, or waits for these to end
        self.getters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiters = Waiters(self._mutex)
        self._lost: list[int] = []

    # Asked before each use: in a forked child a thread that holds the lock may not exist.

    @property
    def _lock(self) -> threading.RLock:
        self.devices[0].mesh_state.check_process()
        return self._mutex

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return f"<AGNCenter of {len(self._variables)} variables on {names}>"

    # -- members ----------------------------------------------------------------------------------

    def variables(self) -> list[Variable]:
        """Centre variables and their slots, sorted by name."""
        with self._lock:
            kept = [*self._variables.values(), *self.slot_variables()]
            return sorted(kept, key=lambda each: each.name)

    @property
    def lost_workers(self) -> tuple[int, ...]:
        """Task indices of the workers that an exception has ended, in that order."""
        with self._lock:
            return tuple(self._lost)

    def start_worker(self, task_index: int, work: Callable[[], object]) -> threading.Thread:
        """Runs a worker in a thread of its own.

        Args:
            task_index: of the worker.
            work: what it does; called without arguments.

        Returns:
            The running thread, a daemon: join it. Its ``join`` raises the exception that ended the
            worker, if one did; the others go on, and ``lost_workers`` names it.

        Raises:
            TypeError: a ``task_index`` that is no integer, or ``work`` that cannot be called.
            ValueError: a negative ``task_index``.
        """
        if not callable(work):
            raise TypeError(f"work={work!r} is not callable")
        number = as_count("task_index", task_index, least=0)
        self._found(number)
        worker = WorkerThread(number, work, self.lose)
        worker.start()
        return worker

    def state_dict(self, *, deadline: float | None = None) -> dict[str, Any]:
        """Centre variables and their slots, as host data; halves come as float32.

        If all workers lock, of one moment: no push is half in it. Without, a variable and its slots
        are, and another variable may be a push behind. Waits for the devices.

        Args:
            deadline: seconds from now in which the devices must be done, or their mesh dies.
        """
        seconds = as_deadline(deadline)
        with (
            self._lock,
            self.devices[0].mesh_state.launch_lock,
        ):  # each push holds the second, at least
            self.check_usable()
            finish = saved_center(self._rule, self._variables, self._slots)
        return finish(seconds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        r"""Puts back what ``state_dict`` gave, in this process or another, on any backend.

        A centre that refuses pushes, because one failed half way, is whole again. What is refused
        has changed nothing; an error of a device half way makes the centre refuse pushes. Pushes of
        workers that run meanwhile come before it, or behind.

        Args:
            state: of a centre with variables of the same names, which workers have made, and with
                their ``AGNOptimizer``\ s if it has slots. Load the workers behind it.

        Raises:
            KeyError: a key is missing or unknown, or a variable that no worker has made.
            TypeError: a value of another type.
            ValueError: another format or rule, slots where no worker has made an
                ``AGNOptimizer``, or an array of another shape or dtype.
        """
        self.devices[0].mesh_state.check_process()
        mine = object()

        def loaded() -> bool:
            if self._loading is None:
                self._loading = mine  # from here on pushes that do not lock wait, too
            if self._loading is not mine or self._unlocked:
                return False
            load = ready_center(self._rule, self._variables, self._slots, state)
            self.version += 1
            self._fault = "a load_state_dict failed part-way"
            load()
            self._fault = None
            return True

        with DeferInterrupts():
            try:
                self._waiters.until(loaded)
            finally:
                with self._lock:
                    if self._loading is mine:
                        self._loading = None
                        self._waiters.notify()

    # -- what getters and optimizers ask ----------------------------------------------------------

    def check_reached(self, devices: Sequence[Device]) -> None:
        """Raises unless a worker's devices are of the same mesh, so that copies get there."""
        for device in devices:
            if device.mesh_state is not self.devices[0].mesh_state:
                raise DeviceMismatchError(
                    f"{device.name} of the worker and {self.devices[0].name} of the centre belong "
                    "to different meshes; pass center=gr.AGNCenter(mesh) with the worker's mesh"
                )

    def variable_for(self, name: str, local: Variable) -> Variable:
        """The centre variable of a name, made like a worker's if it is the first of that name.

        Raises:
            ValueError: it has another shape or dtype.
        """
        with self._lock:
            found = self._variables.get(name)
            if found is None:
                found = self._variables[name] = Variable(
                    local.buffers[0], f"{PREFIX}/{name}", trainable=False, device=self._emptiest()
                )
            elif (found.shape, found.dtype) != (local.shape, local.dtype):
                raise ValueError(
                    f"{name!r} is {local.dtype}{list(local.shape)} at this worker, but "
                    f"{found.dtype}{list(found.shape)} at the centre, as another worker created it"
                )
            return found

    def _emptiest(self) -> Device:
        held = dict.fromkeys(self.devices, 0)
        for variable in self._variables.values():
            held[variable.devices[0]] += variable.buffers[0].nbytes
        return min(self.devices, key=lambda device: held[device])

    def join(self, optimizer: Optimizer) -> Slots:
        """The slots of centre variables, whose rule is that of the first optimizer.

        Raises:
            ValueError: one of another class, or with other slots or masters.
        """
        with self._lock:
            kind, own = type(optimizer), optimizer._slots
            rule = kind.__name__
            if self._slots is None:
                self._rule, self._kind = rule, kind
                dtype = "float32" if own.has_masters else None
                self._slots = Slots(own.owner, own.names, dtype)
            elif (kind, own.names, own.has_masters) != (
                self._kind, self._slots.names, self._slots.has_masters
            ):  # fmt: skip
                raise ValueError(
                    f"the centre uses {self._rule} with slots {list(self._slots.names)}"
                    f"{' and masters' if self._slots.has_masters else ''}; this worker uses "
                    f"{'another ' if rule == self._rule and kind is not self._kind else ''}{rule} "
                    f"with {list(own.names)}{' and masters' if own.has_masters else ''}; all "
                    "workers must use the same rule"
                )
            return self._slots

    def prepare(
        self, optimizer: Optimizer, variables: Sequence[Variable]
    ) -> dict[Variable, list[Buffer]]:
        """Makes the slots of centre variables that are not there yet.

        Returns:
            For each variable what an update of it writes, of one moment: see ``Slots.rows``.
        """
        for variable in variables:
            if optimizer._slots.wants_master(variable):
                ops.prepare_pack(
                    variable.devices[0], optimizer._slots.state_dtype(variable), variable.dtype
                )
        with self._lock:
            self.check_usable()
            slots = self.join(optimizer)
            slots.make(variables, optimizer._slot_start)
            return {variable: slots.rows(variable)[0] for variable in variables}

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """That of a centre variable; None if it was not created."""
        with self._lock:
            return self._slots.by_name.get(name, {}).get(variable) if self._slots else None

    def slots_of(self, variable: Variable) -> list[Variable]:
        """Those of a centre variable that exist."""
        with self._lock:
            return self._slots.of(variable) if self._slots else []

    def slot_variables(self) -> list[Variable]:
        """Every slot of a centre variable."""
        with self._lock:
            return self._slots.all() if self._slots else []

    def pushing(self, *, use_locking: bool) -> AbstractContextManager[object]:
        """Inside, the centre is not loaded; with locking, no other worker pushes or pulls."""
        return self._lock if use_locking else self._among_others()

    @contextmanager
    def _among_others(self) -> Iterator[None]:
        self.devices[0].mesh_state.check_process()

        def begun() -> bool:
            if self._loading is not None:
                return False
            self._unlocked += 1
            return True

        self._waiters.until(begun)
        try:
            yield
        finally:
            with self._lock:
                self._unlocked -= 1
                self._waiters.notify()

    def check_usable(self, version: int | None = None) -> None:
        """Raises ``CollectiveError`` if a push failed half way.

        Args:
            version: for which a push was planned; ``StalePushError`` if there is another by now.
        """
        if version is not None and version != self.version:
            raise StalePushError("the centre was loaded after the push was planned")
        if self._fault is not None:
            raise CollectiveError(
                f"the centre is only partly updated: {self._fault}; restore it with load_state_dict"
            )

    def half_pushed(self, task: str, error: BaseException) -> None:
        """From now on pushes are refused."""
        self._fault = f"a push failed part-way: {task}: {error!r}"
        error.add_note(
            "A push failed part-way: the centre rejects pushes until load_state_dict restores it."
        )

    # -- workers that come and go ------------------------------------------------------------------

    def begin(self, task_index: int) -> None:
        """A worker is there; if it was lost, it is back."""
        with self._lock:
            self._begun.add(task_index)
            self._ended.discard(task_index)
            self._found(task_index)
            self._waiters.notify()

    def end(self, task_index: int) -> None:
        """A worker is done, or lost. When all are that began, the next to come are others."""
        with self._lock:
            self._ended.add(task_index)
            if self._ended >= self._begun:  # who still waits goes on looking at the old ones
                self._begun, self._ended = set(), set()

    def _found(self, task_index: int) -> None:
        with self._lock:
            if task_index in self._lost:
                self._lost.remove(task_index)

    def wait_for(self, num_worker: int, timeout: float) -> None:
        """Blocks until so many different workers have begun, one that was lost since included.

        Raises:
            DeadlineExceededError: naming who is missing.
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

    def lose(self, task_index: int, error: BaseException) -> None:
        """An exception has ended a worker: one warning says so."""
        with self._lock:
            if task_index in self._lost:
                return
            self._lost.append(task_index)
            self.end(task_index)
        _log.warning(
            "worker %d failed, the other workers continue: %s: %s",
            task_index, type(error).__name__, str(error),  # not itself: a record may be kept
        )  # fmt: skip


_latest: weakref.ref[AGNCenter] | None = None
_latest_lock = ModuleLock()


def process_wide(near: Device, getter: object) -> AGNCenter:
    """The centre of all getters that name none; it serves as long as one of them lives.

    Args:
        near: a device of the mesh over which it is spread, if it is made now.
        getter: that asks.
    """
    global _latest
    with _latest_lock.lock:
        center = None if _latest is None else _latest()
        mesh_state = None if center is None else center.devices[0].mesh_state
        gone = mesh_state is None or mesh_state.is_closed or mesh_state.is_inherited
        if center is None or gone or not center.getters:
            center = AGNCenter(near.mesh)
            _latest = weakref.ref(center)
        center.getters.add(getter)
        return center
