"""The collectives of a process group of the backend: their comparison, and their record."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from gradreduce.comm.description import KNOWN_CALLS, Description, digest_of
from gradreduce.comm.torch_group import UNUSED_TAG, TorchGroup, without_advice
from gradreduce.device import inside_library
from gradreduce.errors import CollectiveError, listed

# The methods of ProcessGroup whose names in torch.distributed, and in its flight recorder, differ.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "_allgather_base": "all_gather_single",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
_MOST_NAMED = 3  # tensors
_LOOK_SECONDS = 0.05  # between two checks of the other processes


class _Tensor(NamedTuple):
    """What the processes compare of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    place: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
        is_dense = tensor.layout == torch.strided
        return cls(dtype, tuple(tensor.shape), place if is_dense else f"{place} sparse")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{self.place}"


class GroupCalls(TorchGroup):
    """The processes of a group of the backend, which compare each collective once.

    So its number is the number of the collective in the group. All collectives of the group, those
    of the inner group too, are calls of the mesh on the CPU.
    """

    def begin(self, description: Description, seconds: float) -> None:
        """Compares a collective with the other processes; see ``ProcessGroup.agree``."""
        super().agree(description, seconds)

    def end(self) -> None:
        """Notes that the last collective has ended, for the flight record."""
        assert self.last_call is not None
        self.ended = self.last_call.number

    def agree(self, description: Description, seconds: float) -> None:
        """Does nothing: the reductions of a collective follow from it."""

    @inside_library()
    def run(self, start: Callable[[], Any], seconds: float) -> Any:
        """Runs the last collective by gloo.

        Args:
            start: starts it and returns its work.
            seconds: the time limit.

        Returns:
            The work, which has ended.

        Raises:
            CollectiveError: another process has not come within ``seconds``, has ended, or makes
                another call. The other processes are told, and all connections are closed.
            Exception: ``start`` has raised it.
        """
        work = start()
        thread = None if has_future(work) else self._thread()
        try:
            self._await(work, thread, seconds)
        except BaseException as error:
            if not isinstance(error, CollectiveError):
                error = CollectiveError(self._describe_break(error))
            self.tell_failure(str(error))  # before connections close, which ends the others' calls
            self._abort(self._last_tag, self.others)
            raise error from None
        finally:
            if thread is not None:
                thread.stop()
        return work

    def _await(self, work: Any, thread: Any, seconds: float) -> None:
        """Waits for a collective, by a thread if there is one; see ``run``."""
        end = time.monotonic() + seconds
        has_ended = partial(_has_ended, work)
        if thread is not None:
            thread.start(work.wait)
            has_ended = thread.has_ended
        self.post_kept()
        while not has_ended(_LOOK_SECONDS):
            reason = self.look()
            if reason is None and time.monotonic() >= end:
                reason = self.describe_late(seconds, asks=True) or (
                    f"{self.called} has not ended within {seconds:.3g} s, but all processes have "
                    "come"
                )
            if reason is not None:
                raise CollectiveError(reason)

    def _describe_break(self, error: BaseException) -> str:
        """Returns why a collective of gloo has failed: usually a process has ended."""
        broken = []
        for rank in self.others:
            try:
                self._group.recv([torch.empty(1)], rank, self._last_tag + UNUSED_TAG)
            except RuntimeError:  # at once: the connection is closed
                broken.append(rank)
        reasons = self.reasons(self.others, 0.0) or self.reasons(broken)
        if reasons:
            return reasons[0]
        difference = self._difference_of_all()
        if difference or not broken:
            return difference or f"{self.called} failed: {error}"
        names, have = ("process", "has") if len(broken) == 1 else ("processes", "have")
        return (
            f"{names} {listed(broken)} of {self.size} {have} ended, or the connection has broken "
            f"({without_advice(error)})"
        )


def has_future(work: Any) -> bool:
    """Whether a work has a future. Those of gloo's reduce-scatters have none, nor a timeout."""
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def _has_ended(work: Any, seconds: float) -> bool:
    """Whether a collective ends within so many seconds; raises its error."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # also after the time
        if not work.is_completed():
            return False
        work.wait()
    return True


class GroupCollective:
    """A collective of a process group: what the processes compare, and errors show.

    Args:
        method: the method of ``ProcessGroup``.
        arguments: those of the method: outputs, and inputs if these are others.

    Attributes:
        name: the name in ``torch.distributed``.
        tensors: all tensors.
        timeout: that of the options; None: there are none.
        description: compares the name, the options, and dtype and size of the tensors that must be
            equal in all processes. It also has the shapes of all.
    """

    def __init__(self, method: str, arguments: Sequence[Any]) -> None:
        self.name = _NAMES.get(method, method)
        lists = [each for each in arguments if isinstance(each, torch.Tensor | list | tuple)][:2]
        self.tensors = list(tensors_in(lists))
        outputs, inputs = (lists * 2)[:2] if lists else ([], [])
        uses_outputs = self.name.startswith("all_gather") or self.name == "scatter"
        options: Any = next((each for each in arguments if hasattr(each, "timeout")), None)
        op = options.reduceOp.op.name if hasattr(options, "reduceOp") else None
        self.timeout = getattr(options, "timeout", None)
        self.description = _describe(
            (self.name, op, getattr(options, "rootRank", None)),
            tuple(map(_Tensor.of, tensors_in([outputs if uses_outputs else inputs]))),
            (self._sizes(inputs), self._sizes(outputs)),
        )

    def _sizes(self, side: Any) -> tuple[_Tensor, ...]:
        """Returns the inputs or outputs; a list for all processes as one tensor, as in NCCL."""
        rows = [side] if isinstance(side, torch.Tensor) or self.name == "all_to_all" else side
        return tuple([_joined(row) for row in ([*tensors_in([each])] for each in rows) if row])

    @property
    def shapes(self) -> str:
        """Dtypes and shapes of the first tensors: ``"float32[2, 3], float32[]"``."""
        return listed([str(_Tensor.of(each)) for each in self.tensors], _MOST_NAMED)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the collective is queued on a stream."""
        return any([tensor.is_cuda for tensor in self.tensors])


def _joined(tensors: Sequence[torch.Tensor]) -> _Tensor:
    first = _Tensor.of(tensors[0])
    if len(tensors) == 1:
        return first
    return first._replace(shape=(sum([each.numel() for each in tensors]),))


@lru_cache(KNOWN_CALLS)
def _describe(
    what: tuple[str, str | None, int | None],
    tensors: tuple[_Tensor, ...],
    sizes: tuple[tuple[_Tensor, ...], tuple[_Tensor, ...]],
) -> Description:
    """Describes a collective: name, reduction and root; tensors that must be equal; all sizes."""
    name, op, root = what
    if name == "all_to_all":  # each process may send other sizes
        tensors = ()
    compared = [(each.dtype, math.prod(each.shape), each.place) for each in tensors]
    values: dict[str, Any] = {"call": name, "op": op, "root": root}
    values = {key: value for key, value in values.items() if value is not None}
    values["tensors"] = [*map(str, tensors)]
    values["sizes"] = [[*map(str, side)] for side in sizes]
    return Description(digest_of(f"{what} {compared}".encode()), json.dumps(values))


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors in lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
