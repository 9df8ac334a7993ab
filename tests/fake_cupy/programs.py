"""Random programs of public calls of devices, on both queues and without any wait.

For each buffer a program keeps the expected content as a NumPy array. A fault in such a program is
a fault of the backend, or of the machine.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np
from support.captures import captured

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Buffer, Device, Mesh

from .plugin import fresh

PLACEMENTS = ([0, 0], [0, 0, 1, 1], [0, 1, 1, 2, 0], [0, 1, 2], [0])
SIZES = (5, 256, 1003)
FLOAT = np.dtype("float32")
LIMIT = 1024  # larger values would not stay exact for long


class Value:
    """A buffer and its expected values."""

    def __init__(self, buffer: Buffer, holds: np.ndarray) -> None:
        self.buffer = buffer
        self.holds = holds.copy()


class Edge(NamedTuple):
    """A copy, or a sum on a device that is at neither end of it."""

    to: Value
    of: Value
    device: Device
    queue: str

    @property
    def ends(self) -> tuple[Value, Value]:
        return self.to, self.of

    @property
    def copies(self) -> bool:
        return self.device in [end.buffer.device for end in self.ends]

    def submit(self) -> None:
        to, of = self.to.buffer, self.of.buffer
        if self.copies:
            self.device.copy(to, of, queue=self.queue)
        else:
            ops.add_n([to], [[of, of]], device=self.device, queue=self.queue)

    def follow(self) -> None:
        """Changes the expected values."""
        self.to.holds = self.of.holds * (1 if self.copies else 2)


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
            self.collective, self.quiet, self.capture, self.accumulate, self.accumulate,
            self.copy_into,
        ]  # fmt: skip
        self.between = [self.overwrite, self.copy, self.make, self.look, self.copy_into, self.quiet]

    def run(self, num_steps: int) -> None:
        """Runs a number of random steps, checks all values, and leaves some work in the queues."""
        for _ in range(num_steps):
            self.random.choice(self.steps)()
            if len(self.values) > 12:
                self.forget()
        self.make()
        self.random.shuffle(self.values)
        for value in self.values:
            self.check(value)
        for step in (self.make, self.copy_and_forget, self.add):
            step()
        self.values.clear()

    def reaches(self, device: Device, buffer: Buffer) -> bool:
        home = buffer.device.physical
        return device.physical == home or self.mesh.mesh_state.peers(device.physical, home)

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
        ops.add_n([out.buffer], [[first.buffer, second.buffer]], device=device, queue=queue)
        out.holds %= 1024
        if (out.holds != first.holds + second.holds).any():
            return  # too large to stay exact for long; dropped while the launch may be queued
        self.values.append(out)

    def copy(self) -> Value | None:
        source = self.like()
        if source is None:
            return None
        target = Value(self.device().empty(source.holds.shape, FLOAT), source.holds)
        runner = self.random.choice((source.buffer.device, target.buffer.device))
        queue = self.queue()
        runner.copy(target.buffer, source.buffer, queue=queue)
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
        device.upload(value.holds, out=value.buffer, queue=queue)

    def forget(self) -> None:
        if self.values:
            self.values.pop(self.random.randrange(len(self.values)))

    def look(self) -> None:
        value = self.like()
        if value is not None:
            self.check(value)

    def check(self, value: Value) -> None:
        self.checked += 1
        found = value.buffer.numpy()
        assert (found == value.holds).all(), f"{value.buffer} holds {found}, not {value.holds}"

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

    def accumulate(self) -> None:
        """A sum into a part of memory that is used already."""
        out = self.like()
        if out is None or not out.buffer.block.writable:
            return
        term, device, queue = self.like(out.holds.size), self.device(), self.queue()
        start = self.random.randrange(out.holds.size // 4 + 1) * 4
        stop = self.random.randint(start, out.holds.size)
        total = out.holds[start:stop] + term.holds[start:stop]
        ends = out.buffer, term.buffer
        if total.max(initial=0) >= LIMIT or not all(self.reaches(device, each) for each in ends):
            return
        parts = [each.view(start, (stop - start,)) for each in ends]
        if out is term:  # its kernels allow no overlap
            return
        ops.accumulate_n(parts[:1], [parts[1:]], device=device, queue=queue)
        out.holds[start:stop] = total

    def copy_into(self) -> None:
        """A copy into a part of memory that is used already."""
        target = self.like()
        if target is None:
            return
        source = self.like(target.holds.size)
        if source is target:
            return
        start = self.random.randrange(target.holds.size // 4 + 1) * 4
        stop = self.random.randint(start, target.holds.size)
        runner = self.random.choice((source.buffer.device, target.buffer.device))
        ends = [each.buffer.view(start, (stop - start,)) for each in (target, source)]
        runner.copy(*ends, queue=self.queue())
        target.holds[start:stop] = source.holds[start:stop]

    def edges(self) -> list[Edge]:
        """A few copies and sums between values; none if a device does not reach another one."""
        chosen = [value for value in (self.like() for _ in range(3)) if value is not None]
        devices = [value.buffer.device for value in chosen]
        if not all(self.reaches(a, value.buffer) for a in devices for value in chosen):
            return []
        pairs = [(self.random.choice(chosen), self.random.choice(chosen)) for _ in chosen * 2]
        return [
            Edge(to, of, self.random.choice(devices), self.queue())
            for to, of in pairs
            if to is not of and to.holds.size == of.holds.size
        ]

    def capture(self) -> None:
        """Edges as one graph, submitted twice, then forgotten."""
        edges = self.edges()
        if not edges:
            return
        of_edges = [(each.device, *[end.buffer.device for end in each.ends]) for each in edges]
        devices = list(dict.fromkeys(chain(*of_edges)))
        for device in devices:
            device.compile_kernel(ops.ADD_N, ("float32", "float32", 2))
        step = captured(devices, lambda: [each.submit() for each in edges])
        for each in edges:
            each.follow()
        for _ in range(2):
            for between in self.random.choices(self.between, k=2):
                between()
            step.submit()
            for each in edges:
                each.follow()
        self.values = [value for value in self.values if (value.holds < LIMIT).all()]

    def quiet(self) -> None:
        device = self.device()
        self.random.choice((device.synchronize, device.trim, device.drain))()


def run(seed: int, num_steps: int = 40) -> int:
    """Runs a program on a new machine, both with this seed; returns the number of checked values.

    Every third machine knows no peer access.
    """
    machine = fresh(seed, peers=seed % 3 != 2)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    with gr.open_mesh(placement, backend="cuda") as mesh:
        program = Program(mesh, seed)
        program.run(num_steps)
        checked = program.checked
    del mesh, program
    gc.collect()  # devices and what they still hold
    machine.settle()
    return checked
