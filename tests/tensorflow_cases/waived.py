"""The cases of the file that do not hold here, each with its reason. The one table of them.

An entry goes when the case holds: ``test_tensorflow_cases.py`` fails on one that would pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from .better import Change, newer, refuses

NOT_BUILT = "not built yet: "


@dataclass(frozen=True)
class Waiver:
    """Why a case does not hold.

    Attributes:
        reason: one sentence; what is not built yet raises ``NotImplementedError``.
        instead: what holds in its place.
    """

    reason: str
    instead: Change | None = None

    @property
    def not_built(self) -> bool:
        return self.reason.startswith(NOT_BUILT)


def not_built(name: str) -> Waiver:
    return Waiver(NOT_BUILT + name)


AGN = not_built("AGNOptimizer")

WAIVED: dict[str, Waiver] = {
    "AGN-002": AGN,
    "AGN-004": AGN,
    "AGN-006": AGN,
    "AGN-007": AGN,
    "AGN-008": AGN,
    "AGN-010": AGN,
    "AGN-013": AGN,
    "AGN-015": AGN,
    "AGN-019": AGN,
    "AGN-020": AGN,
    "AGN-021": AGN,
    "AGN-022": AGN,
    "AGN-025": AGN,
    "CA-049": Waiver(
        "A step is an integer here, and a float is a TypeError.",
        instead=refuses(1, 4, 6, a=0, b=0, c=0),
    ),
    "CA-056": Waiver("Static shapes do not exist outside a graph: a take has no result before it."),
    "PK-007": Waiver(
        "num_packs=0 means no packing, for the packer too; a negative number is refused.",
        instead=refuses(1),
    ),
    "XD-090": Waiver(
        "Only TensorFlow's distribution strategies have values that are not distributed."
    ),
    "XD-092": Waiver(
        "num_packs=0 means no packing for NCCL too, as in newer TensorFlow.", instead=newer
    ),
}
