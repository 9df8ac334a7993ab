"""The cases of the file that do not hold here, each with its reason. The one table of them.

An entry goes when the case holds: ``test_tensorflow_cases.py`` fails on one that would pass.
"""

from dataclasses import dataclass

from .better import Change, newer, refuses


@dataclass(frozen=True)
class Waiver:
    """Why a case does not hold, and what holds in its place."""

    reason: str
    instead: Change | None = None


WAIVED: dict[str, Waiver] = {
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
