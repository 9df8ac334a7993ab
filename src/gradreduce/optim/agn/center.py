"""The AGN center: variables and slots that the workers of one training share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.checkpoint import downloader, load_all, values_of
from gradreduce.comm.process_group import check_one_process
from gradreduce.device import (
    Device,
    Mesh,
    as_deadline,
    names_of,
)
from gradreduce.errors import NotCopied
from gradreduce.optim.hyperparameters import as_integer

from .center_interface import Center
from .center_rules import CenterRule
from .center_state import CenterState
from .checkpoint import center_table, ready_center
from .rounds import PushKind, as_options
from .session_hook import WorkerThread


class AGNCenter(NotCopied):
    """Center variables and their slots, shared by the workers of one training.

    The first worker that creates a variable of a name also creates the center variable, with the
    same value. The first push creates the slots. Each new variable goes to the device with the
    fewest bytes, so that pushes of many workers do not queue on one GPU. All methods are
    thread-safe. Source: ``tf.contrib.opt.AGNOptimizer``, whose center is on parameter servers.

    Args:
        mesh: the devices of the variables: a mesh, a part of one, or a device. A device may be
            passed as its name (``"gpu:1"``) or as a ``torch.device``, in ``gr.default_mesh()``.
            Default: all devices of ``gr.default_mesh()``.
        center_rule: how a push changes the center: a rule of ``gr.center_rules``, or one of yours.
            The inner optimizer then makes only the local steps. Default: the center applies the
            mean gradient by the inner optimizer, as AGN does.
        push: what a rule gets: ``"gradient_mean"``, or ``"delta"``, the worker's variables at the
            start of the period minus those at its end.
        num_required: applies the rule to rounds: when this many workers have pushed, the rule gets
            the weighted mean of their pushes, and all of them pull. A push waits until its round
            is applied. Workers that have ended (``make_session_run_hook``) are not waited
            for. None: each push is applied at once.
        grace: seconds that a round with enough pushes waits for those of other workers.
        max_staleness: drops a push if the center has applied more pushes of other workers since
            the worker last pulled; the worker pulls. None: no limit.

    Attributes:
        devices: the devices of the variables.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the default mesh does not have the device, a number is out of range, an option
            needs a ``center_rule``.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> center = gr.AGNCenter(mesh)
        >>> getter = gr.AGNCustomGetter(mesh.devices[1], center=center)
        >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
        >>> center.variables()
        [<Variable 'global_center_variable/w' float32[1] on sim:0>]
        >>> center.values()
        {'w': array([4.], dtype=float32)}
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    def __init__(  # options of one call
        self,
        mesh: Mesh | DeviceLike | None = None,
        *,
        center_rule: CenterRule | None = None,
        push: PushKind = "gradient_mean",
        num_required: int | None = None,
        grace: float = 0.0,
        max_staleness: int | None = None,
    ) -> None:
        self.devices: tuple[Device, ...] = as_devices(
            default_mesh() if mesh is None else mesh, "mesh="
        )
        check_one_process(self.devices[0], "AGNCenter")
        options = as_options(center_rule, push, num_required, grace, max_staleness)
        self._state = CenterState(self.devices, options)
        # Getters and optimizers use only this attribute. For a center in another process it is
        # another implementation of ``Center``.
        self._shared: Center = self._state

    def __repr__(self) -> str:
        return f"<AGNCenter of {len(self._state.variables)} variables on {names_of(self.devices)}>"

    # -- members ----------------------------------------------------------------------------------

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """Returns the slot ``name`` of a center variable; None if there is none."""
        return self._shared.slot(variable, name)

    def variables(self) -> list[Variable]:
        """Returns the center variables without slots, sorted by name.

        ``AGNOptimizer.variables`` returns the slots.
        """
        with self._state.lock:
            return sorted(self._state.variables.values(), key=lambda each: each.name)

    def values(self) -> dict[str, Any]:
        """Returns a new array of each variable by its name (``"w"``), between two pushes.

        The call waits for the devices.

        Raises:
            CollectiveError: a push failed part-way.
        """
        center = self._state
        with center.lock:
            center.check_usable()
            copies = values_of(center.variables).save()
        return {name: copies[name].numpy() for name in sorted(copies)}

    @property
    def failed_workers(self) -> tuple[int, ...]:
        """The task indices of workers that an exception ended, in the order of the exceptions."""
        return tuple(self._shared.registry.list_failed())

    def start_worker(self, task_index: int, work: Callable[[], object]) -> threading.Thread:
        """Runs a worker in its own thread.

        If an exception ends the worker, the other workers continue, and ``failed_workers`` contains
        its task index.

        Args:
            task_index: the number of the worker, from 0 on.
            work: the function to run, which is called without arguments.

        Returns:
            The running daemon thread. Call its ``join``, which raises the exception that ended the
            worker, if there was one.

        Raises:
            TypeError: ``task_index`` is not an integer, or ``work`` is not callable.
            ValueError: ``task_index`` is negative.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> center = gr.AGNCenter(mesh)
            >>> def work():
            ...     getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
            ...     w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
            ...     inner = gr.GradientDescentOptimizer(0.25)
            ...     optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
            ...     with optimizer.make_session_run_hook(True, 0):
            ...         for _ in range(4):
            ...             optimizer.minimize(lambda: np.sum(2 * w))
            >>> center.start_worker(0, work).join()
            >>> center.variables()[0].numpy()
            array([3.], dtype=float32)
        """
        if not callable(work):
            raise TypeError(f"work={work!r} is not callable")
        number = as_integer("task_index", task_index, least=0)
        registry = self._shared.registry
        registry.clear_failure(number)
        worker = WorkerThread(number, work, registry)
        worker.start()
        return worker

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns center variables and slots as host data, for a checkpoint.

        Float16 and bfloat16 values are saved as float32. The state is consistent: it contains each
        push completely or not at all. The call waits for the devices.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Raises:
            ValueError: ``deadline`` is not a number above 0, ``output_type`` is unknown, or it is
                ``"torch"`` and PyTorch is not imported.
            CollectiveError: a push failed part-way.
        """
        download, center = downloader(as_deadline(deadline), output_type), self._state
        with center.lock:
            center.check_usable()
            copies = center_table(center.variables, center.slots, center.owner_of_progress).save()
        return download(copies)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a ``state_dict``, which may come from another process or backend.

        Workers must first create the variables in ``state`` and, if it has slots, an
        ``AGNOptimizer``. Load the states of the workers after that of the center.

        If the center rejected pushes, because one had failed part-way, it accepts them again. If
        ``state`` is invalid, nothing changes. If a device fails during the load, the center rejects
        pushes. Pushes of other threads run before or after the load. The host waits for a push that
        is being launched, and for no device.

        Args:
            state: the ``state_dict`` of a center with variables of the same names.

        Raises:
            KeyError: a key is missing or unknown, or no worker has created a variable.
            TypeError: a value has a wrong type.
            ValueError: the format or rule differs, there are slots and no worker has an
                ``AGNOptimizer``, or an array has another shape or dtype.
        """
        center = self._state
        with center.lock:
            load = ready_center(center.variables, center.slots, state, center.owner_of_progress)
            begin = partial(setattr, center, "fault", "a load_state_dict failed part-way")
            load_all([begin, load, center.end_load])
