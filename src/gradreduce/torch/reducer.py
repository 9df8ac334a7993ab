"""Reduces gradients while ``backward`` computes others, as the reducer of DDP does.

The first backward shows in which order gradients become ready. At its end, the reducer makes
buckets in this order, and moves the gradients into them. In later backwards, the reduction of a
bucket starts when all replicas have the gradients of all its parameters, and the reductions of all
earlier buckets have started. Therefore the order is the same in all processes.

A round is one backward of each replica, in one call of ``backward`` or in several. It ends with the
backward of the last replica. Then all buckets have been reduced, also those with parameters that
got no gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any
from weakref import ref

import torch

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.device import Mesh, attach_again
from gradreduce.device.exchange import fail
from gradreduce.errors import listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .buckets import Size, plan_buckets
from .worker import Task, with_name, worker_of


class Replica:
    """The parameters of one device, and the progress of their backward in this round.

    It refers to the parameters weakly. The hooks of a parameter refer to this object, and PyTorch
    does not free a parameter that its own hook refers to.

    Attributes:
        index: the index of the device.
        device: PyTorch's device.
        waits: whether the replica waits for its first gradient, which begins its backward.
        runs: whether its backward has begun and not ended.
        is_done: whether its backward in this round has ended.
        is_incomplete: whether a parameter was freed, because the module has another one instead.
        ready: in the first round, the indices of the parameters in the order of their gradients.
        parts: the part of each bucket that belongs to this replica.
    """

    def __init__(self, index: int, parameters: Sequence[Any]) -> None:
        self.index = index
        self.device = parameters[0].device
        self._parameters = [ref(parameter, self._set_incomplete) for parameter in parameters]
        self.is_incomplete = False
        self.waits, self.runs, self.is_done = True, False, False
        self.ready: list[int] = []
        self.parts: list[Part] = []

    def wait(self) -> None:
        """Makes the next gradient begin a backward."""
        self.waits = True
        for part in self.parts:
            part.missing = 0

    @property
    def parameters(self) -> list[Any]:
        """The parameters, in the order of the module."""
        return [parameter() for parameter in self._parameters]

    def _set_incomplete(self, _: object) -> None:
        self.is_incomplete = True


class Part:
    """One replica's gradients of a bucket.

    Attributes:
        bucket: the bucket.
        total: the number of gradients that are expected in a round. A parameter that several
            reentrant checkpoints share gets several gradients.
        missing: the number of gradients that have not come yet. 0 while the replica waits. Infinite
            inside ``no_sync``, and before the first round has ended.
    """

    __slots__ = ("bucket", "missing", "total")

    def __init__(self, bucket: Bucket, total: int) -> None:
        self.bucket = bucket
        self.total = total
        self.missing: float = math.inf


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        name: the name for error messages.
        blocks: the memory of the flat buffer of each replica.
        step: the prepared step that reduces the bucket.
        num_ready: the number of parts that are ready.
        is_launched: whether its reduction has started in this round.
        streams: on GPUs, for each replica the stream that computed its gradients.
    """

    def __init__(self, name: str, step: Any) -> None:
        self.name = name
        self.blocks = [buffer.block for buffer in step.flat.buffers]
        self.step = step
        self.num_ready = 0
        self.is_launched = False
        self.streams: dict[int, Any] = {}

    def reduce(self) -> None:
        """Averages the gradients over all replicas, in place."""
        with naming(self.name):
            self.step()

    def reset(self) -> None:
        """Prepares for the next round."""
        self.num_ready, self.is_launched = 0, False


