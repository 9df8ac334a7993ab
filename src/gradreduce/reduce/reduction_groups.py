"""Which replicas make the two halves of hierarchical_copy; never looks at a device."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from typing import Any

from gradreduce.device import as_index
from gradreduce.errors import brief, listed

__all__ = ["Halves", "as_topology", "halves_of"]

# Replica numbers of the first half and of the second, each in the order of its additions.
Halves = tuple[tuple[int, ...], tuple[int, ...]]


def as_topology(topology: Any) -> Halves:
    """Two lists of replica numbers, checked as far as they can be without any devices.

    Raises:
        ValueError: something else, a number that is no integer from 0 up, one that is named
            twice, or one left out below the largest: no number of replicas fits that.
    """
    if not isinstance(topology, list | tuple) or len(topology) != 2:
        raise ValueError(f"topology={brief(topology)} must be two lists of replica numbers")
    first, second = (_as_half(topology, half) for half in topology)
    named = sorted((*first, *second))
    if named and named[-1] >= 2 * len(named) + 8:  # not to make a list of what is left out
        raise ValueError(
            f"topology={brief(topology)} names {named[-1]} and leaves out most below it"
        )
    if not named:
        raise ValueError(f"topology={brief(topology)} names no replica")
    twice = [number for number, after in pairwise(named) if number == after]
    if twice:
        raise ValueError(
            f"topology={brief(topology)} names {_replicas(dict.fromkeys(twice))} twice"
        )
    missing = sorted(set(range(named[-1])) - set(named))
    if missing:
        raise ValueError(f"topology={brief(topology)} leaves out {_replicas(missing)}")
    return first, second


def halves_of(num_replicas: int, topology: Halves | None = None) -> Halves:
    """The halves of so many replicas: those of ``topology``, else the first n // 2 and the rest.

    Raises:
        ValueError: the topology is one of another number of replicas.
    """
    if topology is None:
        split = num_replicas // 2
        return tuple(range(split)), tuple(range(split, num_replicas))
    num_named = len(topology[0]) + len(topology[1])
    if num_named < num_replicas:
        missing = _replicas(range(num_named, num_replicas))
        raise ValueError(
            f"topology={brief(topology)} leaves out {missing} of {num_replicas} replicas"
        )
    if num_named > num_replicas:
        beyond = _replicas(range(num_replicas, num_named))
        raise ValueError(f"topology={brief(topology)} names {beyond} of {num_replicas} replicas")
    return topology


def _as_half(topology: Any, half: Any) -> tuple[int, ...]:
    if not isinstance(half, list | tuple | range):
        raise ValueError(f"topology={brief(topology)}: {brief(half)} is no list of replica numbers")
    return tuple(_as_number(topology, number) for number in half)


def _as_number(topology: Any, number: Any) -> int:
    with suppress(TypeError):
        if as_index(number) >= 0:
            return as_index(number)
    raise ValueError(f"topology={brief(topology)}: {brief(number)} is no integer from 0 up")


def _replicas(numbers: Collection[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
