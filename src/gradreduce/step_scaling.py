"""What a ``SyncStep`` does with mean gradients before the update: unscale, measure, skip, clip.

Every device does it with its own copies or shards, in place. The norm has the same bits on all
devices of all processes, so that all take the same decision without an exchange of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Any

from gradreduce import ops
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import integer, optional, plain
from gradreduce.device import Buffer, as_dtype, as_flag
from gradreduce.errors import brief
from gradreduce.optim.hyperparameters import as_count

# A dynamic scale stays in the range of float32, in which losses are multiplied by it.
_LEAST, _MOST = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that ``SyncStep`` adapts, by the rule of ``torch.amp.GradScaler``.

    It shrinks when gradients overflow, and grows when they have not for a while.

    Attributes:
        init_scale: the scale at first.
        growth_factor: by which it is multiplied after ``growth_interval`` updates without a
            skipped one; above 1.
        backoff_factor: by which it is multiplied when a step is skipped; between 0 and 1.
        growth_interval: see above; at least 1.

    Raises:
        TypeError: an argument that is not a number.
        ValueError: one outside its range.

    Example::

        step = gr.SyncStep(variables, optimizer, ops, loss_scale=gr.DynamicLossScale())
        loss = step.loss_scale * mean_loss  # differentiate this one
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        above_zero("init_scale", self.init_scale, finite=True)
        if not above_zero("growth_factor", self.growth_factor, finite=True) > 1:
            raise ValueError(f"growth_factor={brief(self.growth_factor)} must be above 1")
        if not above_zero("backoff_factor", self.backoff_factor) < 1:
            raise ValueError(f"backoff_factor={brief(self.backoff_factor)} must be below 1")
        as_count("growth_interval", self.growth_interval, least=1)


class GradientScaling:
    """Unscales, measures and clips the mean gradients of a ``SyncStep``.

    Args:
        variables: of the step.
        clip_norm: see ``SyncStep``.
        skip_nonfinite: see there.
        loss_scale: see there.
        check_finite: see there.

    Attributes:
        acts: whether mean gradients are looked at.
        checks: whether gradients of replicas are.
        scale: of the next update.
        num_skipped: updates that were skipped.
        norm: of the last gradients; on the device, unless updates can be skipped. None without any.
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
        self._limit = None if clip_norm is None else above_zero("clip_norm", clip_norm)
        self._rule = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
        self._skips = as_flag("skip_nonfinite", skip_nonfinite) or self._rule is not None
        self.scale = 1.0
        if self._rule is not None:
            self.scale = float(self._rule.init_scale)
        elif loss_scale is not None:
            self.scale = above_zero("loss_scale", loss_scale, finite=True)
        self._check_dtypes(variables, loss_scale)
        self.checks = as_flag("check_finite", check_finite)
        if self.checks and self._skips:
            raise ValueError(
                "check_finite=True raises for gradients that skip_nonfinite=True or a "
                "DynamicLossScale would skip: pass one of them"
            )
        self.num_skipped = 0
        self.norm: Buffer | float | None = None
        self._growth_tracker = 0  # updates since the scale has changed
        self._measures = self._skips or self._limit is not None
        self.acts = self._measures or loss_scale is not None
        # What all processes must agree in, for messages.
        self.options = {
            "clip_norm": self._limit,
            "skip_nonfinite": self._skips,
            "loss_scale": self._rule or self.scale,
            "check_finite": self.checks,
        }
        uses_kernels = self.acts or self.checks
        for dtype in {variable.dtype: None for variable in variables} if uses_kernels else ():
            for device in self._devices:
                ops.prepare_norm_of(device, dtype)
                ops.prepare_clip(device, dtype)
                ops.prepare_all_sum(device, dtype, dtype)

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
        """Unscales and clips gradients in place; False if the update is to be skipped.

        The host waits for the norm if updates can be skipped.

        Args:
            gradients: for each device those that it updates with; overwritten.
            share_sums: takes the block sums of each device, and returns those of all gradients for
                each; by default each device has all gradients.
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
        norm = self.norm  # another thread may begin an update meanwhile
        return _on_host(norm) if isinstance(norm, Buffer) else norm

    def _is_finite(self, norm: Buffer) -> bool:
        """Whether the gradients of this norm are finite; counts, and adapts the scale."""
        self.norm = _on_host(norm)
        is_finite = math.isfinite(self.norm)
        self.num_skipped += not is_finite
        rule = self._rule
        if rule is not None:
            self._growth_tracker = self._growth_tracker + 1 if is_finite else 0
            factor = 1.0 if is_finite else rule.backoff_factor
            if self._growth_tracker >= rule.growth_interval:  # a loaded one may be above
                self._growth_tracker, factor = 0, rule.growth_factor
            self.scale = min(max(self.scale * factor, _LEAST), _MOST)
        return is_finite

    # -- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns entries of the step's state."""
        return {
            "num_skipped": self.num_skipped,
            "loss_scale": self.scale,
            "growth_tracker": None if self._rule is None else self._growth_tracker,
        }

    def ready_state(self, found: Mapping[str, Any], *, continues: bool) -> Callable[[], None]:
        """Returns a function that loads these entries; the scale, if it is and was dynamic.

        Args:
            found: the entries, which fit ``SCHEMA``.
            continues: whether gradients of their scale wait for an update.

        Raises:
            ValueError: gradients of another scale than the step's wait.
        """
        scale, tracker, before = self.scale, self._growth_tracker, found["loss_scale"]
        if self._rule is not None and found["growth_tracker"] is not None:
            scale, tracker = before, found["growth_tracker"]
        if continues and scale != before:
            raise ValueError(
                f"gradients of loss_scale {before:g} wait for an update, and this step has "
                f"loss_scale {scale:g}: pass the same one, or save a state when the step has "
                "returned True"
            )

        def load() -> None:
            self.num_skipped, self.scale = found["num_skipped"], scale
            self._growth_tracker, self.norm = tracker, None

        return load


def _on_host(norm: Buffer) -> float:
    return float(norm.numpy()[0])


def first_nonfinite(gradients: Sequence[PerReplica], first: int) -> tuple[int, int]:
    """Returns the index of the first gradient that is not finite, and its replica; -1 if all are.

    The host waits for the gradients.

    Args:
        gradients: of each tensor those of the replicas of this process.
        first: the number of its first replica.
    """
    sizes = [gradient.buffers[0].size for gradient in gradients]
    ends = list(accumulate(map(ops.num_blocks, sizes)))
    columns = zip(*[gradient.buffers for gradient in gradients], strict=True)
    sums = [ops.block_sums(column, column[0].device) for column in columns]
    wrong = []
    for replica, of_replica in enumerate(sums, first):
        totals = of_replica.numpy().tolist()
        block = next((block for block, each in enumerate(totals) if not math.isfinite(each)), -1)
        if block >= 0:
            wrong.append((bisect_right(ends, block), replica))
    return min(wrong, default=(-1, -1))


def above_zero(name: str, value: Any, *, finite: bool = False) -> float:
    """Validates a number above 0.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0, or not finite where it must be.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={brief(value)} must be a number")
    number = float(value)
    if not number > 0 or (finite and number == math.inf):
        raise ValueError(f"{name}={brief(value)} must be above 0{' and finite' * finite}")
    return number


# Of what ``GradientScaling.state_dict`` returns.
SCHEMA = {
    "num_skipped": integer(0),
    "loss_scale": lambda where, saved: above_zero(where, plain(saved), finite=True),
    "growth_tracker": optional(integer(0)),
}
