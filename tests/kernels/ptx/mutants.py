"""Small changes of a PTX text, most of which a launch must show."""

import random
import re
from collections.abc import Callable, Container, Iterator, Mapping

from .instructions import bits_of
from .text import Entry, Instruction

Texts = Iterator[str]
Written = Mapping[str, Instruction]  # register -> the last instruction before that writes it
ORDERED = ("sub", "div", "selp", "shl", "shr")
# Changes that no result shows. Patterns of: what writes the sources; the instruction -> the change.
EQUIVALENT = (
    r"\+24\];.*setp\.ne\.s64\s.* 0 ->",  # whether an aligned row has several loads in flight
    r"\+24\];.*@%p\d+\s+bra\s+\S+ -> bra",  # the same, and no vectors
    r"setp\.lt\.s64\s.*, 2( -> .*, 1|;@%p\d+\s+bra\s+\S+ -> )$",  # whether one row is searched
    r"-4294967296( ->|;setp\.\w+\.s64\s.*;@%p\d+\s+bra\s+\S+ -> $)",  # a division of 32 or 64 bits
    r"shr\.[us]64\s.*, (59|6\d) ->",  # the sign of an index, which is never negative
    r"mov\.u32\s+\S+, 1( -> .*, 2|;setp\.ne\.s32\s.* 0 -> .* -1)$",  # whether a load is wanted
    r"or\.b32\s.*, 64 ->|2139095040 -> .*2139095041",  # payloads of NaNs
    r"sub\.rn\.f64\s+\S+, (\S+), \1;.* -> (fma|add\.rz)",  # + 0, or + NaN
)
COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "neu": "equ"}


def exchanged(each: Instruction, written: Written) -> Texts:
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


def constants(each: Instruction, written: Written) -> Texts:
    """A number one more or less, or a float with another last bit."""
    last = each.operands[-1] if each.operands else ""
    if re.fullmatch(r"-?\d+", last):
        for by in (1, -1):
            yield _with_last(each, str(int(last) + by))
    elif re.fullmatch(r"0[fd][0-9A-F]+", last):
        yield _with_last(each, f"{last[:2]}{int(last[2:], 16) ^ 1:0{len(last) - 2}X}")


def compared(each: Instruction, written: Written) -> Texts:
    opcode, *modifiers = each.name.split(".")
    if opcode == "setp" and modifiers[0] in COMPARISONS:
        yield each.text.replace(f".{modifiers[0]}.", f".{COMPARISONS[modifiers[0]]}.", 1)


def unguarded(each: Instruction, written: Written) -> Texts:
    """With the opposite of its predicate, or a branch without one."""
    if found := re.match(r"@(!?)(\S+)\s+", each.text):
        rest = each.text[found.end() :]
        yield f"@{'' if found[1] else '!'}{found[2]} {rest}"
        if rest.startswith("bra"):
            yield rest


def moved(each: Instruction, written: Written) -> Texts:
    """A load or store of the next element."""
    if each.name.startswith(("ld", "st")):
        size = bits_of(each.name.rpartition(".")[2]) // 8 * (4 if ".v4" in each.name else 1)
        found = re.search(r"\[([^]+]+)(?:\+(-?\d+))?\]", each.text)
        changed = f"[{found[1]}+{int(found[2] or 0) + size}]"
        yield each.text.replace(found[0], changed)


def rounded(each: Instruction, written: Written) -> Texts:
    """Towards zero. Integers of 16 bits and halves have all their bits in a float."""
    if ".rn." in each.name and not re.search(r"\.[us](8|16)$|f64\.[us]32$", each.name):
        yield each.text.replace(".rn.", ".rz.", 1)


def dropped(each: Instruction, written: Written) -> Texts:
    last = written.get(each.operands[0]) if each.operands else None
    if last is None or last.text != each.text:  # else it has the value already
        yield ""


def fused(each: Instruction, written: Written) -> Texts:
    """A sum of a product, rounded once."""
    found = re.fullmatch(r"(add|sub)\.rn\.(f\d\d)", each.name)
    if not found:
        return
    to, *terms = each.operands
    for place, term in enumerate(terms):
        product = written.get(term)
        if product and product.name.startswith("mul.rn"):
            _, a, b = product.operands
            c, kind, minus = terms[1 - place], found[2], found[1] == "sub"
            name = f"fma{each.name[3:]}"
            if not minus:
                yield f"{name} {to}, {a}, {b}, {c}"
                continue
            negated = a if place else c
            n = f"n{kind[1:]}"
            factors = ", ".join((n, b, c) if place else (a, b, n))
            yield f"{{.reg .{kind} {n}; neg.{kind} {n}, {negated}; {name} {to}, {factors};}}"


CHANGES: dict[str, Callable[[Instruction, Written], Texts]] = {
    "exchanged": exchanged, "constant": constants, "comparison": compared, "guard": unguarded,
    "moved": moved, "rounded": rounded, "dropped": dropped, "fused": fused,
}  # fmt: skip


def mutants(entry: Entry, executed: Container[int], *, rounds: bool, seed: int,
            number: int) -> list[tuple[Instruction, str]]:  # fmt: skip
    """Instructions with the texts of their changes: of each kind as many, if there are.

    Args:
        entry: what is changed.
        executed: the places of instructions that lanes have executed: others are not changed.
        rounds: whether to change roundings; a result of 16 bits has not their last bit.
        seed: decides which ones.
        number: how many.
    """
    pools: dict[str, list[tuple[Instruction, str]]] = {}
    written: dict[str, Instruction] = {}
    for each in entry.instructions():
        for what, text in _changes(each, written, rounds) if each.start in executed else ():
            pools.setdefault(what, []).append((each, text))
        written |= dict.fromkeys(each.operands[:1], each)
    rng = random.Random(seed)
    chosen: list[tuple[Instruction, str]] = []
    for pool in pools.values():
        rng.shuffle(pool)
    while len(chosen) < number and any(pools.values()):
        for pool in pools.values():
            chosen += [pool.pop()] if pool else []
    return chosen[:number]


def _changes(each: Instruction, written: Written, rounds: bool) -> Iterator[tuple[str, str]]:
    """Kinds of changes, and texts in the place of an instruction."""
    known = "".join(f"{other.text};" for other in _sources(each, written))
    for what, change in CHANGES.items():
        for text in change(each, written):
            is_result = rounds or what not in ("rounded", "fused") or ".f16." in each.name
            changed = f"{known}{each.text} -> {text}"
            if is_result and not any(re.search(pattern, changed) for pattern in EQUIVALENT):
                yield what, text


def _sources(each: Instruction, written: Written, depth: int = 3) -> Iterator[Instruction]:
    """The instructions that write what it reads, after those that write what these read."""
    for name in (*each.operands[1:], *(each.guard or ())[:1]) if depth else ():
        if name in written:
            yield from (*_sources(written[name], written, depth - 1), written[name])


def _with_last(each: Instruction, text: str) -> str:
    return each.text[: each.text.rindex(each.operands[-1])] + text
