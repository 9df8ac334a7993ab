"""Unscales, measures and clips the mean gradients of a ``SyncStep``, or skips the update.

Every device does this in place, with its own copies or shards. The norm has the same bits on all
devices of all processes, so that all skip the same updates without telling each other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from gradreduce import ops
from gradreduce.arrays.distributed import Part, buffer_of
from gradreduce.arrays.variable import Variable
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.checkpoint import StateEntry, StateTable, attribute, integer, optional, plain
from gradreduce.device import Buffer, Device, as_dtype, as_flag, as_positive
from gradreduce.errors import brief
from gradreduce.optim.hyperparameters import as_integer

# The range of a dynamic scale: losses are multiplied by it in float32.
_LEAST, _MOST = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that ``SyncStep`` adapts, by the rule of ``torch.amp.GradScaler``.

    The scale decreases when gradients overflow, and increases when they have not overflowed for
    some time. Multiply the loss by ``SyncStep.loss_scale`` before you differentiate it.

    Attributes:
        init_scale: the initial scale.
        growth_factor: after ``growth_interval`` updates in a row without a skipped one, the scale
            is multiplied by this number; above 1.
        backoff_factor: when an update is skipped, the scale is multiplied by this number; above 0
            and below 1.
        growth_interval: a number of updates; at least 1.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([1]), "w", device=mesh)
        >>> optimizer = gr.GradientDescentOptimizer(0.5)
        >>> cross_device_ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        >>> scale = gr.DynamicLossScale(init_scale=8.0)
        >>> step = gr.SyncStep([w], optimizer, cross_device_ops, loss_scale=scale)
        >>> step([[[np.float32([np.inf])]]]), step.loss_scale  # skipped
        (False, 4.0)
        >>> step([[[np.float32([step.loss_scale * 1])]]])  # a gradient of 1, scaled
        True
        >>> w.numpy()
        array([0.5], dtype=float32)
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        as_positive("init_scale", self.init_scale, finite=True)
        if not as_positive("growth_factor", self.growth_factor, finite=True) > 1:
            raise ValueError(f"growth_factor={brief(self.growth_factor)} must be above 1")
        if not as_positive("backoff_factor", self.backoff_factor) < 1:
            raise ValueError(f"backoff_factor={brief(self.backoff_factor)} must be below 1")
        as_integer("growth_interval", self.growth_interval, least=1)


class GradientScaling:
    """Unscales, measures and clips the mean gradients of a ``SyncStep``.

    Args:
        variables: the variables of the step.
        clip_norm: see ``SyncStep``.
        skip_nonfinite: see ``SyncStep``.
        loss_scale: see ``SyncStep``.
        check_finite: see ``SyncStep``.

    Attributes:
        acts: whether ``apply`` must be called with the mean gradients.
        checks: whether the gradients of each replica must be finite.
        scale: the loss scale of the next update.
        num_skipped: the number of updates that were skipped.
        norm: the norm of the last mean gradients; a Buffer, or a number if updates can be skipped.
            None before the first.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        clip_norm: float | None,
        skip_nonfinite: bool,
        loss_scale: float | DynamicLossScale | None,
        check_finite: bool,
    ) -> None:
        self._devices = variables[0].devices
        self._limit = None if clip_norm is None else as_positive("clip_norm", clip_norm)
        self._rule = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
        self._skips = as_flag("skip_nonfinite", skip_nonfinite) or self._rule is not None
        self.scale = 1.0
        if self._rule is not None:
            self.scale = float(self._rule.init_scale)
        elif loss_scale is not None:
            self.scale = as_positive("loss_scale", loss_scale, finite=True)
        self._check_dtypes(variables, loss_scale)
        self.checks = as_flag("check_finite", check_finite)
        if self.checks and self._skips:
            raise ValueError(
                "check_finite=True raises for gradients that skip_nonfinite=True or a "
                "DynamicLossScale would skip: pass one of them"
            )
        self.num_skipped = 0
        self.norm: Buffer | float | None = None
        self._growth_tracker = 0  # updates since the scale changed
        self._measures = self._skips or self._limit is not None
        self.acts = self._measures or loss_scale is not None
        # Options that must be equal in all processes.
        self.options = {
            "clip_norm": self._limit,
            "skip_nonfinite": self._skips,
            "loss_scale": self._rule or self.scale,
            "check_finite": self.checks,
        }
        if self.acts or self.checks:
            compile_rows(
                "scaling", self._rehearse, {(each.dtype,) for each in variables}, self._devices[0]
            )

    def _rehearse(self, rows: Sequence[Sequence[Buffer]], device: Device) -> None:
        """Unscales, measures and clips gradients on one device, with whatever options."""
        dry = copy(self)
        vars(dry).update(_devices=[device], _measures=True, _skips=False, _limit=1.0, scale=2.0)
        dry.apply([[gradient for (gradient,) in rows]])

    def _check_dtypes(self, variables: Sequence[Variable], loss_scale: Any) -> None:
        for variable in variables if loss_scale is not None else ():
            if variable.dtype == as_dtype("float16"):
                raise ValueError(
                    f"loss_scale={brief(loss_scale)} cannot be used with {variable.name!r}, which "
                    "is float16: a gradient divided by the scale would underflow; use float32 "
                    "Variables, and compute the loss in float16"
                )

    def apply(
        self,
        gradients: Sequence[Sequence[Buffer]],
        share_sums: Callable[[list[Buffer]], list[Buffer]] | None = None,
    ) -> bool:
        """Unscales and clips gradients in place; returns False to skip the update.

        The host waits for the norm if updates can be skipped.

        Args:
            gradients: for each device the mean gradients that it uses; overwritten.
            share_sums: takes the block sums that each device has computed, and returns for each
                device the block sums of all gradients. Needed if a device has only some gradients.
        """
        work = list(zip(self._devices, gradients, strict=True))
        if self.scale != 1:
            for device, own in work:
                rows = [[each] for each in own]
                ops.all_sum(rows, rows, divisor=self.scale, device=device)
        if not self._measures:
            return True
        clips = self._limit is not None and self._limit < math.inf
        if share_sums is None and not clips:
            work = work[:1]
        sums = [ops.block_sums(own, device) for device, own in work]
        norms = [ops.norm_of(each) for each in (share_sums(sums) if share_sums else sums)]
        self.norm = norms[0]
        if self._skips and not self._is_finite(norms[0]):
            return False
        if self._limit is not None and clips:
            for (device, own), norm in zip(work, norms, strict=True):
                ops.clip(own, own, norm, limit=self._limit, device=device)
        return True

    def read_norm(self) -> float | None:
        """Returns the last norm; the host waits for it."""
        norm = self.norm  # read once, because another thread may replace it
        return float(norm.numpy()[0]) if isinstance(norm, Buffer) else norm

    def _is_finite(self, norm: Buffer) -> bool:
        """Whether a norm is finite; counts skipped updates, and adapts the scale."""
        # Unlike ``numpy`` it does not warn, which may raise, before the gradients are used.
        self.norm = float(norm.device.download(norm)[0])
        is_finite = math.isfinite(self.norm)
        self.num_skipped += not is_finite
        rule = self._rule
        if rule is not None:
            self._growth_tracker = self._growth_tracker + 1 if is_finite else 0
            factor = 1.0 if is_finite else rule.backoff_factor
            if self._growth_tracker >= rule.growth_interval:  # above, if it was loaded
                self._growth_tracker, factor = 0, rule.growth_factor
            self.scale = min(max(self.scale * factor, _LEAST), _MOST)
        return is_finite

    # -- checkpoint -------------------------------------------------------------------------------

    def table(self) -> StateTable:
        """Returns the entries of ``SyncStep.state_dict`` that belong to this object."""
        return StateTable(
            num_skipped=attribute(self, "num_skipped", integer(0)),
            loss_scale=StateEntry(
                lambda: self.scale,
                lambda where, saved: as_positive(where, plain(where, saved), finite=True),
            ),
            growth_tracker=StateEntry(
                lambda: None if self._rule is None else self._growth_tracker, optional(integer(0))
            ),
        )

    def ready_state(self, saved: Mapping[str, Any], *, continues: bool) -> Callable[[], None]:
        """Returns a function that loads the scale, if it and the saved one are dynamic.

        Args:
            saved: the validated entries of ``table``.
            continues: whether the state has gradients that wait for an update.

        Raises:
            ValueError: gradients wait that have another scale than this step.
        """
        scale, tracker, before = self.scale, self._growth_tracker, saved["loss_scale"]
        if self._rule is not None and saved["growth_tracker"] is not None:
            scale, tracker = before, saved["growth_tracker"]
        if continues and scale != before:
            raise ValueError(
                f"the state has gradients with loss_scale {before:g} that wait for an update, but "
                f"this step has loss_scale {scale:g}: use the same loss_scale, or load a state "
                "that was saved right after the step returned True"
            )
        return partial(vars(self).update, scale=scale, _growth_tracker=tracker, norm=None)


def first_nonfinite(terms: Sequence[Sequence[Sequence[Part]]], first: int) -> tuple[int, int]:
    """Returns the index of the variable and the replica of the first term that is not finite.

    Returns (-1, -1) if all terms are finite. The host waits for the terms.

    Args:
        terms: ``[variable][replica]``, the terms on each replica of this process.
        first: the number of the first replica of this process.
    """
    columns: list[tuple[int, list[Buffer], list[int]]] = []
    for replica, of_one in enumerate(zip(*terms, strict=True), first):
        owners = [index for index, parts in enumerate(of_one) for _ in parts]
        column = [buffer_of(part) for parts in of_one for part in parts]
        if column:
            columns.append((replica, column, owners))
    sums = [ops.block_sums(column, column[0].device) for _, column, _ in columns]
    wrong = []
    for (replica, column, owners), of_replica in zip(columns, sums, strict=True):
        totals = of_replica.device.download(of_replica).tolist()
        block = next((block for block, each in enumerate(totals) if not math.isfinite(each)), -1)
        if block >= 0:
            ends = list(accumulate([ops.num_blocks(buffer.size) for buffer in column]))
            wrong.append((owners[bisect_right(ends, block)], replica))
    return min(wrong, default=(-1, -1))
