"""Random programs of operations, run by a mesh at once and by another in a random order.

An operation is a tuple: its name, and its arguments. A view is (slot, first element, size). A slot
holds one array; ``renew`` drops it and makes another one. Any part of a program is a program, so
one that fails is made shorter before it is printed.

Operations do not commute: most compute ``x = 3 * x + y`` modulo 2**32.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np

import gradreduce as gr
from gradreduce.comm.exchange import exchange
from gradreduce.comm.process_group import ProcessGroup
from gradreduce.device import (
    Buffer,
    Capture,
    CommandList,
    Device,
    Kernel,
    Mesh,
    RepeatedWork,
)
from gradreduce.device.order import uses
from gradreduce.device.processes import Message

SIZE = 24  # elements of a slot
DTYPE = np.dtype(np.uint32)
NUM_OPERATIONS = 48
MOST_RUNS = 600  # to make a failing program shorter
QUEUES = ("compute", "transfer")

View = tuple[int, int, int]
Operation = tuple


def _mix(rows: Sequence[Sequence[np.ndarray]], num_written: int) -> None:
    for row in rows:
        for out in row[:num_written]:
            out *= 3
            for term in row[num_written:]:
                out += term


MIX = Kernel("mix", "none", _mix, (("num_written", "int64"),), (), writes="num_written")


@dataclass(frozen=True)
class Program:
    """A program."""

    seed: int  # the seed that made it
    placement: tuple[int, ...]  # the physical device of each logical one
    homes: tuple[int, ...]  # the device of each slot
    max_ranges: int  # how many ranges of a block are tracked separately
    # In each phase the operations of each thread, which begins when all threads have finished the
    # phase before. Threads of a phase write nothing that another one uses.
    phases: tuple[tuple[tuple[Operation, ...], ...], ...]

    def __str__(self) -> str:
        lines = [f"program {self.seed} on physical devices {self.placement}; slots on devices "
                 f"{self.homes}; at most {self.max_ranges} ranges"]  # fmt: skip
        for number, phase in enumerate(self.phases):
            for thread, operations in enumerate(phase):
                lines += [f"  phase {number}, thread {thread}: {each}" for each in operations]
        return "\n".join(lines)

    def without(self, phase: int, thread: int, at: int) -> Program:
        phases = [list(threads) for threads in self.phases]
        operations = phases[phase][thread]
        phases[phase][thread] = operations[:at] + operations[at + 1 :]
        return replace(self, phases=tuple(map(tuple, phases)))

    def places(self) -> Iterator[tuple[int, int, int]]:
        """The places of all operations; those of a thread from the last to the first."""
        for phase, threads in enumerate(self.phases):
            for thread, operations in enumerate(threads):
                yield from ((phase, thread, at) for at in reversed(range(len(operations))))


class _Writer:
    def __init__(self, seed: int) -> None:
        self._random = pick = random.Random(seed)
        num_physical = pick.choice((1, 2, 2, 3))
        num_extra = pick.choice((0, 0, 1, pick.randint(2, 6 - num_physical)))
        extra = [pick.randrange(num_physical) for _ in range(num_extra)]
        self._placement = (*range(num_physical), *extra)
        self._homes = tuple(
            pick.randrange(len(self._placement)) for _ in range(pick.choice((3, 4, 6, 8)))
        )
        self._num_threads = pick.choice((1, 1, 2))
        self._steps: list[tuple[int, set[int], set[int]]] = []  # number, slots written, slots read
        # Some programs use one queue of each device only, or hardly any other slots than two.
        self._queues = pick.choice((QUEUES, QUEUES, QUEUES, ("compute",)))
        self._few = self._distinct(range(len(self._homes)), 2)
        self._prefers_few = pick.choice((0.0, 0.7))
        self._whole = pick.choice((0.8, 0.3, 0.1))  # how often an operation uses a whole slot
        max_ranges = pick.choice((2, 4, uses.MAX_RANGES))
        self.program = Program(
            seed, self._placement, self._homes, max_ranges, tuple(self._phases())
        )

    def _phases(self) -> Iterator[tuple[tuple[Operation, ...], ...]]:
        pick, num_phases = self._random, self._random.randint(2, 3)
        for _ in range(num_phases if self._num_threads > 1 else 1):
            roles = [pick.randrange(3) for _ in self._homes]
            threads = []
            for thread in range(self._num_threads):
                self._mine = [slot for slot, role in enumerate(roles) if role == thread]
                self._ours = [slot for slot, role in enumerate(roles) if role in (thread, 2)]
                if self._num_threads == 1:
                    self._mine = self._ours = list(range(len(self._homes)))
                count = NUM_OPERATIONS // (num_phases if self._num_threads > 1 else 1)
                made = [self._operation() for _ in range(count)]
                threads.append(tuple(each for each in made if each))
            yield tuple(threads)

    def _device(self) -> int:
        return self._random.randrange(len(self._placement))

    def _queue(self) -> str:
        return self._random.choice(self._queues)

    def _distinct(self, slots: Sequence[int], count: int) -> list[int]:
        return self._random.sample(list(slots), min(count, len(slots)))

    def _slot(self, *, written: bool = False) -> int:
        slots = self._mine if written else self._ours
        few = [slot for slot in self._few if slot in slots]
        return self._random.choice(
            few if few and self._random.random() < self._prefers_few else slots
        )

    def _view(self, size: int, *, written: bool = False, slot: int | None = None) -> View:
        slot = self._slot(written=written) if slot is None else slot
        return slot, self._random.randint(0, SIZE - size), size

    def _size(self) -> int:
        pick = self._random
        return SIZE if pick.random() < self._whole else pick.choice((1, 4, pick.randint(0, SIZE)))

    def _operation(self, *, recorded: str = "") -> Operation | None:
        if not self._mine:
            return ("download", self._device(), self._view(SIZE)) if self._ours else None
        names = {"launch": 29, "copy": 16, "fill": 6, "renew": 8, "collective": 5, "exchange": 1}
        if recorded == "capture":
            del names["exchange"]
        if not recorded:
            names |= {"upload": 8, "download": 1, "host": 1, "record": 4, "replay": 12, "forget": 1}
        (name,) = self._random.choices(list(names), list(names.values()))
        return getattr(self, f"_{name}")(**({"recorded": recorded} if name == "renew" else {}))

    def _launch(self) -> Operation:
        pick = self._random
        num_written, num_read = pick.choice((1, 1, 1, 2)), pick.choice((0, 1, 1, 2))
        rows = []
        for _ in range(pick.choice((1, 1, 1, 3))):
            size = self._size()
            written = [self._view(size, written=True) for _ in range(num_written)]
            rows.append((*written, *[self._view(size) for _ in range(num_read)]))
        at_home = pick.random() < 0.4
        device = self._homes[rows[0][0][0]] if at_home else self._device()
        queue = "compute" if at_home else self._queue()
        return ("launch", device, queue, num_written, tuple(rows))

    def _copy(self) -> Operation:
        size = self._size()
        at = self._random.choice(("source", "target"))
        return ("copy", at, self._queue(), self._view(size, written=True), self._view(size))

    def _fill(self) -> Operation:
        return ("fill", self._view(self._size(), written=True))

    def _upload(self) -> Operation:
        view = self._view(self._size(), written=True)
        return ("upload", self._queue(), view, self._random.randrange(1000))

    def _download(self) -> Operation:
        return ("download", self._device(), self._view(self._size()))

    def _renew(self, recorded: str = "") -> Operation:
        hows = ("zeros", "copy") if recorded else ("zeros", "copy", "upload", "adopt")
        return (
            "renew", self._slot(written=True), self._random.choice(hows), self._queue(),
            self._slot(),
        )  # fmt: skip

    def _apart(self, slots: Sequence[int]) -> list[int]:
        """At most one of the slots on each physical device."""
        found: dict[int, int] = {}
        for slot in self._distinct(slots, len(slots)):
            found.setdefault(self._placement[self._homes[slot]], slot)
        return self._distinct(list(found.values()), self._random.randint(1, 3))

    def _collective(self) -> Operation:
        pick = self._random
        slots = self._apart(self._mine)
        name = pick.choice(("all_reduce", "reduce", "broadcast", "all_gather"))
        size = pick.randint(1, SIZE // len(slots) if name == "all_gather" else SIZE)
        inputs = tuple(self._view(size, slot=slot) for slot in slots)
        outputs = inputs
        if name == "all_gather":
            outputs = tuple(self._view(size * len(slots), slot=slot) for slot in slots)
        return ("collective", name, self._queue(), inputs, outputs, pick.randrange(len(slots)))

    def _exchange(self) -> Operation:
        device = self._homes[self._slot(written=True)]
        ours = [slot for slot in self._ours if self._homes[slot] == device]
        mine = [slot for slot in self._mine if self._homes[slot] == device]
        sizes = [self._size() for _ in range(self._random.randint(1, 2))]
        sends = tuple(self._view(size, slot=self._random.choice(ours)) for size in sizes)
        receives = tuple(self._view(size, slot=self._random.choice(mine)) for size in sizes)
        return ("exchange", device, self._queue(), sends, receives)

    def _host(self) -> Operation:
        return ("host", self._slot(written=True))

    def _record(self) -> Operation:
        pick = self._random
        kind, number = pick.choice(("prepare", "capture")), len(self._steps)
        made = [self._operation(recorded=kind) for _ in range(pick.randint(2, 9))]
        self._steps.append((number, set(self._mine), set(self._ours)))
        return ("record", number, kind, tuple(each for each in made if each))

    def _able(self) -> list[int]:
        """The recorded steps that this thread may use in this phase."""
        return [
            number
            for number, written, read in self._steps
            if written <= set(self._mine) and read <= set(self._ours)
        ]

    def _replay(self) -> Operation:
        able = self._able()
        return ("replay", self._random.choice(able)) if able else self._record()

    def _forget(self) -> Operation:
        able = self._able()
        return ("forget", self._random.choice(able)) if able else self._record()


def random_program(seed: int) -> Program:
    return _Writer(seed).program


def _first(slot: int) -> np.ndarray:
    return np.arange(SIZE, dtype=DTYPE) * 7 + 1000 * slot


def _host_values(size: int, number: int) -> np.ndarray:
    return np.arange(size, dtype=DTYPE) * (2 * number + 1) + number


def _move(sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
    for target, source in zip(receives, [source.copy() for source in sends], strict=True):
        target[...] = source


class _Loop(ProcessGroup):
    """The other process sends back what it receives."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        _move([array for _, array in sends], [array for _, array in receives])

    def post(self, key: str, text: str) -> None:
        pass

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        return None


