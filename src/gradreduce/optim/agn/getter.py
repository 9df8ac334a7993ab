"""A worker's variables, each with its copy at the centre and its accumulation; never updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradreduce.device import Device, DeviceLike, Mesh, as_devices
from gradreduce.errors import NotCopied, listed
from gradreduce.variables import Variable, reused

from .center import AGNCenter, process_wide
from .lazy import Accumulation, Changes

__all__ = ["AGNCustomGetter", "Member"]


@dataclass(frozen=True, eq=False)
class Member:
    """A variable of a worker.

    Attributes:
        local: the worker's copy.
        center: the centre's.
        total: the sum of its gradients since the last push.
    """

    local: Variable
    center: Variable
    total: Accumulation


class AGNCustomGetter(NotCopied):
    """Makes the local, centre and accumulation copies of a worker's variables.

    One for each worker: the ``custom_getter`` of ``gr.get_variable``. A trainable variable ``n``
    lies on the worker; the centre has ``global_center_variable/n``, made by whichever worker comes
    first, with that one's value, and the worker ``grad_variable/n``, zero at first. Others lie on
    the worker, alone. A worker that begins at another value than the centre's wants the hook of its
    ``AGNOptimizer``, or ``get_init_op``, before its first step.

    Args:
        worker_device: the worker's device, its name (``"gpu:1"``) or a ``torch.device``, in the
            mesh of ``center``, else in ``gr.default_mesh()``; or its part of a mesh: then its
            variables are mirrored there, and it is several replicas.
        center: where the centre variables are. Default: the process-wide centre, spread over the
            mesh of the getter that comes first; it serves as long as one of its getters lives. So
            let go of a training's getters before the next begins, or give each its own centre.

    Raises:
        DeviceMismatchError: the worker's device is not of the centre's mesh.
        TypeError: an argument of another type.
        ValueError: a name of a device that the mesh has not.
    """

    _copied_as = "make one for each worker"

    def __init__(
        self, worker_device: DeviceLike | Mesh, *, center: AGNCenter | None = None
    ) -> None:
        if center is not None and not isinstance(center, AGNCenter):
            raise TypeError(f"center={center!r} is not an AGNCenter")
        named_in = None if center is None else center.devices[0].mesh
        self.devices: tuple[Device, ...] = as_devices(worker_device, "worker_device=", named_in)
        self.worker_device = worker_device if isinstance(worker_device, Mesh) else self.devices[0]
        for device in self.devices:
            device.fabric.check_usable(device)
        self.center = process_wide(self.devices[0], self) if center is None else center
        self.center.check_reached(self.devices)
        self._members: dict[Variable, Member] = {}
        self._made: dict[str, Variable] = {}
        self._changes = Changes()

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return f"<AGNCustomGetter of {len(self._members)} variables on {names}>"

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
        """See ``gr.get_variable``, which calls it; ``reuse`` gives what this getter has made.

        Raises:
            ValueError: this getter has made a trainable one of this name, which would be the same
                at the centre, or the centre has one with another shape or dtype. With ``reuse``,
                see there.
        """
        before = self._made.get(name)
        if reuse:
            shape, dtype = options.get("shape"), options.get("dtype")
            return reused(before, name, initial_value, shape, dtype)
        if trainable and before is not None and before.trainable:
            raise ValueError(
                f"this getter has made {name!r} already, and a worker has one of a name: "
                "reuse=True gives it"
            )
        options["device"] = self.worker_device
        local = getter(name, initial_value, trainable=trainable, **options)
        if local.trainable:
            total = Accumulation(local, f"grad_variable/{name}", self._changes)
            self._members[local] = Member(local, self.center.variable_for(name, local), total)
        self._made[name] = local
        return local

    def center_variable(self, var: Variable) -> Variable:
        """The centre copy of a worker's variable: what the last push of any worker made of it.

        Pushes go on while it is read: the values of one moment are the centre's ``state_dict``.

        Args:
            var: a variable that came through this getter.

        Raises:
            KeyError: another one.
        """
        return self.member(var).center

    def accumulation(self, var: Variable) -> Variable:
        """The sum of the gradients of a worker's variable since its last push; only to be read.

        Of float32 for halves. A sum of sparse gradients is shown as an array, and stays sparse.

        Args:
            var: a variable that came through this getter.

        Raises:
            KeyError: another one.
        """
        return self.member(var).total

    def member(self, var: Variable) -> Member:
        """All copies of a worker's variable; ``KeyError`` for another one."""
        found = self._members.get(var) if isinstance(var, Variable) else None
        if found is None:
            raise KeyError(f"{var!r} did not come through this AGNCustomGetter")
        return found

    @property
    def members(self) -> list[Member]:
        """Of every trainable variable, in the order in which they were made."""
        return list(self._members.values())
