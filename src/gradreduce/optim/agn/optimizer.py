"""AGNOptimizer: local steps of a worker, and a push to the center once per period.

See arXiv 1710.02368.

local:  w <- rule(w, g); a <- a + weight * g                 each step
global: c <- rule(c, a / sum of weights); w <- c; a <- 0     once per period

With dense gradients each is one launch per GPU and dtype, if all weights are 1. A local step with
another weight is two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gradreduce.accumulator.validate import as_timeout
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.variable import Variable
from gradreduce.autodiff.gradients import Engine
from gradreduce.checkpoint import downloader
from gradreduce.device import as_deadline, as_flag, as_positive
from gradreduce.errors import brief
from gradreduce.optim.compute_gradients import gradients_to_apply
from gradreduce.optim.gradient_inputs import check_global_step, validate_pairs
from gradreduce.optim.hyperparameters import as_integer, no_attribute
from gradreduce.optim.optimizer import Optimizer
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.sums.methods import AggregationMethod

from .checkpoint import load_worker, worker_table
from .push import PushConfig
from .session_hook import AGNHook
from .step_weight import as_step_weight
from .variables import AGNCustomGetter, step_counter
from .worker import Worker


class AGNOptimizer(Optimizer):
    """Accumulates gradients locally and pushes their mean to the center once per period.

    Create an AGNOptimizer for each worker, with its own getter and inner optimizer. Each
    ``apply_gradients`` updates the worker's variables by the inner rule and adds the gradients to a
    sum. Every ``communication_period`` calls, it also updates the center variables by the mean
    (push), and copies them to the worker's variables (pull). With ``weight=`` it is the weighted
    mean. ``docs/agn.md`` describes steps, pushes, pulls, and workers with several replicas.

    After the training, read the center variables. Gradients of an unfinished period are not pushed.

    Source: ``tf.contrib.opt.AGNOptimizer``; arXiv 1710.02368.

    Args:
        optimizer: the inner optimizer, whose rule makes the local and the center updates.
        num_worker: number of workers; ``make_session_run_hook`` can wait for them.
        custom_getter: the worker's ``AGNCustomGetter``, which created the variables.
        communication_period: number of local steps in a period, at least 1.
        use_locking: no effect: push, center update and pull are always atomic.
        name: name of the optimizer.
        distance_scale: divide each element of a mean by ``d**2 / distance_scale + 1``, where d is
            the distance that the center has moved since this worker's last pull; before the first
            one, the distance to the worker's values at its first step. A value of about 1e-4 lets
            many workers with a short period converge. None: do not divide.
        reset_momentum: whether a pull sets the worker's momentum to zero, which is in the slots
            ``"momentum"`` or ``"m"``.

    Raises:
        ValueError: a period or ``num_worker`` is less than 1, ``distance_scale`` is not above 0 (at
            least 1.2e-38, the smallest normal float32), the name is empty, the center's other
            workers have another rule, or another AGNOptimizer uses the getter or inner optimizer.
        TypeError: an argument has a wrong type.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> getter = gr.AGNCustomGetter(mesh.devices[1], center=gr.AGNCenter(mesh))
        >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
        >>> inner = gr.GradientDescentOptimizer(0.5)
        >>> optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
        >>> optimizer.apply_gradients([(np.float32([1]), w)])  # a local step
        False
        >>> w.numpy(), getter.center_variable(w).numpy()
        (array([3.5], dtype=float32), array([4.], dtype=float32))
        >>> optimizer.apply_gradients([(np.float32([3]), w)])  # pushes the mean, 2; pulls
        True
        >>> w.numpy(), getter.center_variable(w).numpy()
        (array([3.], dtype=float32), array([3.], dtype=float32))
    """

    _is_elementwise = False  # a push needs whole variables

    def __init__(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        optimizer: Optimizer,
        num_worker: int,
        custom_getter: AGNCustomGetter,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
        *,
        distance_scale: float | None = None,
        reset_momentum: bool = False,
    ) -> None:
        super().__init__(name)
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AGNOptimizer):
            raise TypeError(
                f"optimizer={brief(optimizer)} must be an Optimizer of gradreduce other than "
                "AGNOptimizer"
            )
        if not isinstance(custom_getter, AGNCustomGetter):
            raise TypeError(f"custom_getter={brief(custom_getter)} is not an AGNCustomGetter")
        self._inner, self._getter = optimizer, custom_getter
        self._devices = custom_getter.devices
        self._center = custom_getter.center._shared
        self._num_worker = as_integer("num_worker", num_worker, least=1)
        period = as_integer("communication_period", communication_period, least=1)
        as_flag("use_locking", use_locking)
        config = PushConfig(_as_scale(distance_scale), name)
        self._step = step_counter(custom_getter._shared, custom_getter.devices[0])
        self._worker = Worker(
            optimizer,
            custom_getter._shared,
            self._center,
            config,
            period=period,
            resets=as_flag("reset_momentum", reset_momentum),
        )
        _check_free(custom_getter, optimizer)
        if self._center.options.rule is not None and distance_scale is not None:
            raise ValueError(
                f"distance_scale={brief(distance_scale)} is for a center without a rule; this one "
                f"has {self._center.options.rule!r}: gr.center_rules.StalenessScaled makes old "
                "pushes small"
            )
        self._center.expect(self._num_worker)
        self._center.join(optimizer)
        for owned in (custom_getter, optimizer):
            _owners[owned] = weakref.ref(self)

    def _no_attribute(self, name: str) -> AttributeError:
        inner = self._inner
        known = (*inner._hyperparameters, *inner._settings)
        return no_attribute(type(self).__name__, name, known, "its inner optimizer")

    def __repr__(self) -> str:
        return (
            f"<AGNOptimizer {self._name!r} of {self._inner!r}, communication_period "
            f"{self._worker.period}, local_step {self._worker.variables.num_steps}>"
        )

    # -- members ----------------------------------------------------------------------------------

    @property
    def local_step(self) -> Variable:
        """The number of steps of this worker, a read-only int32 Variable."""
        return self._step

    @property
    def num_dropped(self) -> int:
        """The number of pushes that the center has dropped (``AGNCenter(max_staleness=)``)."""
        return self._worker.num_dropped

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The ``CrossDeviceOps`` that reduces ``PerReplica`` gradients; can be set."""
        return self._inner.cross_device_ops

    @cross_device_ops.setter
    def cross_device_ops(self, cross_device_ops: CrossDeviceOps) -> None:
        self._inner.cross_device_ops = cross_device_ops

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns the slot ``name`` of a worker's variable or center variable, or None."""
        found = self._inner.get_slot(var, name)
        return self._center.slot(var, name) if found is None else found

    def get_slot_names(self) -> list[str]:
        """Returns the names of the inner optimizer's existing slots, sorted."""
        return self._inner.get_slot_names()

    def variables(self) -> list[Variable]:
        """Returns the slots of worker and center variables, sorted by name."""
        return sorted(
            [*self._inner.variables(), *self._center.slot_variables()], key=lambda each: each.name
        )

    @StreamScope()
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        deadline: float | None = None,
        weight: float | Sequence[float] = 1,
    ) -> bool:
        """Runs a local step and, every ``communication_period`` steps, a push and a pull.

        A push is the mean of the gradients of its period, weighted by ``weight``: the sum of the
        products, divided by the sum of the weights. The local step uses the gradients as they are.

        The host waits for devices only where ``Optimizer.apply_gradients`` does. It may wait until
        another worker has launched its push, and with ``AGNCenter(num_required=)`` until a round
        has its pushes.

        If arguments are invalid, nothing changes. If a push fails before it has changed the center,
        the local step is kept, and the next call first repeats the push, which may fail again.
        Ctrl-C takes effect after the step and its push are launched and counted.

        Args:
            grads_and_vars: see ``Optimizer.apply_gradients``; the variables are from the getter.
            global_step: a Variable that is incremented by one with each push.
            name: ignored.
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            weight: the weight of the gradients in the push, such as their number of examples: a
                number of at least 0 on the host. For a worker with several replicas also a list
                with a number for each: then ``PerReplica`` gradients are averaged with these
                weights, for the local step too, and the weight of the step is their sum. A product
                is rounded once to the accumulate dtype; the sum of weights is exact, and rounded
                once to float64. With weight 0 the gradients are not read, and may be None or NaN:
                the step is counted, but changes neither the worker's variables nor the push; with
                0 in a list, that replica's are not read.

        Returns:
            True if it pushed and pulled, otherwise False. A push that is too old for the center is
            dropped: the worker pulls, and the result is False.

        Raises:
            KeyError: the getter did not create a variable.
            DeadlineExceededError: a round did not get its pushes within 90 % of ``deadline``. The
                push belongs to the round, and the next call waits for it again.
            ValueError, TypeError: see ``Optimizer.apply_gradients``. Also if a weight is negative,
                not finite or not a number, if a list has another length than the worker has
                replicas, or if all steps of a period would have weight 0. That error is raised by
                the call that would end the period, which is not counted: make it again with other
                gradients and a weight above 0.
            CollectiveError: the center rejects pushes, because a push failed part-way.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
            >>> w = gr.get_variable("w", np.float32([0]), custom_getter=getter)
            >>> inner = gr.GradientDescentOptimizer(1.0)
            >>> optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
            >>> optimizer.apply_gradients([(np.float32([1]), w)], weight=3)
            False
            >>> optimizer.apply_gradients([(np.float32([5]), w)], weight=1)
            True
            >>> w.numpy()  # minus (3 * 1 + 1 * 5) / (3 + 1)
            array([-2.], dtype=float32)
        """
        seconds = as_deadline(deadline)
        step_weight = as_step_weight(weight, len(self._getter.devices))
        is_read = step_weight.units != 0
        gradients, variables = validate_pairs(grads_and_vars, is_read=is_read)
        check_global_step(global_step)
        return self._worker.apply(gradients, variables, step_weight, global_step, seconds)

    def minimize(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        loss: Callable[[], Any],
        global_step: Variable | None = None,
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = Optimizer.GATE_OP,
        aggregation_method: AggregationMethod | int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        *,
        engine: Engine | None = None,
        deadline: float | None = None,
        weight: float | Sequence[float] = 1,
    ) -> bool:
        """Computes the gradients of ``loss`` on each replica and applies them, in one call.

        See ``Optimizer.minimize``. The loss is called also if ``weight`` is 0.

        Args:
            loss: see ``Optimizer.minimize``.
            global_step: see ``apply_gradients``.
            var_list: see ``Optimizer.minimize``.
            gate_gradients: see ``Optimizer.minimize``.
            aggregation_method: see ``Optimizer.minimize``.
            colocate_gradients_with_ops: see ``Optimizer.minimize``.
            name: ignored.
            grad_loss: see ``Optimizer.minimize``.
            engine: see ``Optimizer.minimize``.
            deadline: see ``apply_gradients``; it starts when the gradients are computed.
            weight: see ``apply_gradients``.

        Returns:
            True if it pushed and pulled, otherwise False.

        Raises:
            Exception: any error of ``Optimizer.minimize`` and ``apply_gradients``.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
            >>> w = gr.get_variable("w", np.float32([0]), custom_getter=getter)
            >>> inner = gr.GradientDescentOptimizer(1.0)
            >>> optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
            >>> for batch in np.float32([1, 1, 1]), np.float32([5]):
            ...     pushed = optimizer.minimize(lambda: np.mean(w * batch), weight=len(batch))
            >>> w.numpy()
            array([-2.], dtype=float32)
        """
        as_deadline(deadline)  # an invalid argument raises before the loss is called
        as_step_weight(weight, len(self._getter.devices))
        options = (gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss)
        compute = partial(self.compute_gradients, engine=engine)
        pairs = gradients_to_apply(compute, self._devices, loss, var_list, *options)
        return self.apply_gradients(pairs, global_step, name, deadline=deadline, weight=weight)

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Compiles the kernels for these variables and creates slots of worker and center.

        Raises:
            KeyError: the getter did not create a variable.
        """
        self._worker.prepare(variables)

    def get_init_op(self, task_index: int) -> Callable[[], None]:
        """Returns a function that copies the center to this worker.

        Call the function before the worker's first step, or use ``make_session_run_hook``.

        Args:
            task_index: the number of the worker, from 0 on.

        Returns:
            A function without arguments that copies the center to the local variables and clears
            the sums of their gradients. It does not wait for other workers.

        Raises:
            ValueError: the getter has created no trainable variable, or ``task_index`` is negative.
            TypeError: ``task_index`` is not an integer.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> center = gr.AGNCenter(mesh)
            >>> for task, value in enumerate([1.0, 2.0]):  # the first worker sets the center
            ...     getter = gr.AGNCustomGetter(mesh.devices[task], center=center)
            ...     w = gr.get_variable("w", np.float32([value]), custom_getter=getter)
            ...     optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, getter)
            ...     optimizer.get_init_op(task)()
            ...     print(w.numpy())
            [1.]
            [1.]
        """
        as_integer("task_index", task_index, least=0)
        if not self._worker.variables.centers:
            raise ValueError("the list of local variables should not be empty: create them with "
                             "gr.get_variable(..., custom_getter=getter)")  # fmt: skip
        return self._worker.start

    def make_session_run_hook(
        self, is_chief: bool, task_index: int, *, wait_timeout: float | None = None
    ) -> AGNHook:
        """Returns a context manager inside which the worker trains.

        Entering it registers the worker, waits for the others (``wait_timeout``), copies the center
        to the worker's variables, and drops gradients that were not pushed; ``local_step`` is not
        reset. If entering or the code inside raises, the center records the worker in
        ``failed_workers``.

        Args:
            is_chief: ignored: center variables are initialized when they are created.
            task_index: the number of the worker, from 0 on.
            wait_timeout: seconds to wait, on entering, until ``num_worker`` workers with different
                task indices have started. None: do not wait.

        Raises:
            ValueError: see ``get_init_op``; or ``wait_timeout`` is not a number.
            TypeError: an argument has a wrong type.
            DeadlineExceededError: on entering: fewer workers have started within ``wait_timeout``.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> center = gr.AGNCenter(mesh)
            >>> getter = gr.AGNCustomGetter(mesh.devices[1], center=center)
            >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
            >>> inner = gr.GradientDescentOptimizer(0.25)
            >>> optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
            >>> with optimizer.make_session_run_hook(is_chief=True, task_index=0):
            ...     for _ in range(4):  # two pushes
            ...         pushed = optimizer.minimize(lambda: np.sum(2 * w))
            >>> center.variables()[0].numpy()
            array([3.], dtype=float32)
        """
        start, limit = self.get_init_op(task_index), as_timeout(wait_timeout, "wait_timeout")
        return AGNHook(
            self._center.registry,
            start,
            as_integer("task_index", task_index, least=0),
            self._num_worker,
            limit,
        )

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns the state of the worker as host data, for a checkpoint.

        The state has variables, sums of gradients, inner optimizer and ``local_step``; if the
        weights of the steps since the last push are not all 1, also their sum. To continue a
        training with the same bits, save the ``state_dict`` of all workers and of the center while
        no worker runs a step. The call waits for the devices.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Raises:
            ValueError: two variables have the same name, ``deadline`` is not a number above 0,
                ``output_type`` is unknown, or it is ``"torch"`` and PyTorch is not imported.
        """
        table = worker_table(self._worker, has_weight=self._worker.variables.excess != 0)
        return downloader(as_deadline(deadline), output_type)(table.save())

    def load_state_dict(
        self, state: Mapping[str, Any], variables: Sequence[Variable] | None = None
    ) -> None:
        """Restores a ``state_dict``, which may come from another process or backend.

        The inner optimizer gets the saved hyperparameters; see ``Optimizer.load_state_dict``. On
        error, the worker is unchanged.

        Args:
            state: the ``state_dict`` of a worker with the same inner rule.
            variables: ignored; the getter's variables are used.

        Raises:
            KeyError: a key is missing or unknown, or the getter did not create a variable.
            TypeError: a value has a wrong type.
            ValueError: the format or rule differs, or an array has another shape or dtype.
        """
        self._getter.devices[0].mesh_state.check_process()
        load_worker(self._worker, state)


# Getter or inner optimizer -> the AGNOptimizer that uses it.
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[AGNOptimizer]] = weakref.WeakKeyDictionary()


def _check_free(*owned: Any) -> None:
    for part in owned:
        known = _owners.get(part)
        if known is not None and known() is not None:
            raise ValueError(
                f"{part!r} is used by another AGNOptimizer; create a getter, an inner optimizer "
                "and an AGNOptimizer for each worker"
            )


_LEAST = 2.0**-126  # the smallest normal float32, which the kernel divides by


def _as_scale(distance_scale: float | None) -> float | None:
    if distance_scale is None:
        return None
    scale = as_positive("distance_scale", distance_scale)
    if scale < _LEAST:
        raise ValueError(f"distance_scale={scale} must be above 0 (at least {_LEAST:.2g}), or None")
    return scale
