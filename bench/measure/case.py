"""The measurements of one operation, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .clock import Took

OURS = "gradreduce "  # how the names of our own candidates begin; the implementation follows


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    name: str  # floors refer to it
    size: str = ""  # describes the operands
    nbytes: int = 0  # that it must read and write, together; 0 if unknown
    # Candidate -> its time; "copy" is a plain copy that reads and writes as many bytes.
    took: Mapping[str, Took] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)  # others that were measured

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
