"""Gradients of a DataParallel with exact sums: each backward adds its gradients to words.

After the backward of a replica its gradients are moved to accumulators, and every ``.grad`` is
None. The last backward of a step adds the words of all replicas and processes, divides their
rounded sum, and sets every ``.grad`` to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from gradreduce.accumulator.conditional import (
    ConditionalAccumulator,
    SparseConditionalAccumulator,
)
from gradreduce.accumulator.exact_storage import ExactStorage
from gradreduce.accumulator.multi import add_all
from gradreduce.accumulator.state import LAST_STEP, AccumulatorState, hold_locks
from gradreduce.accumulator.take_queue import take_locked
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffers
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.replica_context import replica as use_replica
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, as_dtype
from gradreduce.reduce.algorithms import Settings, check_wire
from gradreduce.weights import to_units

from .reducer import Reducer
from .replica import Replica, run_for
from .sparse_gradients import as_coo, check_sparse
from .weights import StepDivisor, multiplier


class _ParameterSum(ConditionalAccumulator):
    """An accumulator over the devices of all processes."""

    _spans_processes = True


class _RowSum(SparseConditionalAccumulator):
    """The same for the sparse gradients of an embedding; divides by all weights."""

    _spans_processes = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, sparse_mean="per_gradient", **options)


class ExactReducer(Reducer):
    """A ``Reducer`` with exact sums; it makes no buckets.

    The arguments are those of ``Reducer``, for parameters that ``check_exact_parameters`` has seen.
    """

    _multiplier = staticmethod(partial(multiplier, exact=True))

    def __init__(self, *arguments: Any) -> None:
        names, replicas, frozen, sparse, mesh, ops, bucket_bytes = arguments
        options = {"device": mesh, "cross_device_ops": ops, "exact": True, "words": ops.words}
        kinds = [_RowSum if index in sparse else _ParameterSum for index in range(len(names))]
        self._accumulators = [  # a state is closed with its last accumulator
            kind(_dtype_of(parameter), tuple(parameter.shape), name=name, **options)
            for kind, name, parameter in zip(kinds, names, replicas[0], strict=True)
        ]
        self._states = [each.accumulator_ref for each in self._accumulators]
        for state, name in zip(self._states, names, strict=True):
            state.tensor = name
        # Last: its hooks use the states. It reduces no sparse gradients.
        super().__init__(names, replicas, frozen, (), mesh, ops, bucket_bytes)

    def _move_gradients(self, replica: Replica) -> None:
        """Moves the gradients of a micro-batch to the sums: every ``.grad`` becomes None.

        Of one with weight 0 only those that were None: they are zeros, which say that a parameter
        was used. The others may have to stay as they are, if all weights of the step are 0.
        """
        if replica.weight:
            self._or_drop(self._add, replica, range(len(self._states)), replica.weight)
        else:
            self._or_drop(self._add, replica, replica.zeroed, 1.0)
        replica.zeroed.clear()
        replica.keeps_weights = True

    def _add(self, replica: Replica, indices: Sequence[int], weight: float) -> None:
        all_parameters = replica.parameters
        used = [
            index
            for index in dict.fromkeys(indices)
            if getattr(all_parameters[index], "grad", None) is not None  # it may be freed
        ]
        if not used:
            return
        states = [self._states[index] for index in used]
        parameters = [all_parameters[index] for index in used]
        with use_replica(replica.index):
            grads = [_checked_gradient(*pair) for pair in zip(states, parameters, strict=True)]
            add_all(states, grads, LAST_STEP, cast=False, weight=weight)
        for parameter in parameters:
            parameter.grad = None

    def _forget_sums(self) -> None:
        with hold_locks(self._states):
            for state in self._states:
                state.reset(state.step)

    def _warn(self) -> None:
        self.mesh.mesh_state.inexact.warn()

    def _reduce_dense(self, divisor: StepDivisor) -> None:
        """Sets every ``.grad`` to the mean, or to None if no replica of any process has one."""
        self._wait()
        if divisor.error is not None:
            self._forget_sums()
            return
        for replica in self._replicas:  # the gradients before a micro-batch of weight 0
            self._add(replica, range(len(self._states)), 1.0)
        by = self.mesh.num_replicas if divisor.total is None else divisor.total
        self._run(partial(run_for, "the exact sums", self._reduce, by))

    def _reduce(self, divisor: float) -> None:
        used = self._find_used()
        with StreamScope():
            with hold_locks(self._states):
                take = partial(self._take, used, divisor)
                means = take_locked(self._states, lambda _, guard: take(guard))
            for replica in self._replicas:
                parameters = replica.parameters
                row = [of_one[replica.index] for of_one in means]
                dense = from_buffers([each for each in row if isinstance(each, Buffer)], "torch")
                tensors = iter(dense)
                for index, mean in zip(used, row, strict=True):
                    parameters[index].grad = (
                        as_coo(mean) if isinstance(mean, IndexedSlices) else next(tensors)
                    )

    def _find_used(self) -> list[int]:
        """Returns the indices of the parameters with a gradient in any replica of any process."""
        is_used = [state.sum_shape is not None for state in self._states]
        if self.mesh.num_processes > 1:
            what = "DataParallel: which parameters have gradients"
            rows = Replicas(self.mesh.devices).compare_numbers(what, list(map(int, is_used)))
            is_used = [any(column) for column in zip(*rows, strict=True)]
        return [index for index, each in enumerate(is_used) if each]

    def _take(
        self, used: Sequence[int], divisor: float, guard: ExitStack
    ) -> list[tuple[Part, ...]]:
        """Returns the means ``[used parameter][replica]``."""
        states = [self._states[index] for index in used]
        dense = [state for state in states if not state.storage.is_sparse]
        rows = [state for state in states if state.storage.is_sparse]
        for state in rows:
            self._complete(state, divisor)
        means = self._reduce_sums(dense, divisor)
        for state in rows:
            means |= state.storage.take([state], guard)
        return [means[state] for state in states]

    def _reduce_sums(
        self, states: Sequence[AccumulatorState], divisor: float
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """Returns the means of sums of arrays."""
        if not states:
            return {}
        storage = states[0].storage
        assert isinstance(storage, ExactStorage)
        means = self.cross_device_ops.reduce_buffers(
            storage.partial_sums(states), weight=divisor, num_words=storage.num_words,
            out_dtypes=[state.dtype for state in states], names=[state.tensor for state in states],
        )  # fmt: skip
        storage.report_inexact(states)
        return dict(zip(states, means, strict=True))

    def _complete(self, state: AccumulatorState, divisor: float) -> None:
        """Gives every replica a sum of rows, and the state the weights of all processes."""
        for device, total in zip(state.devices, state.totals, strict=True):
            if total is None:
                shape = tuple([extent or 0 for extent in state.shape or ()])
                nothing = IndexedSlices(device.empty((0, *shape[1:]), state.dtype), (), shape)
                with use_replica(device.index):
                    add_all([state], [nothing], LAST_STEP, cast=False)
        state.update(excess=0)
        state.update(excess=to_units(divisor) - state.weight())


def check_exact_parameters(named: Sequence[tuple[str, Any]], settings: Settings) -> None:
    """Raises if the sums of the gradients of a parameter cannot be exact.

    Args:
        named: the parameters of a replica that require gradients, with their names.
        settings: those of the exact sums.

    Raises:
        TypeError: a parameter is complex.
        ValueError: ``wire_dtype`` would round the terms of a parameter.
    """
    for name, parameter in named:
        if _dtype_of(parameter) not in ("float64", "float32", "float16", "bfloat16"):
            raise TypeError(
                f"{name} is {_dtype_of(parameter)}: exact=True supports parameters of float64, "
                "float32, float16 and bfloat16"
            )
        check_wire(settings, as_dtype(_dtype_of(parameter)))


def _checked_gradient(state: AccumulatorState, parameter: Any) -> Any:
    grad = parameter.grad.detach()
    if state.storage.is_sparse:
        check_sparse(state.tensor, grad)
    elif grad.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {state.tensor} has layout {grad.layout}; only dense gradients are "
            "allowed"
        )
    return grad


def _dtype_of(parameter: Any) -> str:
    return str(parameter.dtype).removeprefix("torch.")
