"""``variables``: Variables on the memory of a module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gradreduce.arrays.convert import Form, in_order, to_buffer
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, Mesh
from gradreduce.errors import about, brief

from .data_parallel import as_modules, check_alike


class _Copy(NamedTuple):
    """A parameter of one replica.

    Attributes:
        parameter: of PyTorch.
        layout: what it was when its memory was shared.
        places: the modules that have it, each with the name that it has there.
    """

    parameter: Any
    layout: tuple[Any, ...]
    places: Sequence[tuple[Any, str]]


class ParameterVariable(Variable):
    """A Variable on the memory of a parameter, or of the same parameter of several replicas.

    Each use raises ``RuntimeError`` if the parameter has got other memory, or its module another
    parameter. Calls are ordered with PyTorch's current streams, and autograd sees what they write.

    Args:
        name: of the parameter.
        parameters: one for each device.
        devices: that they are on.
        places: of each, the modules that have it, each with the name that it has there.
        order: of the parameters' axes in the Variable: that of their memory. None: the same.

    Raises:
        ValueError: the memory of a parameter cannot be shared with its device.
        TypeError: a parameter whose memory does not hold its values, such as a DTensor.
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
            _shared(name, parameter, device, order)
            for parameter, device in zip(parameters, devices, strict=True)
        )
        self._copies = [
            _Copy(parameter, _layout(parameter), within)
            for parameter, within in zip(parameters, places, strict=True)
        ]

    def of_replica(self, index: int) -> ParameterVariable:
        """Returns a Variable on one replica's copy."""
        copy, device = self._copies[index], self.devices[index]
        name = self.name if len(self._copies) == 1 else f"{self.name} of replica {index}"
        return ParameterVariable(name, [copy.parameter], [device], [copy.places])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """See ``Variable.buffers``; checks the memory, and waits for PyTorch's current streams."""
        self._check_memory()
        wait_for_inputs(self._buffers)
        return self._buffers

    def _check_memory(self) -> None:
        for parameter, layout, places in self._copies:
            is_there = all([owner._parameters.get(leaf) is parameter for owner, leaf in places])
            if not is_there or _layout(parameter) != layout:
                raise RuntimeError(
                    f"the parameter {brief(self.name)} has been replaced or has other memory than "
                    "when it was shared, as after module.to(...) or load_state_dict(assign=True): "
                    "make new variables, or a new optimizer, of the module as it is now"
                )


def variables(module_or_replicas: Any, mesh: Mesh) -> list[ParameterVariable]:
    """Returns Variables on the memory of a module's parameters; nothing is copied.

    What an optimizer, a ``SyncStep`` or ``assign`` writes is in the module at once, and what
    PyTorch writes to a parameter (``load_state_dict``, another optimizer) is in the Variable::

        net = torch.nn.Linear(8, 1)
        weight, bias = gr.torch.variables(net, gr.open_mesh(1, backend="sim"))
        net(x).mean().backward()
        optimizer = gr.AdamOptimizer(0.1)
        optimizer.apply_gradients([(net.weight.grad, weight), (net.bias.grad, bias)])

    Calls come behind what PyTorch's current streams hold, and those behind them; the host waits for
    nothing. A parameter that gets other memory (by ``module.to``) or is replaced (by
    ``load_state_dict(assign=True)``) is found by its address: the next use of its Variable raises
    ``RuntimeError``, and the old memory stays as it was.

    Args:
        module_or_replicas: a module, for a mesh of one device; or a list of alike modules, one on
            each device of the mesh, such as ``DataParallel.replicas``. Those must have equal
            values, which is not checked.
        mesh: the devices of this process. The simulation has the parameters in host memory.

    Returns:
        One Variable for each parameter, of its name, shape and dtype, in the order of
        ``named_parameters()``; with a copy for each replica. Tied weights are one, of the first
        name. ``trainable`` is what ``requires_grad`` is now.

    Raises:
        TypeError: no module or list of modules, no Mesh, or a parameter whose memory does not hold
            its values (a DTensor).
        ValueError: another number of replicas than devices, replicas that differ, a parameter that
            is not contiguous or not on the device of its replica, two parameters that share
            memory, a mesh with a ``schedule_seed``, or no parameter.
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
    check_alike(named)
    if not named[0]:
        raise ValueError("the module has no parameter")
    places = [_places(replica) for replica in replicas]
    made = []
    for row in zip(*named, strict=True):
        parameters = [parameter for _, parameter in row]
        within = [place[id(parameter)] for place, parameter in zip(places, parameters, strict=True)]
        made.append(ParameterVariable(row[0][0], parameters, mesh.devices, within))
    check_separate(made)
    return made


def check_separate(variables: Sequence[ParameterVariable]) -> None:
    """Raises ``ValueError`` if two of these Variables share memory, which one launch writes."""
    copies = [(each.name, buffer) for each in variables for buffer in each._buffers if buffer.size]
    copies.sort(key=lambda copy: copy[1].address)
    for (one, low), (other, high) in pairwise(copies):
        if low.address + low.nbytes > high.address:
            raise ValueError(
                f"the parameters {brief(one)} and {brief(other)} share memory: make them the same "
                "parameter, or copy one"
            )


def _places(module: Any) -> dict[int, list[tuple[Any, str]]]:
    """Returns the modules that have each parameter, by its id, and the names that it has there."""
    found: dict[int, list[tuple[Any, str]]] = {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            found.setdefault(id(parameter), []).append((owner, leaf))
    return found


def _layout(parameter: Any) -> tuple[Any, ...]:
    """Returns what differs if a parameter has got other memory."""
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _shared(name: str, parameter: Any, device: Device, order: Form) -> Buffer:
    """Returns a Buffer of ``device`` on the memory of a parameter."""
    what = f"the parameter {brief(name)}"
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
        seeded = device.defers and device.mesh_state.backend == "sim"
        why = "which has a schedule_seed" if seeded else "move the module there"
        raise ValueError(f"{what} is on {parameter.device}, not in memory of {device.name}: {why}")
    return buffer
