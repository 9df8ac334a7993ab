"""Rules that change an AGN center by a push, its age and its weight; ``gr.center_rules``.

Without a rule the center applies the mean gradient of a push by the inner optimizer, as in AGN. The
rules of this file run the update kernels on the center's variables; a rule in Python gets arrays.
Sources: DiLoCo (arXiv 2311.08105), delayed Nesterov (2401.09135), staleness-aware rates
(1511.05950).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.ops import update_rules
from gradreduce.optim.hyperparameters import Number, as_integer
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import Slots

__all__ = ["CenterRule", "DelayedNesterov", "Mean", "Nesterov", "StalenessScaled"]


class CenterRule(Optimizer):
    """Base class of center rules; subclass it to write one.

    A subclass overrides ``update``, and names its slots in ``_slot_names``. The center keeps slots
    for each of its variables and saves them in its ``state_dict``. Attributes are numbers, strings
    or other values that can be pickled, because ``gr.ray.AGNCenter`` sends the rule to its actors.
    Each push sends the values of the hyperparameters; Variables are not pickled. A rule belongs to
    one center.

    Args:
        name: name of the rule; default: that of the class.

    Raises:
        TypeError: ``name`` is not a string.

    Example:
        >>> class Damped(gr.center_rules.CenterRule):
        ...     def update(self, center, slots, push, age, weight):
        ...         center -= push * weight / (1 + age)
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> center = gr.AGNCenter(mesh, center_rule=Damped())
        >>> getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
        >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
        >>> inner = gr.GradientDescentOptimizer(0.5)
        >>> optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=1)
        >>> optimizer.apply_gradients([(np.float32([3]), w)])
        True
        >>> w.numpy()  # 4 - 3
        array([1.], dtype=float32)
    """

    _age, _weight = 0, 1.0  # of the push that is applied; set by the center, under its lock

    def __init__(self, name: str = "") -> None:
        super().__init__(name or type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kept = {name: value for name, value in vars(self).items() if name != "_slots"}
        for name, value in kept.items():
            if isinstance(value, Variable):
                kept[name] = None
        return _make, (type(self), kept)

    def update(
        self, center: Any, slots: dict[str, Any], push: Any, age: int, weight: float
    ) -> None:
        """Changes a center variable and its slots in place, elementwise.

        It is called for each variable of a push, in any order, in plain NumPy. It must return None.
        If it raises, the center is unchanged, and ``apply_gradients`` of the worker raises.

        Args:
            center: a NumPy array, or a CuPy array on GPUs: the whole variable, or the rows that a
                sparse push touches. If the variable has a master, it is the master, in float32.
            slots: arrays of the same shape, by name; change them in place.
            push: the mean gradient of a period, or the start of a period minus its end; the
                weighted mean of these in a round (``num_required=``). Read-only.
            age: the number of pushes of other workers that the center has applied since the worker
                last pulled; in a round the largest one.
            weight: the weight of the push divided by the mean weight of all accepted pushes, this
                one included; 1 in a round.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rule: override update")

    def _apply(self, variable: Any, slots: dict[str, Any], gradient: Any) -> None:
        return self.update(variable, slots, gradient, self._age, self._weight)

    def begin(self, age: int, weight: float, num_updates: int) -> Scalars:
        """For the center: sets what ``update`` gets; returns the scalars of the kernel.

        Args:
            age: see ``update``.
            weight: see ``update``.
            num_updates: the number of updates before this one.
        """
        self._age, self._weight = age, weight
        return self._scalars(age, num_updates)

    def slots_like(self, slots: Slots) -> Slots:
        """For the center: returns the slots of this rule, with masters if ``slots`` has them."""
        return Slots(
            type(self), self._name, self._slots.names, "float32" if slots.has_masters else None
        )

    def _scalars(self, age: int, num_updates: int) -> Scalars:
        """Returns the scalars of the kernel."""
        return self._next_update(())[0]


def _make(kind: type[CenterRule], attributes: Mapping[str, Any]) -> CenterRule:
    """Returns a rule with these attributes, and no slots."""
    rule = kind.__new__(kind)
    vars(rule).update(attributes)
    CenterRule.__init__(rule, rule.get_name())
    return rule


