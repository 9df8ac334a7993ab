"""Base class of optimizers: validates gradients, manages slots, launches the update.

Its members are those of tf.train.Optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope, release_inputs
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.variable import Variable, begin_writes
from gradreduce.autodiff.gradients import Engine, Pairs
from gradreduce.checkpoint import by_name, checked, downloader, equal, optional
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    LaunchBatch,
    PackInfo,
    as_deadline,
    as_flag,
    deadline_scope,
)
from gradreduce.errors import NotCopied, brief
from gradreduce.reduce.aggregation import AggregationMethod
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .array_rules import run_python_rule
from .checkpoint import number_like, power, queued_slots, ready_slots, saved_number, slots_schema
from .compute_gradients import ready_gradients
from .gradient_inputs import (
    check_global_step,
    check_no_overlap,
    checked_pairs,
    made_dense,
    ready_count,
    to_variables,
)
from .hyperparameters import Number, as_number, no_attribute, text_of, value_of
from .slots import Slots
from .update_plan import Job, Plan, by_kernel

Scalars = tuple[float, ...]
SlotValues = dict[Variable, dict[str, Any]]  # host arrays, by the name of the slot
_FORMAT = "gradreduce optimizer 2"


class Optimizer(NotCopied):
    """Base class of optimizers; subclass it to write an update rule.

    A subclass names its slots in ``_slot_names`` and overrides two methods: ``_apply`` changes one
    variable and its slots, given as arrays, and ``_slot_start`` returns the initial value of a
    slot. The base class handles the rest: gradients of every kind, sparse ones (``_apply`` gets
    the rows that they touch, each once), mirrored variables, masters and errors. Attributes that
    it names in ``_hyperparameters`` must be numbers, and are in its ``state_dict``.

    For subclasses and wrappers of this library, such as ``AGNOptimizer``: ``_rule`` is the compiled
    rule (None: ``_apply`` is called), ``_slots`` has the slots, ``_slot_start`` their first values,
    ``_hyperparameters`` and ``_settings`` name the attributes that can be set. ``_next_update``,
    ``_compile``, ``_colocated_gradients``, ``_ready`` and ``_launch`` are the parts of an update;
    ``_queued_state`` and ``_ready_state`` are those of a checkpoint.

    Setting a public attribute that an optimizer of this library does not have, such as
    ``optimizer.lr``, raises ``AttributeError``; a subclass may have any.

    Args:
        name: of the optimizer.
        master_dtype: ``"float32"`` keeps a float32 master of each float16 and bfloat16 variable,
            from which it is rounded at every update, and float32 slots. None: slots have the
            variable's dtype. Assigning to a variable between updates overrides its master.

    Attributes:
        GATE_NONE: gradients may be used as soon as they are computed.
        GATE_OP: compute all gradients of an operation before any of them is used.
        GATE_GRAPH: compute all gradients before any is used. As in eager TensorFlow, the three
            have no effect: an update is one launch over all variables.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is empty, or ``master_dtype`` is something else.
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    #: names of the slots that the rule keeps for each variable
    _slot_names: tuple[str, ...] = ()

    def __init__(self, name: str, *, master_dtype: Any = None) -> None:
        if not name:
            raise ValueError("Must specify the optimizer name")
        if not isinstance(name, str):
            raise TypeError(f"name={brief(name)} must be a string")
        self._name = name
        names = self._slot_names if self._rule is None else self._rule.slots
        self._slots = Slots(type(self), name, names, master_dtype, self._power_names)
        self._cross_device_ops: CrossDeviceOps | None = None
        self._plan: Plan | None = None

    def _set_numbers(self, **numbers: Number) -> None:
        """Adds hyperparameters, which become attributes that can be set."""
        self._hyperparameters += tuple(numbers)
        for name, value in numbers.items():
            setattr(self, name, as_number(name, value, is_decay=name in self._decays))

    def __setattr__(self, name: str, value: Any) -> None:
        is_known = name.startswith("_") or hasattr(type(self), name)
        is_known = is_known or name in (*self._hyperparameters, *self._settings)
        if not is_known and type(self).__module__.startswith("gradreduce."):
            raise self._no_attribute(name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        fields = [f"{name}={text_of(getattr(self, name))}" for name in
                (*self._hyperparameters, *self._settings)]  # fmt: skip
        return f"<{type(self).__name__} {self._name!r}{' ' if fields else ''}{', '.join(fields)}>"

    # -- the two hooks ----------------------------------------------------------------------------

    def _apply(self, variable: Any, slots: dict[str, Any], gradient: Any) -> None:
        """Updates ``variable`` and ``slots`` in place from ``gradient``; elementwise.

        Called for each copy of each variable, in no order. Plain NumPy: ``variable -= 0.1 *
        gradient``. If it raises, state is unchanged; to return anything is a ``ValueError``.

        Args:
            variable: a NumPy array, or a CuPy array on GPUs: a whole copy, or the rows that a
                sparse gradient touches, or a one-dimensional part of a copy
                (``SyncStep(…, shard_optimizer=True)``); float32 for a half that has a master.
            slots: by name, arrays of the same shape; replacing one is a ``ValueError``.
            gradient: of the same shape; read-only (enforced for NumPy; for CuPy it is a copy).
        """
        raise NotImplementedError(f"{type(self).__name__} has no update rule: override _apply")

    def _slot_start(self, name: str) -> float:
        """Returns the initial value of slot ``name``; 0 unless overridden."""
        return 0.0

    # -- what the rules of this library override instead, which are kernels ------------------------

    _is_elementwise = True  # whether parts of a variable can be updated one by one
    _densifies = False  # whether a sparse gradient changes all rows
    _hyperparameters: tuple[str, ...] = ()  # attributes: numbers, or callables
    _settings: tuple[str, ...] = ()  # other attributes that may be set

    _decays: tuple[str, ...] = ()  # those hyperparameters that must be at least 0 and below 1
    _power_names: tuple[str, ...] = ()  # powers of decays, which are state besides slots

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        """Returns the scalars of the next update, and the powers after it.

        Called once per update, before any launch.

        Args:
            powers: before the update; empty before the first one.
        """
        scalars = tuple(
            [
                value_of(name, getattr(self, name), is_decay=name in self._decays)
                for name in self._hyperparameters
            ]
        )
        return scalars, powers

    def _no_attribute(self, name: str) -> AttributeError:
        """Returns the error for setting an unknown attribute."""
        known = (*self._hyperparameters, *self._settings, "cross_device_ops")
        return no_attribute(type(self).__name__, name, known)

    _rule: ops.UpdateRule | None = None  # has kernels, used in place of ``_apply``, and slots
    # -- members ----------------------------------------------------------------------------------

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Reduces ``PerReplica`` gradients by MEAN; can be set.

        Default: ``AllReduceCrossDeviceOps()``.
        """
        if self._cross_device_ops is None:
            self._cross_device_ops = AllReduceCrossDeviceOps()
        return self._cross_device_ops

    @cross_device_ops.setter
    def cross_device_ops(self, cross_device_ops: CrossDeviceOps) -> None:
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(f"cross_device_ops={brief(cross_device_ops)} is not a CrossDeviceOps")
        self._cross_device_ops = cross_device_ops

    def get_name(self) -> str:
        """The name given to the constructor."""
        return self._name

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns the slot ``name`` of ``var`` (a master is ``"master"``), or None."""
        return self._slots.by_name.get(name, {}).get(var)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the existing slots, sorted."""
        return sorted(name for name, slots in self._slots.by_name.items() if slots)

    def variables(self) -> list[Variable]:
        """Returns every Variable that holds state of the optimizer, sorted by name."""
        return self._slots.all()

    @StreamScope()
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        deadline: float | None = None,
    ) -> bool | None:
        """Updates every variable by its gradient, with one launch per GPU.

        Args:
            grads_and_vars: pairs. A gradient is None (the variable stays as it is), an array of
                the variable's shape and dtype, ``IndexedSlices`` of its rows (those of the same
                index are added first), a ``Mirrored`` of either on its devices, or a
                ``PerReplica`` on them, which is reduced by MEAN first. Gradients are only read;
                after this returns, the current stream of their library may overwrite them. Small
                NumPy arrays are copied together.
            global_step: a Variable that is incremented by one afterwards.
            name: ignored; TensorFlow's name of the operation.
            deadline: seconds from now; if the devices are not done by then, the mesh has failed.

        Raises:
            ValueError: no pair, None for every gradient, a variable twice, a gradient of another
                shape, dtype or device than its variable, with rows that it has not, or in the
                memory of a variable that is written, a ``global_step`` that is not a scalar, or
                a ``deadline`` that is not above 0. On error, state is unchanged.
            TypeError: a gradient that is not an array, or a variable that is not a Variable of
                floats.
        """
        seconds = as_deadline(deadline)
        gradients, variables = checked_pairs(grads_and_vars)
        check_global_step(global_step)
        plan = self._plan
        if plan is not None and not plan.is_valid_for(variables, self._slots, self._rule):
            plan = None
        devices = plan.devices if plan else [each for var in variables for each in var.devices]
        with deadline_scope("apply_gradients", seconds, devices):
            parts = self._colocated_gradients(gradients, variables, plan)
            count = ready_count(global_step)
            with self._slots.rollback_on_error() if plan is None else nullcontext():
                if plan is None:
                    self.prepare(variables)
                    plan = Plan(variables, self._slots, self._rule)
                self._change(plan, parts, count)
            self._plan = plan
        return None

    def compute_gradients(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
        *,
        engine: Engine | None = None,
        return_loss: bool = False,
    ) -> Any:
        """Computes the gradients of ``loss`` with respect to variables.

        This is the first half of ``minimize``.

        Args:
            loss: a function without arguments that reads Variables and returns the value to
                minimize (of an array: the sum of its elements). It uses NumPy functions, on NumPy
                or CuPy arrays; an operation without a gradient raises ``NotImplementedError``. It
                may return a PyTorch tensor, which PyTorch differentiates (PyTorch's functions take
                a Variable as a tensor). It may be a generator of terms, such as the losses of
                micro-batches: each is differentiated and freed before the next is computed, and
                their gradients are combined like other terms. Values that another thread computes
                are constants. Do not write to a Variable from another thread during the call. If
                the loss overwrites a constant array, its last values count. ``h += y`` creates a
                new value that other names of ``h`` do not see. To compute on a GPU other than
                CuPy's current one, use ``with cupy.cuda.Device(...)`` in the loss; the backward
                pass selects its GPUs itself.
            var_list: Variables, or one. Default: the trainable ones that ``loss`` reads, in the
                order of the first read.
            gate_gradients: ``GATE_NONE``, ``GATE_OP`` or ``GATE_GRAPH``; no effect.
            aggregation_method: how the terms of a gradient are summed: one term for each use of
                a tensor; with PyTorch and JAX, one for each loss.
            colocate_gradients_with_ops: no effect.
            grad_loss: the gradient with respect to ``loss``, of its shape; default: ones. For a
                generator, that of each term.
            engine: ``"jax"``: ``loss`` is a JAX function, for ``jax.value_and_grad``. It is called
                twice, and reads Variables by ``variable.read("jax")`` and by operators with JAX
                arrays. Read them outside ``jax.jit``, and pass them in.
            return_loss: whether to return the value of the loss too.

        Returns:
            A pair (gradient, variable) for each variable. A gradient is an array of the
            variable's shape and dtype; ``IndexedSlices``, if the variable was only looked up by
            ``gr.embedding_lookup`` or ``np.take(variable, rows, axis=0)``, all on one device; or
            None, if the loss does not use the variable. The caller owns it. With ``return_loss`` a
            tuple of the value of the loss and these pairs. The value is a plain one, copied, in
            the library of the loss; of a generator the list of its terms' values, and of a worker
            of AGN with several replicas the list of theirs. The host does not wait for it.

        Raises:
            ValueError: an invalid ``gate_gradients``, ``aggregation_method`` or ``engine``, a
                ``colocate_gradients_with_ops`` that is not a bool, a ``grad_loss`` of another shape
                than the loss or not of real numbers, or no variable.
            InvalidVariableError: (a ``TypeError`` and a ``ValueError``) ``var_list`` holds
                something else than Variables of floats, or the loss returned no float.
            RuntimeError: ``loss`` is not callable; or, with ``engine="jax"``, reads a Variable in a
                function that JAX caches.
            NotImplementedError: called inside a loss; or the loss contains an operation without a
                derivative rule.
        """
        return_loss = as_flag("return_loss", return_loss)
        gradients = ready_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops,
            grad_loss, engine,
        )  # fmt: skip
        value, pairs = self._differentiated(gradients)
        return (value, pairs) if return_loss else pairs

    def _differentiated(self, gradients: Callable[[], tuple[Any, Pairs]]) -> tuple[Any, Pairs]:
        """Differentiates; AGN overrides it to do so for each replica."""
        return gradients()

    def minimize(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        loss: Callable[[], Any],
        global_step: Variable | None = None,
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        *,
        engine: Engine | None = None,
        deadline: float | None = None,
    ) -> bool | None:
        """Computes the gradients of ``loss`` and applies them, in one call.

        Args:
            loss: see ``compute_gradients``.
            global_step: see ``apply_gradients``.
            var_list: see there.
            gate_gradients: see there.
            aggregation_method: see there.
            colocate_gradients_with_ops: no effect.
            name: ignored.
            grad_loss: see there.
            engine: see there.
            deadline: see ``apply_gradients``; it starts when the loss has been differentiated.

        Returns:
            What ``apply_gradients`` returns: None, or for AGN whether it communicated.

        Raises:
            ValueError: the loss uses none of the variables; and what the two methods raise.
        """
        as_deadline(deadline)  # a wrong one is told before the loss is called
        options = (var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops)
        pairs = self.compute_gradients(loss, *options, grad_loss, engine=engine)
        return self.apply_gradients(pairs, global_step, name, deadline=deadline)

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns the state of the optimizer as host data, without the variables. Waits for them.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh has failed.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Returns:
            A dict of new objects: ``"format"``; ``"optimizer"``, the name of the class;
            ``"hyperparameters"``, the attributes that can be set (``"learning_rate"``), by name:
            numbers, and None for callables and Variables, which belong to the program;
            ``"powers"``, Adam's, or None before the first update; and ``"slots"``, arrays by the
            names of the variable and of the slot, masters included (float32 of float16 and
            bfloat16).

        Raises:
            ValueError: two variables with slots have the same name, another ``output_type``, or
                PyTorch is not imported.
            CollectiveError: the mesh has failed.
        """
        download = downloader(as_deadline(deadline), output_type)
        state: dict[str, Any] = download(self._queued_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any], variables: Sequence[Variable]) -> None:
        """Restores a ``state_dict``, also of another process or backend.

        Replaces all slots, and all hyperparameters that are numbers both in the state and here, as
        in PyTorch: to continue with another one, set it afterwards. On error, state is unchanged.

        Args:
            state: from an optimizer of the same class.
            variables: one or several, matched by name; at least those that the state has slots of.

        Raises:
            KeyError: a key is missing or unknown, or there are slots of a variable not passed.
            TypeError: a value of another type.
            ValueError: another class, format or ``eps_mode``, a slot of another shape or dtype, two
                variables of the same name, or a decay or power that is not at least 0 and below 1.
        """
        those = [variables] if isinstance(variables, Variable) else variables
        load = self._ready_state(state, those)
        with DeferInterrupts():
            load()

    def _queued_state(self, slots: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Queues copies of the state, see ``state_dict``; ``slots`` replaces ``queued_slots``."""
        names = (*self._hyperparameters, *self._settings)
        return {
            "format": _FORMAT,
            "hyperparameters": {name: saved_number(getattr(self, name)) for name in names},
            "powers": dict(zip(self._slots.power_names, self._slots.powers, strict=False)) or None,
            **(slots or queued_slots(self._slots)),
        }

    def _ready_state(
        self,
        state: Any,
        variables: Sequence[Variable],
        where: str = "state",
        placed: Callable[[SlotValues], SlotValues] | None = None,
    ) -> Callable[[], None]:
        """Validates a state and allocates memory; the returned function loads it.

        Args:
            state: see ``load_state_dict``.
            variables: see there.
            where: the name of the state, for errors.
            placed: converts the arrays of slots, ``[variable][slot]``, to those of this optimizer.
        """
        slots, owners = self._slots, by_name(variables)
        numbers = {
            name: number_like(getattr(self, name), is_decay=name in self._decays)
            for name in (*self._hyperparameters, *self._settings)
        }
        schema = {
            "format": equal(_FORMAT),
            **slots_schema(slots, owners),  # first the name of the class
            "hyperparameters": numbers,
            "powers": optional(dict.fromkeys(slots.power_names, power)),
        }
        found = checked(where, state, schema)
        values = {owners[name]: of_var for name, of_var in found["slots"].items()}
        load_slots = ready_slots(slots, placed(values) if placed else values)

        def load() -> None:
            load_slots()
            slots.powers = tuple((found["powers"] or {}).values())
            for name, number in found["hyperparameters"].items():
                setattr(self, name, number)

        return load

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Compiles the kernels for these variables and creates their slots.

        ``apply_gradients`` does it too; call this first where a later failure must be excluded.
        """
        self._check_hyperparameters()
        self._compile(variables, "plain")
        self._slots.make(variables, self._slot_start)

    def _compile(self, variables: Sequence[Variable], *variants: ops.Variant) -> None:
        """Compiles variants of the rule for variables, unless it is in Python."""
        if (rule := self._rule) is not None:
            kinds = {
                (device, var.dtype, self._slots.state_dtype(var))
                for var in variables
                for device in var.devices
            }
            for device, dtype, state in kinds:
                for variant in variants:
                    device.prepare(ops.RULE_KERNELS[rule, variant], (dtype.name, state.name))

    def _without_slots(self) -> Self:
        """Returns a new optimizer with the same rule and hyperparameters, and no slots."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        slots, master_dtype = self._slots, "float32" if self._slots.has_masters else None
        made._slots = Slots(slots.kind, slots.owner, slots.names, master_dtype, slots.power_names)
        made._plan = None
        return made

    def _colocated_gradients(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        plan: Plan | None,
        others: Sequence[Buffer] = (),
    ) -> Sequence[Part]:
        """Validates gradients and returns, for each copy of each variable, a colocated one.

        Without a plan, ``others`` is what the call writes besides the variables and their slots.
        """
        if plan is not None and (plain := plan.plain(gradients)) is not None:
            return plain
        found = to_variables(gradients, variables, self.cross_device_ops)
        ranges = self._slots.ranges(variables, others) if plan is None else plan.ranges
        check_no_overlap(variables, found, ranges)
        if self._densifies:
            found = made_dense(found, variables)
        return [part for parts in found for part in parts]

    def _count_update(self) -> None:
        """Counts an update that changes no variable, as where other processes have all shards."""
        _, powers = self._next_update(self._slots.powers)
        self._slots.commit(powers)

    def _check_hyperparameters(self) -> None:
        for name in self._hyperparameters:  # may have been set to anything meanwhile
            as_number(name, getattr(self, name), is_decay=name in self._decays)

    def _change(self, plan: Plan, parts: Sequence[Part], count: Callable[[], None]) -> None:
        """Runs the rule on all copies of all variables: one job for each physical device.

        Args:
            plan: of the variables.
            parts: for each copy its gradient.
            count: increments the global step.
        """
        if plan.shared:
            begin_writes(plan.shared)
        scalars, powers = self._next_update(self._slots.powers)
        ready = [self._ready(job, scalars, writer) for job, writer in plan.jobs(parts)]
        self._launch(ready, plan.devices, plan.label, powers, count)

    def _launch(
        self,
        launches: Sequence[Callable[[], None]],
        devices: Sequence[Device],
        label: PackInfo,
        powers: Scalars,
        count: Callable[[], None],
    ) -> None:
        """Launches an update and counts it; if it fails part-way, the devices fail.

        Args:
            launches: in this order.
            devices: that they write.
            label: names the variables in the log.
            powers: of the rule after the update.
            count: called after the launches.
        """
        mesh_state = devices[0].mesh_state
        with DeferInterrupts():
            with mesh_state.launch_lock, mesh_state.fail_on_partial_write(devices):
                thread = mesh_state.thread
                before, thread.label = thread.label, label  # a scope would take a microsecond
                try:
                    for launch in launches:
                        launch()
                finally:
                    thread.label = before
                self._slots.commit(powers)
            count()
            release_inputs()

    def _ready(
        self,
        job: Job,
        scalars: tuple[float, ...],
        writer: LaunchBatch | None,
        variant: ops.Variant = "plain",
    ) -> Callable[[], None]:
        """Returns a function that launches a job; computes a Python rule right away."""
        if (rule := self._rule) is not None:
            return partial(job.run, by_kernel(ops.RULE_KERNELS[rule, variant], scalars, writer))
        return partial(job.end, run_python_rule(self._apply, self._slot_names, job))
