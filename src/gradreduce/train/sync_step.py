"""One data-parallel training step, from gradients to updated variables; read this first.

on each device                                      across devices             on each device
terms ──aggregate──► gradient ──accumulate──► sum ──pack─► all-reduce ─►unpack─► mean ──optimize──► variable
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradreduce.accumulator.multi import add_pending
from gradreduce.accumulator.state import PendingGradient
from gradreduce.accumulator.validate import as_required, as_step, parts_to_add, terms_to_add
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.distributed import Part, PerReplica
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import (
    StateEntry,
    StateTable,
    anything,
    attribute,
    by_name,
    check_order,
    constant,
    downloader,
    integer,
    load_all,
    validate_state,
    values_of,
)
from gradreduce.comm.description import Description, digest_of
from gradreduce.comm.process_group import check_one_process
from gradreduce.comm.replicas import Replicas
from gradreduce.device import (
    DeferInterrupts,
    PackInfo,
    as_deadline,
    as_flag,
    by_physical,
    deadline_scope,
    names_of,
)
from gradreduce.errors import NotCopied, brief, listed, repeated
from gradreduce.optim import Optimizer
from gradreduce.reduce.all_reduce_ops import is_exact
from gradreduce.reduce.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from gradreduce.sums.aggregators import aggregate_buffers
from gradreduce.sums.methods import AggregationMethod, as_aggregation_method
from gradreduce.sums.slices import concatenate_slices
from gradreduce.weights import NUM_NUMBERS, from_numbers, to_numbers

from .accumulators import make_accumulator
from .checkpoint import check_alike, ready_accumulators, save_accumulators
from .scaling import DynamicLossScale, GradientScaling, first_nonfinite
from .shards import ShardedUpdate
from .terms import find_sparse, place_terms
from .update import ReplicatedUpdate, UpdateStages
from .weights import TermWeights

_FORMAT = "gradreduce SyncStep 2"


class SyncStep(NotCopied):
    """Runs synchronous data-parallel training steps on mirrored variables.

    Each call sums the micro-batch gradients of every replica, computes the mean of these sums
    across the devices, and updates the variables with the optimizer. It queues work on the devices
    and does not wait for it. Gradients are accumulated in one ``ConditionalAccumulator`` per
    variable, so that an update may use the gradients of several calls (``num_required``). It then
    divides by the number of replicas times the number of these calls.

    Over several processes, every process makes the same calls, with the gradients of its own
    replicas; see ``docs/processes.md``. The constructor copies the values of process 0 to the
    variables of all processes.

    Args:
        variables: trainable Variables, all with a copy on each device of the same mesh.
        optimizer: applies the mean gradients.
        cross_device_ops: a ``CrossDeviceOps`` that reduces the sums across devices. With its
            ``exact=True`` all terms are added as real numbers, and their sum is rounded once, so
            that the numbers of micro-batches, replicas and processes do not change a bit; see
            docs/same_bits.md.
        aggregation_method: how the micro-batch gradients of a replica are summed.
        num_required: the number of gradients for an update, counted over all processes; each call
            adds one per replica. An integer, or a Variable, which is read once, by the constructor.
            Default: the number of replicas.
        shard_optimizer: whether each of n replicas updates an n-th of the variables and then copies
            it to the others (ZeRO stage 1). Slots and masters take an n-th of the memory on each
            device. The updated values are the same; with ``hierarchical_copy`` they have the same
            bits. It needs an ``AllReduceCrossDeviceOps``, or a subclass that keeps its
            ``reduce_batch``; and an optimizer with an elementwise rule that has no slots of these
            variables yet; its slots are then of parts of variables.
        clip_norm: the largest norm of the mean gradients of an update, a number above 0. Larger
            gradients are scaled, as by ``gr.clip_by_global_norm``. ``math.inf`` only computes
            ``last_norm``.
        skip_nonfinite: whether to skip an update, on every replica, if an element of the mean
            gradients is infinite or NaN. The host waits for the norm of each update.
        loss_scale: the number above 0 by which you multiply the loss; mean gradients are divided by
            it first. Or a ``gr.DynamicLossScale``: then multiply the loss by the step's attribute
            ``loss_scale``, and call the step in one thread only; ``skip_nonfinite`` is implied. Not
            for float16 variables.
        check_finite: whether to raise an error if the gradient of a replica is infinite or NaN. The
            host waits for the gradients of each call. Not with ``skip_nonfinite``.
        sparse_variables: those of ``variables`` whose gradients are ``IndexedSlices``, such as
            embedding tables: only rows are added, sent and updated. The mean divides by the number
            of all gradients, as for arrays. Norms count the rows after equal ones were added. It
            needs an ``AllReduceCrossDeviceOps``. With ``shard_optimizer`` they are cut between
            rows.

    Raises:
        ValueError: there is no variable, a variable is passed twice or is not trainable, variables
            are on different devices, the aggregation method is invalid, a number is out of range,
            or arguments cannot be combined.
        TypeError: an argument has a wrong type.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
        >>> optimizer = gr.GradientDescentOptimizer(0.5)
        >>> step = gr.SyncStep([w], optimizer, gr.AllReduceCrossDeviceOps(mesh=mesh))
        >>> first = [np.float32([1, 0]), np.float32([1, 0])]  # two micro-batches of replica 0
        >>> second = [np.float32([0, 4])]  # one micro-batch of replica 1
        >>> step([[first], [second]])  # terms[replica][variable]; the mean is [1, 2]
        True
        >>> w.numpy()
        array([0.5, 1. ], dtype=float32)
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"
    # The settings of the last call over processes, and their description.
    _described: tuple[Mapping[str, Any], Description] = ({}, Description("", ""))

    def __init__(  # noqa: PLR0913  # the options of a training step
        self,
        variables: Sequence[Variable],
        optimizer: Optimizer,
        cross_device_ops: CrossDeviceOps,
        *,
        aggregation_method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
        num_required: int | Variable | None = None,
        shard_optimizer: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scale: float | DynamicLossScale | None = None,
        check_finite: bool = False,
        sparse_variables: Sequence[Variable] = (),
    ) -> None:
        self.variables = _validate_variables(variables)
        self._sparse = find_sparse(sparse_variables, self.variables)  # indices
        self._label = PackInfo(range(len(self.variables)), names=[v.name for v in self.variables])
        self.devices = self.variables[0].devices
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={brief(optimizer)} is not an Optimizer of gradreduce")
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(f"cross_device_ops={brief(cross_device_ops)} is not a CrossDeviceOps")
        if isinstance(cross_device_ops, ReductionToOneDevice):
            check_one_process(self.devices[0], "ReductionToOneDevice")
        self.optimizer, self.cross_device_ops = optimizer, cross_device_ops
        self._is_exact = is_exact(cross_device_ops)
        self.aggregation_method = as_aggregation_method(aggregation_method)
        whole = self.devices[0].mesh
        mesh = whole[[whole.devices.index(device) for device in self.devices]]
        self.num_replicas = mesh.num_replicas  # in all processes
        self.num_required = self.num_replicas if num_required is None else as_required(num_required)
        self._scaling = GradientScaling(
            self.variables, clip_norm, skip_nonfinite, loss_scale, check_finite
        )
        of_update = self.variables, self._sparse, optimizer
        self._shards: ShardedUpdate | None = None
        if as_flag("shard_optimizer", shard_optimizer):
            self._shards = ShardedUpdate(*of_update, cross_device_ops, self._scaling)
        # The stages after the accumulators.
        self._update: UpdateStages
        self._update = self._shards or ReplicatedUpdate(*of_update, self._scaling)
        self.accumulators = [
            make_accumulator(variable, mesh, cross_device_ops, is_sparse=index in self._sparse)
            for index, variable in enumerate(self.variables)
        ]
        self._states = [each.accumulator_ref for each in self.accumulators]
        optimizer.prepare(self._update.variables)
        if mesh.num_processes > 1:
            copies = cross_device_ops.broadcast(
                [PerReplica.of(each.buffers[:1], name=each.name) for each in self.variables], mesh
            )
            for variable, copied in zip(self.variables, copies, strict=True):
                variable.assign(copied.primary)

    def __repr__(self) -> str:
        return (
            f"<SyncStep of {len(self.variables)} variables on {names_of(self.devices)}, "
            f"global_step {self.accumulators[0].accumulator_ref.step}, "
            f"num_required {self.num_required}>"
        )

    @property
    def global_step(self) -> int:
        """The number of updates, also skipped ones. Gradients of an earlier step are stale."""
        return self.accumulators[0].global_step

    @property
    def num_skipped(self) -> int:
        """The number of updates that were skipped because gradients were infinite or NaN."""
        return self._scaling.num_skipped

    @property
    def loss_scale(self) -> float:
        """The current loss scale, or 1.0; it changes only when ``global_step`` changes."""
        return self._scaling.scale

    @property
    def last_norm(self) -> float | None:
        """The global norm of the last mean gradients; the host waits for it.

        It is the norm after the division by the loss scale and before clipping. It is infinite or
        NaN if an element was infinite or NaN. It is None before the first update, and if neither
        ``clip_norm`` nor ``skip_nonfinite`` nor a dynamic loss scale is used.
        """
        return self._scaling.read_norm()

    @StreamScope()
    def __call__(
        self,
        terms: Sequence[Any],
        local_step: int | Variable | None = None,
        *,
        weights: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> bool:
        """Adds one gradient per replica and, if enough have been added, updates the variables.

        Args:
            terms: ``terms[replica][variable]`` is a list with the gradients of that replica's
                micro-batches, arrays of the variable's shape and dtype. Their *sum* is one
                gradient. None in a list is ignored. For a variable without a gradient, pass None,
                or a list of None, on every replica. ``terms[replica]`` may also be a dict of such
                lists by the names of the variables. Or it is a PyTorch module, or the module's
                ``named_parameters()``: then each ``.grad`` is the only term. The gradients of
                ``sparse_variables``, and only these, are ``IndexedSlices`` or
                ``torch.sparse_coo`` tensors, possibly without rows. Arrays are only read. After the
                call, work on the current stream of their library may overwrite them.
            local_step: the step at which the gradients were computed: an integer, or a Variable
                that holds one. Default: ``global_step``. If it is stale in one process, all
                processes drop their gradients.
            weights: ``weights[replica]`` is a list with a number of at least 0 for each micro-batch
                of the replica, such as its number of examples, or the number of a single one. The
                mean is then the sum of weight times gradient over all micro-batches, replicas and
                processes, divided by the sum of these weights; a term that is None counts as zeros.
                A micro-batch with weight 0 is not read. ``terms[replica]`` may be None if all its
                weights are 0; if those of all replicas of a process are, the call is about the
                variables whose gradients wait for an update, else about all. All processes pass
                weights, or none.
            deadline: seconds from now; if the devices are not done by then, the mesh fails.

        Returns:
            True if the variables were updated. False if the gradients were dropped as stale, if
            they were added but more are needed, or if the update was skipped (see
            ``num_skipped``). After an update or a skipped update, the step of every accumulator is
            one higher, even if its variable has no gradient.

        Raises:
            ValueError: the number of replicas or variables is wrong, names differ from those of the
                variables, a gradient has another shape or dtype than its variable, a variable has
                None on some replicas but not on all, no variable has a gradient, or ``deadline`` is
                not above 0. After this error and the next two, nothing has changed.
            TypeError: a gradient is not an array, is ``IndexedSlices`` although its variable is not
                in ``sparse_variables``, or is not although it is.
            InvalidArgumentError: (a ``ValueError``) the options or hyperparameters of another
                process differ. The mesh has failed.
            FloatingPointError: with ``check_finite``, the gradient of a replica, in any process, is
                infinite or NaN. With exact sums each term times its weight is checked.
            InvalidArgumentError: ``global_step`` is 2**63 - 1. Nothing has changed.
        """
        seconds = as_deadline(deadline)
        step = self.global_step if local_step is None else as_step("local_step", local_step)
        self.optimizer.prepare(self._update.variables)  # may fail: before a gradient is taken
        for variable in self.variables:
            variable._check_memory()
        for state in self._states:
            state.check_step()
        by, begun = None, []
        if weights is not None:
            by = TermWeights(weights, len(self.devices))
            begun = [index for index, state in enumerate(self._states) if state.count]
        placed = place_terms(terms, self.variables, self._sparse, self.devices, by, begun)
        with deadline_scope("a SyncStep", seconds, self.devices):
            stale = step < self.global_step
            gradients = self._aggregate(placed, by, stale=stale or self._is_exact)
            checked: Sequence[Sequence[Sequence[Part]]] | None = None
            if self._scaling.checks:
                checked = [[[part] for part in row] for row in gradients]
                if self._is_exact:
                    placed = by.products(placed) if by and not stale else placed
                    checked = list(placed.values())
            step = self._earliest(step, list(placed), checked, by)
            pending_gradients = self._pending(placed, gradients, by)
            with DeferInterrupts(), self.devices[0].mesh_state.label_scope(self._label):
                is_added = add_pending(pending_gradients, step)
                # Every process adds one gradient for each of its replicas at each call.
                num_here = -(-self.num_required // self.num_replicas) * len(self.devices)
                means = self._update.reduce(self._states, num_here) if is_added else None
                is_updated = means is not None and self._update.scale(means)
                if is_updated:
                    self._update.apply(means)
        self.devices[0].mesh_state.inexact.warn()
        return is_updated

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns everything that the training needs to continue, as host data.

        Over several processes, every process makes this call and gets the same state. The call
        waits for the devices. Do not call the step in another thread during it.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Returns:
            A dict of new objects. It can be pickled; all of it except the arrays fits into JSON.

            - ``"format"``: the version of these keys.
            - ``"num_replicas"``, ``"num_required"``: integers.
            - ``"variables"``: an array for each variable, by name; float32 for float16 and
              bfloat16.
            - ``"optimizer"``: the ``state_dict`` of the optimizer.
            - ``"accumulators"``: the ``state_dict`` of each accumulator, by the name of its
              variable. Counts and partial sums are those of the replicas of all processes.
            - ``"num_skipped"``, ``"loss_scale"``: numbers.
            - ``"growth_tracker"``: for a dynamic loss scale, the number of updates since it
              changed; otherwise None.

        Raises:
            ValueError: two variables have the same name, the processes have made different numbers
                of steps, ``deadline`` is not above 0, ``output_type`` is unknown, or it is
                ``"torch"`` and PyTorch is not imported.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
            >>> cross_device_ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
            >>> step = gr.SyncStep([w], gr.GradientDescentOptimizer(0.5), cross_device_ops)
            >>> state = step.state_dict()
            >>> _ = w.assign([0.0, 0.0])
            >>> step.load_state_dict(state)
            >>> w.numpy()
            array([1., 2.], dtype=float32)
        """
        with deadline_scope("SyncStep.state_dict", as_deadline(deadline), self.devices):
            return downloader(None, output_type)(self._table().save())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a ``state_dict``, which may come from another process or backend.

        Over several processes, every process makes this call, with the same state. On error,
        nothing has changed in this process; if another process has raised no error, load again in
        all. ``num_required`` becomes the saved number, and a dynamic loss scale continues with the
        saved one. ``docs/checkpoints.md`` says when the number of replicas may differ, and what
        else is loaded. Example: see ``state_dict``.

        Args:
            state: the ``state_dict`` of a step with variables of the same names. Types that
                checkpoint formats return are accepted; see
                ``ConditionalAccumulator.load_state_dict``.

        Raises:
            KeyError: a key or a variable is missing or unknown.
            TypeError: a value has a wrong type.
            ValueError: a value has another format, shape or dtype; the optimizer has another class;
                gradients of another number of replicas or with another loss scale wait for an
                update; or the processes have different states.
            RuntimeError: a variable cannot be written now; see ``Variable.assign``.
        """
        self.devices[0].mesh_state.check_process()
        table = self._table()
        entries = state if isinstance(state, Mapping) else {}
        values = {key: entries.get(key) for key in table}
        check_alike(self.devices[0], "SyncStep.load_state_dict", values)
        loaded = validate_state("state", state, table)
        check_order("state['variables']", state["variables"], loaded["variables"])
        saved, before = loaded["accumulators"], loaded["num_replicas"]
        loads = [
            table.ready(loaded),
            *ready_accumulators(self.accumulators, saved, self.devices, self.num_replicas, before),
        ]
        continues = any(each["num_accumulated"] for each in saved.values())
        loads.append(self._scaling.ready_state(loaded, continues=continues))
        load_all(loads)

    def _table(self) -> StateTable:
        """Returns the table of the state."""
        owners = by_name(self.variables)
        by_variable = dict(zip(owners, self.accumulators, strict=True))
        optimizer = self.optimizer._state_table(owners)
        if self._shards:
            optimizer["slots"] = self._shards.slots_entry(optimizer["slots"])
        return StateTable(
            format=constant(_FORMAT),
            num_replicas=StateEntry(lambda: self.num_replicas, integer(1)),
            num_required=attribute(self, "num_required", integer(1)),
            variables=values_of(owners),
            optimizer=optimizer,
            accumulators=StateEntry(
                lambda: save_accumulators(by_variable, self.devices, self.num_replicas),
                dict.fromkeys(owners, anything),
            ),
            **self._scaling.table(),
        )

    def _pending(
        self,
        placed: Mapping[int, Sequence[Sequence[Part]]],
        gradients: Sequence[Sequence[Part]],
        weights: TermWeights | None,
    ) -> list[PendingGradient]:
        """Returns the gradient of each variable, one for each replica."""
        states = [self._states[index] for index in placed]
        if weights is None and self._is_exact:
            return [terms_to_add(*each) for each in zip(states, placed.values(), strict=True)]
        if weights is None:
            return [parts_to_add(*each) for each in zip(states, gradients, strict=True)]
        weights.check_total(states)
        return [
            weights.pending(state, *each, self.num_replicas)
            for state, each in zip(states, placed.items(), strict=True)
        ]

    def _earliest(
        self,
        step: int,
        with_gradients: list[int],
        checked: Sequence[Sequence[Sequence[Part]]] | None,
        weights: TermWeights | None,
    ) -> int:
        """Returns the earliest step of all processes. If it is stale, all gradients are dropped.

        Args:
            step: the step of this process.
            with_gradients: indices of the variables with gradients; equal in all processes.
            checked: ``[variable][replica]``, lists of what must be finite unless it is dropped;
                None if nothing must.
            weights: the weights of this process; gets the sum of all processes.

        Raises:
            FloatingPointError: a gradient of ``checked`` is not finite, in any process.
        """
        replicas = Replicas(self.devices)
        group = replicas.group
        if group.size == 1 and checked is None:
            return step
        # Compared with these numbers, which travel anyway.
        scheduled = self.optimizer._numbers_of_schedules()
        numbers, now = [step, _number_of(scheduled)], self.global_step
        if checked is not None:
            numbers += first_nonfinite(() if step < now else checked, replicas.first)
        if weights is not None:
            numbers += to_numbers(weights.total)
        with replicas.call(self._description(with_gradients, weights is not None)):
            of_processes = replicas.exchange_numbers(numbers)
            if len({each[1] for each in of_processes}) > 1:
                what = {"call": "a SyncStep", "tensors": [], **scheduled}
                replicas.compare(Description.of(what))
        if weights is not None:
            weights.total = sum([from_numbers(each[-NUM_NUMBERS:]) for each in of_processes])
        earliest = min([each[0] for each in of_processes])
        wrong = [] if checked is None else [each[2:4] for each in of_processes if each[2] >= 0]
        if wrong and earliest >= now:
            index, replica = min(wrong)
            name = self.variables[with_gradients[index]].name
            process = group.label(group.rank_of(replica))
            raise FloatingPointError(
                f"the gradient of {name!r} in replica {replica}{process} is not finite at step "
                f"{earliest}; nothing was added"
            )
        return earliest

    def _description(self, with_gradients: list[int], has_weights: bool) -> Description:
        """Describes a call for the comparison with other processes, with all settings."""
        what = {
            "call": "a SyncStep",
            "num_required": self.num_required,
            "aggregation_method": self.aggregation_method.name,
            "shard_optimizer": self._shards is not None,
            "weights": has_weights,
            "words": self._states[0].storage.num_words,
            "sparse_variables": [self.variables[index].name for index in self._sparse],
            **self.optimizer._settings_to_compare(),
            **self._scaling.options,
            "tensors": with_gradients,
        }
        if what != self._described[0]:
            names = [self.variables[index].name for index in with_gradients]
            self._described = what, Description.of(what, names, compared=False)
        return self._described[1]

    def _aggregate(
        self,
        placed: dict[int, list[Sequence[Any]]],
        weights: TermWeights | None,
        *,
        stale: bool,
    ) -> list[list[Part]]:
        """Sums each list of terms to ``[variable][replica]``; a GPU's replicas share launches.

        Stale gradients will be dropped, so their first terms are returned and nothing is launched.
        If only another process is stale, that is known later, and the sums are dropped. Terms of
        exact sums are returned, too: the accumulators add them. So are terms with weights, unless
        the sum of a replica is needed before.
        """
        tree = self.aggregation_method is AggregationMethod.EXPERIMENTAL_TREE
        if weights is not None:
            if not stale and (tree or self._scaling.checks):
                placed.update(weights.sum_terms(placed, self.variables, tree=tree))
            return [[part for row in of_one for part in row] for of_one in placed.values()]
        totals: dict[int, list[Part]] = {
            index: [lists[0] for lists in of_one] for index, of_one in placed.items()
        }
        for replicas in by_physical(() if stale else self.devices).values():
            pairs = [
                (index, replica)
                for index, of_one in placed.items()
                for replica in replicas
                if len(of_one[replica]) > 1
            ]
            sparse = [pair for pair in pairs if pair[0] in self._sparse]
            dense = [pair for pair in pairs if pair[0] not in self._sparse]
            if not pairs:
                continue
            with self.devices[0].mesh_state.label_scope(self._label):
                sums = aggregate_buffers(
                    [placed[index][replica] for index, replica in dense],
                    self.devices[replicas[0]],
                    tree=tree,
                )
                rows = [
                    concatenate_slices(placed[index][replica], self.devices[replica])
                    for index, replica in sparse  # the accumulator adds equal rows
                ]
            for (index, replica), total in zip(dense, sums, strict=True):
                totals[index][replica] = total
            for (index, replica), slices in zip(sparse, rows, strict=True):
                totals[index][replica] = slices
        return list(totals.values())


def _number_of(scheduled: Mapping[str, float]) -> int:
    """Returns a hash of the last values of schedules; 0 if there are none."""
    return int(digest_of(repr(scheduled).encode()), 16) if scheduled else 0


def _validate_variables(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    result = tuple(variables)
    if not result:
        raise ValueError("No variables provided.")
    for index, variable in enumerate(result):
        if not isinstance(variable, Variable):
            raise TypeError(f"variables[{index}] is {brief(variable)}, not a Variable")
        if not variable.trainable:
            raise ValueError(f"{variable!r} is not trainable; pass trainable variables only")
        if variable.devices != result[0].devices:
            raise ValueError(
                f"{variable!r} and {result[0]!r} are on different devices; create all variables on "
                "the same devices"
            )
    if len(set(result)) != len(result):
        raise ValueError(
            f"variables contains {listed(repeated(result))} more than once; pass each variable once"
        )
    return result
