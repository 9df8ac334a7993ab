"""Runs a PTX entry for all threads of a launch, as a program of C++.

The threads, here called lanes, run one after the other. They cannot wait for each other, so any
order is allowed; a byte that one lane writes and another one reads or writes is an error, so that
the order makes no difference. Registers begin with random bits: NVRTC computes with registers that
nothing wrote, but a result that depends on them is wrong.
"""

import ctypes
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .instructions import C_TYPES, FUNCTIONS, TABLE, bits_of
from .text import Entry, Instruction, parsed

SPACES = ("global", "param")
# Bits of an address: its space if it is generic (0 for global), its segment, its place there.
SPACE, SEGMENT, START = 60, 36, 1 << 20
FIRST = 1 << 10  # number of the first segment: below it is space for what no launch may reach
MOST = 10_000_000  # blocks of instructions of a run
REGISTERS = {1: "bool", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}
SPECIAL = {"%ctaid.x": "block", "%tid.x": "thread", "%nctaid.x": "grid", "%ntid.x": "threads"}
# Without optimization, which would take longer than the runs and move work over fesetround.
FLAGS = "-O0 -std=c++17 -shared -fPIC -ffp-contract=off -frounding-math -fwrapv -w".split()

HEADER = f"""
#include <cstdint>
#define memcpy __builtin_memcpy
extern "C" int fesetround(int);
enum {{ TO_NEAREST, TOWARDS_ZERO = {0xC00000 if platform.machine() == "aarch64" else 0xC00} }};
template <typename T> T from(uint64_t bits) {{
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}}
{FUNCTIONS}
struct Segment {{ uint64_t start, size, space, writes; uint8_t* bytes; int32_t *writer, *reader; }};
static Segment* segments;
static uint64_t num_segments, num_steps, most;
static int32_t lane, current;
static uint8_t* executed;
static int32_t mutant;
static const int NOBODY = -1, SEVERAL = -2;

template <typename R, typename T> void write(R& into, T value) {{
    if constexpr (sizeof(R) == sizeof(T)) memcpy(&into, &value, sizeof(T));
    else into = value;  // filled by the sign
}}
template <typename R> uint64_t bits(R value) {{
    uint64_t made = 0;
    memcpy(&made, &value, sizeof(R));
    return made;
}}
static uint64_t random_bits() {{  // SplitMix64
    static uint64_t state = 0;
    uint64_t bits = state += 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
}}
static void step() {{ if (++num_steps > most) throw "it does not end"; }}
static uint8_t* at(uint64_t address, int size, int space, bool writes) {{
    const uint64_t window = address >> {SPACE}, place = address & ((1ull << {SPACE}) - 1);
    const uint64_t number = (place >> {SEGMENT}) - {FIRST};
    if (number >= num_segments) throw "an access outside of every buffer";
    const Segment& segment = segments[number];
    const uint64_t offset = place - segment.start;
    const bool inside = offset <= segment.size && size <= segment.size - offset;
    if (!inside || window != (space < 0 ? segment.space : 0))
        throw "an access outside of every buffer";
    if (space >= 0 && segment.space != space) throw "an access to another space";
    if (place % size) throw "an access that is not aligned";
    if (writes && !segment.writes) throw "a write to what is only read";
    if (!writes && segment.writes == 2) throw "a read of what several threads write";
    for (uint64_t k = offset; segment.writes == 1 && k < offset + size; ++k) {{
        int32_t &writer = segment.writer[k], &reader = segment.reader[k];
        if (writer != NOBODY && writer != lane) throw "an access to what another thread writes";
        if (writes && reader != NOBODY && reader != lane)
            throw "a write to what another thread reads";
        if (writes) writer = lane;
        else reader = reader == NOBODY || reader == lane ? lane : SEVERAL;
    }}
    return segment.bytes + offset;
}}
"""
RUN = """
extern "C" const char* run(Segment* given, uint64_t count, const uint64_t* parameters,
                           uint32_t grid, uint32_t threads, uint32_t first_block, uint64_t limit,
                           uint8_t* reached, int32_t changed, uint64_t* steps, int32_t* place) {
    segments = given, num_segments = count, most = limit, num_steps = 0, executed = reached;
    mutant = changed;
    const char* failure = nullptr;
    try {
        for (lane = 0; lane < (grid - first_block) * threads; ++lane)
            one(parameters, grid, threads, first_block + lane / threads, lane % threads);
    } catch (const char* why) { failure = why; }
    fesetround(TO_NEAREST);
    *steps = num_steps, *place = current;
    return failure;
}
"""


