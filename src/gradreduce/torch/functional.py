"""``functional``: a module whose parameters are the variables of an AGN worker."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradreduce.arrays.get_variable import get_variable
from gradreduce.arrays.replica_context import current_replica
from gradreduce.arrays.variable import Variable
from gradreduce.device import Device
from gradreduce.errors import NotCopied, about, brief, listed
from gradreduce.optim.agn import AGNCustomGetter

from .data_parallel import DataParallel
from .engine import check_value
from .variables import places_of


class FunctionalModule(NotCopied):
    """See ``functional``, which makes it.

    Args:
        modules: a copy of the user's module for each device of the worker.
        variables: one for each parameter, in the order of ``named_parameters()``.

    Attributes:
        variables: see above.
    """

    _copy_hint = "call gr.torch.functional for each worker"

    def __init__(self, modules: Sequence[Any], variables: Sequence[Variable]) -> None:
        self.variables = list(variables)
        self._modules = list(modules)
        # A parameter is swapped by hand and stays, unlike in torch.func.functional_call, so that
        # activation checkpoints find it during backward.
        self._places = [
            [places[id(parameter)] for parameter in each.parameters()]
            for each, places in [(each, places_of(each)) for each in self._modules]
        ]

    def __repr__(self) -> str:
        name, places = type(self._modules[0]).__name__, listed(d.name for d in self._devices)
        return f"<functional {name} of {len(self.variables)} variables on {places}>"

    @property
    def _devices(self) -> Sequence[Device]:
        return self.variables[0].devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's ``forward`` with the values of the Variables."""
        module, _ = self._replace_parameters([each.read("torch") for each in self.variables])
        return module(*args, **kwargs)

    def train(self, mode: bool = True) -> FunctionalModule:
        """Sets training mode, as the method of a module does; returns itself."""
        for module in self._modules:
            module.train(mode)
        return self

    def eval(self) -> FunctionalModule:
        """Sets evaluation mode, as the method of a module does; returns itself."""
        return self.train(False)

    def state_dict(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns a copy of parameters and buffers, for the ``load_state_dict`` of the module.

        Args:
            values: parameters by name, such as ``center.values()``. Default, also for missing
                names: those of the worker. Buffers are always those of the worker.
        """
        values = values or {}
        variables = [
            Variable(values[each.name], trainable=False, device=each.devices[0])
            if each.name in values
            else each
            for each in self.variables
        ]
        module, kept = self._replace_parameters([each.read("torch") for each in variables])
        try:
            state: dict[str, Any] = copy.deepcopy(module.state_dict())
        finally:  # a backward may still read them
            self._replace_parameters(kept)
        return state

    def _replace_parameters(self, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Replaces the parameters of the current replica; returns its module, and those before."""
        index = (current_replica() or 0) if len(self._modules) > 1 else 0
        before = []
        for tensor, places in zip(tensors, self._places[index], strict=True):
            before.append(places[0][0]._parameters[places[0][1]])
            for owner, leaf in places:
                owner._parameters[leaf] = tensor
        return self._modules[index], before


def functional(module: Any, getter: AGNCustomGetter) -> FunctionalModule:
    """Returns a function that calls a PyTorch module with the variables of an AGN worker.

    Creates a Variable for each parameter by ``gr.get_variable(…, custom_getter=getter)``, with its
    name and value. Then the result takes the place of the module in a loss::

        model = gr.torch.functional(net, getter)
        optimizer = gr.AGNOptimizer(gr.AdamOptimizer(1e-3), num_workers, getter)
        optimizer.minimize(lambda: cross_entropy(model(images), labels))

    Example: see ``docs/agn.md``.

    The call has the arguments and the result of ``module(…)``. In a loss, PyTorch differentiates it
    with respect to the Variables; elsewhere it has their present values and no gradient. In
    ``gr.replica(i)`` it is on replica i of the worker, and its tensors must be on that device.

    The module is copied and not changed, so that workers in threads can pass the same one; each
    calls ``functional`` with its own getter. The copy has no parameters of its own. Buffers, such
    as the statistics of ``BatchNorm``, belong to the worker, separately for each of its replicas:
    they are neither pushed nor averaged. Workers in threads share PyTorch's random generator, which
    ``Dropout`` uses. What ``forward`` writes into a parameter, as ``Embedding(max_norm=)`` does, is
    not in the Variable. Activation checkpoints must have ``use_reentrant=False``. A module of
    ``torch.compile`` is allowed; the names are then those of its ``named_parameters()``.

    Args:
        module: any module that ``copy.deepcopy`` copies. Parameters with ``requires_grad=False``
            are on the worker only and are not trained; a later change of it has no effect. Tied
            weights are one Variable, with the first name.
        getter: the worker's getter.

    Returns:
        A callable, with these members:

        - ``variables``: the Variables, in the order of ``module.named_parameters()``.
        - ``train(mode=True)`` and ``eval()``: as those of a module. At first it has the mode of
          ``module``.
        - ``state_dict(values=None)``: new tensors for ``module.load_state_dict``: the parameters of
          ``values``, such as ``center.values()``, or else of the worker, and the buffers of the
          worker's replica.

    Raises:
        TypeError: ``module`` is not a module, or is a DataParallel or of TorchScript; or ``getter``
            is not an AGNCustomGetter.
        ValueError: there is no parameter; a parameter or buffer has no values (it is lazy or on the
            device ``meta``); a parameter is trained and complex, or has another shape or dtype at
            the center; or the getter has a variable of its name. After an error make a new getter.
    """
    named = _validate_arguments(module, getter)
    modules = [_without_values(module, device) for device in getter.devices]
    return FunctionalModule(
        modules, [_variable(name, parameter, getter) for name, parameter in named.items()]
    )


def _check_module(module: Any) -> None:
    """Raises ``TypeError`` unless it is a module that can be copied."""
    if isinstance(module, DataParallel):
        raise TypeError("a DataParallel has replicas of its own: pass its .module")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module={brief(module)} must be a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be copied: pass the module it was made from")


def _validate_arguments(module: Any, getter: Any) -> dict[str, Any]:
    """Validates the arguments of ``functional``; returns the parameters by name."""
    _check_module(module)
    if not isinstance(getter, AGNCustomGetter):
        raise TypeError(f"getter={brief(getter)} is not an AGNCustomGetter")
    named = dict(module.named_parameters())
    if not named:
        raise ValueError("the module has no parameter")
    for name, parameter in named.items():
        check_value(f"the parameter {brief(name)}", parameter)
        if name in getter._made:
            raise ValueError(
                f"the getter has a variable {brief(name)} already: make a getter for each worker, "
                "and one torch.nn.ModuleDict of several modules"
            )
    for name, buffer in module.named_buffers():
        check_value(f"the buffer {brief(name)}", buffer)
    return named


def _variable(name: str, parameter: Any, getter: AGNCustomGetter) -> Variable:
    """Creates the Variable of a parameter."""
    trainable = parameter.requires_grad
    try:
        return get_variable(name, parameter.detach(), trainable=trainable, custom_getter=getter)
    except (TypeError, ValueError) as error:
        raise about(f"the parameter {brief(name)}", error) from None


def _without_values(module: Any, device: Device) -> Any:
    """Copies a module; the parameters of the copy have no memory, its buffers are on a device."""
    name = "cpu" if device.mesh_state.shares_host_memory else f"cuda:{device.physical}"
    memo: dict[int, Any] = {}
    for tensor in module.parameters():
        memo[id(tensor)] = torch.nn.Parameter(tensor.to("meta"), tensor.requires_grad)
    for tensor in module.buffers():
        memo[id(tensor)] = tensor.detach().to(name, copy=True)
    return copy.deepcopy(module, memo)
