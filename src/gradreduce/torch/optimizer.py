"""``Optimizer``: a ``torch.optim.Optimizer`` that uses an optimizer of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch

from gradreduce import optim
from gradreduce.arrays.convert import Form, axis_order, in_order, inverse
from gradreduce.arrays.variable import Variable
from gradreduce.backends import only_mesh
from gradreduce.checkpoint import anything, array, map_leaves, plain, validate_state
from gradreduce.device import Mesh
from gradreduce.errors import NotCopied, brief, listed
from gradreduce.optim.checkpoint import power, ready_slots
from gradreduce.optim.hyperparameters import text_of

from .reducer import reducer_of
from .variables import ParameterVariable, check_separate

_BETAS = ("beta1", "beta2")  # together "betas"; schedulers look for this and for "lr"
# Options of PyTorch's optimizers. If the rule lacks one, a group that sets it is an error.
_OPTIONS_OF_PYTORCH = {
    "alpha", "amsgrad", "betas", "centered", "dampening", "eps", "lr", "lr_decay", "maximize",
    "momentum", "nesterov", "weight_decay",
}  # fmt: skip


class _Group:
    """The rule and the Variables of a parameter group.

    Args:
        number: the number of the group.
        rule: an optimizer that only this group uses.

    Attributes:
        number: see above.
        rule: see above.
        variables: for each parameter that is updated a Variable on its memory.
        views: for each of them that has slots the tensors in ``Optimizer.state``, which share
            memory with the slots.
    """

    def __init__(self, number: int, rule: optim.Optimizer) -> None:
        self.number = number
        self.rule = rule
        self.variables: dict[Any, ParameterVariable] = {}
        self.views: dict[Any, list[Any]] = {}
        self._mesh: Mesh | None = None  # of parameters that were passed without Variables

    def variable_of(self, options: Mapping[str, Any], index: int) -> ParameterVariable:
        """Returns the Variable of a parameter of the group; the first call creates it."""
        parameter = options["params"][index]
        if parameter not in self.variables:
            names = options.get("param_names")
            name = names[index] if names else f"param_groups[{self.number}].params[{index}]"
            order = axis_order(parameter)  # such as channels_last
            mesh = self._mesh = self._mesh or _mesh_of(options["params"])
            device = next(
                (each for each in mesh if each.physical == parameter.device.index), mesh[0]
            )
            self.variables[parameter] = ParameterVariable(name, [parameter], [device], [[]], order)
        return self.variables[parameter]


class Optimizer(NotCopied, torch.optim.Optimizer):  # type: ignore[misc]  # see DataParallel
    """A PyTorch optimizer that updates parameters in place by a rule of this library.

    The result has the same bits as ``apply_gradients`` of the rule. There is one launch for each
    parameter group, dtype and GPU::

        optimizer = gr.torch.Optimizer(gr.AdamOptimizer(1e-3), net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
        loss.backward()
        optimizer.step()

    Example: see ``docs/pytorch.md``.

    - The options of a parameter group are the hyperparameters of the rule, by their names. As
      schedulers expect, ``learning_rate`` is ``"lr"``, and ``beta1`` and ``beta2`` are ``"betas"``.
      Each group has its own options, also Adam's powers (``"beta1_power"``, ``"beta2_power"``).
    - The state of a parameter has its slots, as tensors that share their memory. Change them in
      place.
    - ``state_dict()`` is PyTorch's: it has tensors and numbers, for ``torch.save`` and
      ``torch.load(weights_only=True)``.
    - Parameters whose ``.grad`` is None are not updated. A sparse ``.grad`` is used like
      ``IndexedSlices``.
    - ``GradScaler`` works as with PyTorch's optimizers that are not fused: it unscales the
      gradients (``unscale_``), and skips the step if a gradient is infinite or NaN.

    Args:
        optimizer: has the rule, and numbers as default options, not callables. It is not changed.
        params: parameters, pairs of name and parameter, or parameter groups, as in
            ``torch.optim.SGD``. They must be in memory of the mesh of their DataParallel, else of
            the open mesh. (If no mesh is open, or several are: of ``gr.default_mesh()``.) Or
            Variables of ``gr.torch.variables``, whose mesh is used.

    Raises:
        TypeError: ``optimizer`` is not a ``gr.Optimizer``, is an ``AGNOptimizer``, or has a
            hyperparameter that is not a number; or an error of ``variables``.
        ValueError: ``optimizer`` already has state, the rule does not have an option of a group,
            the memory of a parameter cannot be shared (see ``variables``), or an error of
            ``torch.optim.Optimizer``.
    """

    _copy_hint = "make a new one, and load the state_dict() of this one into it"

    def __init__(self, optimizer: optim.Optimizer, params: Any) -> None:
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"optimizer={brief(optimizer)} is not a gr.Optimizer")
        if isinstance(optimizer, optim.AGNOptimizer):
            raise TypeError(
                "an AGNOptimizer updates the variables of its getter: pass its inner optimizer"
            )
        if any(optimizer._slots.by_name.values()) or optimizer._slots.powers:
            raise ValueError(
                f"{optimizer!r} has state, which would not be used: pass a new one, and load the "
                "state_dict of a gr.torch.Optimizer"
            )
        self._template = optimizer
        options = _options(optimizer)
        self._options = tuple(options)
        self._groups: list[_Group] = []
        self._saved: list[Any] = []
        super().__init__([params] if isinstance(params, Variable) else params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``. The group gets its own slots and options."""
        params = param_group["params"]
        items = [params] if isinstance(params, torch.Tensor | Variable) else params
        if not isinstance(items, set):
            items = list(items)
            param_group["params"] = [
                parameter
                for item in items
                for parameter in (
                    item._parameters if isinstance(item, ParameterVariable) else (item,)
                )
            ]
        rule = self._template
        known = {*_OPTIONS_OF_PYTORCH, *rule._hyperparameters, *rule._settings}
        wrong = sorted(name for name in known - {*self._options} if param_group.get(name))
        if wrong:
            raise ValueError(
                f"{listed(wrong)} of a parameter group is not an option of {self._template!r}, "
                f"which has {listed(self._options)}"
            )
        super().add_param_group(param_group)
        try:
            group = _Group(len(self._groups), self._template._without_slots())
            _set_options(group.rule, param_group, self._options)
            group.rule._check_hyperparameters()
            for variable in [each for each in items if isinstance(each, ParameterVariable)]:
                for index, parameter in enumerate(variable._parameters):
                    group.variables[parameter] = variable.of_replica(index)
            variables = [
                group.variable_of(param_group, index) for index in range(len(param_group["params"]))
            ]
            check_separate(variables)
            if len({each.devices[0].mesh_state for each in variables}) > 1:
                raise ValueError(
                    "the parameters of a group are on different meshes; pass parameters of one mesh"
                )
        except BaseException:
            self.param_groups.pop()
            raise
        self._groups.append(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients; does not wait for the device.

        Args:
            closure: a function that computes the loss and its gradients.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: a parameter has other memory than before, or its state was replaced.
                Nothing is updated.
            ValueError: the rule cannot use the value of an option.
        """
        return self._step() if closure is None else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # PyTorch must not wrap ``step`` again

    @torch.optim.Optimizer.profile_hook_step  # type: ignore[untyped-decorator]
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Implements ``step``; PyTorch calls the users' hooks before and after it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, options, pairs in self._updates():
            if pairs:
                group.rule._update(pairs)  # DataParallel has averaged over processes
                options.update(
                    zip(group.rule._slots.power_names, group.rule._slots.powers, strict=False)
                )
                self._show_state(group)
        return loss

    def _updates(self) -> list[tuple[_Group, dict[str, Any], list[tuple[Any, ParameterVariable]]]]:
        """Returns the groups with options and pairs; checks everything before an update."""
        if len(self.param_groups) != len(self._groups):
            raise RuntimeError(
                f"param_groups has {len(self.param_groups)} groups, but the optimizer was made for "
                f"{len(self._groups)}: add a group by add_param_group, or make a new optimizer"
            )
        updates = []
        for group, options in zip(self._groups, self.param_groups, strict=True):
            _set_options(group.rule, options, self._options)
            updates.append((group, options, self._pairs(group, options)))
        for group, _, pairs in updates if len(updates) > 1 else ():
            group.rule._check_hyperparameters()
            for _, variable in pairs:
                variable._check_memory()
            if group.rule._plan is None:
                group.rule._rehearse_update([variable for _, variable in pairs])
                group.rule._rehearse_update(
                    [variable for grad, variable in pairs if grad.is_sparse], sparse=True
                )
        return updates

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a ``state_dict``. On error, the optimizer is unchanged.

        Raises:
            KeyError: an option or a slot is missing or unknown, because another optimizer was
                saved.
            TypeError: a slot is not an array, or an entry has another type.
            ValueError: a slot has another shape or dtype, an option is not a number or a short
                list, the state is nested too deeply, or an error of PyTorch.
        """
        powers = [name for group in self._groups for name in group.rule._slots.power_names]
        _check_form(state_dict, [*self._options, *powers])

        def take_state(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Removes the state, because PyTorch would cast it to the parameters' dtypes."""
            keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            self._saved = list(map(state_dict["state"].get, keys))
            return {**state_dict, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._saved = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Validates and restores a state; called by PyTorch in ``load_state_dict``."""
        saved = iter(self._saved)
        ready = []
        for group, options in zip(self._groups, state["param_groups"], strict=True):
            missing = [name for name in self._options if name not in options]
            if missing:
                raise KeyError(f"param_groups of the state have no {listed(missing)}")
            values: dict[Variable, dict[str, Any]] = {}
            for index, slots_of_parameter in zip(
                range(len(options["params"])), saved, strict=False
            ):
                if slots_of_parameter:
                    variable = group.variable_of(options, index)
                    values[variable] = _validate_slots(group.rule, variable, slots_of_parameter)
            slots = group.rule._slots
            powers = tuple(
                [power(name, options[name]) for name in slots.power_names if name in options]
            )
            ready.append((group, powers, ready_slots(slots, values)))
        super().__setstate__(state)
        for group, powers, load in ready:
            load()
            group.rule._slots.powers = powers
            group.views.clear()
            self._show_state(group)

    def _pairs(
        self, group: _Group, options: Mapping[str, Any]
    ) -> list[tuple[Any, ParameterVariable]]:
        """Returns the gradients of a group that are not None, with their Variables."""
        pairs = []
        for index, parameter in enumerate(options["params"]):
            grad = parameter.grad
            if grad is None:
                continue
            variable = group.variable_of(options, index)
            views = group.views.get(parameter)
            state = self.state.get(parameter, {}).values()
            if views is not None and list(map(id, state)) != list(map(id, views)):
                raise RuntimeError(
                    f"the state of the parameter {brief(variable.name)} was replaced: change its "
                    "tensors in place, or call load_state_dict"
                )
            grad = grad.detach() if grad.requires_grad else grad
            order = variable.order
            pairs.append((grad if order is None else in_order(grad, order), variable))
        return pairs

    def _show_state(self, group: _Group) -> None:
        """Adds new slots of parameters to ``state``."""
        slots = group.rule._slots.by_name
        for parameter, variable in group.variables.items() if slots else ():
            if parameter in group.views:
                continue
            views = {
                name: of_name[variable].array("torch")
                for name, of_name in slots.items()
                if variable in of_name
            }
            if (order := variable.order) is not None:
                views = {name: in_order(view, inverse(order)) for name, view in views.items()}
            if views:
                group.views[parameter] = list(views.values())
                self.state[parameter] = views


def _mesh_of(parameters: Iterable[Any]) -> Mesh:
    """Returns the mesh of the DataParallel that has one of the parameters, else the open mesh."""
    found = [each.mesh for each in map(reducer_of, parameters) if each is not None and each.owner()]
    return found[0] if found else only_mesh()


def _options(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Returns the default options of parameter groups: the hyperparameters of an optimizer."""
    known = (*optimizer._hyperparameters, *optimizer._settings)
    public = [name for name in vars(optimizer) if not name.startswith("_")]
    options = {name: getattr(optimizer, name) for name in dict.fromkeys((*known, *public))}
    for name, value in list(options.items()):
        if isinstance(value, Real):
            continue
        if name in optimizer._hyperparameters:
            raise TypeError(
                f"{name}={text_of(value)} is not a number: pass a number, and change it by "
                "param_groups, or by a scheduler of torch.optim.lr_scheduler"
            )
        del options[name]  # another attribute of a rule written in Python
    if _BETAS[0] in options:
        options["betas"] = tuple(options.pop(name) for name in _BETAS)
    if "learning_rate" in options:
        options = {"lr": options.pop("learning_rate"), **options}
    return options


def _set_options(rule: optim.Optimizer, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Sets the hyperparameters of a rule to the options of a parameter group."""
    for name in names:
        if name == "betas":
            rule.beta1, rule.beta2 = options[name]
        else:
            is_renamed = name == "lr" and hasattr(rule, "learning_rate")
            setattr(rule, "learning_rate" if is_renamed else name, options[name])


def _check_form(saved: Any, options: Sequence[str]) -> None:
    """Checks types, sizes and depths of a ``state_dict``, before PyTorch copies parts of it."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict is a {type(saved).__name__}; expected a dict")
    map_leaves(anything, saved, "state_dict")
    slots, groups = saved["state"], saved["param_groups"]
    if not isinstance(slots, Mapping) or not isinstance(groups, list | tuple):
        raise TypeError("state_dict['state'] must be a dict, state_dict['param_groups'] a list")
    for index, group in enumerate(groups):
        where = f"state_dict['param_groups'][{index}]"
        if not isinstance(group, Mapping) or not isinstance(group["params"], list | tuple):
            raise TypeError(f"{where} must be a dict with a list 'params'")
        for name in options:
            plain(f"{where}[{name!r}]", group.get(name))
    for key, each in slots.items():
        if not isinstance(each, Mapping):
            raise TypeError(f"state_dict['state'][{brief(key)}] must be a dict")


def _as_saved(value: Any, order: Form) -> Any:
    """Converts a tensor of ``state`` to the form in a ``state_dict`` of ``gr.Optimizer``."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return value if order is None or value.dim() != len(order) else in_order(value, order)


def _validate_slots(
    rule: optim.Optimizer, variable: ParameterVariable, saved: Any
) -> dict[str, Any]:
    """Validates the slots of a parameter in a ``state_dict``; returns host arrays."""
    slot = array(variable.shape, rule._slots.state_dtype(variable))
    if isinstance(saved, Mapping):
        saved = {name: _as_saved(value, variable.order) for name, value in saved.items()}
    where = f"the state of the parameter {brief(variable.name)}"
    return dict(validate_state(where, saved, dict.fromkeys(rule._slots.names_for(variable), slot)))
