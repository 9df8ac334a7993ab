"""Base class of optimizers: validates gradients, manages slots, launches the update.

Source: tf.train.Optimizer, whose public methods it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

from gradreduce import ops
from gradreduce.accumulator.state import Launches, launch_all
from gradreduce.arrays.caller_streams import StreamScope, release_inputs
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices, to_dense_n
from gradreduce.arrays.replica_context import current_replica
from gradreduce.arrays.variable import Variable, begin_writes
from gradreduce.autodiff.gradients import Engine
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.comm.replicas import comparing
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    PackInfo,
    as_deadline,
    as_flag,
    deadline_scope,
)
from gradreduce.errors import brief
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.sums.methods import AggregationMethod

from .checkpoint import OptimizerState
from .compute_gradients import gradients_of_replicas, gradients_to_apply, ready_gradients
from .gradient_inputs import (
    check_float,
    check_global_step,
    check_no_overlap,
    device_over_processes,
    make_dense,
    ready_count,
    to_variables,
    validate_pairs,
)
from .slots import Slots
from .update_plan import Plan, UpdateJob, ready_python_rule

Scalars = tuple[float, ...]


class Optimizer(OptimizerState):
    """Base class of optimizers (tf.train.Optimizer); subclass it to write an update rule.

    A subclass names its slots in ``_slot_names`` and overrides ``_apply``, which updates the arrays
    of one variable and its slots. It may override ``_slot_start``, which returns the initial value
    of a slot. The base class does the rest: it accepts gradients of every type, sparse gradients
    (``_apply`` gets each row that they touch once), mirrored variables and masters. Attributes
    named in ``_hyperparameters`` must be numbers. They are saved in the ``state_dict``.

    You cannot set a public attribute that an optimizer of this library does not have:
    ``optimizer.lr = 1`` raises ``AttributeError``. A subclass outside of the library may have any
    attributes.

    Args:
        name: name of the optimizer.
        master_dtype: ``"float32"`` keeps a float32 copy, the master, of each float16 and bfloat16
            variable, and float32 slots. An update changes the master and rounds it to the variable.
            If you assign to a variable, the next update starts from the assigned value. None: no
            masters, and slots have the variable's dtype.

    Attributes:
        GATE_NONE: gradients may be used as soon as they are computed.
        GATE_OP: compute all gradients of an operation before any of them is used.
        GATE_GRAPH: compute all gradients before any is used. As in eager TensorFlow, the three
            have no effect: an update is one launch over all variables.

    Raises:
        TypeError: ``name`` is not a string, or ``master_dtype`` is not a dtype.
        ValueError: ``name`` is empty, or ``master_dtype`` is neither None nor float32.

    Example:
        >>> class DecreasingSteps(gr.Optimizer):
        ...     _slot_names = ("count",)
        ...     def _apply(self, variable, slots, gradient):
        ...         slots["count"] += 1
        ...         variable -= gradient / slots["count"]
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
        >>> optimizer = DecreasingSteps("decreasing")
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([(np.float32([0.5, 1]), w)])
        >>> w.numpy()
        array([0.25, 0.5 ], dtype=float32)
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    # -- the two hooks ----------------------------------------------------------------------------

    def _apply(self, variable: Any, slots: dict[str, Any], gradient: Any) -> None:
        """Updates ``variable`` and ``slots`` in place from ``gradient``, elementwise.

        Override this in a subclass, in plain NumPy: ``variable -= 0.1 * gradient``. It is called
        for each copy of each variable, in any order. It must return None. If it raises, no
        variable or slot is changed.

        Args:
            variable: a NumPy array, or a CuPy array on GPUs. It is a whole copy, or the rows that a
                sparse gradient touches, or a part of a copy, of one dimension or of whole rows
                (``SyncStep(…, shard_optimizer=True)``). If the variable has a master, it is the
                master, in float32.
            slots: arrays of the same shape, by name. Change them in place; do not replace them.
            gradient: an array of the same shape; read-only for NumPy, a copy for CuPy.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update rule: override _apply")

    def _slot_start(self, name: str) -> float:
        """Returns the initial value of slot ``name``; 0 unless overridden."""
        return 0.0

    # -- overridden by the rules of this library, which are kernels -------------------------------

    _is_elementwise = True  # whether parts of a variable can be updated one by one
    _densifies = False  # whether a sparse gradient changes all rows
    _devices: Sequence[Device] | None = None  # of all replicas; None: those of the variables

    _cross_device_ops: CrossDeviceOps | None = None
    _plan: Plan | None = None  # of the last update

    # -- members ----------------------------------------------------------------------------------

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The ``CrossDeviceOps`` that averages over replicas and processes; can be set.

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

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        deadline: float | None = None,
    ) -> bool | None:
        """Updates every variable by its gradient, with one launch per GPU and dtype.

        Sparse gradients of a dtype take one to three more launches. The host waits only to read
        hyperparameters that are Variables, and indices of sparse gradients that are on a GPU. On
        error, variables and slots are unchanged.

        Args:
            grads_and_vars: pairs (gradient, variable). A gradient is an array with the shape and
                dtype of the variable, or ``IndexedSlices`` of its rows, which may repeat: the
                gradient of this process, which is averaged over the processes of the mesh; or a
                ``PerReplica`` with one of these for each device of the variable, which is averaged
                over all replicas of all processes; or a ``Mirrored`` of these, which is reduced
                already; or None, which leaves the variable unchanged. ``cross_device_ops`` computes
                the averages. Over several processes each process passes gradients of the same
                variables in the same order. Gradients are only read. After the call, work on the
                current stream of their library may overwrite them.
            global_step: a Variable that is incremented by one after the update.
            name: ignored; TensorFlow's name of the operation.
            deadline: seconds from now; if the devices are not done by then, the mesh fails. The
                call has usually returned by then; the next use of the mesh raises
                ``CollectiveError``.

        Returns:
            None. (``AGNOptimizer`` returns whether it communicated.)

        Raises:
            ValueError: there is no pair, all gradients are None, a variable is in two pairs, a
                gradient has another shape, dtype or device than its variable, rows that the
                variable does not have, or memory that the update writes, ``global_step`` is not a
                scalar, or ``deadline`` is not above 0. Over several processes: a variable is not on
                all devices of this process's mesh, or another process passes gradients of other
                variables.
            TypeError: a gradient is not an array, or a variable is not a Variable of floats.
            InvalidArgumentError: (a ``ValueError``) gradients are averaged over processes, and the
                hyperparameters of another process differ. The mesh has failed.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
            >>> optimizer = gr.GradientDescentOptimizer(0.5)
            >>> grad = gr.PerReplica([np.float32([0, 2]), np.float32([2, 4])], mesh)
            >>> optimizer.apply_gradients([(grad, w)])  # the mean is [1, 3]
            >>> w.numpy()
            array([0.5, 0.5], dtype=float32)
        """
        self._update(grads_and_vars, global_step, deadline, over_processes=True)
        return None

    @StreamScope()
    def _update(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        deadline: float | None = None,
        *,
        over_processes: bool = False,
    ) -> None:
        """Updates variables; see ``apply_gradients``.

        Args:
            grads_and_vars: see ``apply_gradients``.
            global_step: see ``apply_gradients``.
            deadline: see ``apply_gradients``.
            over_processes: whether gradients are averaged over the processes of the mesh. False:
                arrays and IndexedSlices are reduced already.
        """
        seconds = as_deadline(deadline)
        gradients, variables = validate_pairs(grads_and_vars)
        check_global_step(global_step)
        plan = self._plan
        if plan is not None and not plan.is_valid_for(variables, self._slots, self._rule):
            plan = None
        devices = plan.devices if plan else [each for var in variables for each in var.devices]
        whole = plan.device_over_processes if plan else device_over_processes(variables)
        over_processes &= whole is not None
        with (
            deadline_scope("apply_gradients", seconds, devices),
            comparing(
                whole,
                {
                    **self._settings_to_compare(),
                    **self._history.numbers_to_compare(self._numbers_of_schedules),
                },
            )
            if whole is not None
            else nullcontext(),
        ):
            count = ready_count(global_step)
            parts = self._colocate_gradients(
                gradients, variables, plan, over_processes=over_processes
            )
            with self._slots.rollback_on_error() if plan is None else nullcontext():
                if plan is None:
                    self.prepare(variables)
                    plan = Plan(variables, self._slots, self._rule)
                begin_writes(plan.shared)
                scalars, powers = self._next_update(self._slots.powers)
                launches = [
                    launch for job in plan.jobs(parts) for launch in self._ready(job, scalars)
                ]
                self._launch(launches, plan.devices, plan.label, powers, count)
            self._plan = plan
            if over_processes:
                self._history = self._history.after(self._numbers_of_schedules())

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

        Call it inside ``gr.replica(i)`` for the gradients of replica i: ``minimize`` does so for
        each replica. Outside, the gradients are those of replica 0; an AGN worker computes those of
        all its replicas. For a JAX loss the host waits for the gradients; for other losses it does
        not wait.

        ``docs/gradients.md`` has the rules for a loss of NumPy functions. For example, an operation
        without a derivative rule raises ``NotImplementedError``.

        Args:
            loss: a function without arguments that reads Variables and returns the value to
                minimize. If it returns an array, the sum of the elements is minimized. It uses
                NumPy functions, on NumPy or CuPy arrays. Or it uses PyTorch's functions, which
                accept a Variable as a tensor, and returns a tensor, which PyTorch differentiates.
                It may be a generator of losses, for example of micro-batches: each loss is
                differentiated and freed before the next one is computed, and the gradients are
                summed as ``aggregation_method`` says.
            var_list: a list of Variables, or one Variable. Default: the trainable Variables that
                ``loss`` reads, in the order in which it reads them first.
            gate_gradients: ``GATE_NONE``, ``GATE_OP`` or ``GATE_GRAPH``; no effect.
            aggregation_method: how the terms of a gradient are summed. The gradient of a Variable
                or intermediate value has one term for each of its uses; with PyTorch and JAX, that
                of a Variable has one term for each loss.
            colocate_gradients_with_ops: no effect.
            grad_loss: the gradient with respect to the value of ``loss``, an array of its shape.
                For a generator, it is used for each loss. Default: ones.
            engine: ``"jax"`` if ``loss`` is a JAX function, which ``jax.value_and_grad``
                differentiates. It is called twice. It reads Variables by ``variable.read("jax")``
                and by operators with JAX arrays, outside ``jax.jit``.
            return_loss: whether to return the value of the loss too.

        Returns:
            A list of pairs (gradient, variable), or, with ``return_loss``, a tuple of the value of
            the loss and this list. The caller owns gradients and value.

            A gradient is an array of the variable's shape and dtype. It is ``IndexedSlices`` if the
            loss used the variable only in ``gr.embedding_lookup`` or ``np.take(variable, rows,
            axis=0)``, on one device. It is None if the loss did not use the variable.

            The value is an array of the library that the loss used. For a generator it is the list
            of its values. For an AGN worker with several replicas it is the list of their values.

        Raises:
            ValueError: ``gate_gradients``, ``aggregation_method`` or ``engine`` is invalid,
                ``colocate_gradients_with_ops`` is not a bool, ``grad_loss`` has another shape than
                the value of the loss or does not hold real numbers, or there is no variable.
            InvalidVariableError: (a ``TypeError`` and a ``ValueError``) ``var_list`` has an item
                that is not a Variable of floats, or the loss did not return a float.
            RuntimeError: ``loss`` is not callable; or, with ``engine="jax"``, the loss reads a
                Variable in a function that JAX caches.
            NotImplementedError: the loss contains an operation without a derivative rule, or this
                method is called inside a loss.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> w = gr.Variable(np.float32([1, 3]), "w", device=mesh.devices[0])
            >>> optimizer = gr.GradientDescentOptimizer(0.5)
            >>> value, pairs = optimizer.compute_gradients(lambda: np.sum(w * w), return_loss=True)
            >>> value
            np.float32(10.0)
            >>> pairs
            [(array([2., 6.], dtype=float32), <Variable 'w' float32[2] on sim:0>)]
        """
        return_loss = as_flag("return_loss", return_loss)
        gradients = ready_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops,
            grad_loss, engine,
        )  # fmt: skip
        is_whole = self._devices is not None and current_replica() is None
        value, pairs = gradients_of_replicas(gradients, self._devices) if is_whole else gradients()
        return (value, pairs) if return_loss else pairs

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

        The loss is called once for each device of the variables, inside its ``gr.replica``, and the
        gradients are averaged over all replicas of all processes by ``cross_device_ops``. So the
        same program trains on one GPU, on several, and over several processes. A loss reads the
        copies of its replica; ``value.get()`` of a ``PerReplica`` is the data of its replica. Every
        process makes this call; variables that are equal before it are equal after it.

        Args:
            loss: see ``compute_gradients``.
            global_step: see ``apply_gradients``.
            var_list: see ``compute_gradients``.
            gate_gradients: no effect; see ``compute_gradients``.
            aggregation_method: see ``compute_gradients``.
            colocate_gradients_with_ops: no effect.
            name: ignored.
            grad_loss: see ``compute_gradients``.
            engine: see ``compute_gradients``.
            deadline: see ``apply_gradients``; it starts when the gradients are computed.

        Returns:
            None. (``AGNOptimizer`` returns whether it communicated.)

        Raises:
            ValueError: the loss uses none of the variables, or uses a variable on some replicas but
                not on all; or variables are mirrored on different devices.
            RuntimeError: the call is inside a ``gr.replica``.
            Exception: any error of ``compute_gradients`` and ``apply_gradients``.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> w = gr.Variable(np.float32([1, 3]), "w", device=mesh)
            >>> step = gr.Variable(0, "step", trainable=False, device=mesh)
            >>> optimizer = gr.GradientDescentOptimizer(0.25)
            >>> optimizer.minimize(lambda: np.sum(w * w), global_step=step)
            >>> w.numpy(), int(step)
            (array([0.5, 1.5], dtype=float32), 1)
        """
        as_deadline(deadline)  # an invalid one raises before the loss is called
        options = (gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss)
        compute = partial(self.compute_gradients, engine=engine)
        pairs = gradients_to_apply(compute, self._devices, loss, var_list, *options)
        return self.apply_gradients(pairs, global_step, name, deadline=deadline)

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Compiles the kernels for these variables and creates their slots.

        ``apply_gradients`` does the same at its first call. Call ``prepare`` before it to get
        compilation errors and out-of-memory errors early. The host waits for the compiler only.

        Raises:
            InvalidVariableError: a Variable is not of floats.
            MemoryError: there is not enough memory for the slots.
            BackendUnavailableError: the compiler is missing.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
            >>> optimizer = gr.AdamOptimizer()
            >>> optimizer.prepare([w])
            >>> optimizer.get_slot(w, "v").numpy()
            array([0., 0.], dtype=float32)
        """
        self._check_hyperparameters()
        if self._plan is None or not self._plan.is_valid_for(variables, self._slots, self._rule):
            self._rehearse_update(variables)
            self._slots.make(variables, self._slot_start)
        else:  # compiled, with slots
            device = self._plan.devices[0]
            device.mesh_state.check_usable(device)

    def _rehearse_update(self, variables: Sequence[Variable], *, sparse: bool = False) -> None:
        """Compiles the kernels of an update and of new masters.

        Args:
            variables: the variables to update.
            sparse: whether the gradients are IndexedSlices.
        """
        self._rehearse(variables, ("update", sparse), partial(_update, sparse))

    def _rehearse(
        self,
        variables: Sequence[Variable],
        what: Hashable,
        launch: Callable[[Self, Sequence[Variable]], object],
    ) -> None:
        """Compiles what ``launch`` launches for variables like these.

        Args:
            variables: the variables of a call.
            what: what the kernels depend on besides dtypes and rule.
            launch: called with an optimizer of this rule and dry-run variables that have slots.
        """

        def work(rows: Sequence[Sequence[Buffer]], at: Device) -> None:
            dry = self._without_slots()
            likes = [Variable._on_buffers(row, "", trainable=True) for row in rows]
            dry._slots.make(likes, self._slot_start)
            launch(dry, likes)

        for var in variables:
            check_float(var)
        if variables:
            compile_rows(
                (what, self._rule, self._densifies, self._slots.names, self._slots.has_masters),
                work,
                {(var.dtype,) for var in variables},
                variables[0].devices[0],
            )

    def _without_slots(self) -> Self:
        """Returns a new optimizer with the same rule and hyperparameters, and no slots."""
        optimizer = type(self).__new__(type(self))
        optimizer.__dict__.update(self.__dict__)
        slots, master_dtype = self._slots, "float32" if self._slots.has_masters else None
        optimizer._slots = Slots(
            slots.kind, slots.owner, slots.names, master_dtype, slots.power_names
        )
        optimizer._plan = None
        return optimizer

    def _colocate_gradients(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        plan: Plan | None,
        others: Sequence[Buffer] = (),
        *,
        over_processes: bool = False,
        rehearse: Callable[..., None] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Sequence[Part]:
        """Validates gradients; returns a colocated gradient for each copy of each variable.

        Args:
            gradients: one for each variable.
            variables: the variables of the update.
            plan: the plan of these variables, if there is one.
            others: without a plan, what the call writes besides the variables and their slots.
            over_processes: whether arrays and IndexedSlices are averaged over processes.
            rehearse: called instead of ``_rehearse_update``.
            weights: the weight of each replica of ``PerReplica`` gradients; None: all are 1.
        """
        plain = None if plan is None or over_processes else plan.plain(gradients)
        if plain is not None:
            return plain
        sparse = [
            var
            for grad, var in zip(gradients, variables, strict=True)
            if isinstance(grad, IndexedSlices) or getattr(grad, "is_sparse", False)
        ]
        rehearse = rehearse or self._rehearse_update
        rehearse(sparse, sparse=True)
        rehearse([] if plan else variables)
        colocated = to_variables(
            gradients,
            variables,
            self.cross_device_ops,
            over_processes=over_processes,
            weights=weights,
        )
        ranges = self._slots.ranges(variables, others) if plan is None else plan.ranges
        check_no_overlap(variables, colocated, ranges)
        if self._densifies:
            colocated = make_dense(colocated, variables)
        return [part for parts in colocated for part in parts]

    def _count_update(self) -> None:
        """Counts an update without a variable, for a process that has no shard of any."""
        _, powers = self._next_update(self._slots.powers)
        self._slots.commit(powers)

    def _launch(
        self,
        launches: Launches,
        devices: Sequence[Device],
        label: PackInfo,
        powers: Scalars,
        count: Callable[[], None],
    ) -> None:
        """Launches an update and counts it. If it fails part-way, the devices are marked failed.

        Args:
            launches: called in this order.
            devices: the devices that the launches write.
            label: names the variables in the operation log.
            powers: the powers of the rule after the update.
            count: called after the launches.
        """
        mesh_state = devices[0].mesh_state
        with DeferInterrupts():
            with (
                mesh_state.launch_lock,
                mesh_state.fail_on_partial_write(devices),
                mesh_state.label_scope(label),
            ):
                launch_all(launches)
                self._slots.commit(powers)
            count()
            release_inputs()

    def _ready(self, job: UpdateJob, scalars: Scalars, variant: ops.Variant = "plain") -> Launches:
        """Returns the launches of a job. A Python rule is computed right away."""
        rule = self._rule
        if rule is None:
            launch_all(job.before)
            return [ready_python_rule(self._apply, self._slot_names, job), *job.after]
        kernel = ops.RULE_KERNELS[rule, variant]
        update = partial(
            ops.update_rows, kernel, job.updates, scalars, job.device, are_alike=job.are_alike
        )
        return [*job.before, update, *job.after]


def gradients_like(
    optimizer: Optimizer, variables: Sequence[Variable], indices: Sequence[int]
) -> list[Part]:
    """Returns sparse gradients of dry-run variables, as an update gets them."""
    slices = [
        IndexedSlices(var.buffers[0].view(0, (len(indices), 2)), indices, var.shape)
        for var in variables
    ]
    return [*(to_dense_n(slices) if optimizer._densifies else slices)]


def _update(sparse: bool, optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Updates dry-run variables."""
    written = [row for var in variables for row in optimizer._slots.rows(var)]
    gradients: Sequence[Part] = [row[0] for row in written]
    if sparse:
        gradients = gradients_like(optimizer, variables, [0, 1])
    launch_all(optimizer._ready(UpdateJob(written, gradients), ()))