class _Step:
    """Operations that were recorded, and can be submitted again."""

    def __init__(self, mesh: Mesh, kind: str, call: Callable[[], object]) -> None:
        self._state = mesh.mesh_state
        commands = CommandList()
        with self._state.recording_commands(commands):
            call()
            self._work = RepeatedWork(mesh.devices, commands)
        self._replay = partial(commands.replay, self._state.log)
        if kind == "capture":
            self._replay = Capture(mesh.devices, commands).submit

    def __call__(self) -> None:
        with self._state.launch_lock:
            self._work.run(self._replay)


class OnMesh:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self._mesh, self._state = mesh, mesh.mesh_state
        self._buffers = [mesh[home].upload(_first(slot)) for slot, home in enumerate(program.homes)]
        self._steps: dict[int, _Step] = {}

    def run(self, operations: Sequence[Operation]) -> list[np.ndarray]:
        """Runs operations; returns what they have downloaded."""
        return [
            found
            for found in [getattr(self, each[0])(*each[1:]) for each in operations]
            if found is not None
        ]

    def last(self) -> list[np.ndarray]:
        return [buffer.numpy() for buffer in self._buffers]

    def _view(self, view: View) -> Buffer:
        slot, start, size = view
        return self._buffers[slot].view(start, (size,))

    def _device(self, index: int) -> Device:
        return self._mesh.devices[index]

    def launch(self, device, queue, num_written, rows) -> None:
        buffers = [list(map(self._view, row)) for row in rows]
        self._device(device).launch(MIX, (), buffers, (num_written,), queue=queue)

    def copy(self, at, queue, target, source) -> None:
        dst, src = self._view(target), self._view(source)
        (src if at == "source" else dst).device.copy(dst, src, queue=queue)

    def fill(self, view) -> None:
        buffer = self._view(view)
        buffer.device.fill_zero(buffer)

    def upload(self, queue, view, number) -> None:
        buffer = self._view(view)
        buffer.device.upload(_host_values(view[2], number), out=buffer, queue=queue)

    def download(self, device, view) -> np.ndarray:
        return self._device(device).download(self._view(view))

    def renew(self, slot, how, queue, source) -> None:
        home, kept = self._buffers[slot].device, self._buffers[source]
        if how != "copy":
            del kept
        self._buffers[slot] = None  # so that the new one may get the same memory
        if how == "zeros":
            self._buffers[slot] = home.zeros((SIZE,), DTYPE)
        elif how == "adopt":
            self._buffers[slot] = home.adopt(_first(slot))
        elif how == "upload":
            self._buffers[slot] = home.upload(_first(slot), queue=queue)
        else:
            self._buffers[slot] = home.empty((SIZE,), DTYPE)
            home.copy(self._buffers[slot], kept, queue=queue)

    def collective(self, name, queue, inputs, outputs, root) -> None:
        ins, outs = list(map(self._view, inputs)), list(map(self._view, outputs))
        collective = self._mesh.collective
        with self._state.launch_lock:
            if name == "all_reduce":
                collective.all_reduce(ins, queue=queue)
            elif name == "reduce":
                collective.reduce(ins[root], ins, root, queue=queue)
            elif name == "broadcast":
                collective.broadcast(ins, root, queue=queue)
            else:
                collective.all_gather(outs, ins, queue=queue)

    def exchange(self, device, queue, sends, receives) -> None:
        ins, outs = ([(1, self._view(each)) for each in ends] for ends in (sends, receives))
        exchange(self._device(device), ins, outs, queue)

    def host(self, slot) -> None:
        buffer = self._buffers[slot]
        array = buffer.device.release(buffer)
        array *= 5

    def record(self, number, kind, operations) -> None:
        self._steps[number] = _Step(self._mesh, kind, partial(self.run, operations))

    def replay(self, number) -> None:
        if number in self._steps:
            self._steps[number]()

    def forget(self, number) -> None:
        self._steps.pop(number, None)