class PtxError(Exception):
    """An instruction that is unknown, or that does what no kernel may do."""


class _Segment(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in (
        "start", "size", "space", "writes", "bytes", "writer", "reader",
    ))  # fmt: skip


class Memory:
    """Segments of one address space, 64 GiB apart."""

    def __init__(self) -> None:
        self._contents: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self.segments: list[_Segment] = []

    def add(
        self, content: np.ndarray, *, space: str = "global", writes: int = 0, start: int = 0
    ) -> int:
        """Adds a segment with this content, and returns its address.

        Args:
            content: bytes.
            space: one of ``SPACES``.
            writes: 1: lanes may write it, each byte one of them; 2: several may, and none reads it.
            start: the bytes by which the address misses a multiple of 2**20.
        """
        address = (len(self.segments) + FIRST << SEGMENT) + START + start
        self._contents.append(content.copy())
        users = np.full((2, content.size), -1, np.int32)  # the lanes that write and read each byte
        self._kept.append(users)
        self.segments.append(_Segment(
            address, content.size, SPACES.index(space), writes, self._contents[-1].ctypes.data,
            users[0].ctypes.data, users[1].ctypes.data,
        ))  # fmt: skip
        return address

    def content(self, address: int) -> np.ndarray:
        """The bytes of the segment that starts there."""
        return self._contents[(address >> SEGMENT) - FIRST]


