"""The measurements of one operation, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import Took

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
        for name, took in sorted(self.took.items(), key=lambda item: item[1].seconds):
            print(f"  {name:46} {took.seconds * 1e3:10.4f} ms {self.rates(name, took)}")
        for name, figure in self.figures.items():
            print(f"  {name:46} {figure:10.4g}")

    def rates(self, name: str, took: Took) -> str:
        """Formats the rates of a candidate, and the host's time if it differs."""
        copy = self.seconds("copy")
        words = f"{self.nbytes / took.seconds / 1e9:8.1f} GB/s"
        words += f" {copy / took.seconds:6.2f} of the copy" if copy else ""
        if took.host_seconds != took.seconds:
            bound = ", the GPU waited for it" if took.host_bound else ""
            words += f"   host {took.host_seconds * 1e3:.4f} ms{bound}"
        return words

    def as_json(self) -> dict[str, Any]:
        """Returns the case for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Reduced(Case):
    """One all-reduce at one size; ``nbytes`` is what the baseline copy moves.

    Bandwidths are those of nccl-tests: ``algbw`` is the bytes of one replica divided by the time.
    ``busbw`` is ``algbw * 2 (n - 1) / n``: the rate at which each of n devices sends over its link
    if all links are used alike. With replicas that share a device it is not the rate of a link.

    Attributes:
        replica_nbytes: of one replica, all tensors together.
        num_replicas: how many there are.
        line: the candidate that all others are compared with.
    """

    replica_nbytes: int = 0
    num_replicas: int = 1
    line: str = "copy"

    def rates(self, name: str, took: Took) -> str:
        """Formats bandwidths, the ratio to the line, and the host's time."""
        algbw = self.replica_nbytes / took.seconds / 1e9
        busbw = algbw * 2 * (self.num_replicas - 1) / self.num_replicas
        words = f"algbw {algbw:7.2f} busbw {busbw:7.2f} GB/s" if name != "copy" else f"{'':32}"
        line = self.seconds(self.line)
        words += f" {line / took.seconds:7.2f} of the line" if line else ""
        late = ", the GPU waited for it" if took.host_bound else ""
        return f"{words}   host {took.host_seconds * 1e6:.1f} us{late}"
