"""``DataParallel``: modules whose gradients are averaged while ``backward`` runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch

from gradreduce.comm.replicas import comparing
from gradreduce.device import Mesh, as_count, as_flag, as_positive
from gradreduce.errors import NotCopied, brief, refuses
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.weights import as_weight

from .before_forward import BeforeForward
from .engine import check_value, check_values
from .exact_reducer import ExactReducer, check_exact_parameters
from .module_state import broadcast_state, load_state
from .reducer import Reducer, reducer_of
from .sparse_gradients import sparse_indices

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
# Arguments of PyTorch's DistributedDataParallel, and what to do instead.
_OF_DDP = {
    "find_unused_parameters": "leave it out, unused parameters are found in every step",
    "static_graph": "leave it out, no graph needs to be static",
    "gradient_as_bucket_view": "leave it out, gradients are always views of buckets",
    "init_sync": "leave it out, the parameters of process 0 are always copied to all",
    "device_ids": "leave it out, the mesh has the devices (gr.open_mesh)",
    "output_device": "leave it out, each replica returns outputs on its own device",
    "dim": "leave it out, each replica is called with its own batch",
    "bucket_cap_mb": "pass bucket_mb=",
    "process_group": "pass it to gr.open_mesh(process_group=...), and pass that mesh",
    "device_mesh": "pass a mesh of gr.open_mesh",
    "mixed_precision": "use torch.autocast, and ops=gr.AllReduceCrossDeviceOps(wire_dtype=...)",
}


class DataParallel(NotCopied, torch.nn.Module, Generic[ModuleT]):  # type: ignore[misc]  # PyTorch need not be installed
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
    - If no replica of any process used a parameter since the last step, its ``.grad`` stays None,
      or zeros where ``zero_grad`` has zeroed it in place, as in DDP with
      ``find_unused_parameters``. If some replicas used it, those that did not count as zeros.
    - Parameters that are frozen (``requires_grad`` is False) when the DataParallel is made have no
      gradient, and must stay frozen.
    - Before a forward of training, the buffers of process 0's first replica are copied to all.
    - The first forward with gradients after the first step compares all parameters of all replicas.
    - The sparse gradients of ``Embedding(sparse=True)`` and ``EmbeddingBag`` are averaged at the
      end of ``backward``. They stay sparse, with one row for each index that a replica has used.
    - If a reduction fails, ``backward`` raises ``CollectiveError`` with the names of the
      parameters.
    - If a module inside gets another parameter that is not frozen, ``RuntimeError`` is raised.
    - A ``backward`` of compiled autograd raises ``RuntimeError``.
    - After a ``backward`` that an error has ended, zero the gradients. The step is dropped if the
      ``backward`` of all processes has failed; see ``docs/pytorch.md``.

    Args:
        module_or_replicas: a module, which is copied to all devices but the first; or a list with
            one module for each device, with the same parameters. The parameters must stay the same
            objects.
        mesh: a mesh with the devices of this process, over all processes.
        bucket_mb: the largest size of a bucket, in MiB. A larger gradient is reduced alone.
        ops: an ``AllReduceCrossDeviceOps``, which may have a ``wire_dtype``. Default: one that
            uses NCCL. With its ``exact=True`` the gradients of all micro-batches, replicas and
            processes are added as real numbers: each ``backward`` moves them to exact sums and
            leaves every ``.grad`` None, and the ``backward`` that averages sets it at its end, so
            that nothing overlaps. Then only ``zero_grad`` of this class drops a step that was not
            averaged. See docs/same_bits.md.
        broadcast_buffers: whether to copy the buffers of process 0's first replica to all others:
            before each forward of the DataParallel for which DDP does it; or, if replicas are
            called, before the first of their training forwards after each step.
        check_replicas: compare the parameters every so many steps. Default: once, after the first
            step. If they differ, the forward raises ``RuntimeError`` in all processes. The host
            waits for one checksum of each replica.

    Attributes:
        replicas: the modules, one for each device of this process, in the order of the mesh. The
            constructor copies the parameters and buffers of process 0's first replica to all of
            them.

    Raises:
        TypeError: ``module_or_replicas`` is not a module or a list of modules, ``mesh`` is not a
            Mesh, ``bucket_mb`` is not a number, ``broadcast_buffers`` is not a bool, or an argument
            is one of ``DistributedDataParallel``; the error says what to do instead.
        ValueError: the number of replicas is not the number of devices, replicas differ, no
            parameter requires gradients, a parameter is in another DataParallel, a lazy module has
            not been called yet, a parameter is on the meta device, or ``bucket_mb``,
            ``ops`` or ``check_replicas`` is invalid; or another process has other parameters, has
            frozen others, or passes other options.
        RuntimeError: FakeTensorMode is active, or a parameter is a FakeTensor.
    """

    _copy_hint = "copy its module"

    @refuses(_OF_DDP)
    def __init__(
        self,
        module_or_replicas: ModuleT | Sequence[ModuleT],
        mesh: Mesh,
        *,
        bucket_mb: float = 25,
        ops: Any = None,
        broadcast_buffers: bool = True,
        check_replicas: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh={brief(mesh)} is not a Mesh: see gr.open_mesh")
        bucket_mb = as_positive("bucket_mb", bucket_mb)
        broadcast_buffers = as_flag("broadcast_buffers", broadcast_buffers)
        if check_replicas is not None and as_count("check_replicas=", check_replicas) == 0:
            raise ValueError("check_replicas=0 must be a number of steps, or None")
        ops = AllReduceCrossDeviceOps(mesh=mesh) if ops is None else ops
        if not isinstance(ops, AllReduceCrossDeviceOps):
            raise ValueError(f"ops={brief(ops)} is not an AllReduceCrossDeviceOps")
        replicas = _replicas_of(module_or_replicas, mesh)
        self.replicas = torch.nn.ModuleList(replicas)
        named = [list(replica.named_parameters()) for replica in replicas]
        trained = [[each for each in row if each[1].requires_grad] for row in named]
        sparse = sparse_indices(replicas[0], trained[0])
        if ops.exact:
            check_exact_parameters(trained[0], ops.settings)
        _check_parameters(named, trained)
        options = {"broadcast_buffers": broadcast_buffers, "check_replicas": check_replicas}
        options |= {f"requires_grad of {name}": each.requires_grad for name, each in named[0]}
        with comparing(mesh[0], options):
            broadcast_state(replicas, mesh, ops)
        make_reducer = ExactReducer if ops.exact else Reducer
        self._reducer = make_reducer(
            [name for name, _ in trained[0]],
            [[parameter for _, parameter in row] for row in trained],
            [each for row in named for each in row if not each[1].requires_grad],
            sparse,
            mesh,
            ops,
            bucket_mb * 2**20,
        )
        self._reducer.owner = ref(self)
        self._before_forward: BeforeForward | None = None
        if mesh.num_replicas > 1:
            self._before_forward = BeforeForward(
                replicas,
                self._reducer,
                check_every=check_replicas,
                broadcast_buffers=broadcast_buffers,
            )
            _add_hooks(self, self._before_forward)
        _owners.update(dict.fromkeys(self.replicas.modules(), ref(self)))

    @property
    def module(self) -> ModuleT:
        """The first replica."""
        return self.replicas[0]  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replica of this process.

        Raises:
            RuntimeError: there are several replicas, or their parameters differ.
        """
        if len(self.replicas) > 1:
            raise RuntimeError(
                f"there are {len(self.replicas)} replicas in this process: call "
                "dp.replicas[i](x_i) for each"
            )
        before = self._before_forward
        if before is not None and (before.broadcasts or not torch.compiler.is_compiling()):
            before.of_data_parallel()
        return self.replicas[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which ``backward`` accumulates gradients without averaging.

        The first ``backward`` after the context averages the accumulated gradients. It matters
        where ``backward`` is called, not where the loss was computed. DDP's ``no_sync`` looks at
        the forward instead: a loss that was computed inside it is not averaged, even if its
        ``backward`` is called after it. Code that has both inside works alike.

        Raises:
            RuntimeError: some replicas have had their ``backward`` of this step, and others have
                not.
        """
        return self._reducer.no_sync()

    def weight(self, weight: float) -> AbstractContextManager[None]:
        """Returns a context in which each ``backward`` has a weight, such as its number of tokens.

        If the processes or micro-batches of a step have different numbers of examples, the mean of
        their means is not the mean over all examples. Let each loss be a mean, and call
        ``backward`` with the number of examples as its weight::

            for number, (x, num_tokens) in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with dp.weight(num_tokens), nullcontext() if is_last else dp.no_sync():
                    dp(x).mean().backward()

        Each ``backward`` of a replica is one micro-batch. Each new gradient is multiplied by the
        weight before it is added to ``.grad``. At the end of the step, the sum over all
        micro-batches, replicas and processes is divided once by the sum of all weights. This sum is
        exact, and equal in all processes. A ``backward`` outside this context counts 1.

        - **Use weights in all processes of a step, or in none.** A step without weights is divided
          by the number of replicas, not by that of micro-batches.
        - With weight 0 the gradient is not used; it may be NaN.
        - Only ``backward`` belongs inside: ``torch.autograd.grad`` would be multiplied, too.
        - Zero the gradients before each step. ``zero_grad`` also forgets the weights of a step that
          was not averaged. Zeroing gradients in place in another way does not.
        - Float16 gradients may overflow: divide all weights by the same number.
        - Replicas that run in threads have the weights of their threads.

        Args:
            weight: a finite number of at least 0, on the host.

        Raises:
            TypeError, ValueError: ``weight`` is something else.
            ValueError: raised by ``backward`` in all processes if all weights of a step are 0, or
                if their sum exceeds the largest float64. No gradient has changed.
        """
        return self._reducer.weight(as_weight("weight", weight))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients, with one fill for each bucket.

        A ``.grad`` that is None stays None. With ``set_to_none``, each ``.grad`` becomes None, and
        the views of flat buffers are lost. A step that has failed, or that some replicas have not
        had their ``backward`` of, is dropped; this waits for the other processes.
        """
        self._reducer.drop_begun()
        if set_to_none or not self._reducer.zero():
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the first replica, with the names of the module; see PyTorch."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state of the module into all replicas of all processes.

        Every process calls it. If the states differ, those parameters and buffers are used that
        process 0 has loaded. If a process raises an error, no replica of any process has changed.

        Args:
            state_dict: the state, such as one of ``state_dict()``.
            strict: whether the names must be those of the module; see ``torch.nn.Module``.
            assign: must be False, because it would replace the parameters.

        Returns:
            What ``torch.nn.Module.load_state_dict`` returns: the missing and unexpected names.

        Raises:
            RuntimeError: the state does not fit the module, here or in another process; or
                ``assign`` is True.
            TypeError: ``state_dict`` is not a dict.
        """
        if assign:
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters of a DataParallel, "
                "which would not average the gradients of others: load without assign, or make a "
                "new DataParallel from the changed module"
            )
        reducer = self._reducer
        reducer.begins_again()
        return load_state(
            list(self.replicas), state_dict, reducer.mesh, reducer.cross_device_ops, strict=strict
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Called by PyTorch if a module around this one loads a state: for all replicas."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            value = state_dict.pop(name)
            for index in range(len(self.replicas)):
                state_dict[f"{prefix}replicas.{index}.{name.removeprefix(prefix)}"] = value
        super()._load_from_state_dict(state_dict, prefix, *arguments)


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
    check_values(chain.from_iterable([each.parameters() for each in replicas]))
    for replica in replicas:
        for kind in ("parameter", "buffer"):
            for name, each in getattr(replica, f"named_{kind}s")():
                check_value(f"the {kind} {brief(name)}", each)
    if replicas[:1] == [module_or_replicas]:
        replicas += [copy.deepcopy(module_or_replicas) for _ in mesh.devices[1:]]
        for device, replica in zip(mesh, replicas, strict=True):
            replica.to("cpu" if mesh.mesh_state.shares_host_memory else f"cuda:{device.physical}")
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


# The DataParallel of each module that is part of one.
_owners: WeakKeyDictionary[Any, ref[DataParallel[Any]]] = WeakKeyDictionary()


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


def _add_hooks(data_parallel: DataParallel[Any], before: BeforeForward) -> None:
    """Adds hooks that prepare the forward of a replica; a module with them can be pickled."""
    hook = _with_buffers if before.broadcasts else _without_buffers
    before.handles += [each.register_forward_pre_hook(hook) for each in data_parallel.replicas]
    finalize(data_parallel, before.remove_hooks).atexit = False


def _with_buffers(module: Any, _: Any) -> None:
    """A hook of replicas whose buffers are broadcast: a graph break in a compiled replica."""
    if not torch.compiler.is_exporting():
        _call_before_forward(module)


def _without_buffers(module: Any, _: Any) -> None:
    """A hook of other replicas, which does nothing in a compiled one."""
    if not torch.compiler.is_compiling():
        _call_before_forward(module)


def _call_before_forward(module: Any) -> None:
    owner = _owners.get(module)
    data_parallel = None if owner is None else owner()
    if data_parallel is not None and data_parallel._before_forward is not None:
        data_parallel._before_forward.of_replica(module)


torch.nn.modules.module.register_module_parameter_registration_hook(_reject_others)
torch.nn.modules.module.register_module_module_registration_hook(_reject_others)
