"""Small changes of a PTX text, most of which a launch must show."""

import random
import re
from collections.abc import Callable, Container, Iterator, Sequence

from .instructions import bits_of
from .text import Entry, Instruction

Texts = Iterator[str]
Before = Sequence[Instruction]  # the instructions before it
ORDERED = ("sub", "div", "selp", "shl", "shr")
COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "neu": "equ"}


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


def rounded(each: Instruction, before: Before) -> Texts:
    """Towards zero. Integers of 16 bits and halves have all their bits in a float."""
    if ".rn." in each.name and not re.search(r"\.[us](8|16)$|f64\.[us]32$", each.name):
        yield each.text.replace(".rn.", ".rz.", 1)


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
    "moved": moved, "rounded": rounded, "dropped": dropped, "fused": fused,
}  # fmt: skip


def mutants(body: str, entry: Entry, executed: Container[int], *, rounds: bool, seed: int,
            number: int) -> list[tuple[str, str]]:  # fmt: skip
    """Changed texts with their changes: of each kind as many, if there are.

    Args:
        body: the text.
        entry: what it was parsed to.
        executed: the places of instructions that lanes have executed: others are not changed.
        rounds: whether to change roundings; a result of 16 bits has not their last bit.
        seed: decides which ones.
        number: how many.
    """
    pools: dict[str, list[tuple[str, str]]] = {}
    before: list[Instruction] = []
    for each in entry.instructions():
        for what, text in _changes(each, before, rounds) if each.start in executed else ():
            # A scope and nothing have no semicolon.
            end = each.start + len(each.text) + (text == "" or text.startswith("{"))
            changed = body[: each.start] + text + body[end:]
            pools.setdefault(what, []).append((changed, f"{each.text} -> {text}"))
        before.append(each)
    rng = random.Random(seed)
    chosen: list[tuple[str, str]] = []
    for pool in pools.values():
        rng.shuffle(pool)
    while len(chosen) < number and any(pools.values()):
        for pool in pools.values():
            chosen += [pool.pop()] if pool else []
    return chosen[:number]


def _changes(each: Instruction, before: Before, rounds: bool) -> Iterator[tuple[str, str]]:
    """Kinds of changes, and texts in the place of an instruction."""
    for what, change in CHANGES.items():
        if rounds or what not in ("rounded", "fused") or ".f16." in each.name:
            yield from ((what, text) for text in change(each, before))


def _with_last(each: Instruction, text: str) -> str:
    return each.text[: each.text.rindex(each.operands[-1])] + text