class Reducer:
    """Averages the gradients of replicas over all devices and processes of a mesh.

    Args:
        names: the names of the parameters.
        replicas: the parameters on each device of this process, in the order of the names.
        frozen: parameters that get no gradients, with their names.
        mesh: the mesh of the devices.
        cross_device_ops: reduces the gradients.
        bucket_bytes: the largest size of a bucket. A larger parameter has a bucket of its own.

    Attributes:
        owner: the DataParallel that made the reducer, which sets this. When it has been freed,
            another reducer may use the parameters.
    """

    owner: ref[Any]

    def __init__(
        self,
        names: Sequence[str],
        replicas: Sequence[Sequence[Any]],
        frozen: Sequence[tuple[str, Any]],
        mesh: Mesh,
        cross_device_ops: AllReduceCrossDeviceOps,
        bucket_bytes: float,
    ) -> None:
        self._names = names
        self._frozen = [(name, ref(parameter)) for name, parameter in frozen]
        self._mesh = mesh
        self._cross_device_ops = cross_device_ops
        self._bucket_bytes = bucket_bytes
        self._worker = worker_of(mesh)
        self._lock = Lock()  # replicas may run in threads
        self._replicas = [Replica(*each) for each in enumerate(replicas)]
        self._buckets: list[Bucket] = []
        self._tasks: list[Task] = []  # of the buckets whose reduction has started
        self._is_paused = False
        self._is_interrupted = False
        self._handles = [  # remove the hooks
            parameter.register_post_accumulate_grad_hook(_first_hook(self, replica, index))
            for replica, parameters in zip(self._replicas, replicas, strict=True)
            for index, parameter in enumerate(parameters)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``DataParallel.no_sync``."""
        if self._is_paused:
            yield
            return
        self._clean_up()
        begun = [replica for replica in self._replicas if replica.is_done or replica.runs]
        if begun:
            raise RuntimeError(
                f"no_sync() was entered after a backward of replica {begun[0].index}, before all "
                "replicas had theirs: enter it before the first backward of a step"
            )
        try:
            self._is_paused = True
            for replica in self._replicas:
                replica.waits = False
                for part in replica.parts:
                    part.missing = math.inf
            yield
        finally:
            self._is_paused = False
            self._reset()

    def zero(self) -> bool:
        """Zeroes all gradients, with one fill for each bucket; returns False without buckets."""
        for bucket in self._buckets:
            bucket.step.flat.zero()
        return bool(self._buckets)

    def remove_hooks(self) -> None:
        """Removes all hooks, so that another reducer can use the parameters."""
        for handle in self._handles:
            handle.remove()

    # -- a backward -------------------------------------------------------------------------------

    def begin(self, replica: Replica) -> None:
        """Begins the backward of a replica, with its first gradient."""
        self._clean_up()
        if replica.is_done:
            others = [each.index for each in self._replicas if not each.is_done]
            self._is_interrupted = True  # the next backward begins a new round
            raise RuntimeError(
                f"backward was called a second time for replica {replica.index}, before it was "
                f"called for replica {listed(others)}: call it once for each replica; to "
                "accumulate gradients, make all calls but the last inside no_sync()"
            )
        if replica.is_incomplete:
            raise RuntimeError(
                f"a parameter of replica {replica.index} was replaced by another tensor: make a "
                "new DataParallel"
            )
        thawed = [name for name, frozen in self._frozen if getattr(frozen(), "requires_grad", 0)]
        if thawed:
            raise RuntimeError(
                f"{listed(thawed)} did not require gradients when the DataParallel was made: make "
                "a new one"
            )
        EndOfBackward(partial(self._end, replica), partial(self._interrupt, replica)).register()
        replica.waits, replica.runs = False, True  # last: after an interrupt it still waits
        for part in replica.parts:
            part.missing = part.total

    def part_is_ready(self, replica: Replica, part: Part, parameter: Any) -> None:
        """Starts the reduction of the part's bucket, if it and all earlier ones are ready."""
        if replica.waits:
            self.begin(replica)
            part.missing -= 1
            if part.missing > 0:
                return
        bucket = part.bucket
        if bucket.is_launched:
            with self._dropping_if_failed():
                index = [each is parameter for each in replica.parameters].index(True)
                raise RuntimeError(
                    f"{self._names[index]} got another gradient after {bucket.name} was reduced: "
                    "several reentrant checkpoints use this parameter, and their number differs "
                    "from that in the first backward; use use_reentrant=False"
                )
        if part.missing < 0:
            return
        with self._dropping_if_failed():
            self._collect(bucket, replica)
        with self._lock:
            bucket.num_ready += 1
            while len(self._tasks) < len(self._buckets):
                following = self._buckets[len(self._tasks)]
                if following.num_ready < len(self._replicas):
                    break
                self._launch(following)

    def _end(self, replica: Replica) -> None:
        """Ends the backward of a replica, and the round if it is the last one."""
        with self._lock:
            replica.runs, replica.is_done = False, True
            replica.wait()
            if not all(each.is_done for each in self._replicas):
                return
        with self._dropping_if_failed():
            if self._buckets:
                self._finish()
            else:
                self._make_buckets()
        self._reset()

    @contextmanager
    def _dropping_if_failed(self) -> Iterator[None]:
        """Drops the round if an error is raised inside; other processes are told."""
        try:
            yield
        except BaseException as error:
            self._drop_round(f"failed: {error!r}")
            raise

    def _interrupt(self, replica: Replica) -> None:
        """Notes that an error ended a backward; the next backward cleans up."""
        self._is_interrupted = True
        replica.wait()

    def _clean_up(self) -> None:
        """Drops an interrupted round; raises if the mesh cannot be used."""
        mesh_state = self._mesh.mesh_state
        mesh_state.check_process()
        if self._is_interrupted:
            self._drop_round("was interrupted")
        mesh_state.check_usable(self._mesh[0])

    def _finish(self) -> None:
        """Reduces the remaining buckets, and waits for all reductions."""
        for bucket in self._buckets[len(self._tasks) :]:
            for replica in self._replicas:
                self._collect(bucket, replica)
            self._launch(bucket)
        for task in self._tasks:
            task.wait()
        for task in self._tasks[-1:]:  # all tasks use the same streams
            task.join()

    def _launch(self, bucket: Bucket) -> None:
        bucket.is_launched = True
        # If a replica had its backward before this one, its gradients may have been replaced since.
        bucket.step.attaches = any([replica.is_done for replica in self._replicas])
        self._tasks.append(self._worker.submit(bucket.reduce, bucket.streams.values()))

    def _collect(self, bucket: Bucket, replica: Replica) -> None:
        """Moves gradients to the flat buffer; on a GPU, notes the stream that computed them."""
        with naming(bucket.name):
            attach_again(bucket.blocks[replica.index : replica.index + 1])
        if replica.device.type == "cuda":
            bucket.streams[replica.index] = torch.cuda.current_stream(replica.device)

    def _drop_round(self, why: str) -> None:
        """Drops a round. A mesh over several processes fails, because their rounds differ."""
        mesh_state = self._mesh.mesh_state
        group = mesh_state.process_group
        if group is not None and mesh_state.reason is None:
            fail(mesh_state, f"a backward of process {group.rank} of {group.size} {why}")
        self._reset()

    def _reset(self) -> None:
        """Prepares for the next round."""
        self._tasks = []
        for replica in self._replicas:
            replica.runs, replica.is_done, replica.ready = False, False, []
            replica.wait()
        for bucket in self._buckets:
            bucket.reset()
        # Last, so that the next backward cleans up after an interrupt of this function.
        self._is_interrupted = False

    # -- after the first backward -----------------------------------------------------------------

    def _make_buckets(self) -> None:
        """Makes the buckets, moves the gradients there, and reduces them for the first time."""
        rows = [replica.parameters for replica in self._replicas]
        # Parameters without a gradient come last, in reversed order, because the gradients of the
        # first layers become ready last.
        last = reversed(range(len(self._names)))
        order = list(dict.fromkeys([*self._replicas[0].ready, *last]))
        if self._mesh.num_processes > 1:  # all use the order of process 0
            first = self._cross_device_ops.broadcast(torch.tensor(order), self._mesh[0])
            order = first.primary.tolist()
        sizes = [Size(each.dtype, each.nbytes) for each in rows[0]]
        counts = [Counter(replica.ready) for replica in self._replicas]
        plan = plan_buckets(sizes, order, self._bucket_bytes)
        made: dict[int, Bucket] = {}
        nbytes = [sum([sizes[index].nbytes for index in indices]) for indices in plan]
        # The largest bucket first, because the others reuse its temporary memory.
        for number in sorted(range(len(plan)), key=nbytes.__getitem__, reverse=True):
            names = [self._names[index] for index in plan[number]]
            inside = [[row[index] for index in plan[number]] for row in rows]
            made[number] = self._bucket(f"bucket {number} ({listed(names)})", names, inside)
        buckets = [made[number] for number in range(len(plan))]
        handles = []
        parts: list[list[Part]] = [[] for _ in rows]
        for bucket, indices in zip(buckets, plan, strict=True):
            for replica, row, count in zip(self._replicas, rows, counts, strict=True):
                part = Part(bucket, sum([max(1, count[index]) for index in indices]))
                parts[replica.index].append(part)
                hook = _hook(self, replica, part)  # has no effect before the end of the round
                for index in indices:
                    handles.append(row[index].register_post_accumulate_grad_hook(hook))
        # The old hooks are removed last, so that an interrupt leaves hooks that can begin a round.
        self._buckets = buckets
        for replica, found in zip(self._replicas, parts, strict=True):
            replica.parts = found
        first, self._handles = self._handles, handles
        for handle in first:
            handle.remove()

    def _bucket(
        self, name: str, names: Sequence[str], parameters: Sequence[Sequence[Any]]
    ) -> Bucket:
        """Makes a bucket of existing gradients, ``[replica][parameter]``, and averages it."""
        shapes = {key: tuple(each.shape) for key, each in zip(names, parameters[0], strict=True)}
        dtype = str(parameters[0][0].dtype).removeprefix("torch.")
        with naming(name):
            flat = self._mesh.flat_buffer(shapes, dtype)
            flat.attach(parameters)
            step = flat.prepare_all_reduce(ReduceOp.MEAN, cross_device_ops=self._cross_device_ops)
        return Bucket(name, step)


def _first_hook(reducer: Reducer, replica: Replica, index: int) -> Callable[[Any], None]:
    """Returns the hook of a parameter in the first round."""

    def gradient_is_ready(_: Any) -> None:
        if reducer._is_paused:
            return
        if replica.waits:
            reducer.begin(replica)
        replica.ready.append(index)

    gradient_is_ready.reducer = reducer  # type: ignore[attr-defined]
    return gradient_is_ready


def _hook(reducer: Reducer, replica: Replica, part: Part) -> Callable[[Any], None]:
    """Returns the hook of parameters after the first round; called for each gradient."""

    def gradient_is_ready(parameter: Any) -> None:  # called thousands of times in a backward
        part.missing -= 1
        if part.missing <= 0:
            reducer.part_is_ready(replica, part, parameter)

    gradient_is_ready.reducer = reducer  # type: ignore[attr-defined]
    return gradient_is_ready


def reducer_of(parameter: Any) -> Reducer | None:
    """Returns the reducer whose hook a parameter has, or None."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    found = (getattr(hook, "reducer", None) for hook in hooks.values())
    return next((each for each in found if isinstance(each, Reducer)), None)


class EndOfBackward:
    """A callback for the end of the outermost backward, or for its error.

    A reentrant checkpoint calls ``backward`` inside a node of an outer backward. At the end of the
    inner backward, the callback is registered again in the outer one.

    Args:
        ended: called when the outermost backward ends.
        interrupted: called instead if an error ends it.
    """

    _ended: Callable[[], None] | None = None

    def __init__(self, ended: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted
        self._ended = ended

    def register(self) -> None:
        """Registers the callback in the backward that is running."""
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Called by PyTorch at the end of the backward in which it is registered."""
        try:
            node = torch._C._current_autograd_node()
            if node is None:
                assert self._ended is not None
                self._ended()
                self._ended = None
                return
        except BaseException:  # also a KeyboardInterrupt before the round is reset
            self._ended = None
            self._interrupted()
            raise

        def pass_on(*_: object) -> None:
            handle.remove()
            self.register()

        handle = node.register_hook(pass_on)

    def __del__(self) -> None:
        if self._ended is not None:
            self._interrupted()


@contextmanager
def naming(bucket: str) -> Iterator[None]:
    """Adds the name of the bucket to errors that are raised inside."""
    try:
        yield
    except Exception as error:
        raise with_name(error, bucket) from error.__cause__
