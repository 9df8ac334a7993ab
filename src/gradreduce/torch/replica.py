"""The replicas, buckets and their parts of a reducer: what they hold, and how far a round is."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch

from gradreduce.arrays.convert import from_buffer
from gradreduce.arrays.distributed import ReduceOp
from gradreduce.errors import brief
from gradreduce.reduce.prepared import PreparedStep
from gradreduce.weights import ONE, to_units

from .engine import context_of_backward
from .unused import write_flags
from .weights import StepDivisor, divide
from .worker import with_name


class Replica:
    """The parameters of one device, and the progress of their backward in this round.

    It refers to the parameters weakly. The hooks of a parameter refer to this object, and PyTorch
    does not free a parameter that its own hook refers to.

    Attributes:
        index: the index of the device.
        device: PyTorch's device.
        waits: whether the replica waits for its first gradient, which begins its backward.
        runs: whether its backward has begun and not ended.
        is_incomplete: whether a parameter was freed, because the module has another one instead.
        end: refers to the function that PyTorch calls at the end of its backward; None: the
            backward has not begun, or has ended.
        gone: not empty if an error has ended the backward, so that PyTorch has freed that function.
            Only ``list.append`` writes it, which Ctrl-C cannot interrupt.
        error: that error, for messages; empty if it is not known.
        ready: in the first round, the indices of the parameters in the order of their gradients.
        used: in the first round, 1 for each parameter that has got a gradient, and 0 for others.
        parts: the part of each bucket that belongs to this replica.
        units: the exact sum of the weights of its micro-batches since the last averaged step.
        weight: the weight of the last one.
        is_weighted: whether a micro-batch had a weight.
        keeps_weights: whether the gradients of these micro-batches are no longer in ``.grad``.
        zeroed: the parameters whose ``.grad`` was None before a gradient of weight 0.
        flags: with several processes, a view at the end of the last bucket: see ``unused.py``.
    """

    def __init__(self, index: int, parameters: Sequence[Any]) -> None:
        self.index = index
        self.device = parameters[0].device
        self._parameters = [ref(parameter, self._set_incomplete) for parameter in parameters]
        self.is_incomplete = False
        self.waits, self.runs = True, False
        self.end: ref[Callable[[], None]] | None = None
        self.gone: list[object] = []
        self.error = ""
        self._token: ref[object] | None = None
        self.ready: list[int] = []
        self.used = bytearray(len(parameters))
        self.parts: list[BucketPart] = []
        self.units, self.is_weighted = 0, False
        self.weight = 1.0
        self.keeps_weights = False
        self.zeroed: list[int] = []
        self.flags: Any = None

    def wait(self) -> None:
        """Makes the next gradient begin a backward, also inside ``no_sync``."""
        self.waits = True
        for part in self.parts:
            part.missing = 0

    def count(self, weight: tuple[float, Any] | None) -> None:
        """Counts a micro-batch; see ``multiplier``. None: one without a weight, which counts 1."""
        self.weight = 1.0 if weight is None else weight[0]
        self.units += ONE if weight is None else to_units(weight[0])
        self.is_weighted = self.is_weighted or weight is not None

    def forget_weights(self) -> None:
        """Forgets the micro-batches that were counted, whose gradients are averaged or dropped."""
        self.units, self.is_weighted = 0, False
        self.keeps_weights = False
        self.zeroed.clear()

    def forget_dropped(self) -> None:
        """Forgets the micro-batches that were counted if no ``.grad`` is left of them."""
        if not self.keeps_weights and all([each.grad is None for each in self.parameters]):
            self.forget_weights()

    def forget_used(self) -> None:
        """Clears the marks and the weights for the next step."""
        self.forget_weights()
        self.used[:] = bytes(len(self.used))
        for part in self.parts:
            part.used[:] = bytes(len(part.used))
            part.unset = set()

    def drop(self) -> None:
        """Forgets a step that was dropped: a ``.grad`` that was None before it is None again."""
        parameters = self.parameters
        for part in self.parts:
            for position in part.unset:
                parameters[part.indices[position]].grad = None
        self.forget_used()

    def leave_without_mean(self) -> None:
        """Ends a step whose weights are all 0: a ``.grad`` that was None is None again."""
        for index in self.zeroed:
            self.parameters[index].grad = None
        self.drop()

    def begin_paused(self, end: Callable[[], None]) -> None:
        """Makes PyTorch call ``end`` at the end of a backward inside ``no_sync``.

        If an error ends it, the next gradient begins another backward.
        """
        self.end = ref(end, lambda _: self.wait())
        torch.autograd.Variable._execution_engine.queue_callback(end)
        for part in self.parts:
            part.missing = math.inf
        self.waits = False

    def begin(self, end: Callable[[], None]) -> None:
        """Makes PyTorch call ``end`` at the end of the backward that is running."""
        self.error = ""
        self.end = ref(end, self.gone.append)
        context = context_of_backward()
        if context is not None:
            token = _Token()
            self._token = ref(token, self._note_error)
            context.run(_token.set, token)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def finish(self) -> None:
        """Notes that the backward has ended without an error."""
        self.end = self._token = None

    def _note_error(self, _: object) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self.error = f" by {brief(error)}"

    @property
    def parameters(self) -> list[Any]:
        """The parameters, in the order of the module."""
        return [parameter() for parameter in self._parameters]

    def _set_incomplete(self, _: object) -> None:
        self.is_incomplete = True


class _Token:
    """An object that PyTorch frees at the end of a backward."""


_token: ContextVar[_Token] = ContextVar("gradreduce.torch.backward")


class BucketPart:
    """One replica's gradients of a bucket.

    Attributes:
        bucket: the bucket.
        indices: the parameters in the bucket.
        used: for each of them whether it has got a gradient since the last averaged step.
        unset: the positions of those that have got none and whose ``.grad`` was None. In the flat
            buffer they have zeros.
        total: the number of gradients that are expected in a round. A parameter that several
            reentrant checkpoints share gets several gradients.
        missing: the number of gradients that have not come yet. 0 while the replica waits. Infinite
            in a backward inside ``no_sync``, and before the first round has ended.
    """

    __slots__ = ("bucket", "indices", "missing", "total", "unset", "used")
    bucket: Bucket

    def __init__(self, replica: Replica, indices: Sequence[int]) -> None:
        counts = Counter(replica.ready)
        self.indices = indices
        self.used = bytearray([replica.used[index] for index in indices])
        self.unset: set[int] = set()
        self.total = sum([max(1, counts[index]) for index in indices])
        self.missing: float = math.inf

    def find_unset(self, parameters: Sequence[Any]) -> None:
        """Notes which gradients must become None again if they were None in all replicas."""
        self.unset = {
            position
            for position, index in enumerate(self.indices)
            if not self.used[position] and getattr(parameters[index], "grad", self) is None
        }


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        name: the name for error messages.
        flat: the flat buffer with the gradients.
        blocks: its memory, of each replica.
        num_ready: the number of parts that are ready.
        streams: on GPUs, for each replica the stream that computed its gradients.
        flagged: the replicas whose flags are in this bucket.
    """

    def __init__(self, name: str, flat: Any, cross_device_ops: Any, num_gradients: int) -> None:
        self.name = name
        self.flat = flat
        self.blocks = [buffer.block for buffer in flat.buffers]
        self.num_ready = 0
        self.streams: dict[int, Any] = {}
        self.flagged: Sequence[Replica] = ()
        self._cross_device_ops = cross_device_ops
        self._num_gradients = num_gradients
        self._steps: dict[ReduceOp, PreparedStep] = {}
        self._attaches = True

    def attach(self, attaches: bool) -> None:
        """Says whether the next reduction attaches gradients again; see ``PreparedStep``."""
        self._attaches = attaches
        for step in self._steps.values():
            step.attaches = attaches

    def reduce(self, divisor: StepDivisor) -> None:
        """Averages the gradients over all replicas, in place; without a divisor does nothing."""
        if divisor.error is not None:
            return
        for replica in self.flagged:
            write_flags(replica)
        op = ReduceOp.MEAN if divisor.total is None else ReduceOp.SUM
        step = self._steps.get(op)
        if step is None:  # preparing reduces, too
            self._steps[op] = self.flat.prepare_all_reduce(
                op, cross_device_ops=self._cross_device_ops
            )
            self.attach(self._attaches)
        else:
            step()
        if divisor.total is None:
            return
        for buffer, views in zip(self.flat.buffers, self.flat.views, strict=True):
            last = views[self._num_gradients - 1]  # flags follow, which must stay above 0
            end = (last.address + last.nbytes - buffer.address) // buffer.dtype.itemsize
            divide(from_buffer(buffer, "torch")[:end], divisor.total)


