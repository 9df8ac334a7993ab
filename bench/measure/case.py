"""The measurements of one operation, and the floors that they are compared with."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .clock import Took

OURS = "gradreduce "  # how the names of our own candidates begin; the implementation follows
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    name: str  # floors refer to it
    size: str = ""  # describes the operands
    nbytes: int = 0  # that it must read and write, together; 0 if unknown
    # Candidate -> its time; "copy" is a plain copy that reads and writes as many bytes.
    took: Mapping[str, Took] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)  # others that were measured

    def seconds(self, candidate: str) -> float | None:
        """Returns the time of a candidate; None if it was left out."""
        took = self.took.get(candidate)
        return None if took is None else took.seconds

    def show(self) -> None:
        """Prints the table, fastest first: times, rates, and the host's time if it differs."""
        moved = f", {self.nbytes / 1e6:.1f} MB to move" if self.nbytes else ""
        print(f"\n{self.name}: {self.size}{moved}", flush=True)
        copy = self.seconds("copy")
        for name, took in sorted(self.took.items(), key=lambda item: item[1].seconds):
            words = f"  {name:46} {took.seconds * 1e3:10.4f} ms"
            words += f" {self.nbytes / took.seconds / 1e9:8.1f} GB/s" if self.nbytes else ""
            words += f" {copy / took.seconds:6.2f} of the copy" if copy else ""
            if took.host_seconds != took.seconds:
                bound = ", the GPU waited for it" if took.host_bound else ""
                words += f"   host {took.host_seconds * 1e3:.4f} ms{bound}"
            print(words)
        for name, figure in self.figures.items():
            print(f"  {name:46} {figure:10.4g}")


Figure = Callable[[Case], float | None]
# Where floors were measured: with chip and date.
H100, BESIDE = "H100, 2026-11", "docs/benchmarks.md, 2026-11"
NOT_YET = "not yet measured on a GPU"
SIGNS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


class Decision(NamedTuple):
    """Why the bound of a floor was changed; docs/benchmarks.md lists all."""

    was: float
    why: str


@dataclass(frozen=True)
class Floor:
    """A bound for one figure of one case."""

    name: str  # describes the promise
    case: str
    figure: Figure  # of a case; None if a peer that it needs was left out
    sign: str  # ">=" or "<="
    bound: float
    measured: str  # the measured figure, with chip and date
    peers: tuple[str, ...] = ()  # the libraries that it is compared with
    decision: Decision | None = None

    def check(self, cases: Mapping[str, Case], absent: Mapping[str, str]) -> dict[str, Any]:
        """Returns a JSON object: the floor, the figure, and whether it ``holds``.

        ``holds`` is None if there is nothing to compare with; ``without`` lists its peers that were
        left out, with the reasons in ``absent``.
        """
        case = cases.get(self.case)
        figure = None if case is None else self.figure(case)
        holds = None if figure is None else SIGNS[self.sign](figure, self.bound)
        return {
            "floor": self.name, "case": self.case, "figure": figure, "sign": self.sign,
            "bound": self.bound, "measured": self.measured, "holds": holds,
            "without": [f"{peer}: {absent[peer]}" for peer in self.peers if peer in absent],
        }  # fmt: skip


def kept(
    floors: Sequence[Floor], cases: Mapping[str, Case], absent: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Checks and prints all floors."""
    print("\nfloors")
    found = [floor.check(cases, absent) for floor in floors]
    for one in found:
        word = {True: "holds", False: "BROKEN", None: "not checked"}[one["holds"]]
        figure = "nothing" if one["figure"] is None else f"{one['figure']:.3g}"
        bound = f"{one['sign']} {one['bound']:g}"
        print(f"  {word:12} {one['floor']}: {figure}, {bound} (measured: {one['measured']})")
        for text in one["without"]:
            print(f"  {'':12} without {text}")
    return found


def over(peer: str, implementation: str) -> Figure:
    """Our time over that of a peer or of the copy."""

    def figure(case: Case) -> float | None:
        ours, theirs = case.seconds(OURS + implementation), case.seconds(peer)
        return ours / theirs if ours and theirs else None

    return figure


def times(peer: str, implementation: str) -> Figure:
    """How many times as fast we are as a peer or the copy."""

    def figure(case: Case) -> float | None:
        share = over(peer, implementation)(case)
        return 1 / share if share else None

    return figure


def counted(name: str) -> Figure:
    """A figure that the case counted."""
    return lambda case: case.figures.get(name)
