"""``variables``: Variables on the memory of a module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from gradreduce.arrays.convert import Form, in_order, to_buffer
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, Mesh, group_by
from gradreduce.errors import about, brief

from .data_parallel import as_modules, check_alike
from .engine import check_value


class ParameterVariable(Variable):
    """A Variable that shares memory with a parameter, on one or several replicas.

    Each use raises ``RuntimeError`` if the parameter has other memory than before, or its module
    has another parameter. Calls are ordered with PyTorch's current streams. Autograd notices when
    they write the parameter.

    Args:
        name: the name of the parameter.
        parameters: the parameter on each device.
        devices: the devices of the parameters.
        places: for each parameter the modules that have it, each with the parameter's name in the
            module.
        order: the order in which the Variable has the axes of the parameter, which is their order
            in memory. None: the same order.

    Raises:
        ValueError: the memory of a parameter cannot be shared with its device.
        TypeError: the memory of a parameter does not hold its values, as in a DTensor.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Any],
        devices: Sequence[Device],
        places: Sequence[Sequence[tuple[Any, str]]],
        order: Form = None,
    ) -> None:
        self.name = name
        self.order = order
        self.trainable = parameters[0].requires_grad
        self._parameters = tuple(parameters)
        self._buffers = tuple(
            _share_memory(name, parameter, device, order)
            for parameter, device in zip(parameters, devices, strict=True)
        )
        # For each replica the parameter, its layout when its memory was shared, and its places.
        self._copies = [
            (parameter, _layout(parameter), within)
            for parameter, within in zip(parameters, places, strict=True)
        ]

    def of_replica(self, index: int) -> ParameterVariable:
        """Returns a Variable on one replica's copy."""
        parameter, _, places = self._copies[index]
        name = self.name if len(self._copies) == 1 else f"{self.name} of replica {index}"
        return ParameterVariable(name, [parameter], [self.devices[index]], [places])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """See ``Variable.buffers``. Checks the memory; waits for PyTorch's current streams."""
        self._check_memory()
        wait_for_inputs(self._buffers)
        return self._buffers

    def _check_memory(self) -> None:
        for parameter, layout, places in self._copies:
            is_there = all([owner._parameters.get(leaf) is parameter for owner, leaf in places])
            if not is_there or _layout(parameter) != layout:
                raise RuntimeError(
                    f"the parameter {brief(self.name)} was replaced or moved to other memory since "
                    "its variable was made, for example by module.to(...) or "
                    "load_state_dict(assign=True): make new variables, or a new optimizer, from "
                    "the module"
                )


def variables(module_or_replicas: Any, mesh: Mesh) -> list[ParameterVariable]:
    """Returns Variables that share memory with a module's parameters; nothing is copied.

    If an optimizer, a ``SyncStep`` or ``assign`` writes a Variable, the parameter of the module
    changes too. If PyTorch writes a parameter (``load_state_dict``, another optimizer), the
    Variable changes too::

        net = torch.nn.Linear(8, 1)
        weight, bias = gr.torch.variables(net, gr.open_mesh(1, backend="sim"))
        net(x).mean().backward()
        optimizer = gr.AdamOptimizer(0.1)
        optimizer.apply_gradients([(net.weight.grad, weight), (net.bias.grad, bias)])

    Example: see ``docs/pytorch.md``.

    Work on the Variables waits for earlier work on PyTorch's current streams, and later work on
    these streams waits for it; the host does not wait. If a parameter is moved to other memory (by
    ``module.to``) or replaced (by ``load_state_dict(assign=True)``), the next use of its Variable
    raises ``RuntimeError``, and the old memory is not changed.

    Args:
        module_or_replicas: a module, for a mesh of one device; or a list of modules with the same
            parameters, one on each device of the mesh, such as ``DataParallel.replicas``. Their
            values must be equal; this is not checked.
        mesh: the devices of this process. For simulated devices the parameters are in host memory.

    Returns:
        One Variable for each parameter, with its name, shape and dtype and a copy for each replica,
        in the order of ``named_parameters()``. Tied weights have one Variable, with the first name.
        ``trainable`` is the current value of ``requires_grad``.

    Raises:
        TypeError: ``module_or_replicas`` is not a module or a list of modules, ``mesh`` is not a
            Mesh, or the memory of a parameter does not hold its values (a DTensor).
        ValueError: the number of replicas is not the number of devices, replicas differ, a
            parameter is not contiguous or not on the device of its replica, two parameters share
            memory, a lazy module has not been called yet, a parameter is on the meta device, the
            mesh has a ``schedule_seed``, or there is no parameter.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={brief(mesh)} is not a Mesh: see gr.open_mesh")
    replicas = as_modules(module_or_replicas)
    if len(replicas) != len(mesh):
        raise ValueError(
            f"there are {len(replicas)} modules for {len(mesh)} devices: pass one for each, such "
            "as the replicas of a DataParallel"
        )
    named = [list(replica.named_parameters()) for replica in replicas]
    for name, parameter in chain.from_iterable(named):
        check_value(f"the parameter {brief(name)}", parameter)
    check_alike(named)
    if not named[0]:
        raise ValueError("the module has no parameter")
    places = [places_of(replica) for replica in replicas]
    result = []
    for row in zip(*named, strict=True):
        parameters = [parameter for _, parameter in row]
        within = [place[id(parameter)] for place, parameter in zip(places, parameters, strict=True)]
        result.append(ParameterVariable(row[0][0], parameters, mesh.devices, within))
    check_separate(result)
    return result


def check_separate(variables: Sequence[ParameterVariable]) -> None:
    """Raises ``ValueError`` if two Variables share memory, because one launch writes both."""
    copies = [(each.name, buffer) for each in variables for buffer in each._buffers if buffer.size]
    copies.sort(key=lambda copy: copy[1].address)
    for (one, low), (other, high) in pairwise(copies):
        if low.address + low.nbytes > high.address:
            raise ValueError(
                f"the parameters {brief(one)} and {brief(other)} share memory: make them the same "
                "parameter, or copy one"
            )


def places_of(module: Any) -> dict[int, list[tuple[Any, str]]]:
    """Returns the modules that have each parameter, and its names there, by id."""
    return group_by(
        [
            (id(parameter), (owner, leaf))
            for owner in module.modules()
            for leaf, parameter in owner._parameters.items()
        ]
    )


def _layout(parameter: Any) -> tuple[Any, ...]:
    """Returns a key that changes if a parameter gets other memory."""
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _share_memory(name: str, parameter: Any, device: Device, order: Form) -> Buffer:
    """Returns a Buffer of ``device`` that shares the memory of a parameter."""
    what = f"the parameter {brief(name)}"
    check_value(what, parameter)
    seen = parameter.detach() if order is None else in_order(parameter.detach(), order)
    try:
        buffer = to_buffer(seen, device)
    except (TypeError, ValueError) as error:
        raise about(what, error) from None
    if not seen.is_contiguous():
        raise ValueError(
            f"{what} is not contiguous, with strides {parameter.stride()}: call "
            "module.to(memory_format=torch.contiguous_format), or make a parameter of "
            ".contiguous()"
        )
    if buffer.device is not device or buffer.array_owner != "torch":
        seeded = device.defers and device.mesh_state.shares_host_memory
        why = "which has a schedule_seed" if seeded else "move the module there"
        raise ValueError(f"{what} is on {parameter.device}, not in memory of {device.name}: {why}")
    return buffer
