"""The text of a PTX entry, as blocks of instructions.

A block starts at a label or after a branch. Lanes that enter a block run all of it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# A label, a brace of a scope, or what ends with a semicolon, with the braces of operands.
BLANK = re.compile(r"(?:\s|//[^\n]*)*")
STATEMENT = re.compile(r"(?:([$\w]+):(?!:)|([{}])|((?:[^;{}]|\{[^;{}]*\})*);)")
DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z]\w*(?:\.\w+)*)\s*(.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s{}[\]]+")
WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    text: str  # of the instruction, without the semicolon, with the names of ``Entry.registers``
    start: int  # its place in the body
    name: str  # such as ``add.rn.f32``
    operands: tuple[str, ...]  # their texts, the destination first
    # The predicate without which a lane skips it, and the value that it must have.
    guard: tuple[str, bool] | None


@dataclass
class Entry:
    """A function."""

    parameters: dict[str, int]  # name -> bytes, in order
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits; a predicate has 1
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])  # of instructions
    labels: dict[str, int] = field(default_factory=dict)  # name -> the number of its block

    def instructions(self) -> Iterator[Instruction]:
        return (instruction for block in self.blocks for instruction in block)


def parsed(parameters: str, body: str) -> Entry:
    """Parses the parameters and the body of an entry.

    Raises:
        ValueError: a statement or a declaration is unknown.
    """
    sizes = {"u64": 8, "f64": 8}
    entry = Entry(
        {name: int(count) if count else sizes[kind]
         for kind, name, count in PARAMETER.findall(parameters)}
    )  # fmt: skip
    scopes: list[dict[str, str]] = [{}]  # the names of registers that are declared in braces
    place = 0
    while (place := BLANK.match(body, place).end()) < len(body):  # type: ignore[union-attr]
        found = STATEMENT.match(body, place)
        if not found:
            raise ValueError(f"unknown PTX: {body[place : place + 80]}")
        start, place = place, found.end()
        label, brace, statement = found.groups()
        if label:
            if entry.blocks[-1]:
                entry.blocks.append([])
            entry.labels[label] = len(entry.blocks) - 1
        elif brace:
            scopes = [*scopes, {}] if brace == "{" else scopes[:-1]
        elif statement.startswith("."):
            _declare(entry, scopes, statement.strip())
        else:
            _append(entry, scopes, statement, start)
    return entry


def _declare(entry: Entry, scopes: list[dict[str, str]], statement: str) -> None:
    if statement == '.pragma "nounroll"':
        return
    found = DECLARED.fullmatch(statement)
    if not found or found[1] not in WIDTHS:
        raise ValueError(f"unknown declaration: {statement}")
    for name in found[2].split(","):
        name = name.strip()
        several = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{several[1]}{k}" for k in range(int(several[2]))] if several else [name]
        for each in names:
            if len(scopes) > 1:  # unlike all names of other scopes
                scopes[-1][each] = each = f"{each}${len(entry.registers)}"
            entry.registers[each] = WIDTHS[found[1]]


def _append(entry: Entry, scopes: list[dict[str, str]], statement: str, start: int) -> None:
    found = INSTRUCTION.fullmatch(statement)
    if not found:
        raise ValueError(f"unknown instruction: {statement}")
    names = {inner: outer for scope in scopes for inner, outer in scope.items()}

    def renamed(text: str) -> str:
        return re.sub(r"[%$\w]+", lambda name: names.get(name[0], name[0]), text)

    guard = (renamed(found[2]), not found[1]) if found[2] else None
    operands = tuple(renamed(operand) for operand in OPERAND.findall(found[4]))
    entry.blocks[-1].append(Instruction(renamed(statement), start, found[3], operands, guard))
    if found[3].split(".")[0] in ("bra", "ret"):
        entry.blocks.append([])
