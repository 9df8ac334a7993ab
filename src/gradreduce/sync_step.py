"""One training step, the whole flow in order; read this first.

on each device                                      across devices             on each device
terms ──aggregate──► gradient ──accumulate──► sum ──pack─► all-reduce ─►unpack─► mean ──optimize──► variable
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.accumulator import ConditionalAccumulator, apply_grads, take_now
from gradreduce.accumulator.validate import as_required, as_step
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import to_buffer
from gradreduce.arrays.convert_gpu import reading
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    as_deadline,
    by_physical,
    deadline_scope,
)
from gradreduce.errors import NotCopied, about, brief, listed, repeated
from gradreduce.optim import Optimizer
from gradreduce.reduce.aggregation import AggregationMethod, as_aggregation_method
from gradreduce.reduce.aggregators import aggregate_buffers
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

__all__ = ["SyncStep"]


class SyncStep(NotCopied):
    """Synchronous data-parallel training of mirrored variables; never blocks the host.

    Keeps one ``ConditionalAccumulator`` over the mesh for each variable, reduction MEAN.

    Args:
        variables: trainable, each with a copy on every device of one mesh.
        optimizer: applies the mean gradients.
        cross_device_ops: any ``CrossDeviceOps``; reduces the sums across devices.
        aggregation_method: how a replica's micro-batch gradients become its gradient.
        num_required: arrivals before an update; one call brings one from each replica. An integer,
            or a Variable, which is read now. Default: the number of replicas.

    Raises:
        ValueError: no variable, one twice, one that is not trainable, variables on different
            devices, an invalid method, or ``num_required`` less than 1.
        TypeError: an argument of another type.
    """

    _copied_as = ("pass the state_dict() of its optimizer and of each of its accumulators, and "
                  "load them into a new step")  # fmt: skip

    def __init__(
        self,
        variables: Sequence[Variable],
        optimizer: Optimizer,
        cross_device_ops: CrossDeviceOps,
        *,
        aggregation_method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
        num_required: int | Variable | None = None,
    ) -> None:
        self.variables = _checked_variables(variables)
        self.devices: tuple[Device, ...] = self.variables[0].devices
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={brief(optimizer)} is not an Optimizer")
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(f"cross_device_ops={brief(cross_device_ops)} is not a CrossDeviceOps")
        self.optimizer = optimizer
        self.cross_device_ops = cross_device_ops
        self.aggregation_method = as_aggregation_method(aggregation_method)
        self.num_required = len(self.devices) if num_required is None else as_required(num_required)
        mesh = self.devices[0].mesh
        indices = [mesh.devices.index(device) for device in self.devices]
        self.accumulators = [
            ConditionalAccumulator(
                variable.dtype,
                variable.shape,
                name=f"{variable.name}/grad_accum",
                device=mesh[indices],
                cross_device_ops=cross_device_ops,
            )
            for variable in self.variables
        ]
        optimizer.prepare(self.variables)

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return (
            f"<SyncStep of {len(self.variables)} variables on {names}, global_step "
            f"{self.accumulators[0].accumulator_ref.step}, num_required {self.num_required}>"
        )

    @property
    def global_step(self) -> int:
        """How many updates were made; gradients of an earlier step are stale."""
        return self.accumulators[0].global_step

    @StreamScope()
    def __call__(
        self,
        terms: Sequence[Sequence[Sequence[Any] | None]],
        local_step: int | Variable | None = None,
        *,
        deadline: float | None = None,
    ) -> bool:
        """Brings one arrival from each replica and, if enough came, makes an update.

        Args:
            terms: ``terms[replica][variable]`` is the list of that replica's micro-batch
                gradients for that variable, of its shape and dtype; their *sum* is one arrival.
                None among them is ignored; None, or a list of nothing else, on every replica, for
                a variable without a gradient. Dense: of ``IndexedSlices`` pass ``.to_dense()``.
                Not written; when this returns their library's current stream may overwrite them.
            local_step: the step at which they were computed, an integer, or a Variable that holds
                one. Default: ``global_step``.
            deadline: seconds from now in which the devices must be done, or their mesh dies.

        Returns:
            True if the variables were updated. False if the gradients were dropped as stale, or
            kept while more are needed. After an update every accumulator is one step on, also
            those of variables without a gradient.

        Raises:
            ValueError: wrong numbers of replicas or variables, a gradient of another shape or
                dtype than its variable, None on some replicas only, or a deadline that is no
                number above 0. Nothing was changed.
            TypeError: ``IndexedSlices``, or something else that is no array. Likewise.
            CollectiveError: the mesh is dead.
        """
        seconds = as_deadline(deadline)
        step = self.global_step if local_step is None else as_step("local_step", local_step)
        self.optimizer.prepare(self.variables)  # what can fail does so before a gradient is taken
        present, placed = self._placed(terms)
        with deadline_scope("a SyncStep", seconds, self.devices):
            return self._given(present, placed, step)

    def _given(self, present: list[int], placed: list[list[list[Buffer]]], step: int) -> bool:
        """The flow itself, of gradients that fit."""
        gradients = self._aggregate(placed, stale=step < self.global_step)
        accumulators = [self.accumulators[index] for index in present]
        with DeferInterrupts():
            if not apply_grads(accumulators, gradients, step):
                return False
            means = take_now(self.accumulators, self.num_required)  # pack, all-reduce, unpack
            if means is None:
                return False
            self.optimizer.apply_gradients(list(zip(means, self.variables, strict=True)))
            return True

    def _placed(
        self, terms: Sequence[Sequence[Sequence[Any] | None]]
    ) -> tuple[list[int], list[list[list[Buffer]]]]:
        """Checks everything; the variables with gradients, and ``[variable][replica]`` Buffers."""
        _check_length("terms", terms, len(self.devices), "device")
        for replica, of_replica in enumerate(terms):
            _check_length(f"terms[{replica}]", of_replica, len(self.variables), "variable")
        present, placed = [], []
        for index, variable in enumerate(self.variables):
            lists = [_without_none(of_replica[index]) for of_replica in terms]
            if all(each is None for each in lists):
                continue
            present.append(index)
            placed.append(
                [
                    _checked_terms(each, variable, replica, device)
                    for replica, (each, device) in enumerate(zip(lists, self.devices, strict=True))
                ]
            )
        if not present:
            raise ValueError("No gradients provided for any variable")
        return present, placed

    def _aggregate(self, placed: list[list[list[Buffer]]], *, stale: bool) -> list[PerReplica]:
        """Each list of terms becomes a gradient; co-located replicas share the launches.

        Stale ones will be dropped: the first terms stand for them, and nothing is launched.
        """
        made: list[list[Buffer]] = [[lists[0] for lists in of_one] for of_one in placed]
        if stale:
            return [PerReplica.of(buffers) for buffers in made]
        for replicas in by_physical(self.devices).values():
            wanted = [(index, replica) for index in range(len(placed)) for replica in replicas]
            sums = aggregate_buffers(
                [placed[index][replica] for index, replica in wanted],
                self.devices[replicas[0]],
                tree=self.aggregation_method is AggregationMethod.EXPERIMENTAL_TREE,
            )
            for (index, replica), total in zip(wanted, sums, strict=True):
                made[index][replica] = total
        return [PerReplica.of(buffers) for buffers in made]


def _checked_variables(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    found = tuple(variables)
    if not found:
        raise ValueError("No variables provided.")
    for index, variable in enumerate(found):
        if not isinstance(variable, Variable):
            raise TypeError(f"variables[{index}] is {brief(variable)}, not a Variable")
        if not variable.trainable:
            raise ValueError(f"{variable!r} is not trainable; pass trainable variables only")
        if variable.devices != found[0].devices:
            raise ValueError(
                f"{variable!r} and {found[0]!r} are on different devices; create all variables on "
                "the same devices"
            )
    if len(set(found)) != len(found):
        raise ValueError(
            f"variables contains {listed(repeated(found))} more than once; pass each variable once"
        )
    return found


def _check_length(name: str, given: Any, wanted: int, of: str) -> None:
    if not isinstance(given, Sequence):
        raise TypeError(f"{name}={brief(given)} must be a list with one entry per {of}")
    if len(given) != wanted:
        raise ValueError(f"{name} has {len(given)} entries; expected {wanted}, one per {of}")


def _without_none(terms: Sequence[Any] | None) -> Sequence[Any] | None:
    """Those that there are, of a list; None if there were only Nones."""
    if not isinstance(terms, list | tuple) or not any([term is None for term in terms]):
        return terms
    return [term for term in terms if term is not None] or None


def _checked_terms(
    terms: Sequence[Any] | None, variable: Variable, replica: int, device: Device
) -> list[Buffer]:
    """The terms of one replica for one variable, as Buffers on its device."""
    where = f"terms of replica {replica} for {variable.name!r}"
    if not isinstance(terms, list | tuple) or not terms:
        raise ValueError(
            f"{where}: expected a list of at least one gradient (or None on every replica), got "
            f"{brief(terms)}"
        )
    if any([isinstance(term, IndexedSlices) for term in terms]):
        raise TypeError(f"{where}: IndexedSlices are not supported; pass .to_dense()")
    try:
        placed = [to_buffer(term, device, dtype=variable.dtype) for term in terms]
    except (TypeError, ValueError) as error:
        raise about(where, error) from None
    reading(placed)
    for buffer in placed:
        if (buffer.shape, buffer.dtype) != (variable.shape, variable.dtype):
            raise ValueError(
                f"{where}: got {buffer.dtype}{list(buffer.shape)}, expected "
                f"{variable.dtype}{list(variable.shape)} as of the variable"
            )
        if buffer.device is not device:
            raise ValueError(f"{where}: {buffer} is not on {device.name}")
    return placed
