"""Describes calls, so that processes can compare them before they exchange data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gradreduce.errors import listed

# The number of different calls that a process remembers. It compares a forgotten call again.
KNOWN_CALLS = 256


class Description(NamedTuple):
    """What a call does, for the comparison with other processes.

    Attributes:
        digest: a hash, equal for equal calls.
        text: JSON with the values on which all processes must agree, by name, and with the names of
            the tensors. Processes may have other ``sizes``, which the flight record shows.
    """

    digest: str
    text: str

    @classmethod
    def of(
        cls, what: Mapping[str, Any], names: Sequence[str] = (), *, compared: bool = True
    ) -> Description:
        """Describes a call by JSON values.

        Args:
            what: the values, by name.
            names: the names of the tensors, for errors; empty if they have none.
            compared: whether the processes must agree on the names, too.
        """
        text = json.dumps({**what, "names": names} if names else what, default=str)
        digested = text if compared else json.dumps(what, default=str)
        return cls(digest_of(digested.encode()), text)

    @lru_cache(KNOWN_CALLS)  # noqa: B019  # the descriptions of known calls are kept anyway
    def with_settings(self, settings: tuple[tuple[str, object], ...]) -> Description:
        """Returns the description of the same call with more values, by name."""
        what = {**json.loads(self.text), **dict(settings)}
        return Description(digest_of(f"{self.digest} {settings}".encode()), json.dumps(what))


def digest_of(content: bytes | memoryview) -> str:
    """Returns 15 hexadecimal digits of the SHA-256: a number that fits in int64."""
    # Loads OpenSSL, as slow as ten of our modules. Backends import it when a mesh is opened.
    from hashlib import sha256

    return sha256(content).hexdigest()[:15]


def summary(description: Description) -> str:
    """Returns the name of a call and its first tensors."""
    what = json.loads(description.text)
    tensors = _describe_tensors(what)
    return f"{what['call']}, tensors: {listed(tensors, 2)}" if tensors else what["call"]


def _describe_tensors(what: Mapping[str, Any]) -> list[str]:
    """Returns texts for the tensors of a call: name (if any), dtype and shape."""
    tensors, names = what["tensors"], what.get("names")
    if not names:
        return list(tensors)
    return [  # a SyncStep lists the indices of its variables
        name if isinstance(each, int) else f"{name} {each}"
        for name, each in zip(names, tensors, strict=True)
    ]


def _with_tensors(what: Mapping[str, Any]) -> str:
    """Returns the name of a call and its first tensors: ``"all_reduce of float32[2, 3]"``."""
    tensors = [each for each in _describe_tensors(what) if isinstance(each, str)]
    return f"{what['call']} of {listed(tensors, 2)}" if tensors else str(what["call"])


def describe_difference(own_text: str, other_text: str | None, rank: int, other: int) -> str:
    """Describes the first difference between two calls."""
    if other_text is None:
        return f"process {other} makes another call than process {rank}"
    here, there = json.loads(own_text), json.loads(other_text)
    if here["call"] != there["call"]:
        return (
            f"the processes make different calls: {_with_tensors(here)} in process {rank}, "
            f"{_with_tensors(there)} in process {other}"
        )
    for name, value in here.items():
        if name not in ("tensors", "names", "sizes") and there.get(name) != value:
            return (
                f"the processes make different calls: {name} is {value} in process {rank}, "
                f"{there.get(name)} in process {other}"
            )
    mine, others = here["tensors"], there["tensors"]
    names, other_names = here.get("names") or [], there.get("names") or []
    differ = "the processes pass different tensors: "
    if len(mine) != len(others):
        alone = [
            f" ({listed(missing)} only in process {number})"
            for number, own, elsewhere in ((rank, names, other_names), (other, other_names, names))
            if (missing := [name for name in own if name not in elsewhere])
        ]
        counts = f"{len(mine)} in process {rank}, {len(others)} in process {other}"
        return differ + counts + "".join(alone)
    # Names are compared only where dtypes and shapes agree.
    one, two = (mine, others) if mine != others else (names, other_names)
    index = next(index for index, each in enumerate(one) if [each] != two[index : index + 1])
    place: Any = index
    if names != other_names:
        mine, others = _describe_tensors(here), _describe_tensors(there)
    elif names:
        place = names[index]
    return (
        f"{differ}tensor {place} is {mine[index]} in process {rank}, {others[index]} in process "
        f"{other}"
    )
