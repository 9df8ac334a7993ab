"""Gradients of a DataParallel with exact sums: each backward adds its gradients to words.

After the backward of a replica its gradients are moved to accumulators, and every ``.grad`` is
None. The last backward of a step adds the words of all replicas and processes, divides their
rounded sum, and sets every ``.grad`` to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gradreduce.accumulator.conditional import ConditionalAccumulator
from gradreduce.accumulator.exact_storage import ExactStorage
from gradreduce.accumulator.multi import add_all
from gradreduce.accumulator.state import LAST_STEP, AccumulatorState, hold_locks
from gradreduce.accumulator.take_queue import take_locked
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffers
from gradreduce.arrays.replica_context import replica as use_replica
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer

from .reducer import Reducer
from .replica import Replica, run_for
from .weights import StepDivisor, multiplier


class _ParameterSum(ConditionalAccumulator):
    """An accumulator over the devices of all processes."""

    _spans_processes = True


class ExactReducer(Reducer):
    """A ``Reducer`` with exact sums; it makes no buckets.

    The arguments are those of ``Reducer``, for parameters that ``check_exact_parameters`` has seen.
    """

    _multiplier = staticmethod(partial(multiplier, exact=True))

    def __init__(self, *arguments: Any) -> None:
        names, replicas, _, _, mesh, ops, _ = arguments
        self._accumulators = [  # a state is closed with its last accumulator
            _ParameterSum(
                _dtype_of(parameter), tuple(parameter.shape), name=name, device=mesh,
                cross_device_ops=ops, exact=True, words=ops.words,
            )
            for name, parameter in zip(names, replicas[0], strict=True)
        ]  # fmt: skip
        self._states = [each.accumulator_ref for each in self._accumulators]
        for state, name in zip(self._states, names, strict=True):
            state.tensor = name
        super().__init__(*arguments)  # last: its hooks use the states

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
            grads = [_dense_gradient(*pair) for pair in zip(states, parameters, strict=True)]
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
            out_dtypes=[state.dtype for state in states], names=[state.tensor for state in states],
        )  # fmt: skip
        storage.report_inexact(states)
        return means


def check_exact_parameters(named: Sequence[tuple[str, Any]], sparse: Sequence[int]) -> None:
    """Raises if the sums of the gradients of a parameter cannot be exact.

    Args:
        named: the parameters of a replica that require gradients, with their names.
        sparse: the indices of those with sparse gradients.

    Raises:
        TypeError: a parameter has another dtype than float32, float16 and bfloat16.
        ValueError: a parameter has sparse gradients.
    """
    for name, parameter in named:
        if _dtype_of(parameter) not in ("float32", "float16", "bfloat16"):
            raise TypeError(
                f"{name} is {_dtype_of(parameter)}: exact=True supports parameters of float32, "
                "float16 and bfloat16"
            )
    for index in sparse:
        raise ValueError(
            f"{named[index][0]} is the weight of an embedding with sparse=True: exact=True does "
            "not support IndexedSlices yet"
        )


def _dense_gradient(state: AccumulatorState, parameter: Any) -> Any:
    grad = parameter.grad.detach()
    if grad.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {state.tensor} has layout {grad.layout}; only dense gradients are "
            "allowed"
        )
    return grad


def _dtype_of(parameter: Any) -> str:
    return str(parameter.dtype).removeprefix("torch.")