class Mean(CenterRule):
    """``center -= learning_rate * weight * push``: gradient descent at the center.

    With ``push="delta"`` and a learning rate of 1, a round is the mean of the workers' variables.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each push.
        name: name of the rule.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number.

    Example:
        >>> gr.center_rules.Mean(0.5)
        <Mean 'Mean' learning_rate=0.5>
    """

    _rule = update_rules.sgd

    def __init__(self, learning_rate: Number = 1.0, name: str = "Mean") -> None:
        super().__init__(name)
        self._set_numbers(learning_rate=learning_rate)


class StalenessScaled(CenterRule):
    """``center -= learning_rate * exp(-alpha * age) * weight * push``: old pushes change less.

    Args:
        learning_rate: see ``Mean``.
        alpha: how fast the influence of a push decreases with its age; 0: not at all.
        name: name of the rule.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number.

    Example:
        >>> gr.center_rules.StalenessScaled(0.5, alpha=0.1)
        <StalenessScaled 'StalenessScaled' learning_rate=0.5, alpha=0.1>
    """

    _rule = update_rules.sgd

    def __init__(
        self, learning_rate: Number = 1.0, alpha: Number = 0.1, name: str = "StalenessScaled"
    ) -> None:
        super().__init__(name)
        self._set_numbers(learning_rate=learning_rate, alpha=alpha)

    def _scalars(self, age: int, num_updates: int) -> Scalars:
        learning_rate, alpha = super()._scalars(age, num_updates)
        return (learning_rate * math.exp(-alpha * age),)


class Nesterov(CenterRule):
    """Nesterov's momentum of the pushes, for rounds in which all workers push.

    ``m = momentum * m + weight * push; center -= learning_rate * (weight * push + momentum * m)``.
    If pushes are applied one by one, old ones make this rule diverge: use ``DelayedNesterov``. An
    ``AGNOptimizer`` warns if its ``num_worker`` is not ``num_required``.

    Args:
        learning_rate: see ``Mean``.
        momentum: the fraction of m that an update keeps, at least 0 and below 1.
        name: name of the rule.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number.

    Example:
        >>> gr.center_rules.Nesterov(0.7, 0.9)
        <Nesterov 'Nesterov' learning_rate=0.7, momentum=0.9>
    """

    _rule = update_rules.nesterov

    def __init__(
        self, learning_rate: Number = 0.7, momentum: Number = 0.9, name: str = "Nesterov"
    ) -> None:
        super().__init__(name)
        self._set_numbers(learning_rate=learning_rate, momentum=momentum)


class DelayedNesterov(CenterRule):
    """Applies each push at once; the momentum follows after several pushes.

    ``center -= learning_rate * weight * push / num_pushes`` at each push. After each
    ``num_pushes`` updates also ``m = momentum * m + mean of them`` and
    ``center -= learning_rate * momentum * m``. With ``num_pushes=1`` it is ``Nesterov``.

    Args:
        num_pushes: number of updates per step of the momentum, such as the number of workers.
        learning_rate: see ``Mean``.
        momentum: see ``Nesterov``.
        name: name of the rule.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number, or ``num_pushes`` is below 1.

    Example:
        >>> gr.center_rules.DelayedNesterov(4, 0.7, 0.9)
        <DelayedNesterov 'DelayedNesterov' learning_rate=0.7, momentum=0.9, num_pushes=4>
    """

    _rule = update_rules.delayed_nesterov
    _settings = ("num_pushes",)
    _densifies = True  # the momentum changes all rows

    def __init__(
        self,
        num_pushes: int,
        learning_rate: Number = 0.7,
        momentum: Number = 0.9,
        name: str = "DelayedNesterov",
    ) -> None:
        super().__init__(name)
        self.num_pushes = as_integer("num_pushes", num_pushes, least=1)
        self._set_numbers(learning_rate=learning_rate, momentum=momentum)

    def _scalars(self, age: int, num_updates: int) -> Scalars:
        learning_rate, momentum = super()._scalars(age, num_updates)
        is_last = (num_updates + 1) % self.num_pushes == 0
        each = learning_rate / self.num_pushes
        return each, learning_rate, momentum, float(self.num_pushes), float(is_last)
