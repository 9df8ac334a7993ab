"""Variables of an AGN worker: local copies, sums of gradients, and the step counter.

``local_step`` and sums that are zero are kept on the host. Their buffers are written only when they
are read, which saves a launch in each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from gradreduce.arrays.convert import numbers
from gradreduce.arrays.get_variable import validate_reuse
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    Mesh,
    ModuleLock,
    accumulate_dtype,
    as_dtype,
    names_of,
)
from gradreduce.errors import DeviceMismatchError, NotCopied

from .center import AGNCenter
from .center_interface import WorkerVariables
from .sums import dense_sum


class LazyVariable(Variable):
    """A read-only Variable whose buffers are computed when they are read.

    Args:
        name: the name of the Variable.
        devices: the device of each buffer.
        read: computes the buffers.
    """

    def __init__(
        self, name: str, devices: tuple[Device, ...], read: Callable[[], tuple[Buffer, ...]]
    ) -> None:
        self.name = name
        self.trainable = False
        self._devices, self._read = devices, read

    @property
    def devices(self) -> tuple[Device, ...]:
        """See ``Variable``; reads nothing."""
        return self._devices

    @property
    def _buffers(self) -> tuple[Buffer, ...]:  # type: ignore[override]  # which a plain one keeps
        return self._read()

    def _sources(self, value: Any) -> NoReturn:  # called by ``assign`` and ``assign_add``
        raise TypeError(f"{self.name!r} is read-only: only its optimizer writes it")


def step_counter(worker: WorkerVariables, device: Device) -> LazyVariable:
    """Returns an int32 Variable that shows ``num_steps``."""
    return LazyVariable(
        "local_step",
        (device,),
        lambda: (device.upload(numbers(worker.num_steps, as_dtype("int32"))),),
    )


class Accumulation(LazyVariable):
    """The sum of the gradients times weights of a worker's variable since its last push.

    Its dtype is the accumulate dtype: float32 for float16 and bfloat16. Reading a sparse sum
    returns a dense array, and the sum stays sparse: an update by rows has another result than an
    update by an array that is zero in all other rows.

    Args:
        local: the worker's variable.
        worker: has the sum.
    """

    def __init__(self, local: Variable, worker: WorkerVariables) -> None:
        super().__init__(
            f"grad_variable/{local.name}",
            local.devices,
            lambda: dense_sum(local, worker.sums.get(local)),
        )
        self._local = local

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the worker's variable."""
        return self._local.shape

    @property
    def dtype(self) -> DType:
        """The accumulate dtype of the worker's variable."""
        return accumulate_dtype(self._local.dtype)


