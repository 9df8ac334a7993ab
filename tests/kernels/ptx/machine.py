"""Runs a PTX entry for all threads of a launch: each thread is a lane of NumPy arrays.

Lanes that are in the same block run it together. Threads cannot wait for each other, so any order
of lanes is allowed; a byte that one lane writes and another one reads or writes is an error, so
that the order makes no difference. Registers begin with random bits: NVRTC computes with registers
that nothing wrote, but a result that depends on them is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from .instructions import TABLE, TYPES, Array
from .text import Entry, Instruction

SPACES = ("global", "param")
# Bits of an address: its space if it is generic (0 for global), its segment, its place there.
SPACE, SEGMENT, START = 60, 36, 1 << 20
FIRST = 1 << 10  # number of the first segment: below it is space for what no launch may reach
NOBODY, SEVERAL = -1, -2  # in place of a lane
WIDTHS = {1: np.dtype(bool), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


class PtxError(Exception):
    """An instruction that is unknown, or that does what no kernel may do."""


class Memory:
    """Segments of one address space, 64 GiB apart.

    Attributes:
        bytes: of all segments together.
    """

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self._writer = np.empty(0, np.int64)  # of each byte, or NOBODY
        self._reader = np.empty(0, np.int64)
        # Of each segment: its first address, size, first byte, space, and whether it is written.
        self._segments = np.empty((0, 5), np.int64)

    def add(
        self, content: Array, *, space: str = "global", writes: bool = False, start: int = 0
    ) -> int:
        """Adds a segment with this content, and returns its address.

        Args:
            content: bytes.
            space: one of ``SPACES``.
            writes: whether lanes may write it.
            start: the bytes by which the address misses a multiple of 2**20.
        """
        address = (len(self._segments) + FIRST << SEGMENT) + START + start
        made = address, content.size, self.bytes.size, SPACES.index(space), writes
        self._segments = np.append(self._segments, np.array([made], np.int64), axis=0)
        self.bytes = np.append(self.bytes, content)
        self._writer = np.append(self._writer, np.full(content.size, NOBODY))
        self._reader = np.append(self._reader, np.full(content.size, NOBODY))
        return address

    def content(self, address: int) -> Array:
        """The bytes of the segment that starts there."""
        _, size, first, *_ = self._segments[(address >> SEGMENT) - FIRST]
        return self.bytes[first : first + size].copy()

    def load(self, space: str, address: Array, size: int, lanes: Array) -> Array:
        """Returns ``(lanes, size)`` bytes."""
        places, segments = self._places(space, address, size)
        shared = segments[:, 4] != 0
        if shared.any():
            bytes_, lane = places[shared], lanes[shared, None]
            writer, reader = self._writer[bytes_], self._reader[bytes_]
            if ((writer != NOBODY) & (writer != lane)).any():
                raise PtxError("a read of what another thread writes")
            mine = np.where((reader == NOBODY) | (reader == lane), lane, SEVERAL)
            self._reader[bytes_] = mine
            self._reader[bytes_[self._reader[bytes_] != mine]] = SEVERAL
        return self.bytes[places]

    def store(self, space: str, address: Array, values: Array, lanes: Array) -> None:
        """Writes ``(lanes, size)`` bytes."""
        places, segments = self._places(space, address, values.shape[1])
        if not segments[:, 4].all():
            raise PtxError("a write to what is only read")
        writer, reader, lane = self._writer[places], self._reader[places], lanes[:, None]
        self._writer[places] = lane
        if (((writer != NOBODY) & (writer != lane)) | (self._writer[places] != lane)).any():
            raise PtxError("a write to what another thread writes")
        if ((reader != NOBODY) & (reader != lane)).any():
            raise PtxError("a write to what another thread reads")
        self.bytes[places] = values

    def _places(self, space: str, address: Array, size: int) -> tuple[Array, Array]:
        """The places of the bytes in ``bytes``, and the segments of the lanes."""
        address = address.view(np.int64)
        window, address = address >> SPACE, address & (1 << SPACE) - 1
        number = (address >> SEGMENT) - FIRST
        known = (number >= 0) & (number < len(self._segments))
        segments = self._segments[np.where(known, number, 0)]
        wanted = 0 if space else segments[:, 3]  # of a generic address
        offset = address - segments[:, 0]
        inside = (offset >= 0) & (offset + size <= segments[:, 1])
        if not (known & inside & (window == wanted)).all():
            raise PtxError("an access outside of every buffer")
        if space and (segments[:, 3] != SPACES.index(space)).any():
            raise PtxError(f"an access to another space than {space}")
        if (address % size).any():
            raise PtxError("an access that is not aligned")
        return (segments[:, 2] + offset)[:, None] + np.arange(size), segments


class Machine:
    """The lanes of one launch of an entry, with their registers.

    Args:
        entry: the entry.
        memory: with everything that it reads and writes, but for parameters.
        parameters: the bytes of each.
        grid: the number of blocks of threads.
        threads: the number of threads of each of these.
        first_block: the blocks before this one are not run.

    Attributes:
        executed: the places in the text of the instructions that lanes have reached.
        num_steps: how many blocks of instructions have been run.
    """

    def __init__(self, entry: Entry, memory: Memory, parameters: Sequence[Array], grid: int,
                 threads: int, first_block: int = 0) -> None:  # fmt: skip
        self._memory, self._labels = memory, entry.labels
        self.lanes = np.arange((grid - first_block) * threads)
        self._symbols = {
            name: np.full(self.lanes.size, memory.add(content, space="param"), np.uint64)
            for name, content in zip(entry.parameters, parameters, strict=True)
        }
        block, thread = np.divmod(self.lanes.astype(np.uint32), np.uint32(threads))
        self._symbols |= {"%ctaid.x": block + np.uint32(first_block), "%tid.x": thread}
        self._symbols["%nctaid.x"] = np.full_like(block, grid)
        self._symbols["%ntid.x"] = np.full_like(block, threads)
        rng = np.random.default_rng(0)
        self._registers = {
            name: rng.integers(0, 2**bits, self.lanes.size, WIDTHS[bits])
            for name, bits in entry.registers.items()
        }
        self._blocks = [[self._decoded(each) for each in block] for block in entry.blocks]
        self._at = np.zeros(self.lanes.size, np.int64)  # the block that each lane enters next
        self.executed, self.num_steps = set[int](), 0

    def run(self, most: int = 100_000) -> None:
        """Runs all lanes to their end.

        Raises:
            PtxError: the entry does what no kernel may do, or runs more than ``most`` blocks.
        """
        with np.errstate(all="ignore"):
            for self.num_steps in range(most):
                number = int(self._at.min())
                if number == len(self._blocks):
                    return
                lanes = np.flatnonzero(self._at == number)
                self._at[lanes] = number + 1
                for instruction, guard, execute in self._blocks[number]:
                    self._execute(instruction, guard, execute, lanes)
        raise PtxError("it does not end")

    def _execute(self, instruction: Instruction, guard: Callable | None, execute: Callable,
                 lanes: Array) -> None:  # fmt: skip
        try:
            if guard is not None:
                lanes = lanes[guard(lanes) == instruction.guard[1]]
            self.executed.add(instruction.start)
            if lanes.size:
                execute(lanes)
        except (PtxError, ArithmeticError) as error:
            raise PtxError(f"{instruction.text}: {error}") from None

    # -- operands ---------------------------------------------------------------------------------

    def _source(self, text: str, kind: str, *, wider: bool = False) -> Callable[[Array], Array]:
        dtype = TYPES[kind]
        values = self._registers.get(text, self._symbols.get(text))
        if values is None:
            constant = np.array([_constant(text, dtype)], dtype)
            return lambda lanes: constant
        self._check_width(text, values.itemsize, dtype, wider and text in self._registers)

        def read(lanes: Array) -> Array:
            found = values[lanes]
            if values.itemsize > dtype.itemsize:
                found = found.astype(f"u{dtype.itemsize}")
            return found.view(dtype)

        return read

    def _destination(self, text: str, kind: str, *, wider: bool = False) -> Callable:
        """A function that writes lanes of an operand; wider registers are filled by the sign."""
        if text not in self._registers:
            raise PtxError(f"{text} is no register")
        values = self._registers[text]
        self._check_width(text, values.itemsize, TYPES[kind], wider)
        filled = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{values.itemsize}")

        def write(lanes: Array, found: Array) -> None:
            if values.itemsize > found.itemsize:
                found = found.astype(filled)
            values[lanes] = found.view(values.dtype)

        return write

    @staticmethod
    def _check_width(text: str, itemsize: int, dtype: np.dtype, wider: bool) -> None:
        if itemsize < dtype.itemsize or (itemsize > dtype.itemsize and not wider):
            raise PtxError(f"{text} has {8 * itemsize} bits, not {8 * dtype.itemsize}")

    # -- instructions -----------------------------------------------------------------------------

    def _decoded(self, instruction: Instruction) -> tuple[Instruction, Callable | None, Callable]:
        opcode, *modifiers = instruction.name.split(".")
        special = {"ld": self._load, "st": self._store, "cvta": self._cvta, "bra": self._branch,
                   "ret": self._return}  # fmt: skip
        try:
            if opcode == "mov" and any("{" in operand for operand in instruction.operands):
                execute = self._move(instruction.operands, modifiers)
            elif opcode in special:
                execute = special[opcode](instruction.operands, modifiers)
            else:
                execute = self._compute(instruction.operands, instruction.name)
            guard = instruction.guard and self._source(instruction.guard[0], "pred")
        except (PtxError, KeyError, ValueError) as error:
            raise PtxError(
                f"{instruction.text}: unknown, or with other operands: {error}"
            ) from None
        return instruction, guard, execute

    def _compute(self, operands: Sequence[str], name: str) -> Callable:
        result, sources, function = TABLE[name]
        to, *texts = operands
        wider = name.startswith("cvt.")
        write = self._destination(to, result, wider=wider)
        pairs = zip(texts, sources, strict=True)
        reads = [self._source(text, kind, wider=wider) for text, kind in pairs]
        return lambda lanes: write(lanes, np.asarray(function(*(read(lanes) for read in reads))))

    def _move(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        """``mov`` of a register from or to its parts; "_" drops a part."""
        (kind,), (to, of) = modifiers, operands
        parts = _names(to if "{" in to else of)
        part = f"b{8 * TYPES[kind].itemsize // len(parts)}"
        if kind[0] != "b" or part not in TYPES:
            raise ValueError(kind)
        if "{" in to:
            read = self._source(of, kind)
            writes = [(place, self._destination(each, part))
                      for place, each in enumerate(parts) if each != "_"]  # fmt: skip

            def unpack(lanes: Array) -> None:
                found = np.broadcast_to(read(lanes), lanes.shape).astype(TYPES[kind])
                for place, write in writes:
                    write(lanes, found.view(TYPES[part])[place :: len(parts)])

            return unpack
        write, reads = self._destination(to, kind), [self._source(each, part) for each in parts]

        def pack(lanes: Array) -> None:
            found = np.empty((lanes.size, len(reads)), TYPES[part])
            for place, each in enumerate(reads):
                found[:, place] = each(lanes)
            write(lanes, found.view(TYPES[kind])[:, 0])

        return pack

    def _access(self, address: str, modifiers: Sequence[str]) -> tuple[str, str, int, Callable]:
        """The space ("" for any), type and number of a load or store, and its address."""
        *rest, kind = modifiers
        space = rest.pop(0) if rest and rest[0] in SPACES else ""
        count = 4 if rest == ["v4"] else 1
        found = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", address)
        if not found:
            raise ValueError(address)
        base, offset = found.groups()
        read, by = self._source(base, "b64"), np.uint64(int(offset or 0) % 2**64)
        if rest not in ([], ["v4"]) or kind == "pred":
            raise ValueError(rest)
        return space, kind, count, lambda lanes: read(lanes) + by

    def _load(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        target, source = operands
        space, kind, count, where = self._access(source, modifiers)
        writes = [self._destination(each, kind, wider=True) for each in _names(target, count)]

        def load(lanes: Array) -> None:
            size = TYPES[kind].itemsize * count
            found = self._memory.load(space, where(lanes), size, lanes).view(TYPES[kind])
            for place, write in enumerate(writes):
                write(lanes, np.ascontiguousarray(found[:, place]))

        return load

    def _store(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        target, source = operands
        space, kind, count, where = self._access(target, modifiers)
        reads = [self._source(each, kind, wider=True) for each in _names(source, count)]

        def store(lanes: Array) -> None:
            found = np.empty((lanes.size, count), TYPES[kind])
            for place, read in enumerate(reads):
                found[:, place] = read(lanes)
            self._memory.store(space, where(lanes), found.view(np.uint8), lanes)

        return store

    def _cvta(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        """An address of a space as a generic one, or the other way round."""
        *to, space, kind = modifiers
        window = SPACES.index(space) << SPACE
        if to not in ([], ["to"]) or kind != "u64":
            raise ValueError(modifiers)
        target, source = operands
        read, write = self._source(source, kind), self._destination(target, kind)
        by = np.uint64((-window if to else window) % 2**64)
        return lambda lanes: write(lanes, read(lanes) + by)

    def _branch(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        target = self._labels[" ".join(operands)]
        if modifiers not in ([], ["uni"]):
            raise ValueError(modifiers)
        return lambda lanes: self._at.__setitem__(lanes, target)

    def _return(self, operands: Sequence[str], modifiers: Sequence[str]) -> Callable:
        if operands or modifiers:
            raise ValueError(modifiers)
        return lambda lanes: self._at.__setitem__(lanes, len(self._blocks))


def _names(text: str, count: int | None = None) -> list[str]:
    """The registers of an operand: one, or those in braces."""
    names = [name.strip() for name in text.strip("{}").split(",")]
    if count and ((count > 1) != ("{" in text) or len(names) != count):
        raise ValueError(text)
    return names


def _constant(text: str, dtype: np.dtype) -> object:
    """The value of a number: ``7``, ``0x7fU``, ``0f3F800000`` or ``0d3FF0000000000000``."""
    if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", text):
        if (found[1], dtype.itemsize) not in (("f", 4), ("d", 8)) or dtype.kind not in "fu":
            raise ValueError(text)
        return np.array(int(found[2], 16), f"u{dtype.itemsize}").view(dtype)
    if dtype.kind == "f":
        raise ValueError(text)
    value = int(text.removesuffix("U"), 0)
    if dtype.kind == "b":
        return bool(value)
    return np.array(value % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)
