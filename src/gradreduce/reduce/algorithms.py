"""The all-reduce algorithms by name, and the settings of ``AllReduceCrossDeviceOps``."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from gradreduce.arrays.types import AllReduceAlg
from gradreduce.device import DType, as_count, as_dtype, as_flag
from gradreduce.errors import brief
from gradreduce.ops import NUM_WORDS, as_num_words

from .algorithm import Algorithm, ProcessesName, ReductionGroups, as_reduction_groups
from .hierarchical_copy import HierarchicalCopy
from .nccl_all_reduce import Nccl

ALGORITHMS: dict[AllReduceAlg, type[Algorithm]] = {
    "nccl": Nccl,
    "hierarchical_copy": HierarchicalCopy,
}


class Settings(NamedTuple):  # hashed in each call, five times as fast as a dataclass
    """The checked arguments of an ``AllReduceCrossDeviceOps``; see there."""

    all_reduce_alg: AllReduceAlg
    num_packs: int
    agg_small_grads_max_bytes: int
    agg_small_grads_max_group: int
    reduction_groups: ReductionGroups | ProcessesName | None
    wire_dtype: DType | None
    exact: bool
    words: int
    num_words: int = 1  # neighbouring Buffers of a replica: its gradient is their exact sum


def make_settings(  # noqa: PLR0913  # those of the constructor
    all_reduce_alg: Any,
    num_packs: Any,
    agg_small_grads_max_bytes: Any,
    agg_small_grads_max_group: Any,
    reduction_groups: Any,
    wire_dtype: Any,
    exact: Any,
    words: Any,
) -> Settings:
    """Checks the arguments of the constructor that calls this; raises what the constructor does."""
    exact = as_flag("exact", exact)
    if exact or words is not NUM_WORDS:
        words = as_num_words(words)
        if not exact and words != NUM_WORDS:
            raise ValueError(f"words={words} is only for exact=True")
    if all_reduce_alg is None:
        all_reduce_alg = "hierarchical_copy" if exact else "nccl"
    if not isinstance(all_reduce_alg, str) or all_reduce_alg not in ALGORITHMS:
        raise ValueError(f"all_reduce_alg={brief(all_reduce_alg)} is not one of {list(ALGORITHMS)}")
    if reduction_groups is not None and not ALGORITHMS[all_reduce_alg].has_groups:
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} is only for 'hierarchical_copy'; "
            f"{all_reduce_alg!r} chooses its own"
        )
    settings = Settings(
        all_reduce_alg,
        as_count("num_packs=", num_packs),
        as_count("agg_small_grads_max_bytes=", agg_small_grads_max_bytes),
        as_count("agg_small_grads_max_group=", agg_small_grads_max_group),
        None if reduction_groups is None else as_reduction_groups(reduction_groups),
        None if wire_dtype is None else _as_wire(wire_dtype),
        exact,
        words,
    )
    if exact:
        _check_exact(settings)
    passed = [
        f"{name}={getattr(settings, name)}"
        for name, default in (("agg_small_grads_max_bytes", 0), ("agg_small_grads_max_group", 10))
        if getattr(settings, name) != default
    ]
    if passed and settings.num_packs:
        verb = "has" if len(passed) == 1 else "have"
        warnings.warn(
            f"{' and '.join(passed)} {verb} no effect with num_packs={settings.num_packs}: pass "
            "num_packs=0 to reduce small gradients in groups",
            stacklevel=3,
        )
    return settings


def _check_exact(settings: Settings) -> None:
    """Raises ``ValueError`` for settings with which a sum would be rounded more than once."""
    if settings.all_reduce_alg == "nccl":
        raise ValueError(
            "all_reduce_alg='nccl' cannot be combined with exact=True: NCCL rounds each addition; "
            "pass 'hierarchical_copy', or None"
        )
    if settings.reduction_groups is not None:
        raise ValueError(
            f"reduction_groups={brief(settings.reduction_groups)} cannot be combined with "
            "exact=True: an exact sum has no order, so groups change nothing"
        )
    if settings.wire_dtype not in (None, as_dtype("float32")):
        raise ValueError(
            f"wire_dtype='{settings.wire_dtype}' cannot be combined with exact=True: terms would "
            "be rounded on the way; pass 'float32', or None"
        )


def check_wire(settings: Settings, dtype: DType) -> None:
    """Raises ``ValueError`` if exact terms of this dtype would be rounded on the way."""
    if settings.wire_dtype is not None and dtype.name == "float64":
        raise ValueError(
            f"wire_dtype='{settings.wire_dtype}' cannot be combined with exact=True for float64: "
            "terms would be rounded on the way; pass None"
        )


def _as_wire(wire_dtype: Any) -> DType:
    with suppress(TypeError):
        if as_dtype(wire_dtype).name in ("float16", "bfloat16", "float32"):
            return as_dtype(wire_dtype)
    raise ValueError(f"wire_dtype={brief(wire_dtype)} is not 'float16', 'bfloat16' or 'float32'")
