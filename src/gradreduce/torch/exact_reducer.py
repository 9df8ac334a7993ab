"""Gradients of a DataParallel with exact sums: each backward adds its gradients to words.

After the backward of a replica its gradients are moved to accumulators, and every ``.grad`` is
None. The last backward of a step adds the words of all replicas and processes, divides their
rounded sum, and sets every ``.grad`` to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gradreduce.accumulator.conditional import ConditionalAccumulator
from gradreduce.accumulator.exact_storage import ExactStorage
from gradreduce.accumulator.multi import add_all
from gradreduce.accumulator.state import hold_locks
from gradreduce.accumulator.take_queue import take_locked
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffers
from gradreduce.arrays.replica_context import replica as use_replica
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer

from .reducer import Reducer
from .replica import Replica, run_for
from .weights import StepDivisor


class _ReplicaSums(ConditionalAccumulator):
    """An accumulator over the devices of all processes."""

    _spans_processes = True


class ExactReducer(Reducer):
    """A ``Reducer`` with exact sums; it makes no buckets.

    Raises:
        TypeError: a parameter has a dtype whose sums cannot be exact.
        ValueError: a parameter has sparse gradients.
    """

    def __init__(self, names: Sequence[str], replicas: Sequence[Any], *arguments: Any) -> None:
        super().__init__(names, replicas, *arguments)
        for index in self.sparse:
            raise ValueError(
                f"{names[index]} is the weight of an embedding with sparse=True: exact=True does "
                "not support IndexedSlices yet"
            )
        self._accumulators = [  # a state is closed with its last accumulator
            _ReplicaSums(
                str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), name=name,
                device=self.mesh, cross_device_ops=self.cross_device_ops, exact=True,
                words=self.cross_device_ops.words,
            )
            for name, parameter in zip(names, replicas[0], strict=True)
        ]  # fmt: skip
        self._states = [each.accumulator_ref for each in self._accumulators]

    def _move_gradients(self, replica: Replica) -> None:
        """Moves the gradients of a replica to the sums: every ``.grad`` becomes None."""
        self._or_drop(self._add, replica)
        replica.keeps_weights = True

    def _add(self, replica: Replica) -> None:
        pairs = [
            (state, parameter)
            for state, parameter in zip(self._states, replica.parameters, strict=True)
            if parameter.grad is not None
        ]
        if not pairs:
            return
        states, parameters = zip(*pairs, strict=True)
        with use_replica(replica.index):
            grads = [parameter.grad.detach() for parameter in parameters]
            add_all(states, grads, self._states[0].step, cast=False)
        for parameter in parameters:
            parameter.grad = None

    def _forget_sums(self) -> None:
        with hold_locks(self._states):
            for state in self._states:
                state.reset(state.step)

    def _reduce_dense(self, divisor: StepDivisor) -> None:
        """Sets every ``.grad`` to the mean, or to None if no replica of any process has one."""
        self._wait()
        if divisor.error is not None:
            self._forget_sums()
            return
        by = self.mesh.num_replicas if divisor.total is None else divisor.total
        self._run(partial(run_for, "the exact sums", self._reduce, by))
        self.mesh.mesh_state.inexact.warn()

    def _reduce(self, divisor: float) -> None:
        used = self._find_used()
        with StreamScope():
            with hold_locks(self._states):
                means = take_locked(self._states, lambda _, guard: self._take(used, divisor))
            for replica in self._replicas:
                parameters = replica.parameters
                row = from_buffers([of_one[replica.index] for of_one in means], "torch")
                for index, mean in zip(used, row, strict=True):
                    parameters[index].grad = mean

    def _find_used(self) -> list[int]:
        """Returns the indices of the parameters with a gradient in any replica of any process."""
        is_used = [state.sum_shape is not None for state in self._states]
        if self.mesh.num_processes > 1:
            what = "DataParallel: which parameters have gradients"
            rows = Replicas(self.mesh.devices).compare_numbers(what, list(map(int, is_used)))
            is_used = [any(column) for column in zip(*rows, strict=True)]
        return [index for index, each in enumerate(is_used) if each]

    def _take(self, used: Sequence[int], divisor: float) -> list[tuple[Buffer, ...]]:
        """Returns the means ``[used parameter][replica]``."""
        states = [self._states[index] for index in used]
        if not states:
            return []
        storage = states[0].storage
        assert isinstance(storage, ExactStorage)
        means = self.cross_device_ops.reduce_buffers(
            storage.partial_sums(states), weight=divisor, num_words=storage.num_words,
            out_dtypes=[state.dtype for state in states], names=[state.name for state in states],
        )  # fmt: skip
        storage.report_inexact(states)
        return means
