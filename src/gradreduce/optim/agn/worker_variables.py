"""Variables of an AGN worker, as its getter, its optimizer and the center share them."""

from __future__ import annotations

from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer

from .push import PushPlan
from .sums import Sums


class WorkerVariables:
    """The trainable variables of a worker.

    Attributes:
        centers: the center's copy of each, in the order of creation.
        sums: of their gradients since the last push; replaced, never changed.
        pulled: the value of the center at the last pull, on the first device; used by the distance
            scaling.
        num_steps: number of local steps.
        last_push: of a center in this process: the plan of the last push if it can run again, its
            sums, and the version of the center.
    """

    def __init__(self) -> None:
        self.centers: dict[Variable, Variable] = {}
        self.sums: Sums = {}
        self.pulled: dict[Variable, Buffer] = {}
        self.num_steps = 0
        self.last_push: tuple[PushPlan, Sums, int] | None = None

    def center_of(self, var: Any) -> Variable:
        """Returns the center's copy of a variable; ``KeyError`` for one of another getter."""
        found = self.centers.get(var) if isinstance(var, Variable) else None
        if found is None:
            raise KeyError(f"{var!r} was not created by this AGNCustomGetter")
        return found