def _together(found: OnMesh, phase: Sequence[Sequence[Operation]]) -> list[list[np.ndarray]]:
    """Runs a phase in its threads, which switch often."""
    if len(phase) == 1:
        return [found.run(phase[0])]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(len(phase)) as pool:
            futures = [pool.submit(found.run, operations) for operations in phase]
            return [future.result(timeout=60) for future in futures]
    finally:
        sys.setswitchinterval(before)


def _run(program: Program, schedule: int | None) -> list[list[np.ndarray]]:
    """What each thread has downloaded, and all slots at the end.

    Without a schedule, a mesh runs each operation when it is submitted, in this thread alone.
    """
    with (
        patch.object(uses, "MAX_RANGES", program.max_ranges),
        gr.open_mesh(program.placement, backend="sim", schedule_seed=schedule) as mesh,
    ):
        alone, mesh.mesh_state.processes = mesh.mesh_state.processes, _Loop(0, 2, 60.0)
        found = OnMesh(program, mesh)
        seen: list[list[np.ndarray]] = [[], []]
        for phase in program.phases:
            together = map(found.run, phase) if schedule is None else _together(found, phase)
            for thread, downloaded in enumerate(together):
                seen[thread] += downloaded
        last = found.last()
        mesh.mesh_state.processes = alone
    return [*seen, last]


