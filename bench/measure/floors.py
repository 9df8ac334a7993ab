"""The floors of a benchmark: each is defined once and compared with the measurement."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .case import OURS, Case

Figure = Callable[[Case], float | None]
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


# -- figures ---------------------------------------------------------------------------------------


def _quotient(over: str, under: str) -> Figure:
    """The time of one candidate divided by that of another."""

    def figure(case: Case) -> float | None:
        one, other = case.seconds(over), case.seconds(under)
        return one / other if one and other else None

    return figure


def times_the_peer(peer: str, implementation: str) -> Figure:
    """Our speed divided by that of one peer."""
    return _quotient(peer, OURS + implementation)


def of_the_copy(implementation: str) -> Figure:
    """Our bandwidth divided by that of a copy of the same size."""
    return times_the_peer("copy", implementation)


def over_the_peer(peer: str, implementation: str) -> Figure:
    """Our time divided by one peer's."""
    return _quotient(OURS + implementation, peer)


def over_the_copy(implementation: str) -> Figure:
    """Our time divided by that of a copy of the same size."""
    return over_the_peer("copy", implementation)


def counted(name: str) -> Figure:
    """A figure that the case counted."""
    return lambda case: case.figures.get(name)
