"""Small changes of a PTX text, each of which a launch must show.

Changes that make no difference are left out where the text shows it: operands of commutative
instructions are not exchanged.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from .instructions import bits_of
from .text import Entry, Instruction

Texts = Iterator[str]
Before = Sequence[Instruction]  # the instructions before it


class Mutant(NamedTuple):
    """A changed text.

    Attributes:
        what: the kind of change.
        body: the changed body of the entry.
        change: the instruction, and what is in its place.
        place: of the instruction in the text.
        rest: the size of the text after it.
    """

    what: str
    body: str
    change: str
    place: int
    rest: int

    def others(self, executed: Counter[int], body: str) -> dict[int, int]:
        """What ``Machine.executed`` has of the other instructions of this or the changed text."""
        return {
            place if place < self.place else place - len(body): count
            for place, count in executed.items()
            if place < self.place or place >= len(body) - self.rest
        }


# Changes without a difference -> why. A pattern of: what defines the sources;the instruction ->
# the change.
EQUIVALENT = {
    r"shr\.[us]64 .*\b(59|6\d) ->": "the sign of a size or an index, which is never negative",
    r"2139095040 -> .*2139095041": "arithmetic makes no NaN with this payload",
    r"or\.b32 .*\b64 ->": "the payload of a NaN",
    r"mov\.u32 .*\b1 -> .*\b2": "whether a load is wanted: any number but 0",
    r"setp\.ne\.s32 .*\b0 ->": "whether a load is wanted: 0 or 1",
    r"%n?tid\.x;.*cvt\.u64\.u32.* -> cvt\.u64\.u16": "a number of threads is less than 65536",
}
ORDERED = ("sub", "div", "selp", "shl", "shr")
COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "neu": "equ"}
THREADS = ("%tid.x", "%ntid.x")


def exchanged(each: Instruction, before: Before) -> Texts:
    """Two sources, or two registers in braces."""
    opcode, *modifiers = each.name.split(".")
    if opcode in ORDERED or (opcode == "setp" and modifiers[0] not in ("eq", "ne", "neu")):
        to, a, b, *rest = each.operands
        if a != b and b.startswith("%"):
            yield f"{each.name} {', '.join([to, b, a, *rest])}"
    for operand in each.operands:
        if "{" in operand:
            first, second, *rest = (part.strip() for part in operand.strip("{}").split(","))
            yield each.text.replace(operand, "{" + ", ".join([second, first, *rest]) + "}")


def constants(each: Instruction, before: Before) -> Texts:
    """A number one more or less, or a float with another last bit."""
    last = each.operands[-1] if each.operands else ""
    if re.fullmatch(r"-?\d+", last):
        for by in (1, -1):
            yield _with_last(each, str(int(last) + by))
    elif re.fullmatch(r"0[fd][0-9A-F]+", last):
        yield _with_last(each, f"{last[:2]}{int(last[2:], 16) ^ 1:0{len(last) - 2}X}")


def compared(each: Instruction, before: Before) -> Texts:
    opcode, *modifiers = each.name.split(".")
    if opcode == "setp" and modifiers[0] in COMPARISONS:
        yield each.text.replace(f".{modifiers[0]}.", f".{COMPARISONS[modifiers[0]]}.", 1)


def unguarded(each: Instruction, before: Before) -> Texts:
    """With the opposite of its predicate, or a branch without one."""
    if found := re.match(r"@(!?)(\S+)\s+", each.text):
        rest = each.text[found.end() :]
        yield f"@{'' if found[1] else '!'}{found[2]} {rest}"
        if rest.startswith("bra"):
            yield rest


def moved(each: Instruction, before: Before) -> Texts:
    """A load or store of the next element."""
    if each.name.startswith(("ld", "st")):
        size = bits_of(each.name.rpartition(".")[2]) // 8 * (4 if ".v4" in each.name else 1)
        found = re.search(r"\[([^]+]+)(?:\+(-?\d+))?\]", each.text)
        changed = f"[{found[1]}+{int(found[2] or 0) + size}]"
        yield each.text.replace(found[0], changed)


def narrowed(each: Instruction, before: Before) -> Texts:
    """Half the width of a load, a store or the source of an extension."""
    head, _, kind = each.name.rpartition(".")
    opcode, *modifiers = head.split(".")
    of_threads = any(
        other.operands[0] in each.operands and other.operands[-1] in THREADS for other in before
    )  # at most 1024
    extends = opcode == "cvt" and modifiers[0][0] in "us" and bits_of(modifiers[0]) > bits_of(kind)
    # The numbers of rows and of their words, and flags, are small.
    small = "param" in modifiers or "global" in modifiers or "+24]" in each.text
    accesses = opcode in ("ld", "st") and kind[0] == "u" and not small
    if (extends or accesses) and bits_of(kind) > 8 and not of_threads:
        yield each.text.replace(each.name, f"{head}.{kind[0]}{bits_of(kind) // 2}", 1)


def rounded(each: Instruction, before: Before) -> Texts:
    """Towards zero. Integers of 16 bits and halves have all their bits in a float."""
    if ".rn." in each.name and not re.search(r"\.[us](8|16)$|f64\.[us]32$", each.name):
        yield each.text.replace(".rn.", ".rz.", 1)


def signed(each: Instruction, before: Before) -> Texts:
    """The other sign, where numbers may be negative: sizes, indices and addresses are not."""
    head, _, kind = each.name.rpartition(".")
    opcode = head.split(".")[0]
    other = f"{head}.{'us'[kind[0] == 'u']}{kind[1:]}"
    negative = (
        opcode == "setp" and "eq" not in head and "ne" not in head and "-" in each.operands[-1]
    )
    numbers = opcode == "cvt" and (".rn" in head or kind.endswith("8")) and kind != "s64"
    if kind[0] in "us" and (negative or numbers or (opcode == "shr" and kind == "s16")):
        yield each.text.replace(each.name, other, 1)


def dropped(each: Instruction, before: Before) -> Texts:
    yield ""


def fused(each: Instruction, before: Before) -> Texts:
    """A sum of a product, rounded once."""
    found = re.fullmatch(r"(add|sub)\.rn\.(f\d\d)", each.name)
    if not found:
        return
    to, *terms = each.operands
    for place, term in enumerate(terms):
        product = next((other for other in reversed(before) if other.operands[0] == term), None)
        if product and product.name.startswith("mul.rn"):
            _, a, b = product.operands
            c, kind, minus = terms[1 - place], found[2], found[1] == "sub"
            name = f"fma{each.name[3:]}"
            if not minus:
                yield f"{name} {to}, {a}, {b}, {c}"
                continue
            negated = a if place else c
            factors = ("n", b, c) if place else (a, b, "n")
            yield f"{{.reg .{kind} n; neg.{kind} n, {negated}; {name} {to}, {', '.join(factors)};}}"


CHANGES: dict[str, Callable[[Instruction, Before], Texts]] = {
    "exchanged": exchanged, "constant": constants, "comparison": compared, "guard": unguarded,
    "moved": moved, "narrowed": narrowed, "rounded": rounded, "sign": signed, "dropped": dropped,
    "fused": fused,
}  # fmt: skip


def mutants(body: str, entry: Entry, executed: Container[int], *, rounds: bool, seed: int,
            number: int) -> list[Mutant]:  # fmt: skip
    """Changes of instructions that lanes have executed: of each kind as many, if there are.

    Args:
        body: the text.
        entry: what it was parsed to.
        executed: the places of instructions.
        rounds: whether to change roundings; a result of 16 bits has not their last bit.
        seed: decides which ones.
        number: how many.
    """
    pools: dict[str, list[Mutant]] = {}
    before: list[Instruction] = []
    for each in entry.instructions():
        for what, text in _changes(each, before, rounds) if each.start in executed else ():
            # A scope and nothing have no semicolon.
            end = each.start + len(each.text) + (text == "" or text.startswith("{"))
            changed = body[: each.start] + text + body[end:]
            change = f"{each.text} -> {text}"
            mutant = Mutant(what, changed, change, each.start, len(body) - end)
            pools.setdefault(what, []).append(mutant)
        before.append(each)
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for pool in pools.values():
        rng.shuffle(pool)
    while len(chosen) < number and any(pools.values()):
        for pool in pools.values():
            chosen += [pool.pop()] if pool else []
    return chosen[:number]


def _changes(each: Instruction, before: Before, rounds: bool) -> Iterator[tuple[str, str]]:
    """Kinds of changes, and texts in the place of an instruction."""
    sources = _definitions(each, before)
    for what, change in CHANGES.items():
        if rounds or what not in ("rounded", "fused") or ".f16." in each.name:
            for text in change(each, before):
                known = f"{sources}{each.text} -> {text}"
                if not any(re.search(pattern, known) for pattern in EQUIVALENT):
                    yield what, text


def _with_last(each: Instruction, text: str) -> str:
    return each.text[: each.text.rindex(each.operands[-1])] + text


def _definitions(each: Instruction, before: Before) -> str:
    """The texts of the last instructions that write its sources, and of those for theirs."""
    found = [each]
    wanted = [each.guard[0]] if each.guard else [*each.operands[1:]]
    for _ in range(2):
        texts = [other for other in before if other.operands and other.operands[0] in wanted]
        wanted = [name for other in texts for name in other.operands[1:]]
        found = texts + found
    return "".join(f"{other.text};" for other in found[:-1])