def difference(program: Program, schedule: int, wanted: list[list[np.ndarray]]) -> str:
    """Runs a program under a schedule; what is wrong, or nothing."""
    lists = zip(_run(program, schedule), wanted, strict=True)
    for place, (ours, theirs) in zip(("thread 0", "thread 1", "slots"), lists, strict=True):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not np.array_equal(one, other):
                return f"{place}, {number}: {one}, expected {other}"
    return ""


def check(program: Program, schedules: Sequence[int]) -> None:
    """Raises ``AssertionError`` with a short program if one schedule gives other values."""
    wanted = _run(program, None)
    for schedule in schedules:
        wrong = difference(program, schedule, wanted)
        if wrong:
            short, wrong = _shortened(program, [schedule, *schedules], wrong)
            raise AssertionError(f"schedule_seed={schedule}: {wrong}\n{short}")


def _shortened(program: Program, schedules: Sequence[int], wrong: str) -> tuple[Program, str]:
    """Leaves out operations as long as a schedule gives other values."""
    num_runs, changed = 0, True
    while changed:
        changed = False
        for place in list(program.places()):
            shorter = program.without(*place)
            wanted = _run(shorter, None)
            for schedule in schedules:
                num_runs += 1
                if num_runs > MOST_RUNS:
                    return program, wrong
                found = difference(shorter, schedule, wanted)
                if found:
                    program, wrong, changed = shorter, f"{schedule=}: {found}", True
                    break
    return program, wrong
