"""Reduces gradients while ``backward`` computes others, as the reducer of DDP does.

The first backward shows in which order gradients become ready. At its end buckets of that order are
made, and the gradients move there. From then on a bucket is reduced as soon as the gradients of all
its parameters are there, in all replicas, and all buckets before it are on their way: so the order
is the same in all processes.

A round is one backward of each replica, by one call of ``backward`` or by several. It ends with the
backward of the last one, when all buckets have been reduced: those too for which gradients did not
come.
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
    """The parameters of one device, and how far their backward has come in this round.

    Holds the parameters weakly, as all that their hooks hold does: PyTorch does not free a
    parameter that its own hook leads to.

    Attributes:
        index: of the device.
        device: of PyTorch.
        waits: whether no backward of it has begun. The first gradient begins it.
        runs: whether one has begun, and not ended.
        is_done: whether one has ended.
        is_incomplete: whether a parameter was freed: the module has another one in its place.
        ready: in the first round, the indices of the parameters in the order of their gradients.
        parts: its gradients of each bucket.
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
        bucket: which.
        total: how many gradients are expected in a round: more than one of a parameter that two
            reentrant checkpoints share.
        missing: how many are still to come: infinitely many inside ``no_sync``, and at first; none
            while the replica waits.
    """

    __slots__ = ("bucket", "missing", "total")

    def __init__(self, bucket: Bucket, total: int) -> None:
        self.bucket = bucket
        self.total = total
        self.missing: float = math.inf


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        name: for errors.
        blocks: the flat buffer of each replica.
        step: reduces it.
        num_ready: how many parts are ready.
        is_launched: whether it is being reduced, or has been.
        streams: on GPUs: of each replica, the stream in which its gradients became ready.
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
        names: of the parameters.
        replicas: the parameters of each of this process's devices, in the order of the names.
        frozen: parameters that get no gradients, with their names.
        mesh: whose devices they are on.
        cross_device_ops: reduces the gradients.
        bucket_bytes: the most that a bucket has, unless it is of one parameter.

    Attributes:
        owner: set by who made it. When that is gone, another reducer may take the parameters.
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
        self._tasks: list[Task] = []  # of the buckets that are launched
        self._is_paused = False
        self._is_interrupted = False
        self._handles = [  # of the hooks
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
                f"no_sync() after a backward of replica {begun[0].index}, but not of all replicas: "
                "enter it before the first one"
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
        """Zeroes all gradients, one fill for each bucket and device; False: there are none yet."""
        for bucket in self._buckets:
            bucket.step.flat.zero()
        return bool(self._buckets)

    def remove_hooks(self) -> None:
        """Leaves the gradients to somebody else."""
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
                f"a second backward of replica {replica.index}, before one of replica "
                f"{listed(others)}: call backward once for each replica, or all but the last "
                "times inside no_sync()"
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
        replica.waits, replica.runs = False, True  # an interrupt before leaves it waiting
        for part in replica.parts:
            part.missing = part.total

    def part_is_ready(self, replica: Replica, part: Part, parameter: Any) -> None:
        """Launches the bucket of a part if all of it is ready, and those before it."""
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
                    "reentrant checkpoints that share it run a varying number of times; use "
                    "use_reentrant=False"
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
        """Context manager: drops the round if an error comes, which the others hear of."""
        try:
            yield
        except BaseException as error:
            self._drop_round(f"failed: {error!r}")
            raise

    def _interrupt(self, replica: Replica) -> None:
        """Notes that an error ended a backward in the middle; the next one cleans up."""
        self._is_interrupted = True
        replica.wait()

    def _clean_up(self) -> None:
        """Drops an interrupted round. Raises if the mesh cannot be used any more."""
        mesh_state = self._mesh.mesh_state
        mesh_state.check_process()
        if self._is_interrupted:
            self._drop_round("was interrupted")
        mesh_state.check_usable(self._mesh[0])

    def _finish(self) -> None:
        """Reduces the buckets that are left, and waits for all."""
        for bucket in self._buckets[len(self._tasks) :]:
            for replica in self._replicas:
                self._collect(bucket, replica)
            self._launch(bucket)
        for task in self._tasks:
            task.wait()
        for task in self._tasks[-1:]:  # the streams are those of all
            task.join()

    def _launch(self, bucket: Bucket) -> None:
        bucket.is_launched = True
        # Between two calls of backward a gradient may have been replaced.
        bucket.step.attaches = any([replica.is_done for replica in self._replicas])
        self._tasks.append(self._worker.submit(bucket.reduce, bucket.streams.values()))

    def _collect(self, bucket: Bucket, replica: Replica) -> None:
        """Moves gradients to the flat buffer; on a GPU, notes the stream that has them."""
        with naming(bucket.name):
            attach_again(bucket.blocks[replica.index : replica.index + 1])
        if replica.device.type == "cuda":
            bucket.streams[replica.index] = torch.cuda.current_stream(replica.device)

    def _drop_round(self, why: str) -> None:
        """Drops a round. A mesh over several processes fails: their rounds would differ."""
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
        self._is_interrupted = False  # last: an error before leaves the rest to the next backward

    # -- after the first backward -----------------------------------------------------------------

    def _make_buckets(self) -> None:
        """Makes the buckets, moves the gradients there, and reduces them for the first time."""
        rows = [replica.parameters for replica in self._replicas]
        last = reversed(range(len(self._names)))  # what was not used; the first layers are last
        order = list(dict.fromkeys([*self._replicas[0].ready, *last]))
        if self._mesh.num_processes > 1:  # that of process 0
            first = self._cross_device_ops.broadcast(torch.tensor(order), self._mesh[0])
            order = first.primary.tolist()
        sizes = [Size(each.dtype, each.nbytes) for each in rows[0]]
        counts = [Counter(replica.ready) for replica in self._replicas]
        plan = plan_buckets(sizes, order, self._bucket_bytes)
        made: dict[int, Bucket] = {}
        nbytes = [sum([sizes[index].nbytes for index in indices]) for indices in plan]
        # The largest first: the others use its temporary memory.
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
        self._buckets = buckets  # in this order: an interrupt leaves hooks that begin a round
        for replica, found in zip(self._replicas, parts, strict=True):
            replica.parts = found
        first, self._handles = self._handles, handles
        for handle in first:
            handle.remove()

    def _bucket(
        self, name: str, names: Sequence[str], parameters: Sequence[Sequence[Any]]
    ) -> Bucket:
        """Makes a bucket of the gradients that are there, by replica, and averages it."""
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
    """Returns the hook of parameters, which is called each time a gradient was accumulated."""

    def gradient_is_ready(parameter: Any) -> None:  # thousands of times in a backward
        part.missing -= 1
        if part.missing <= 0:
            reducer.part_is_ready(replica, part, parameter)

    gradient_is_ready.reducer = reducer  # type: ignore[attr-defined]
    return gradient_is_ready


def reducer_of(parameter: Any) -> Reducer | None:
    """Returns the reducer whose hook a parameter has; None: it has none."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    found = (getattr(hook, "reducer", None) for hook in hooks.values())
    return next((each for each in found if isinstance(each, Reducer)), None)


class EndOfBackward:
    """What is called when the outermost backward ends; or dropped when an error ends it.

    A reentrant checkpoint calls ``backward`` inside a node of another one: then the call is passed
    on to that one, when the node is done.

    Args:
        ended: called at the end.
        interrupted: called instead, when the graph is dropped.
    """

    _ended: Callable[[], None] | None = None

    def __init__(self, ended: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted
        self._ended = ended

    def register(self) -> None:
        """Registers the call in the backward that is running."""
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Ends the innermost backward; called by PyTorch."""
        try:
            node = torch._C._current_autograd_node()
            if node is None:
                assert self._ended is not None
                self._ended()
                self._ended = None
                return
        except BaseException:  # such as a KeyboardInterrupt before the round is reset
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
    """Context manager: errors have the name of the bucket."""
    try:
        yield
    except Exception as error:
        raise with_name(error, bucket) from error.__cause__
