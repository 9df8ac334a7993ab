"""``DataParallel``: modules whose gradients are averaged while ``backward`` runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from gradreduce.arrays.distributed import PerReplica
from gradreduce.device import Mesh
from gradreduce.errors import NotCopied, brief
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .reducer import Reducer, reducer_of


class DataParallel(NotCopied, torch.nn.Module):  # type: ignore[misc]  # PyTorch need not be installed
    """Replicas of a module whose gradients are averaged while ``backward`` runs.

    With one device in this process call it like the module; with several call each replica. The
    caller calls ``backward``, for each replica or for the sum of the losses. When the last one
    returns, every ``.grad`` is the mean over the replicas of all processes::

        mesh = gr.open_mesh(processes="auto", devices_per_process=1)
        dp = gr.torch.DataParallel(net, mesh)
        optimizer = torch.optim.SGD(dp.parameters(), 0.1)
        loss = dp(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    The first backward shows in which order gradients become ready; from then on each bucket is
    reduced as soon as it is complete, while ``backward`` goes on, and all gradients are views of
    flat buffers (``mesh.flat_buffer``). An optimizer's ``zero_grad`` is allowed, but drops the
    views, which costs a copy; ``zero_grad`` of this class keeps them. If gradients are not zeroed,
    the next backward adds to them and averages the sums. A parameter that was not used has a
    gradient of zeros. Parameters that are frozen (``requires_grad`` is False) when the DataParallel
    is made have no gradient, and must stay frozen.

    Args:
        module_or_replicas: a module, of which every device but the first gets a copy; or one
            module for each device, alike. Its parameters must stay the same objects.
        mesh: the devices of this process, and all processes.
        bucket_mb: the most MiB of gradients that are reduced together; larger ones are alone.
        ops: an ``AllReduceCrossDeviceOps``, which may have a ``wire_dtype``. Default: one by NCCL.

    Attributes:
        replicas: the modules, one for each device of this process, in the order of the mesh. The
            parameters and buffers of process 0's first replica are copied to all of them once, when
            the DataParallel is made.

    Raises:
        TypeError: ``module_or_replicas`` is no module or list of modules, or ``mesh`` no Mesh.
        ValueError: another number of replicas than devices, replicas that differ, no parameter
            that requires gradients, one that is in another DataParallel, or a wrong ``bucket_mb``
            or ``ops``.

    ``backward`` raises ``CollectiveError`` if a reduction fails, with the names of the parameters.
    A module inside that would get another parameter, which is not frozen, raises ``RuntimeError``.
    """

    _copy_hint = "copy its module"

    def __init__(
        self,
        module_or_replicas: Any,
        mesh: Mesh,
        *,
        bucket_mb: float = 25,
        ops: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh={brief(mesh)} is not a Mesh: see gr.open_mesh")
        number = isinstance(bucket_mb, Real) and not isinstance(bucket_mb, bool)
        if not number or not bucket_mb > 0:
            raise ValueError(f"bucket_mb={brief(bucket_mb)} must be a number above 0")
        ops = AllReduceCrossDeviceOps(mesh=mesh) if ops is None else ops
        if not isinstance(ops, AllReduceCrossDeviceOps):
            raise ValueError(f"ops={brief(ops)} is not an AllReduceCrossDeviceOps")
        replicas = _replicas_of(module_or_replicas, mesh)
        self.replicas = torch.nn.ModuleList(replicas)
        named = [list(replica.named_parameters()) for replica in replicas]
        trained = [[each for each in row if each[1].requires_grad] for row in named]
        _check_parameters(named, trained)
        _broadcast_state(replicas, mesh, ops)
        self._reducer = Reducer(
            [name for name, _ in trained[0]],
            [[parameter for _, parameter in row] for row in trained],
            [each for row in named for each in row if not each[1].requires_grad],
            mesh,
            ops,
            bucket_mb * 2**20,
        )
        self._reducer.owner = ref(self)
        _owners.update(dict.fromkeys(self.replicas.modules(), ref(self)))

    @property
    def module(self) -> Any:
        """The first replica: save its ``state_dict``."""
        return self.replicas[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the only replica.

        Raises:
            RuntimeError: there are several.
        """
        if len(self.replicas) > 1:
            raise RuntimeError(
                f"there are {len(self.replicas)} replicas in this process: call "
                "dp.replicas[i](x_i) for each"
            )
        return self.replicas[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which ``backward`` only adds to each replica's own gradients.

        The first ``backward`` outside averages what they are by then. Where the loss was computed
        does not matter.

        Raises:
            RuntimeError: some replicas have had their ``backward`` of this step, and some not.
        """
        return self._reducer.no_sync()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients, by one fill for each bucket; ``set_to_none`` drops the views."""
        if set_to_none or not self._reducer.zero():
            super().zero_grad(set_to_none)


def as_modules(module_or_replicas: Any) -> list[Any]:
    """Returns a list of modules, or a list of one; raises ``TypeError`` for anything else."""
    several = isinstance(module_or_replicas, list | tuple | torch.nn.ModuleList)
    modules = list(module_or_replicas) if several else [module_or_replicas]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{brief(module)} is not a torch.nn.Module")
    return modules


def _replicas_of(module_or_replicas: Any, mesh: Mesh) -> list[Any]:
    """Returns a module for each device of the mesh."""
    replicas = as_modules(module_or_replicas)
    if replicas[:1] == [module_or_replicas]:
        replicas += [copy.deepcopy(module_or_replicas) for _ in mesh.devices[1:]]
        for device, replica in zip(mesh, replicas, strict=True):
            replica.to(f"cuda:{device.physical}" if mesh.backend == "cuda" else "cpu")
    if len(replicas) != len(mesh):
        raise ValueError(
            f"there are {len(replicas)} replicas for {len(mesh)} devices: pass one for each"
        )
    return replicas


def check_alike(named: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Raises unless the parameters of all replicas are alike."""
    alike = [
        [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in row]
        for row in named
    ]
    for index, row in enumerate(alike):
        if row != alike[0]:
            missing = [None] * abs(len(row) - len(alike[0]))
            pairs = zip([*alike[0], *missing], [*row, *missing], strict=False)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(f"replica {index} has {other} where replica 0 has {first}")


def _check_parameters(
    named: Sequence[Sequence[tuple[str, Any]]], trained: Sequence[Sequence[tuple[str, Any]]]
) -> None:
    """Raises unless all replicas have parameters alike, which no other DataParallel has."""
    check_alike(named)
    if not trained[0]:
        raise ValueError("the module has no parameter that requires gradients")
    for name, parameter in chain.from_iterable(trained):
        other = reducer_of(parameter)
        if other is not None and other.owner() is not None:
            raise ValueError(
                f"{name} is a parameter of another DataParallel already: delete that one first"
            )
    for _, parameter in chain.from_iterable(trained):
        other = reducer_of(parameter)
        if other is not None:
            other.remove_hooks()


def _broadcast_state(
    replicas: Sequence[Any], mesh: Mesh, cross_device_ops: AllReduceCrossDeviceOps
) -> None:
    """Copies the parameters and buffers of process 0's first replica to all."""
    rows, names = [], []
    for replica in replicas:
        pairs = [*replica.named_parameters(), *replica.named_buffers()]
        names = [name for name, _ in pairs]
        state = [each.detach() for _, each in pairs]
        rows.append([each.view(torch.uint8) if each.itemsize == 1 else each for each in state])
    values = [
        PerReplica([each], devices=[mesh[0]], name=name)
        for each, name in zip(rows[0], names, strict=True)
    ]
    cross_device_ops.broadcast(values, mesh, out=list(zip(*rows, strict=True)))


# The DataParallel of each module inside one.
_owners: WeakKeyDictionary[Any, ref[DataParallel]] = WeakKeyDictionary()


def _reject_others(module: Any, name: str, added: Any) -> None:
    """Refuses parameters whose gradients would not be averaged; called by PyTorch.

    Args:
        module: any, which gets a parameter or a module, also by ``load_state_dict(assign=True)``.
        name: of what it gets.
        added: the parameter or module; or None.

    Raises:
        RuntimeError: ``module`` is in a DataParallel, and has other parameters from here on.
    """
    owner = _owners.get(module)
    if added is None or owner is None or owner() is None:
        return
    parameters = added.parameters() if isinstance(added, torch.nn.Module) else [added]
    if any([each.requires_grad and reducer_of(each) is None for each in parameters]):
        raise RuntimeError(
            f"{name} would be another parameter of a module in a DataParallel, which would not "
            "average its gradients: make a new DataParallel from the changed module"
        )
    if isinstance(added, torch.nn.Module):
        _owners.update(dict.fromkeys(added.modules(), owner))


torch.nn.modules.module.register_module_parameter_registration_hook(_reject_others)
torch.nn.modules.module.register_module_module_registration_hook(_reject_others)