class Machine:
    """An entry that has been compiled, together with its mutants.

    Args:
        entry: the entry.
        changes: of each mutant, the place of an instruction and the text that is there instead.

    Attributes:
        mutant: the number of the mutant that runs; None: the entry.
        executed: the places in the text of the instructions that lanes of the last run reached.
        num_steps: how many blocks of instructions they have run.

    Raises:
        PtxError: an instruction is unknown.
    """

    def __init__(self, entry: Entry, changes: Sequence[tuple[int, str]] = ()) -> None:
        self._instructions = [*entry.instructions()]
        self.mutant: int | None = None
        self.executed, self.num_steps = set[int](), 0
        with tempfile.TemporaryDirectory() as folder:
            text, library = Path(folder, "text.cpp"), Path(folder, "text.so")
            text.write_text(HEADER + "\n".join(_Translation(entry, changes).lines()) + RUN)
            command = ["g++", *FLAGS, "-o", str(library), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            self._run = ctypes.CDLL(str(library)).run
        self._run.restype = ctypes.c_char_p

    def run(
        self, memory: Memory, parameters: Sequence[np.ndarray], grid: int, threads: int,
        first_block: int = 0, most: int = MOST,
    ) -> None:  # fmt: skip
        """Runs all lanes to their end.

        Args:
            memory: with everything that it reads and writes, but for parameters.
            parameters: the bytes of each.
            grid: the number of blocks of threads.
            threads: the number of threads of each of these.
            first_block: the blocks before this one are not run.
            most: how many blocks of instructions may be run.

        Raises:
            PtxError: the entry does what no kernel may do, or runs too many blocks.
        """
        addresses = [memory.add(content, space="param") for content in parameters]
        segments = (_Segment * len(memory.segments))(*memory.segments)
        reached = np.zeros(len(self._instructions), np.uint8)
        steps, place = ctypes.c_uint64(), ctypes.c_int32()
        failure = self._run(
            segments, ctypes.c_uint64(len(segments)),
            (ctypes.c_uint64 * len(addresses))(*addresses), grid, threads, first_block,
            ctypes.c_uint64(most), ctypes.c_void_p(reached.ctypes.data),
            -1 if self.mutant is None else self.mutant, ctypes.byref(steps), ctypes.byref(place),
        )  # fmt: skip
        self.num_steps = steps.value
        self.executed = {self._instructions[k].start for k in np.flatnonzero(reached)}
        if failure:
            raise PtxError(f"{self._instructions[place.value].text}: {failure.decode()}")


class _Translation:
    """The text of a function of C++ that runs one lane of an entry."""

    def __init__(self, entry: Entry, changes: Sequence[tuple[int, str]]) -> None:
        self._entry = entry
        self._changes: dict[int, list[tuple[int, Entry]]] = {}  # by the place of the instruction
        self._registers = dict(entry.registers)
        for mutant, (start, text) in enumerate(changes):
            changed = parsed("", text if text[:1] in ("", "{") else f"{text};")
            self._changes.setdefault(start, []).append((mutant, changed))
            self._registers |= changed.registers
        self._names = {name: f"r{number}" for number, name in enumerate(self._registers)}
        self._symbols = {name: (64, f"parameters[{number}]")
                         for number, name in enumerate(entry.parameters)}  # fmt: skip
        self._symbols |= {name: (32, text) for name, text in SPECIAL.items()}

    def lines(self) -> Iterator[str]:
        yield "static void one(const uint64_t* parameters, uint32_t grid, uint32_t threads,"
        yield "                uint32_t block, uint32_t thread) {"
        for name, bits in self._registers.items():
            random = "random_bits() & 1" if bits == 1 else "random_bits()"
            yield f"{REGISTERS[bits]} {self._names[name]} = {random};"
        number = 0
        for block, instructions in enumerate(self._entry.blocks):
            yield f"L{block}: step();"
            for each in instructions:
                yield f"current = {number}; executed[{number}] = 1;"
                for mutant, changed in self._changes.get(each.start, ()):
                    texts = map(self._guarded, changed.instructions())
                    yield f"if (mutant == {mutant}) {{ {' '.join(texts)} }} else"
                yield f"{{ {self._guarded(each)} }}"
                number += 1
        yield f"L{len(self._entry.blocks)}: return; }}"

    def _guarded(self, each: Instruction) -> str:
        text = f"{{ {self._text(each)} }}"
        if not each.guard:
            return text
        return f"if ({self._read(each.guard[0], 'pred')} == {int(each.guard[1])}) {text}"

    def _text(self, each: Instruction) -> str:
        opcode, *modifiers = each.name.split(".")
        special = {"ld": self._load, "st": self._store, "cvta": self._cvta, "bra": self._branch,
                   "ret": self._return}  # fmt: skip
        try:
            if opcode == "mov" and any("{" in operand for operand in each.operands):
                return self._move(each.operands, modifiers)
            if opcode in special:
                return special[opcode](each.operands, modifiers)
            return self._compute(each.operands, each.name)
        except (PtxError, KeyError, ValueError) as error:
            raise PtxError(f"{each.text}: unknown, or with other operands: {error}") from None

    # -- operands ---------------------------------------------------------------------------------

    def _read(self, text: str, kind: str, *, wider: bool = False) -> str:
        """An operand as a value of this type."""
        if text in self._names:
            self._check_width(text, self._registers[text], kind, wider)
            value = self._names[text]
        elif text in self._symbols:
            width, value = self._symbols[text]
            self._check_width(text, width, kind, False)
        else:
            value = f"{_constant(text, kind)}ull"
        return f"from<{C_TYPES[kind]}>({value})" if kind[0] == "f" else f"{C_TYPES[kind]}({value})"

    def _write(self, text: str, kind: str, value: str, *, wider: bool = False) -> str:
        if text not in self._names:
            raise PtxError(f"{text} is no register")
        self._check_width(text, self._registers[text], kind, wider)
        if kind[0] == "f":
            return f"write({self._names[text]}, {C_TYPES[kind]}({value}));"
        return f"{self._names[text]} = {C_TYPES[kind]}({value});"  # filled by the sign

    @staticmethod
    def _check_width(text: str, width: int, kind: str, wider: bool) -> None:
        if width < bits_of(kind) or (width > bits_of(kind) and not wider):
            raise PtxError(f"{text} has {width} bits, not {bits_of(kind)}")

    # -- instructions -----------------------------------------------------------------------------

    def _compute(self, operands: Sequence[str], name: str) -> str:
        result, sources, text = TABLE[name]
        to, *texts = operands
        wider = name.startswith("cvt.")
        if len(texts) != len(sources):
            raise ValueError(texts)
        reads = "".join(
            f"{C_TYPES[kind]} {letter} = {self._read(each, kind, wider=wider)}; "
            for letter, each, kind in zip("abcd", texts, sources, strict=False)
        )
        computed = f"{C_TYPES[result]} found = {text};"
        if ".rz." in name:
            computed = f"fesetround(TOWARDS_ZERO); {computed} fesetround(TO_NEAREST);"
        return f"{reads}{computed} {self._write(to, result, 'found', wider=wider)}"

    def _move(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        """``mov`` of a register from or to its parts; "_" drops a part."""
        (kind,), (to, of) = modifiers, operands
        parts = _names(to if "{" in to else of)
        bits = bits_of(kind) // len(parts)
        part = f"b{bits}"
        if kind[0] != "b" or part not in C_TYPES:
            raise ValueError(kind)
        if "{" in to:
            writes = (self._write(each, part, f"whole >> {bits * place}")
                      for place, each in enumerate(parts) if each != "_")  # fmt: skip
            return f"uint64_t whole = {self._read(of, kind)}; {''.join(writes)}"
        reads = (f"uint64_t({self._read(each, part)}) << {bits * place}"
                 for place, each in enumerate(parts))  # fmt: skip
        return self._write(to, kind, " | ".join(reads))

    def _access(self, address: str, modifiers: Sequence[str], writes: bool) -> tuple[str, int, str]:
        """The type and number of a load or store, and the text that finds its bytes."""
        *rest, kind = modifiers
        space = SPACES.index(rest.pop(0)) if rest and rest[0] in SPACES else -1
        count = 4 if rest == ["v4"] else 1
        found = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", address)
        if not found or rest not in ([], ["v4"]) or kind == "pred":
            raise ValueError(address)
        base, offset = self._read(found[1], "b64"), int(found[2] or 0) % 2**64
        size = bits_of(kind) // 8 * count
        text = f"at({base} + {offset}ull, {size}, {space}, {int(writes)})"
        return kind, count, f"uint8_t* place = {text}; {C_TYPES[kind]} values[{count}]; "

    def _load(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        target, source = operands
        kind, count, text = self._access(source, modifiers, False)
        writes = (self._write(each, kind, f"values[{k}]", wider=True)
                  for k, each in enumerate(_names(target, count)))  # fmt: skip
        return f"{text}memcpy(values, place, sizeof(values)); {''.join(writes)}"

    def _store(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        target, source = operands
        kind, count, text = self._access(target, modifiers, True)
        reads = (f"values[{k}] = {self._read(each, kind, wider=True)}; "
                 for k, each in enumerate(_names(source, count)))  # fmt: skip
        return f"{text}{''.join(reads)}memcpy(place, values, sizeof(values));"

    def _cvta(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        """An address of a space as a generic one, or the other way round."""
        *to, space, kind = modifiers
        window = SPACES.index(space) << SPACE
        if to not in ([], ["to"]) or kind != "u64":
            raise ValueError(modifiers)
        target, source = operands
        by = (-window if to else window) % 2**64
        return self._write(target, kind, f"{self._read(source, kind)} + {by}ull")

    def _branch(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        if modifiers not in ([], ["uni"]):
            raise ValueError(modifiers)
        return f"goto L{self._entry.labels[' '.join(operands)]};"

    def _return(self, operands: Sequence[str], modifiers: Sequence[str]) -> str:
        if operands or modifiers:
            raise ValueError(modifiers)
        return "return;"


def _names(text: str, count: int | None = None) -> list[str]:
    """The registers of an operand: one, or those in braces."""
    names = [name.strip() for name in text.strip("{}").split(",")]
    if count and ((count > 1) != ("{" in text) or len(names) != count):
        raise ValueError(text)
    return names


def _constant(text: str, kind: str) -> int:
    """The bits of a number: ``7``, ``0x7fU``, ``0f3F800000`` or ``0d3FF0000000000000``."""
    bits = bits_of(kind)
    if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", text):
        if (found[1], bits) not in (("f", 32), ("d", 64)) or kind[0] == "s":
            raise ValueError(text)
        return int(found[2], 16)
    if kind[0] == "f":
        raise ValueError(text)
    return int(text.removesuffix("U"), 0) % 2**bits