def first_hook(reducer: Any, replica: Replica, index: int) -> Callable[[Any], None]:
    """Returns the hook of a parameter in the first round, or of one with sparse gradients."""

    def gradient_is_ready(_: Any) -> None:
        if replica.waits or replica.gone:
            reducer.begin(replica)  # may drop a round, and its marks
        if not reducer.is_paused:
            replica.ready.append(index)
        replica.used[index] = 1

    gradient_is_ready.reducer = reducer  # type: ignore[attr-defined]
    return gradient_is_ready


def bucket_hook(
    reducer: Any, replica: Replica, part: BucketPart, position: int
) -> Callable[[Any], None]:
    """Returns the hook of a parameter after the first round; called for each gradient."""
    used, gone = part.used, replica.gone

    def gradient_is_ready(_: Any) -> None:  # called thousands of times in a backward
        used[position] = 1
        part.missing -= 1
        if part.missing <= 0 or gone:
            reducer.part_is_ready(replica, part, position)

    gradient_is_ready.reducer = reducer  # type: ignore[attr-defined]
    return gradient_is_ready


def plan_buckets(
    parameters: Sequence[Any], order: Sequence[int], most_bytes: float
) -> list[list[int]]:
    """Returns the parameters of each bucket, in the order in which the buckets become ready.

    If a parameter would make a bucket larger than ``most_bytes``, it begins a new bucket. A
    parameter larger than that has a bucket of its own.

    Args:
        parameters: all parameters; all in a bucket have the same dtype.
        order: the parameters in the order in which their gradients become ready.
        most_bytes: the largest size of a bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in order:
        dtype, nbytes = parameters[index].dtype, parameters[index].nbytes
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if bucket and filled + nbytes > most_bytes:
            buckets.append(bucket)
            bucket, filled = [], 0
        bucket.append(index)
        open_buckets[dtype] = bucket, filled + nbytes
    buckets += [bucket for bucket, _ in open_buckets.values()]
    when_ready = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: when_ready[bucket[-1]])


def run_for(bucket: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Makes a call; adds the name of the bucket to its error."""
    try:
        return call(*arguments)
    except Exception as error:
        raise with_name(error, bucket) from error.__cause__
