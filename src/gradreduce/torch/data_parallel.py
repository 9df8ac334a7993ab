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

    With one device in this process, call the DataParallel like the module. With several devices,
    call each replica. Then call ``backward``, once for each replica or once for the sum of the
    losses. After the last ``backward``, every ``.grad`` is the mean over the replicas of all
    processes::

        mesh = gr.open_mesh(processes="auto", devices_per_process=1)
        dp = gr.torch.DataParallel(net, mesh)
        optimizer = torch.optim.SGD(dp.parameters(), 0.1)
        loss = dp(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    Example: see ``examples/train_torch.py``.

    The first backward shows in which order gradients become ready. At its end all gradients become
    views of flat buffers (``mesh.flat_buffer``). In later backwards, each bucket is reduced as soon
    as it is complete, while ``backward`` continues.

    - The ``zero_grad`` of this class keeps these views. That of an optimizer drops them, so that
      the next backward must copy.
    - If gradients are not zeroed, the next backward adds to them and averages the sums.
    - A parameter that was not used has a gradient of zeros.
    - Parameters that are frozen (``requires_grad`` is False) when the DataParallel is made have no
      gradient, and must stay frozen.
    - If a reduction fails, ``backward`` raises ``CollectiveError`` with the names of the
      parameters.
    - If a module inside gets another parameter that is not frozen, ``RuntimeError`` is raised.

    Args:
        module_or_replicas: a module, which is copied to all devices but the first; or a list with
            one module for each device, with the same parameters. The parameters must stay the same
            objects.
        mesh: a mesh with the devices of this process, over all processes.
        bucket_mb: the largest size of a bucket, in MiB. A larger gradient is reduced alone.
        ops: an ``AllReduceCrossDeviceOps``, which may have a ``wire_dtype``. Default: one that
            uses NCCL.

    Attributes:
        replicas: the modules, one for each device of this process, in the order of the mesh. The
            constructor copies the parameters and buffers of process 0's first replica to all of
            them.

    Raises:
        TypeError: ``module_or_replicas`` is not a module or a list of modules, or ``mesh`` is not a
            Mesh.
        ValueError: the number of replicas is not the number of devices, replicas differ, no
            parameter requires gradients, a parameter is in another DataParallel, or ``bucket_mb``
            or ``ops`` is invalid.
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
        """The first replica; save its ``state_dict``."""
        return self.replicas[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replica of this process.

        Raises:
            RuntimeError: there are several replicas.
        """
        if len(self.replicas) > 1:
            raise RuntimeError(
                f"there are {len(self.replicas)} replicas in this process: call "
                "dp.replicas[i](x_i) for each"
            )
        return self.replicas[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which ``backward`` accumulates gradients without averaging.

        The first ``backward`` after the context averages the accumulated gradients. It does not
        matter where the loss was computed.

        Raises:
            RuntimeError: some replicas have had their ``backward`` of this step, and others have
                not.
        """
        return self._reducer.no_sync()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients, with one fill for each bucket.

        With ``set_to_none``, each ``.grad`` becomes None, and the views of flat buffers are lost.
        """
        if set_to_none or not self._reducer.zero():
            super().zero_grad(set_to_none)


def as_modules(module_or_replicas: Any) -> list[Any]:
    """Returns a list of modules, or a list of one; raises ``TypeError`` for anything else."""
    several = isinstance(module_or_replicas, list | tuple | torch.nn.ModuleList)
    modules = list(module_or_replicas) if several else [module_or_replicas]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"{brief(module)} is not a torch.nn.Module: pass a module, or a list of modules"
            )
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
    """Raises ``ValueError`` unless the parameters of all replicas are alike."""
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
    """Raises unless all replicas have the same parameters, which no other DataParallel has."""
    check_alike(named)
    if not trained[0]:
        raise ValueError("the module has no parameter that requires gradients")
    for name, parameter in chain.from_iterable(trained):
        other = reducer_of(parameter)
        if other is not None and other.owner() is not None:
            raise ValueError(
                f"{name} is already a parameter of another DataParallel: delete that one first"
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


# The DataParallel of each module that is part of one.
_owners: WeakKeyDictionary[Any, ref[DataParallel]] = WeakKeyDictionary()


def _reject_others(module: Any, name: str, added: Any) -> None:
    """Rejects parameters whose gradients would not be averaged; called by PyTorch.

    Args:
        module: any module that gets a parameter or a module, also by
            ``load_state_dict(assign=True)``.
        name: the name of the parameter or module.
        added: the parameter or module; or None.

    Raises:
        RuntimeError: ``module`` is in a DataParallel that does not have the parameter.
    """
    owner = _owners.get(module)
    if added is None or owner is None or owner() is None:
        return
    parameters = added.parameters() if isinstance(added, torch.nn.Module) else [added]
    if any([each.requires_grad and reducer_of(each) is None for each in parameters]):
        raise RuntimeError(
            f"{name} cannot be added or replaced in a module of a DataParallel, which would not "
            "average its gradients: make a new DataParallel from the changed module"
        )
    if isinstance(added, torch.nn.Module):
        _owners.update(dict.fromkeys(added.modules(), owner))


torch.nn.modules.module.register_module_parameter_registration_hook(_reject_others)
torch.nn.modules.module.register_module_module_registration_hook(_reject_others)
