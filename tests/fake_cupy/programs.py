"""Random programs of public calls of devices, with all waits that the contract requires.

For each buffer a program keeps the expected content as a NumPy array. A fault in such a program is
a fault of the backend, or of the machine.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import numpy as np
from support.captures import captured

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    Mesh,
    WrittenSpans,
    fork_streams,
    join_streams,
    launch_table,
)
from gradreduce.reduce.algorithms import ALGORITHMS

from .plugin import fresh

__all__ = ["Program", "run"]

PLACEMENTS = ([0, 0], [0, 0, 1, 1], [0, 1, 1, 2, 0], [0, 1, 2], [0])
SIZES = (5, 256, 1003)
FLOAT = np.dtype("float32")
MANY_ROWS = 120  # more than an inline table holds
Users = set[tuple[Device, str]]


class Value:
    """A buffer, its expected values, and the queues that its next user must wait for."""

    def __init__(self, buffer: Buffer, holds: np.ndarray) -> None:
        self.buffer = buffer
        self.holds = holds.copy()
        self.users: Users = set()


class Program:
    """One random program on one mesh."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh = mesh
        self.random = random.Random(seed)
        self.values: list[Value] = []
        self.checked = 0
        self.steps: list[Callable[[], None]] = [
            self.make, self.make, self.make_zeros, self.add, self.add, self.add, self.copy,
            self.copy, self.copy_and_forget, self.overwrite, self.forget, self.forget, self.look,
            self.foreign, self.release, self.collective, self.reduce, self.many, self.quiet,
            self.capture, self.lead,
        ]  # fmt: skip

    def run(self, num_steps: int) -> None:
        """Runs a number of random steps, checks all values, and leaves some work in the queues."""
        for _ in range(num_steps):
            self.random.choice(self.steps)()
            if len(self.values) > 12:
                self.forget()
        self.random.shuffle(self.values)
        for value in self.values:
            self.check(value)
        for step in (self.make, self.foreign, self.copy_and_forget, self.add):
            step()
        self.values.clear()

    # -- what the contract leaves to the caller ---------------------------------------------------

    def fence(self, device: Device, queue: str, *values: Value, copying: bool = False) -> None:
        """``queue`` waits for all queues that used the values; copies wait for compute anyway."""
        users = set().union(*(value.users for value in values))
        if not copying:
            users |= {(value.buffer.device, "compute") for value in values}
        for other, name in sorted(users, key=lambda user: (user[0].index, user[1])):
            if (other, name) != (device, queue):
                device.queue_wait(other.queue_mark(name), queue=queue)

    def used(self, device: Device, queue: str, *values: Value) -> None:
        for value in values:
            if device is not value.buffer.device or queue != "compute":
                value.users.add((device, queue))

    def home(self, *values: Value) -> None:
        """Orders values with the compute queues of their own devices."""
        for value in values:
            self.fence(value.buffer.device, "compute", value)
            value.users.clear()

    def reaches(self, device: Device, buffer: Buffer) -> bool:
        home = buffer.device.physical
        peers = buffer.block.owned and self.mesh.mesh_state.peers(device.physical, home)
        return device.physical == home or peers

    # -- choices ----------------------------------------------------------------------------------

    def device(self) -> Device:
        return self.random.choice(self.mesh.devices)

    def queue(self) -> str:
        return self.random.choice(("compute", "compute", "transfer"))

    def data(self, size: int) -> np.ndarray:
        return np.array([self.random.randrange(8) for _ in range(size)], FLOAT)

    def like(self, size: int | None = None) -> Value | None:
        found = [value for value in self.values if size in (None, value.holds.size)]
        return self.random.choice(found) if found else None

    # -- steps ------------------------------------------------------------------------------------

    def make(self) -> None:
        device, queue, holds = self.device(), self.queue(), self.data(self.random.choice(SIZES))
        value = Value(device.upload(holds, queue=queue), holds)
        self.used(device, queue, value)
        self.values.append(value)

    def make_zeros(self) -> None:
        holds = np.zeros(self.random.choice(SIZES), FLOAT)
        self.values.append(Value(self.device().zeros(holds.shape, FLOAT), holds))

    def add(self) -> None:
        """A sum into new memory, on any device of the mesh and on either queue."""
        first = self.like()
        if first is None:
            return
        second = self.like(first.holds.size)
        device, queue = self.device(), self.queue()
        if not all(self.reaches(device, value.buffer) for value in (first, second)):
            return
        out = Value(device.empty(first.holds.shape, FLOAT), first.holds + second.holds)
        self.fence(device, queue, out, first, second)
        ops.add_n([out.buffer], [[first.buffer, second.buffer]], device=device, queue=queue)
        self.used(device, queue, out, first, second)
        out.holds %= 1024
        if (out.holds != first.holds + second.holds).any():
            return  # too large to stay exact for long; dropped while the launch may be queued
        self.values.append(out)

    def lead(self) -> None:
        """A sum by one device for all that share its GPU, into memory of each of them."""
        first = self.like()
        if first is None or first.users:
            return
        home = first.buffer.device
        near = [device for device in self.mesh.devices if device.physical == home.physical]
        self.random.shuffle(near)
        leader = self.random.choice(near)
        if self.random.random() < 0.3:
            fork_streams(self.random.choice(near), near)
        outs = [Value(device.empty(first.holds.shape, FLOAT), first.holds) for device in near]
        join_streams(leader, near)
        ops.all_sum([[out.buffer for out in outs]], [[first.buffer]], device=leader)
        fork_streams(leader, near)
        self.values += outs[: self.random.randrange(1, len(outs) + 1)]
        del outs
        for device in near:  # memory without another use
            device.empty(first.holds.shape, FLOAT)

    def copy(self) -> Value | None:
        source = self.like()
        if source is None:
            return None
        target = Value(self.device().empty(source.holds.shape, FLOAT), source.holds)
        runner = self.random.choice((source.buffer.device, target.buffer.device))
        queue = self.queue()
        self.fence(runner, queue, source, target, copying=True)
        runner.copy(target.buffer, source.buffer, queue=queue)
        self.used(runner, queue, target)  # the next *writer* of the source waits by itself
        self.values.append(target)
        return source

    def copy_and_forget(self) -> None:
        source = self.copy()
        if source is not None:
            self.values.remove(source)

    def overwrite(self) -> None:
        value = self.like()
        if value is None:
            return
        device, queue = value.buffer.device, self.queue()
        value.holds = self.data(value.holds.size)
        self.fence(device, queue, value, copying=True)
        device.upload(value.holds, out=value.buffer, queue=queue)
        value.users = set()
        self.used(device, queue, value)

    def forget(self) -> None:
        if self.values:
            self.values.pop(self.random.randrange(len(self.values)))

    def look(self) -> None:
        value = self.like()
        if value is not None:
            self.check(value)

    def check(self, value: Value) -> None:
        self.home(value)
        self.checked += 1
        found = value.buffer.numpy()
        assert (found == value.holds).all(), f"{value.buffer} holds {found}, not {value.holds}"

    def foreign(self) -> None:
        """An array of CuPy, which its owner drops at once."""
        import cupy

        device, holds = self.device(), self.data(self.random.choice(SIZES))
        with device.gpu:
            array = cupy.asarray(holds)
        theirs = Value(device.put(array), holds)
        del array
        mine = Value(device.empty(holds.shape, FLOAT), holds)
        queue = self.queue()
        self.fence(device, queue, mine, theirs)
        ops.add_n([mine.buffer], [[theirs.buffer]], device=device, queue=queue)
        self.used(device, queue, mine)
        self.values.append(mine)

    def release(self) -> None:
        """Releases a buffer to CuPy's current stream, which writes it, and adopts it again."""
        value = self.like()
        if value is None or not value.buffer.block.owned:
            return
        self.home(value)
        device = value.buffer.device
        array = device.release(value.buffer, 0)
        with device.gpu:
            array[...] = 3.0
        value.holds = np.full_like(value.holds, 3)
        value.buffer = device.adopt(array, 0)

    def ranks(self, size: int) -> list[Value]:
        """A new value on the first device of each GPU."""
        found = []
        for places in self.mesh.by_physical.values():
            holds = self.data(size)
            found.append(Value(self.mesh.devices[places[0]].upload(holds), holds))
        return found

    def collective(self) -> None:
        ranks = self.ranks(self.random.choice(SIZES))
        buffers = [value.buffer for value in ranks]
        with self.mesh.collective.group():
            if self.random.random() < 0.5:
                self.mesh.collective.all_reduce(buffers)
                total = sum(value.holds for value in ranks)
            else:
                root = self.random.randrange(len(ranks))
                self.mesh.collective.broadcast(buffers, root)
                total = ranks[root].holds
        for value in ranks:
            value.holds = total.copy()
        self.values += ranks

    def reduce(self) -> None:
        """A whole all-reduce of three tensors per device."""
        sizes = [self.random.choice(SIZES) for _ in range(3)]
        rows = [[self.data(size) for size in sizes] for _ in self.mesh.devices]
        grads = [
            [device.upload(holds) for holds in row]
            for device, row in zip(self.mesh.devices, rows, strict=True)
        ]
        algorithm = self.random.choice(list(ALGORITHMS))
        cross = gr.AllReduceCrossDeviceOps(
            algorithm, num_packs=self.random.choice((0, 1, 2)), mesh=self.mesh
        )
        reduced = cross.all_reduce(grads, op=gr.ReduceOp.SUM)
        totals = [sum(row[position] for row in rows) for position in range(len(sizes))]
        new = [
            Value(buffer, total)
            for row in reduced
            for buffer, total in zip(row, totals, strict=True)
        ]
        self.random.shuffle(new)
        self.check(new[0])  # before anything else orders the queues
        self.values += new[:3]

    def many(self) -> None:
        """More rows than an inline table has, twice: the second launch reuses the table."""
        device, queue = self.device(), self.queue()
        out = Value(device.zeros((MANY_ROWS * 4,), FLOAT), np.zeros(MANY_ROWS * 4, FLOAT))
        holds = self.data(MANY_ROWS * 4)
        term = Value(device.upload(holds), holds)
        self.fence(device, queue, out, term)
        for _ in range(2):
            ops.accumulate_n(
                [out.buffer.view(4 * row, (4,)) for row in range(MANY_ROWS)],
                [[term.buffer.view(4 * row, (4,))] for row in range(MANY_ROWS)],
                device=device,
                queue=queue,
            )
        self.used(device, queue, out)
        out.holds = holds * 2
        self.values.append(out)

    def capture(self) -> None:
        """A copy and a sum of it in one graph, called twice with new numbers, then forgotten."""
        near, far, size = self.device(), self.device(), self.random.choice(SIZES)
        devices = [self.device(), near, far]
        physicals = {device.physical for device in devices}
        if not all(self.mesh.mesh_state.peers(a, b) for a in physicals for b in physicals):
            return
        source = Value(far.upload(self.data(size)), self.data(size))
        copied = Value(near.empty((size,), FLOAT), source.holds)
        out = Value(near.empty((size,), FLOAT), source.holds)
        near.prepare(ops.ADD_N, ("float32", "float32", 2))
        queue = self.queue()

        def work() -> None:
            near.copy(copied.buffer, source.buffer, queue=queue)
            near.queue_wait(near.queue_mark(queue))
            ops.add_n([out.buffer], [[copied.buffer, copied.buffer]], device=near)

        step, written = captured(devices, work), WrittenSpans([copied.buffer, out.buffer])
        for _ in range(2):
            source.holds = self.data(size)
            far.upload(source.holds, out=source.buffer)
            written.wait_for_readers(self.mesh.mesh_state)
            step.submit()
            out.holds = source.holds * 2
            self.values.append(Value(self.device().empty((size,), FLOAT), out.holds))
            near.copy(self.values[-1].buffer, out.buffer, queue="transfer")
            self.used(near, "transfer", self.values[-1])
        self.values += [source, out]

    def quiet(self) -> None:
        device = self.device()
        self.random.choice((device.synchronize, device.trim, device.drain))()


def run(seed: int, num_steps: int = 40) -> int:
    """Runs a program on a new machine, both with this seed; returns the number of checked values.

    Every third machine knows no peer access.
    """
    machine = fresh(seed, peers=seed % 3 != 2)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    cached = launch_table.CACHED_WORDS, launch_table.CACHED_TABLES
    # Tables are freed while launches use them.
    launch_table.CACHED_WORDS = launch_table.CACHED_TABLES = 1
    try:
        with gr.open_mesh(placement, backend="cuda") as mesh:
            program = Program(mesh, seed)
            program.run(num_steps)
            checked = program.checked
    finally:
        launch_table.CACHED_WORDS, launch_table.CACHED_TABLES = cached
    del mesh, program
    gc.collect()  # devices and what they still hold
    machine.settle()
    return checked
