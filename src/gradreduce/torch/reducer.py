"""Reduces gradients while ``backward`` computes others, as the reducer of DDP does.

The first backward shows in which order gradients become ready. At its end, the reducer makes
buckets in this order, and moves the gradients into them. In later backwards, the reduction of a
bucket starts when all replicas have the gradients of all its parameters, and the reductions of all
earlier buckets have started. Therefore the order is the same in all processes.

A round is one backward of each replica, in one call of ``backward`` or in several. It ends with the
backward of the last replica. Then all buckets have been reduced, also those with parameters that
got no gradient. Sparse gradients, of embeddings, are in no bucket, and are reduced last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any
from weakref import ref

import torch

from gradreduce.arrays.flat_arrays import attach_again
from gradreduce.comm.process_group import group_of
from gradreduce.device import Mesh
from gradreduce.errors import CollectiveError, listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.weights import ONE

from .engine import check_engine, pass_on
from .replica import (
    Bucket,
    BucketPart,
    Replica,
    bucket_hook,
    first_hook,
    plan_buckets,
    run_for,
)
from .sparse_gradients import average_sparse
from .unused import leave_unused, make_flags
from .weights import BackwardLocal, StepDivisor, multiplier
from .worker import Task, worker_of


class Reducer:
    """Averages the gradients of replicas over all devices and processes of a mesh.

    Args:
        names: the names of the parameters.
        replicas: the parameters on each device of this process, in the order of the names.
        frozen: parameters that get no gradients, with their names.
        sparse: the indices of parameters with sparse gradients.
        mesh: the mesh of the devices.
        cross_device_ops: reduces the gradients.
        bucket_bytes: the largest size of a bucket. A larger parameter has a bucket of its own.

    Attributes:
        mesh: see above.
        cross_device_ops: see above.
        sparse: see above.
        owner: the DataParallel that made the reducer, which sets this. When it has been freed,
            another reducer may use the parameters.
        is_paused: whether ``no_sync`` has been entered.
        num_steps: how often the gradients have been averaged.
        running: inside ``uneven``, what knows which processes still have batches.
    """

    owner: ref[Any]
    _multiplier = staticmethod(multiplier)

    def __init__(
        self,
        names: Sequence[str],
        replicas: Sequence[Sequence[Any]],
        frozen: Sequence[tuple[str, Any]],
        sparse: Collection[int],
        mesh: Mesh,
        cross_device_ops: AllReduceCrossDeviceOps,
        bucket_bytes: float,
    ) -> None:
        self._names = names
        self._frozen = [(name, ref(parameter)) for name, parameter in frozen]
        self.sparse, self.mesh, self.cross_device_ops = sparse, mesh, cross_device_ops
        self._bucket_bytes = bucket_bytes
        self._worker = worker_of(mesh)
        self._lock = Lock()  # replicas may run in threads
        self._replicas = [Replica(*each) for each in enumerate(replicas)]
        self._buckets: list[Bucket] = []
        self._tasks: list[Task] = []  # of the first buckets, whose reduction has started
        self._done: list[Replica] = []  # whose backward in this round has ended
        self._divisor: StepDivisor | None = None  # of this round, from its first reduction on
        self._added: list[Task] = []  # finds it, if this round has weights
        self._weights = BackwardLocal()  # of each backward: see ``multiplier``
        self._multipliers: list[Any] = []  # remove the hooks that multiply
        self.is_paused = False
        self._is_interrupted = False
        self.num_steps = 0
        self.running: Any = None
        self._round = 0  # the number of the round, equal in all processes
        self._num_zeroed = 0  # how many buckets were zeroed when the last round was dropped
        self._is_repeated = False  # whether others wait in this round, which has failed here
        self._group = group_of(mesh[0])
        self._number = self._group.rounds.add_owner()
        self._handles = [  # remove the hooks
            parameter.register_post_accumulate_grad_hook(first_hook(self, replica, index))
            for replica, parameters in zip(self._replicas, replicas, strict=True)
            for index, parameter in enumerate(parameters)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``DataParallel.no_sync``."""
        if self.is_paused:
            yield
            return
        self._clean_up()
        begun = [each for each in self._replicas if each in self._done or each.runs]
        if begun:
            raise RuntimeError(
                f"no_sync() was entered after a backward of replica {begun[0].index}, before all "
                "replicas had theirs: enter it before the first backward of a step"
            )
        try:
            self.is_paused = True
            yield
        finally:
            self.is_paused = False
            self._reset()

    @contextmanager
    def weight(self, weight: float) -> Iterator[None]:
        """See ``DataParallel.weight``."""
        self._multiply()
        before = self._weights.get()
        try:
            # PyTorch multiplies by a tensor in half the time that a number takes.
            self._weights.set((weight, torch.tensor(weight, dtype=torch.float64)))
            yield
        finally:
            self._weights.set(before)

    def _multiply(self) -> None:
        """Adds hooks that multiply gradients by the weight of their backward; once."""
        with self._lock:
            if self._multipliers:
                return
            for replica in self._replicas:
                for index, parameter in enumerate(replica.parameters):
                    if parameter is not None:
                        hook = self._multiplier(self._weights, replica, index, ref(parameter))
                        self._multipliers.append(parameter.register_hook(hook))

    def drop_begun(self) -> None:
        """Drops a round that some replicas have begun, and ends it with the other processes."""
        for replica in self._replicas:
            replica.forget_weights()
        self._forget_sums()
        if self._done:
            self._is_interrupted = True
        self._drop_if_interrupted()

    def zero(self) -> bool:
        """Zeroes all gradients, with one fill for each bucket; returns False without buckets."""
        for bucket in self._buckets:
            bucket.flat._zero(keeps_none=True)
        for parameter in self._sparse_parameters(*self._replicas):
            if parameter.grad is not None:
                parameter.grad.zero_()
        return bool(self._buckets)

    def remove_hooks(self) -> None:
        """Removes all hooks, so that another reducer can use the parameters."""
        for handle in (*self._handles, *self._multipliers):
            handle.remove()

    # -- a backward -------------------------------------------------------------------------------

    def begin(self, replica: Replica) -> None:
        """Begins the backward of a replica, with its first gradient."""
        if self.is_paused:
            replica.begin_paused(partial(self._end_paused, replica))
            replica.count(self._weights.get())
            return
        check_engine()
        self._clean_up()
        if replica in self._done:
            others = [each.index for each in self._replicas if each not in self._done]
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
        replica.begin(partial(self._end, replica))
        replica.waits, replica.runs = False, True  # last: after an interrupt it still waits
        for part in replica.parts:
            part.missing = part.total
        replica.count(self._weights.get())

    def part_is_ready(self, replica: Replica, part: BucketPart, position: int) -> None:
        """Starts the reduction of the part's bucket, if it and all earlier ones are ready.

        Args:
            replica: the replica.
            part: its part of the bucket.
            position: of the parameter in the part whose gradient has come.
        """
        if replica.waits or replica.gone:
            self._num_zeroed = 0
            self.begin(replica)
            self._check_kept(replica, part, position)
            part.used[position] = 1  # it may have dropped a round, and its marks
            part.missing -= 1
            if part.missing > 0:
                return
        if part.missing < 0:
            self._or_drop(self._check_not_launched, part, position)
            return
        self._or_drop(self._collect, part, replica)
        with self._lock:
            part.bucket.num_ready += 1
            while len(self._tasks) < len(self._buckets):
                following = self._buckets[len(self._tasks)]
                if following.num_ready < len(self._replicas):
                    break
                self._launch(following, attaches=bool(self._done))

    def _check_not_launched(self, part: BucketPart, position: int) -> None:
        """Raises if a gradient more than expected has come after the bucket was reduced."""
        bucket = part.bucket
        if bucket in self._buckets[: len(self._tasks)]:
            raise RuntimeError(
                f"{self._names[part.indices[position]]} got another gradient after {bucket.name} "
                "was reduced: several reentrant checkpoints use this parameter, and their number "
                "differs from that in the first backward; use use_reentrant=False"
            )

    def _end_paused(self, replica: Replica) -> None:
        """Ends the backward of a replica inside ``no_sync``."""
        if not pass_on(replica.end):
            replica.wait()
            self._move_gradients(replica)
            replica.finish()

    def _move_gradients(self, replica: Replica) -> None:
        """Called when a backward of a replica has ended; see ``ExactReducer``."""

    def _forget_sums(self) -> None:
        """Called when a step is dropped, also by ``zero_grad``; see ``ExactReducer``."""

    def _warn(self) -> None:
        """Called when a step has ended; see ``ExactReducer``."""

    def _end(self, replica: Replica) -> None:
        """Ends the backward of a replica, and the round if it is the last one.

        An error here, such as Ctrl-C, leaves ``replica.end``: the next backward cleans up.
        """
        if pass_on(replica.end):
            return
        self._move_gradients(replica)  # the last replica, maybe in another thread, needs them
        with self._lock:
            replica.runs = False
            self._done.append(replica)
            replica.wait()
            is_last = len(self._done) == len(self._replicas)
        if not is_last:
            replica.finish()
            return
        self._or_drop(self._end_round)
        error = None if self._divisor is None else self._divisor.error
        self._reset()
        if error is not None:
            raise error
        self.num_steps += 1
        self._warn()

    def _end_round(self) -> None:
        self._group.rounds.note_computed(self._number, self._round)
        divisor = self._find_divisor()
        self._reduce_dense(divisor)
        if divisor.error is None:
            if self.sparse:
                self._reduce_sparse(divisor)
            leave_unused(self._replicas)
        for each in self._replicas:
            if divisor.error is not None:
                each.leave_without_mean()
            each.forget_used()
        self._round += 1
        self._is_repeated = False

    def _reduce_dense(self, divisor: StepDivisor) -> None:
        """Waits for the reductions; the first round makes the buckets."""
        if self._buckets or len(self.sparse) == len(self._names):
            self._finish()
            return
        self._wait()
        if divisor.error is None:
            self._make_buckets(divisor)

    def _find_divisor(self) -> StepDivisor:
        """Returns the divisor of this round, which a task finds before the first reduction."""
        if self._divisor is None:
            self._divisor = divisor = StepDivisor()
            is_weighted = any([replica.is_weighted for replica in self._replicas])
            units = sum([replica.units for replica in self._replicas])
            if self._has_ended:
                own = units if is_weighted else len(self._replicas) * ONE
                find = partial(self._add_running, divisor, own)
            else:
                find = partial(divisor.add, units, self.mesh)
            if is_weighted or self._has_ended:
                self._added.append(self._worker.submit(find, ()))
        return self._divisor

    @property
    def _has_ended(self) -> bool:
        """Whether a process has ended inside ``uneven``."""
        return self.running is not None and self.running.has_ended

    def _add_running(self, divisor: StepDivisor, units: int) -> None:
        """Adds the weights of the processes that run; the others learn of the reductions."""
        divisor.set_total(self.running.sum_units(units), self.mesh.num_replicas)

    def await_round(self) -> None:
        """Notes that this process waits for the round of the others, which it will not drop."""
        self._group.rounds.note_computed(self._number, self._round)

    def join(self, total: int) -> None:
        """Joins the reductions of a step without gradients, of weight 0; see ``uneven``.

        Args:
            total: the exact sum of the weights of the other processes.
        """
        self._clean_up()
        for parameter in chain.from_iterable([each.parameters for each in self._replicas]):
            parameter.grad = None
        self._divisor = divisor = StepDivisor()
        divisor.set_total(total, self.mesh.num_replicas)
        self._or_drop(self._end_round)
        self._reset()
        self.num_steps += divisor.error is None
        self._warn()

    def _or_drop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call. If it raises, drops the round and tells the other processes."""
        try:
            call(*arguments)
        except BaseException as error:
            self._drop_round(f"failed: {error!r}")
            raise

    def begins_again(self) -> bool:
        """Ends an interrupted round; returns whether other processes wait in this round."""
        self._clean_up()
        return self._is_repeated

    def _clean_up(self) -> None:
        """Drops an interrupted round; raises if the mesh cannot be used."""
        mesh_state = self.mesh.mesh_state
        mesh_state.check_process()
        self._drop_if_interrupted()
        mesh_state.check_usable(self.mesh.devices[0])

    def _drop_if_interrupted(self) -> None:
        errors = [replica.error for replica in self._replicas if replica.gone]
        if not errors and not self._is_interrupted:
            return
        why = f"was interrupted{''.join(errors[:1])}"
        if self._group.size > 1 and self.mesh.mesh_state.reason is None:
            self._or_drop(self._settle, why)
        for replica in self._replicas:
            replica.forget_used()
        self._forget_sums()
        self._reset()

    def _settle(self, why: str) -> None:
        """Ends an interrupted round together with the other processes; fails if they cannot."""
        for bucket in self._buckets:
            bucket.attach(False)  # the gradients may be those of the next step already
        launched = len(self._tasks)
        try:
            most = self._group.rounds.drop(self._number, self._round, launched)
        except CollectiveError as error:
            self._drop_round(f"{why}: {error}")
            return
        self._is_repeated = most is None
        if most is None:  # this process begins the round again
            return
        # All have failed. Reductions that others have started wait for this process. They write
        # into the flat buffers, but must not write into gradients of the next step.
        for bucket in self._buckets[launched:most]:
            for replica in self._replicas:
                self._note_stream(bucket, replica)
            self._launch(bucket, attaches=False)
        self._wait()
        for bucket in self._buckets[:most]:
            bucket.flat._fill_zero()
        self._num_zeroed = most
        self._round += 1

    def _check_kept(self, replica: Replica, part: BucketPart, position: int) -> None:
        """Raises if ``_settle`` has zeroed the gradient that has just come."""
        if part in replica.parts[: self._num_zeroed]:
            index = part.indices[position]
            address = replica.parameters[index].grad.data_ptr()
            block = part.bucket.blocks[replica.index]
            if block.address <= address < block.address + block.nbytes:
                raise RuntimeError(
                    f"{self._names[index]} got a gradient while reductions of a step that has "
                    "failed still wrote into it: call zero_grad() of the DataParallel after such a "
                    "step"
                )

    def _finish(self) -> None:
        """Reduces the remaining buckets, also without all of their gradients, and waits for all."""
        for number in range(len(self._tasks), len(self._buckets)):
            for replica in self._replicas:
                self._collect(replica.parts[number], replica)
            self._launch(self._buckets[number], attaches=bool(self._done))
        self._wait()

    def _wait(self) -> None:
        """Waits for the divisor, and for all reductions that have started."""
        for task in (*self._added, *self._tasks):
            task.wait()
        for task in self._tasks[-1:]:  # all tasks use the same streams
            task.join()

    def _reduce_sparse(self, divisor: StepDivisor) -> None:
        """Averages the sparse gradients; a process without one sends no rows."""
        names = [self._names[index] for index in self.sparse]
        parameters = [self._sparse_parameters(replica) for replica in self._replicas]
        name = f"sparse gradients ({listed(names)})"
        operands = (names, parameters, self.mesh, self.cross_device_ops, divisor.total)
        self._run(partial(run_for, name, average_sparse, *operands))

    def _run(self, call: Callable[[], None]) -> None:
        """Runs a call by the worker, on streams of all replicas, and waits for it."""
        streams = [
            torch.cuda.current_stream(replica.device)
            for replica in self._replicas
            if replica.device.type == "cuda"
        ]
        task = self._worker.submit(call, streams)
        task.wait()
        task.join()

    def _sparse_parameters(self, *replicas: Replica) -> list[Any]:
        return [replica.parameters[index] for replica in replicas for index in self.sparse]

    def _launch(self, bucket: Bucket, *, attaches: bool) -> None:
        divisor = self._find_divisor()
        bucket.attach(attaches)
        reduce = partial(run_for, bucket.name, bucket.reduce, divisor)
        self._tasks.append(self._worker.submit(reduce, bucket.streams.values()))

    def _collect(self, part: BucketPart, replica: Replica) -> None:
        """Moves gradients to the flat buffer; on a GPU, notes the stream that computed them."""
        bucket = part.bucket
        if 0 in part.used:
            part.find_unset(replica.parameters)
        run_for(bucket.name, attach_again, bucket.blocks[replica.index : replica.index + 1])
        self._note_stream(bucket, replica)

    def _note_stream(self, bucket: Bucket, replica: Replica) -> None:
        if replica.device.type == "cuda":
            bucket.streams[replica.index] = torch.cuda.current_stream(replica.device)

    def _drop_round(self, why: str) -> None:
        """Drops a round. A mesh over several processes fails, because their rounds differ."""
        mesh_state, group = self.mesh.mesh_state, self._group
        if mesh_state.reason is None:
            mesh_state.fail_all(f"a backward of process {group.rank} of {group.size} {why}")
        for replica in self._replicas:
            replica.drop()
        self._forget_sums()
        self._reset()

    def _reset(self) -> None:
        """Prepares for the next round."""
        self._tasks, self._done = [], []
        self._added, self._divisor = [], None
        for replica in self._replicas:
            replica.runs, replica.ready = False, []
            replica.wait()
        for bucket in self._buckets:
            bucket.num_ready = 0
        # Last, so that the next backward cleans up after an interrupt of this function.
        for replica in self._replicas:
            replica.finish()
        for replica in self._replicas:
            replica.gone.clear()
        self._is_interrupted = False

    # -- after the first backward -----------------------------------------------------------------

    def _make_buckets(self, divisor: StepDivisor) -> None:
        """Makes the buckets, moves the gradients there, and reduces them for the first time."""
        rows = [replica.parameters for replica in self._replicas]
        # Parameters without a gradient come last, in reversed order, because the gradients of the
        # first layers become ready last.
        last = reversed(range(len(self._names)))
        order = list(dict.fromkeys([*self._replicas[0].ready, *last]))
        order = [index for index in order if index not in self.sparse]
        if self.mesh.num_processes > 1:  # all use the order of process 0
            first = self.cross_device_ops.broadcast(torch.tensor(order), self.mesh[0])
            order = first.primary.tolist()
        plan = plan_buckets(rows[0], order, self._bucket_bytes)
        parts = [[BucketPart(replica, indices) for indices in plan] for replica in self._replicas]
        for row, of_replica in zip(rows, parts, strict=True):
            for part in of_replica:
                part.find_unset(row)  # before the gradients become views
        flags = []
        if self.mesh.num_processes > 1:
            flags = [make_flags(*pair) for pair in zip(rows, parts, strict=True)]
        buckets: dict[int, Bucket] = {}
        nbytes = [sum([rows[0][index].nbytes for index in indices]) for indices in plan]
        # The largest bucket first, because the others reuse its temporary memory.
        for number in sorted(range(len(plan)), key=nbytes.__getitem__, reverse=True):
            names = [self._names[index] for index in plan[number]]
            inside = [[row[index] for index in plan[number]] for row in rows]
            name = f"bucket {number} ({listed(names)})"
            if flags and number == len(plan) - 1:
                names.append("flags of used parameters")
                for row, flag in zip(inside, flags, strict=True):
                    row.append(flag)
            buckets[number] = run_for(name, self._bucket, name, names, inside, len(plan[number]))
            run_for(name, buckets[number].reduce, divisor)
        self._use_buckets([buckets[number] for number in range(len(plan))], parts, flags)

    def _use_buckets(
        self, buckets: list[Bucket], parts: Sequence[list[BucketPart]], flags: Sequence[Any]
    ) -> None:
        """Replaces the hooks of the first round by those of these buckets."""
        handles: list[Any] = []
        first: list[Any] = []
        for replica, of_replica in zip(self._replicas, parts, strict=True):
            parameters = replica.parameters
            for part, bucket in zip(of_replica, buckets, strict=True):
                part.bucket = bucket
                for position, index in enumerate(part.indices):
                    # Without effect in this round.
                    hook = bucket_hook(self, replica, part, position)
                    handles.append(parameters[index].register_post_accumulate_grad_hook(hook))
        # The old hooks are removed last, so that an interrupt leaves hooks that can begin a round.
        self._buckets = buckets
        for replica, of_replica in zip(self._replicas, parts, strict=True):
            replica.parts = of_replica
        for replica, flag in zip(self._replicas, flags, strict=False):
            replica.flags = flag.grad
            buckets[-1].flagged = self._replicas
        for number, handle in enumerate(self._handles):
            (handles if number % len(self._names) in self.sparse else first).append(handle)
        self._handles = handles
        for handle in first:
            handle.remove()

    def _bucket(
        self,
        name: str,
        names: Sequence[str],
        parameters: Sequence[Sequence[Any]],
        num_gradients: int,
    ) -> Bucket:
        """Makes a bucket of existing gradients, ``[replica][parameter]``, and flags after them."""
        shapes = {key: tuple(each.shape) for key, each in zip(names, parameters[0], strict=True)}
        dtype = str(parameters[0][0].dtype).removeprefix("torch.")
        flat = self.mesh.flat_buffer(shapes, dtype)
        flat.attach(parameters)
        return Bucket(name, flat, self.cross_device_ops, num_gradients)


def reducer_of(parameter: Any) -> Reducer | None:
    """Returns the reducer whose hook a parameter has, or None."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    found = (getattr(hook, "reducer", None) for hook in hooks)
    return next((each for each in found if isinstance(each, Reducer)), None)
