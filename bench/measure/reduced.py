"""The measurements of one all-reduce, as a table and as JSON.

Bandwidths are those of nccl-tests: ``algbw`` is the bytes of one replica divided by the time.
``busbw`` is ``algbw * 2 (n - 1) / n``: the rate at which each of n devices sends over its link if
all links are used alike. With replicas that share a device it is not the rate of a link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .case import Case
from .clock import Took

__all__ = ["Reduced", "algbw", "busbw"]


def algbw(nbytes: int, seconds: float) -> float:
    """Algorithm bandwidth: bytes of one replica per second."""
    return nbytes / seconds


def busbw(nbytes: int, seconds: float, num_replicas: int) -> float:
    """Bus bandwidth: algorithm bandwidth times the factor of an all-reduce."""
    return algbw(nbytes, seconds) * 2 * (num_replicas - 1) / num_replicas


@dataclass(frozen=True)
class Reduced(Case):
    """One all-reduce at one size; ``nbytes`` is what the baseline copy moves.

    Attributes:
        replica_nbytes: of one replica, all tensors together.
        num_replicas: how many there are.
        line: the candidate that all others are compared with.
    """

    replica_nbytes: int = 0
    num_replicas: int = 1
    line: str = "copy"

    def show(self) -> None:
        """Prints the table, fastest first."""
        print(f"\n{self.name}: {self.size}, {self.num_replicas} replicas", flush=True)
        head = f"{'bytes':>11} {'ms':>9} {'algbw':>7} {'busbw':>7} {'of line':>7} {'host us':>9}"
        print(f"  {'':48} {head}   (GB/s)")
        for name, took in sorted(self.took.items(), key=lambda item: item[1].seconds):
            print(f"  {name:48} {self.row(name, took)}")
        for name, figure in self.figures.items():
            print(f"  {name:48} {figure:10.4g}")

    def row(self, name: str, took: Took) -> str:
        """Formats one candidate's figures; the copy has no all-reduce bandwidth."""
        bandwidths = f"{'':7} {'':7}"
        if name != "copy":
            nbytes, seconds = self.replica_nbytes, took.seconds
            bus = busbw(nbytes, seconds, self.num_replicas)
            bandwidths = f"{algbw(nbytes, seconds) / 1e9:7.2f} {bus / 1e9:7.2f}"
        line = self.seconds(self.line)
        part = f"{line / took.seconds:7.2f}" if line else f"{'':7}"
        late = " the GPU waited for the host" if took.host_bound else ""
        host = f"{took.host_seconds * 1e6:9.1f}{late}"
        return f"{self.replica_nbytes:11} {took.seconds * 1e3:9.4f} {bandwidths} {part} {host}"

    def as_json(self) -> dict[str, Any]:
        """Returns the case for JSON, with bandwidths in bytes per second."""
        rates = {
            name: {
                "algbw": algbw(self.replica_nbytes, took.seconds),
                "busbw": busbw(self.replica_nbytes, took.seconds, self.num_replicas),
            }
            for name, took in self.took.items()
            if name != "copy"
        }
        return {**super().as_json(), "rates": rates}
