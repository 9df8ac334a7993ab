"""Checks ``reduction_groups``: the groups of replicas that hierarchical_copy adds."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any, Literal

from gradreduce.device import as_count
from gradreduce.errors import brief, listed

# The replica numbers of each group, in the order of its additions; groups in the order of theirs.
ReductionGroups = tuple[tuple[int, ...], ...]
# The replicas of each process are one group.
Processes = Literal["processes"]


def as_reduction_groups(reduction_groups: Any) -> ReductionGroups | Processes:
    """Checks the groups as far as possible without knowing the devices.

    Raises:
        ValueError: it is neither lists nor ``"processes"``, a number is not a non-negative integer
            or is repeated, or a number below the largest is missing.
    """
    if isinstance(reduction_groups, str) and reduction_groups == "processes":
        return "processes"
    if not isinstance(reduction_groups, list | tuple):
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} must be a list of lists of replica "
            "numbers, or 'processes'"
        )
    groups = tuple([_as_group(reduction_groups, group) for group in reduction_groups])
    names = f"reduction_groups={brief(reduction_groups)} names"
    named = sorted([number for group in groups for number in group])
    if not named:
        raise ValueError(f"{names} no replica")
    if named[-1] >= 2 * len(named) + 8:  # a list of the missing ones would be too long
        raise ValueError(f"{names} replica {named[-1]} and leaves out most replicas below it")
    twice = [number for number, after in pairwise(named) if number == after]
    if twice:
        raise ValueError(f"{names} {_replicas(dict.fromkeys(twice))} twice")
    missing = sorted(set(range(named[-1])) - set(named))
    if missing:
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} leaves out {_replicas(missing)}"
        )
    return groups


def reduction_groups_of(
    num_replicas: int, reduction_groups: ReductionGroups | None = None
) -> ReductionGroups:
    """Returns ``reduction_groups``; by default the first n // 2 replicas and the rest.

    Raises:
        ValueError: ``reduction_groups`` is for another number of replicas.
    """
    if reduction_groups is None:
        split = num_replicas // 2
        return tuple(range(split)), tuple(range(split, num_replicas))
    num_named = sum(map(len, reduction_groups))
    if num_named != num_replicas:
        ends = sorted([num_named, num_replicas])
        verb = "leaves out" if num_named < num_replicas else "names"
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} {verb} {_replicas(range(*ends))} of "
            f"{num_replicas} replicas"
        )
    return reduction_groups


def _as_group(reduction_groups: Any, group: Any) -> tuple[int, ...]:
    if not isinstance(group, list | tuple | range):
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)}: {brief(group)} must be a list of replica "
            "numbers"
        )
    where = f"reduction_groups={brief(reduction_groups)}: "
    return tuple([as_count(where, number) for number in group])


def _replicas(numbers: Collection[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
