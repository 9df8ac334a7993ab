"""Joins or starts a Ray cluster that asks for a token, and checks the names of actors."""

from __future__ import annotations

import os
import re
from typing import Any

import ray

from gradreduce.errors import brief

# All actors of this library are in this namespace, whatever that of the driver is.
NAMESPACE = "gradreduce"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def init(address: str | None = None, **options: Any) -> None:
    """Joins a running Ray cluster, or starts a local one.

    Does nothing if Ray is initialized. The first use of a class of ``gr.ray`` calls it.

    Args:
        address: of ``ray.init``.
        options: other arguments of ``ray.init``, such as ``num_cpus`` and ``object_store_memory``.
            ``include_dashboard`` is False by default, so that nothing listens for browsers.
    """
    if ray.is_initialized():
        return
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    may_start = (address or os.environ.get("RAY_ADDRESS") or "local") == "local"
    if may_start and mode.lower() != "token":
        raise RuntimeError(f"RAY_AUTH_MODE={mode}: a new Ray cluster would be open")
    ray.init(address, **{"include_dashboard": False, **options})


def check_name(what: str, name: Any) -> str:
    """Returns a name that can be that of an actor and of files.

    Args:
        what: the argument, for errors.
        name: 1 to 128 letters, digits, ``_``, ``.`` and ``-`` of ASCII; the first is a letter or a
            digit.

    Raises:
        TypeError: it is not a string.
        ValueError: it has another form.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what}={brief(name)} must be a string")
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{what}={brief(name)} names an actor and its files: use 1 to 128 ASCII letters, "
            "digits, '_', '-' and single '.', with a letter or digit first"
        )
    return name