class AGNCustomGetter(NotCopied):
    """Creates the local, center and accumulation copies of a worker's variables.

    Create a getter for each worker, and pass it as ``custom_getter`` to ``gr.get_variable``. For a
    trainable variable ``n`` there are three Variables. ``n`` itself is on the worker. The sum of
    its gradients, ``grad_variable/n``, starts at zero. The center variable
    ``global_center_variable/n`` is created by the first worker that creates ``n``, with its value.
    Variables that are not trainable are only on the worker.

    If a worker's initial values differ from the center's, enter the hook of its ``AGNOptimizer``,
    or call its ``get_init_op``, before the first step. Source: ``tf.contrib.opt.AGNCustomGetter``.

    Args:
        worker_device: the worker's device, its name (``"gpu:1"``) or a ``torch.device``, in the
            mesh of ``center`` or, without ``center``, in ``gr.default_mesh()``. Or a part of a
            mesh: then the worker has several replicas, and its variables are mirrored on these
            devices.
        center: the ``AGNCenter``. Default: a center that all getters of the process share, over the
            mesh of the first getter. It exists as long as one of these getters. For a second
            training in the same process, delete the getters of the first, or create a center for
            each training.

    Raises:
        DeviceMismatchError: the worker's device does not belong to the center's mesh.
        TypeError: an argument has a wrong type.
        ValueError: the mesh does not have the device.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> getter = gr.AGNCustomGetter(mesh.devices[1], center=gr.AGNCenter(mesh))
        >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
        >>> w
        <Variable 'w' float32[1] on sim:1>
        >>> getter.center_variable(w)
        <Variable 'global_center_variable/w' float32[1] on sim:0>
        >>> getter.accumulation(w).numpy()
        array([0.], dtype=float32)
    """

    _copy_hint = "create one for each worker"

    def __init__(
        self, worker_device: DeviceLike | Mesh, *, center: AGNCenter | None = None
    ) -> None:
        if center is not None and not isinstance(center, AGNCenter):
            raise TypeError(f"center={center!r} is not an AGNCenter")
        named_in = None if center is None else center.devices[0].mesh
        self.devices: tuple[Device, ...] = as_devices(worker_device, "worker_device=", named_in)
        self.worker_device = worker_device if isinstance(worker_device, Mesh) else self.devices[0]
        for device in self.devices:
            device.mesh_state.check_usable(device)
        if center is None:
            with _sharing_lock.lock:
                self.center = _default_center(self.devices[0])
                _sharing.add(self)
        else:
            self.center = center
        own, home = self.devices[0], self.center.devices[0]
        if own.mesh_state is not home.mesh_state:
            raise DeviceMismatchError(
                f"{own.name} of the worker and {home.name} of the center belong "
                "to different meshes; pass center=gr.AGNCenter(mesh) with the worker's mesh"
            )
        self._shared = WorkerVariables()
        self._accumulations: dict[Variable, Accumulation] = {}
        self._made: dict[str, Variable] = {}

    def __repr__(self) -> str:
        count = len(self._shared.centers)
        return f"<AGNCustomGetter of {count} variables on {names_of(self.devices)}>"

    def __call__(
        self,
        getter: Callable[..., Variable],
        name: str,
        initial_value: Any,
        *,
        trainable: bool = True,
        reuse: bool = False,
        **options: Any,
    ) -> Variable:
        """Creates a variable, or with ``reuse`` finds one; called by ``gr.get_variable``.

        Raises:
            ValueError: this getter has already created a trainable variable of this name, or the
                center has one with another shape or dtype. With ``reuse``, see
                ``gr.get_variable``.
        """
        before = self._made.get(name)
        if reuse:
            return validate_reuse(
                before, name, initial_value, options.get("shape"), options.get("dtype")
            )
        if trainable and before is not None and before.trainable:
            raise ValueError(
                f"this getter has already created a variable named {name!r}; pass "
                "reuse=True to get it"
            )
        options["device"] = self.worker_device
        local = getter(name, initial_value, trainable=trainable, **options)
        if local.trainable:
            self._shared.centers[local] = self.center._shared.variable_for(name, local)
            self._accumulations[local] = Accumulation(local, self._shared)
        self._made[name] = local
        return local

    def center_variable(self, var: Variable) -> Variable:
        """Returns the center variable of a worker's variable.

        Other workers may push while you read it. For a consistent state of several variables, use
        the center's ``state_dict``.

        Args:
            var: a variable that this getter created.

        Raises:
            KeyError: this getter did not create ``var``.
        """
        return self._shared.center_of(var)

    def accumulation(self, var: Variable) -> Variable:
        """Returns the read-only sum of gradients times weights since the last push.

        The result is a Variable: zeros after a push, and float32 for float16 and bfloat16. Only the
        optimizer writes it; ``assign`` raises ``TypeError``. Reading a sum of sparse gradients
        returns a dense array; the sum stays sparse.

        Args:
            var: a variable that this getter created.

        Raises:
            KeyError: this getter did not create ``var``.
        """
        self._shared.center_of(var)
        return self._accumulations[var]


# Getters of the process-wide center. Only they refer to it, so that it is freed with the last one.
_sharing: weakref.WeakSet[AGNCustomGetter] = weakref.WeakSet()
_sharing_lock = ModuleLock()


def _default_center(device: Device) -> AGNCenter:
    """Returns the process-wide center; a new one over the device's mesh if there is none."""
    for getter in _sharing:
        mesh_state = getter.center.devices[0].mesh_state
        if not (mesh_state.is_closed or mesh_state.is_inherited):
            return getter.center
    return AGNCenter(device.mesh)
