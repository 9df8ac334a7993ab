"""The backend ``"gradreduce"`` of ``torch.distributed``; importing this module registers it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from gradreduce.comm.torch_flight import GroupRecord
from gradreduce.errors import brief
from gradreduce.hide_from_torch_compile import hide_from_compiler

from .backend_options import BackendOptions, check_equal, options_from
from .flight_dump import VARIABLE, write_dumps
from .group_calls import GroupCollective, has_future, tensors_in
from .group_sums import GroupSums, op_of
from .worker import BackwardWorker, Task, with_name

_NAME = "gradreduce"
_SHUTDOWN_SECONDS = 10.0  # for calls that run when the group is destroyed
# gloo's own limit, after which it closes all connections, is later than ours.
_LATER = timedelta(seconds=5)
_ABORTED = "its process group was aborted"


class GroupWork(dist.Work):  # type: ignore[misc]
    """A call that the worker of a group runs.

    Args:
        task: the call.
        future: gets the result.
        tensors: those that the call reads and writes, which live as long as this object.
    """

    def __init__(
        self, task: Task, future: torch.futures.Future[Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._task = task
        self._future = future
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the call has ended.

        On GPUs: until it is queued; then the current stream waits for its work.

        Raises:
            RuntimeError: the call does not return within ``timeout``, if that is not 0.
        """
        seconds = timeout.total_seconds()
        if not self._task.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"the call has not ended within {seconds:g} s")
        self._task.join()
        return True

    def synchronize(self) -> None:
        """See ``wait``."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the call has ended, with or without an error; on GPUs: whether it is queued."""
        return bool(self._future.done())

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self.is_completed() and self._task.error is None

    def exception(self) -> BaseException | None:
        """Returns the error of the call; None if it has none so far."""
        return self._task.error

    def result(self) -> Any:
        """Returns the tensors that the call has written; waits like ``wait``."""
        self.wait()
        return self._future.value()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors that the call writes."""
        return self._future


class _Works(dist.Work):  # type: ignore[misc]
    """Several calls, as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for all calls; ``timeout`` is for each."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all calls have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Returns a future of the futures of the calls."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _inner(name: str) -> Any:
    """Returns a method that calls the inner group's method, in the worker."""

    def call(self: GradreduceGroup, *arguments: Any, **options: Any) -> GroupWork:
        return self._call_inner(name, *arguments, **options)

    call.__name__ = name
    return call


def _point_to_point(name: str) -> Any:
    """Returns a method that sends or receives by the inner group.

    On the CPU it does not wait for earlier calls: gloo finds the other process by the tag.
    """

    def call(self: GradreduceGroup, tensors: Any, *arguments: Any) -> Any:
        start = partial(getattr(self.inner_group, name), tensors, *arguments)
        if not any(tensor.is_cuda for tensor in tensors):
            return start()

        def run() -> Any:
            start().wait()
            return tensors

        return self._submit(f"{name} of group {self.group_name!r}", tensors, run)

    call.__name__ = name
    return call


def _refused(name: str, advice: str) -> Any:
    """Returns a method that raises ``RuntimeError``."""

    def call(self: GradreduceGroup, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"the backend 'gradreduce' has no {name}: {advice}")

    call.__name__ = name
    return call


class GradreduceGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group that adds floats by ``AllReduceCrossDeviceOps``.

    ``torch.distributed`` makes it. Sums and averages of dense float16, bfloat16, float32 and
    float64 tensors are ours; everything else is done by gloo or NCCL.

    Attributes:
        options: the ``BackendOptions`` of the group.
        inner_group: the group with gloo and NCCL that sends bytes.
    """

    def __init__(self, made_by: Any, options: BackendOptions) -> None:
        size, rank = made_by.group_size, made_by.group_rank
        super().__init__(rank, size)  # subclasses cannot pass a store
        self._store = made_by.store
        self.options = options
        self.inner_group = dist.ProcessGroup(made_by.store, rank, size)
        self._share_backends(made_by)
        self._sums = GroupSums(self.inner_group, options, made_by.timeout.total_seconds())
        self._limit = options.deadline
        self._worker = BackwardWorker(in_thread=True)
        self._numbers = count()
        self._began = time.time()
        self._has_failed = False
        self._coalesced: list[GroupWork] | None = None

    def _share_backends(self, made_by: Any) -> None:
        """Registers gloo and NCCL in both groups, because C++ code of PyTorch calls them itself."""
        found: dict[str, tuple[Any, Any]] = {}
        place = (made_by.group_rank, made_by.group_size)
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", made_by.store), *place, timeout=made_by.timeout + _LATER
        )
        gloo._set_sequence_number_for_group()
        found["cpu"] = dist.ProcessGroup.BackendType.GLOO, gloo
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = made_by.timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", made_by.store), *place, options)
            nccl._set_sequence_number_for_group()
            found["cuda"] = dist.ProcessGroup.BackendType.NCCL, nccl
        for group in (self, self.inner_group):
            group._set_default_backend(list(found.values())[-1][0])
            for device, (kind, backend) in found.items():
                group._register_backend(torch.device(device), kind, backend)
        self.inner_group._set_group_name(made_by.group_id)
        # So that functions of torch.distributed take the inner group.
        world = dist.distributed_c10d._world
        self._global_ranks = [*(made_by.global_ranks_in_group or range(made_by.group_size))]
        world.pg_group_ranks[self.inner_group] = {
            each: rank for rank, each in enumerate(self._global_ranks)
        }
        names = [f"{device}:{kind.name.lower()}" for device, (kind, _) in found.items()]
        world.pg_backend_config[self.inner_group] = ",".join(names)

    def _submit(
        self, label: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any]
    ) -> GroupWork:
        """Gives a call to the worker.

        Args:
            label: the call, for errors.
            tensors: all that the call reads or writes.
            call: returns the value of the work's future.
        """
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))

        def run() -> None:
            try:
                for tensor in tensors:
                    if tensor.is_cuda:
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                result = call()
            except BaseException as error:
                failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                named = with_name(failure, label)
                future.set_exception(named)
                raise named from error.__cause__
            future.set_result(result)

        task = self._worker.submit(run, map(torch.cuda.current_stream, devices))
        if torch._C._current_graph_task_id() >= 0:
            # Called at the end of backward, before the functions of DDP and FSDP, which would take
            # an error for tensors.
            torch.autograd.Variable._execution_engine.queue_callback(task.wait)
        work = GroupWork(task, future, tensors)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _submit_collective(
        self,
        collective: GroupCollective,
        call: Callable[[float | None], Any],
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Gives a collective to the worker, which compares it with those of the other processes.

        Args:
            collective: the collective.
            call: runs it within so many seconds (None: the timeout), and returns the value of the
                work's future.
            timeout: see ``_deadline``.
        """
        deadline = self._deadline(timeout)

        def run() -> Any:
            try:
                result = call(self._sums.begin(collective, deadline))
            except BaseException:
                self._note_failure()
                raise
            self._sums.end()
            return result

        label = f"{collective.name} {next(self._numbers)} of group {self.group_name!r}"
        return self._submit(f"{label} ({collective.shapes})", collective.tensors, run)

    def _call_inner(self, name: str, *arguments: Any, **options: Any) -> GroupWork:
        """Gives a collective of the inner group to the worker."""
        start = partial(getattr(self.inner_group, name), *arguments, **options)
        collective = GroupCollective(name, [*arguments, *options.values()])

        def run(deadline: float | None) -> Any:
            work = self._sums.run(start, deadline, is_on_gpu=collective.is_on_gpu)
            return work.get_future().wait() if has_future(work) else _listed(arguments[0])

        return self._submit_collective(collective, run, collective.timeout)

    def _note_failure(self) -> None:
        """If the group has failed, lets its other calls fail, and writes the flight record."""
        reason = self._sums.failure
        if reason is None or self._has_failed:
            return
        self._has_failed = True
        self._sums.fail(reason)
        prefix = os.environ.get(VARIABLE)
        failed = self._flight_record()
        if prefix and failed is not None:
            groups = list(dist.distributed_c10d._world.pg_map)
            ours = [each for each in groups if isinstance(each, GradreduceGroup)]
            records = [each._flight_record() for each in ours]
            write_dumps(prefix, [each for each in records if each is not None], failed, self._began)

    def _flight_record(self) -> GroupRecord | None:
        record = self._sums.flight_record()
        if record is None:
            return None
        return GroupRecord(self.group_name, self.group_desc, self._global_ranks, record)

    def _deadline(self, timeout: timedelta | None) -> float | None:
        """Returns the seconds for a collective; None: those of the mesh."""
        passed = 0.0 if timeout is None else timeout.total_seconds()
        limits = [each for each in (passed, self._limit) if each is not None and each > 0]
        return min(limits, default=None)

    # -- sums -------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> GroupWork:
        """See ``torch.distributed.all_reduce``."""
        opts = _options(dist.AllreduceOptions, opts, op, timeout)
        return self._all_reduce("allreduce", _listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> GroupWork:
        """See ``torch.distributed.all_reduce_coalesced``."""
        opts = _options(dist.AllreduceCoalescedOptions, opts)
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Any, opts: Any) -> GroupWork:
        op = op_of(opts.reduceOp, tensors)
        if op is None:
            return self._call_inner(name, tensors, opts)

        def run(deadline: float | None) -> Any:
            self._sums.all_reduce(tensors, op, deadline)
            return tensors

        return self._submit_collective(GroupCollective(name, [tensors, opts]), run, opts.timeout)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> GroupWork:
        """See ``torch.distributed.reduce``. Only the root's tensor changes."""
        if isinstance(opts, int):
            root, opts = opts, None
        opts, tensors = _options(dist.ReduceOptions, opts, op, timeout, root), _listed(tensors)
        ours = op_of(opts.reduceOp, tensors)
        if ours is None or len(tensors) != 1:
            return self._call_inner("reduce", tensors, opts)
        root = opts.rootRank

        def run(deadline: float | None) -> Any:
            self._sums.reduce(tensors[0], ours, root, deadline)
            return tensors

        return self._submit_collective(
            GroupCollective("reduce", [tensors, opts]), run, opts.timeout
        )

    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> GroupWork:
        """See ``torch.distributed.reduce_scatter``."""
        opts = _options(dist.ReduceScatterOptions, opts, op, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        tensors = list(tensors_in([outputs, inputs]))
        ours = op_of(opts.reduceOp, tensors)
        is_regular = len(outputs) == 1 and len(tensors) == 1 + self.size()
        if ours is None or not is_regular or len({each.shape for each in tensors}) > 1:
            return self._call_inner("reduce_scatter", outputs, inputs, opts)

        def run(deadline: float | None) -> Any:
            whole = torch.stack([tensor.detach() for tensor in inputs[0]])
            self._sums.reduce_scatter(outputs, [whole], ours, deadline)
            return outputs

        collective = GroupCollective("reduce_scatter", [outputs, inputs, opts])
        return self._submit_collective(collective, run, opts.timeout)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> GroupWork:
        """See ``torch.distributed.reduce_scatter_single``."""
        return self._reduce_scatter("reduce_scatter_single", [output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> GroupWork:
        """See ``torch.distributed._coalescing_manager``."""
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, outputs: Any, inputs: Any, opts: Any) -> GroupWork:
        opts = _options(dist.ReduceScatterOptions, opts)
        tensors = [*outputs, *inputs]
        op = op_of(opts.reduceOp, tensors)
        sizes = [(each.numel() * self.size(), each.dtype) for each in outputs]
        if op is None or sizes != [(each.numel(), each.dtype) for each in inputs]:
            lists = (outputs, inputs) if name.endswith("coalesced") else (outputs[0], inputs[0])
            return self._call_inner(name, *lists, opts)

        def run(deadline: float | None) -> Any:
            self._sums.reduce_scatter(outputs, inputs, op, deadline)
            return outputs

        collective = GroupCollective(name, [outputs, inputs, opts])
        return self._submit_collective(collective, run, opts.timeout)

    # -- by the inner group -----------------------------------------------------------------------

    allgather = _inner("allgather")
    allgather_coalesced = _inner("allgather_coalesced")
    all_gather_single = _inner("all_gather_single")
    all_gather_single_coalesced = _inner("all_gather_single_coalesced")
    _allgather_base = _inner("_allgather_base")
    allgather_into_tensor_coalesced = _inner("allgather_into_tensor_coalesced")
    all_to_all_single = _inner("all_to_all_single")
    alltoall = _inner("alltoall")
    alltoall_base = _inner("alltoall_base")
    barrier = _inner("barrier")
    broadcast = _inner("broadcast")
    gather = _inner("gather")
    scatter = _inner("scatter")
    send = _point_to_point("send")
    recv = _point_to_point("recv")
    recv_anysource = _point_to_point("recv_anysource")
    monitored_barrier = _refused("monitored_barrier", "call barrier")
    split_group = splitGroup = _refused("split_group", "call new_group")
    merge_remote_group = mergeRemoteGroup = _refused("merge_remote_group", "call new_group")

    # -- the group itself -------------------------------------------------------------------------

    def getBackendName(self) -> str:  # called by C++
        """Returns ``"gradreduce"``."""
        return _NAME

    def name(self) -> str:
        """Returns ``"gradreduce"``."""
        return _NAME

    _get_backend_name = name

    def get_group_store(self) -> Any:
        """Returns the store by which the processes of the group met."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _Works:
        works, self._coalesced = self._coalesced, None
        return _Works(works or [])

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of later calls; that of collectives can only become shorter."""
        super().set_timeout(timeout + _LATER)
        self._limit = self._deadline(timeout)

    def shutdown(self) -> None:
        """Ends the group; called by ``destroy_process_group``.

        Waits at most 10 s for calls that run, and then ends them by an error.
        """
        try:
            task = self._worker.submit(self._sums.close, ())
            if not task.wait(_SHUTDOWN_SECONDS):
                self._sums.fail(_ABORTED)
        finally:
            super().shutdown()
            world = dist.distributed_c10d._world
            world.pg_group_ranks.pop(self.inner_group, None)
            world.pg_backend_config.pop(self.inner_group, None)

    def abort(self) -> None:
        """Ends calls that run, by an error."""
        self._sums.fail(_ABORTED)
        super().abort()


def _options(
    kind: Any, opts: Any, op: Any = None, timeout: timedelta | None = None, root: int = 0
) -> Any:
    """Returns the options object of a sum; Python callers may pass its parts instead."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if hasattr(made, "rootRank"):
        made.rootRank = root
    if opts is not None or op is not None:
        made.reduceOp = opts if op is None else op
    if timeout is not None:
        made.timeout = timeout
    return made


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _create(made_by: Any, passed: Any) -> GradreduceGroup:
    """Makes a group; called by ``torch.distributed``."""
    keys = [f"options/{rank}" for rank in range(made_by.group_size)]
    try:
        options = _default_options() if passed is None else _checked(passed)
    except (TypeError, ValueError) as error:
        made_by.store.set(keys[made_by.group_rank], repr(error))  # the others wait
        raise
    made_by.store.set(keys[made_by.group_rank], str(options))
    made_by.store.wait(keys, made_by.timeout)
    check_equal([made_by.store.get(key).decode() for key in keys])
    return GradreduceGroup(made_by, options)


def _checked(passed: Any) -> BackendOptions:
    if not isinstance(passed, BackendOptions):
        raise TypeError(f"pg_options={brief(passed)} must be gr.torch.BackendOptions or None")
    return passed


def _default_options() -> BackendOptions:
    default = dist.group.WORLD
    return default.options if isinstance(default, GradreduceGroup) else options_from()


dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
hide_from_compiler()
