"""The measurements of one operation, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import Took

__all__ = ["OURS", "Case"]

OURS = "gradreduce "  # how the names of our own candidates begin; the implementation follows


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: name of the operation; floors refer to it.
        size: describes the operands.
        nbytes: bytes that it must read and write, together; 0 if unknown.
        took: candidate -> its time; ``copy`` is a plain copy that reads and writes ``nbytes``.
        figures: other measured figures, by name.
    """

    name: str
    size: str = ""
    nbytes: int = 0
    took: Mapping[str, Took] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, candidate: str) -> float | None:
        """Returns the time of a candidate; None if it was left out."""
        took = self.took.get(candidate)
        return None if took is None else took.seconds

    def show(self) -> None:
        """Prints the table, fastest first."""
        moved = f", {self.nbytes / 1e6:.1f} MB to move" if self.nbytes else ""
        print(f"\n{self.name}: {self.size}{moved}", flush=True)
        copy = self.seconds("copy")
        for name, took in sorted(self.took.items(), key=lambda item: item[1].seconds):
            rate = self.nbytes / took.seconds / 1e9
            part = f"{copy / took.seconds:6.2f} of the copy" if copy else ""
            words = f"{took.seconds * 1e3:10.4f} ms {rate:8.1f} GB/s {part}{_of_host(took)}"
            print(f"  {name:34} {words}")
        for name, figure in self.figures.items():
            print(f"  {name:34} {figure:10.4g}")

    def as_json(self) -> dict[str, Any]:
        """Returns the case for JSON."""
        return asdict(self)


def _of_host(took: Took) -> str:
    """Formats the host time if it differs from the measured time."""
    if took.host_seconds == took.seconds:
        return ""
    bound = ", the GPU waited for it" if took.host_bound else ""
    return f"   host {took.host_seconds * 1e3:.4f} ms{bound}"
