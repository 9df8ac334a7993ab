"""The variables of an AGN worker, shared by its getter, its optimizer and the center."""

from __future__ import annotations

from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer

from .push import PushPlan
from .sums import Sums


class WorkerVariables:
    """The trainable variables of a worker.

    Attributes:
        centers: the center variable of each variable, in the order of creation.
        sums: the sums of gradients since the last push. A step or push sets a new mapping; items
            are not added to, or removed from, the old one.
        pulled: the value from which the distance scaling measures, on the worker's first device;
            see ``Worker._record_pull``.
        num_steps: the number of local steps.
        last_push: the plan of the last push if it can run again, its sums, and the slots of the
            center. Used by a center in this process.
    """

    def __init__(self) -> None:
        self.centers: dict[Variable, Variable] = {}
        self.sums: Sums = {}
        self.pulled: dict[Variable, Buffer] = {}
        self.num_steps = 0
        self.last_push: tuple[PushPlan, Sums, object] | None = None

    def center_of(self, var: Any) -> Variable:
        """Returns the center variable of ``var``; raises ``KeyError`` if there is none."""
        found = self.centers.get(var) if isinstance(var, Variable) else None
        if found is None:
            raise KeyError(f"{var!r} was not created by this AGNCustomGetter")
        return found
