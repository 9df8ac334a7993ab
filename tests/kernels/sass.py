"""The machine code (SASS) of the kernels: a table of figures that decide occupancy and speed.

``sass.txt`` has a line for each entry and architecture, and for each NVRTC of ``VERSIONS``:

* registers of a thread;
* spills: bytes of stack, spill stores and spill loads together;
* blocks of 256 threads that fit on a multiprocessor, as far as registers and threads go;
* loads before the first use: the 16-byte loads of its main loop in batches, ``6+2``. A batch ends
  where an instruction needs one of its vectors, and so waits for memory;
* the same of the loads of single elements, of another loop: through rows that are not aligned;
* the 16-byte loads and stores in the text of the kernel, which are those of its vector loops;
* its other loads and stores, which read the table's words, rows that are not aligned and the tail.

``PYTHONPATH=src:tests python -m kernels.sass`` compares it with what the installed NVRTCs make,
and ``--write`` writes it anew, for the versions that are installed. It needs the extra ``nvrtc``.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from support.skip_rules import find_compiler

from gradreduce.device.run.kernel import Kernel, Template, kernel_text
from gradreduce.ops import KERNELS

from .nvrtc import WHEELS, Entry, compiled

TABLE = Path(__file__).with_suffix(".txt")
ARCHITECTURES = (80, 90, 100)
COLUMNS = ("registers", "spills", "blocks", "batches", "unaligned", "16-byte", "others")
DTYPES = ("float32", "bfloat16")
ADD_N = (0, 2, 4, 8)  # numbers of inputs in the table
ADD_WORDS = (0, 3)  # numbers of words

# The same for sm_80, sm_90 and sm_100. Source: CUDA Programming Guide, technical specifications per
# compute capability; cuda_occupancy.h for the units in which registers are allocated.
THREADS_PER_BLOCK, THREADS_PER_WARP, THREADS_PER_PROCESSOR = 256, 32, 2048
PARTITIONS, REGISTERS_PER_PARTITION, REGISTER_UNIT = 4, 16384, 256

# In a clock of 1.7 GHz, of each of the 132 multiprocessors of an H100: 3.0 TB/s, measured 2026-11.
COPIED_BYTES = 3.0e12 / 132 / 1.7e9

Key = tuple[int, int, str]  # NVRTC, architecture, name
MEMORY = re.compile(r"(LD|ST)[GLS]?\.[\w.]*")


def blocks_per_processor(registers: int) -> int:
    """Blocks of 256 threads that are resident on a multiprocessor at once.

    A warp's registers are of one of the four partitions, rounded up to a unit.
    """
    of_warp = -(-registers * THREADS_PER_WARP // REGISTER_UNIT) * REGISTER_UNIT
    warps = REGISTERS_PER_PARTITION // of_warp * PARTITIONS
    blocks = warps // (THREADS_PER_BLOCK // THREADS_PER_WARP)
    return min(blocks, THREADS_PER_PROCESSOR // THREADS_PER_BLOCK)


def share_of_copy(issued: tuple[int, int], nbytes: int) -> float:
    """The speed over that of a copy, if only memory or the issue of instructions limits it.

    Of an H100: a multiprocessor issues an instruction of four warps in each clock; 128 lanes add
    and multiply floats, and 64 do other arithmetic. Source: NVIDIA H100 whitepaper, 2022.

    Args:
        issued: instructions of a warp, as in ``Listing``.
        nbytes: that a thread of the warp moves with them.
    """
    floats, others = issued
    clocks = max((floats + others) / 4, others / 2)
    return min(1.0, nbytes * THREADS_PER_WARP / COPIED_BYTES / clocks)


def load_batches(instructions: Iterable[tuple[str, str]], *, wide: bool = True) -> tuple[int, ...]:
    """The number of loads that are issued before the first use of one of them.

    Args:
        instructions: operations and operands of a loop, in the order of their addresses.
        wide: counts loads of 16 bytes; False: all others.
    """
    batches: list[int] = []
    pending: set[int] = set()
    for operation, operands in instructions:
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if not pending.isdisjoint(registers):
            pending.clear()
        if MEMORY.fullmatch(operation) and operation.startswith("LD"):
            size = 4 if operation.endswith(".128") else 2 if operation.endswith(".64") else 1
            if (size == 4) == wide:
                if not pending:
                    batches.append(0)
                batches[-1] += 1
                pending.update(register + k for register in registers[:1] for k in range(size))
    return tuple(batches)


@dataclass(frozen=True)
class Listing:
    """The instructions of an entry, as nvdisasm writes them."""

    accesses: Counter[str]  # how often each load and store occurs, ``LDG.E.128``; none of constants
    loops: tuple[Counter[str], ...]  # the same of each loop alone, without the loops in it
    # 16-byte loads before the first use, of the loop that has most of them.
    batches: tuple[int, ...]
    # Other loads before the first use, of the loop without 16-byte accesses that has most of them.
    unaligned: tuple[int, ...]
    # Of the loops with 16-byte accesses: float32 additions and products, and other instructions.
    issued: tuple[int, int]

    @classmethod
    def of(cls, instructions: Sequence[tuple[int, str, str]]) -> Listing:
        jumps = [
            (int(operands.split()[-1], 16), address)
            for address, operation, operands in instructions if operation.startswith("BRA")
        ]  # fmt: skip
        # Shortest first, so that the first loop with an instruction is its innermost loop.
        loops = sorted(
            {(to, at) for to, at in jumps if to < at}, key=lambda ends: ends[1] - ends[0]
        )
        counted: dict[tuple[int, int] | None, Counter[str]] = {}
        texts: dict[tuple[int, int] | None, list[tuple[str, str]]] = {}
        for address, operation, operands in instructions:
            loop = next((ends for ends in loops if ends[0] <= address <= ends[1]), None)
            texts.setdefault(loop, []).append((operation, operands))
            if MEMORY.fullmatch(operation):
                counted.setdefault(loop, Counter())[operation] += 1
        within = tuple(each for loop, each in counted.items() if loop is not None)
        over_chunks = loops[-1:]
        of_loops = [text for loop, text in texts.items() if loop is not None]
        narrow = [
            text for loop, text in texts.items() if loop is not None and loop not in over_chunks
            and not any(name.endswith(".128") for name, _ in text)
        ]  # fmt: skip
        batches = [
            max((load_batches(text, wide=wide) for text in some), key=sum, default=())
            for some, wide in ((of_loops, True), (narrow, False))
        ]
        wide = [
            name.partition(".")[0] for text in of_loops for name, _ in text
            if any(each.endswith(".128") for each, _ in text)
        ]  # fmt: skip
        floats = sum(name in ("FADD", "FMUL", "FFMA") for name in wide)
        issued = floats, len(wide) - floats
        return cls(sum(counted.values(), Counter()), within, *batches, issued)

    def number(self, kind: str, *, wide: bool) -> int:
        """The number of loads (``LD``) or stores (``ST``) with 16 bytes, or with another size."""
        return sum(
            count for access, count in self.accesses.items()
            if access.startswith(kind) and access.endswith(".128") == wide
        )  # fmt: skip


def disassembled(codes: Sequence[bytes], arch: int) -> list[Listing]:
    """Listings of machine codes, all at once: nvdisasm takes a third of a second to start."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [str(find_compiler("nvidia-cuda-nvdisasm")), "--binary", f"SM{arch}", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:1000]
    found = re.findall(
        r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*);", done.stdout,
        re.MULTILINE,
    )  # fmt: skip
    instructions = [(int(address, 16), *rest) for address, *rest in found]
    assert len(instructions) * 16 == sum(map(len, codes)), "not one line for each 16 bytes"
    made, first = [], 0
    for code in codes:
        made.append(Listing.of(instructions[first : first + len(code) // 16]))
        first += len(code) // 16
    return made


def figures(entry: Entry, listing: Listing) -> tuple[str, ...]:
    accesses = (
        f"{listing.number('LD', wide=wide)}/{listing.number('ST', wide=wide)}"
        for wide in (True, False)
    )
    blocks = blocks_per_processor(entry.registers)
    batches = map(_shown, (listing.batches, listing.unaligned))
    return (str(entry.registers), str(entry.spills), str(blocks), *batches, *accesses)


def _shown(batches: Sequence[int]) -> str:
    shown = [str(batch) for batch in batches]
    return "+".join(shown if len(shown) <= 4 else [*shown[:2], "..."]) or "-"


def templates(kernel: Kernel) -> tuple[Template, ...]:
    """The templates in the table: float32 and bfloat16, or all if a kernel has neither."""
    numbers = ADD_WORDS if kernel.name == "add_words" else ADD_N
    chosen = tuple(
        template
        for template in kernel.templates
        if all(part in (DTYPES if isinstance(part, str) else numbers) for part in template)
    )
    return chosen or kernel.templates


def measured(version: int) -> dict[Key, tuple[str, ...]]:
    """Compiles again, and returns all figures of the table for one NVRTC."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        made = {
            (arch, kernel): pool.submit(
                compiled, kernel_text(kernel.source),
                [kernel.expression(template) for template in templates(kernel)], arch, version,
            )
            for arch in ARCHITECTURES for kernel in KERNELS
        }  # fmt: skip
        found: dict[Key, tuple[str, ...]] = {}
        for arch in ARCHITECTURES:
            parts = [made[arch, kernel].result().entries for kernel in KERNELS]
            entries = {name: entry for part in parts for name, entry in part.items()}
            listings = disassembled([entry.code for entry in entries.values()], arch)
            for (name, entry), listing in zip(entries.items(), listings, strict=True):
                found[version, arch, name] = figures(entry, listing)
        return found


def recorded() -> tuple[dict[int, str], dict[Key, tuple[str, ...]]]:
    """The table: versions of the NVRTCs' wheels, and the figures."""
    versions: dict[int, str] = {}
    lines: dict[Key, tuple[str, ...]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# NVRTC"):
            versions = dict(zip(WHEELS, line.split()[2:], strict=True))
        if line.startswith("#"):
            continue
        name, arch, *rest = re.split(r"\s{2,}", line)
        for number, version in enumerate(versions):
            key = version, int(arch.removeprefix("sm_")), name
            lines[key] = tuple(rest[number * len(COLUMNS) :][: len(COLUMNS)])
    return versions, lines


VERSIONS, RECORD = recorded() if TABLE.exists() else ({}, {})


def written(made: dict[Key, tuple[str, ...]], versions: Iterable[str]) -> str:
    columns = "".join(f"{column:<11}" for column in COLUMNS)
    width = 2 + max(len(name) for _, _, name in made)
    lines = [
        f"{'# NVRTC':{width + 9}}" + "".join(f"{version:77}" for version in versions).rstrip(),
        f"{'# entry':{width}}{'GPU':9}" + (columns * 2).rstrip(),
    ]
    for arch, name in dict.fromkeys((arch, name) for _, arch, name in made):
        cells = "".join(f"{cell:<11}" for version in WHEELS for cell in made[version, arch, name])
        lines.append(f"{name:{width}}{f'sm_{arch}':9}{cells}".rstrip())
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    made = {key: found for version in WHEELS for key, found in measured(version).items()}
    text = written(made, [importlib.metadata.version(wheel) for wheel in WHEELS.values()])
    before = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), n=0))
    if "--write" in arguments:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    return int(before != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
