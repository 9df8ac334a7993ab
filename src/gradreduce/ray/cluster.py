"""Joins a Ray cluster, or starts one that requires a token; checks the names of actors."""

from __future__ import annotations

import os
import re
import threading
from functools import lru_cache
from typing import Any

import ray

from gradreduce.errors import BackendUnavailableError, brief, log_warning

# All actors of this library are in this namespace of Ray; the driver's may be another.
NAMESPACE = "gradreduce"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_AUTH_MODE = "RAY_AUTH_MODE"  # if it is not set, Ray sets it to token for a new cluster
_lock = threading.Lock()  # several threads may create their first accumulators at the same time
_was_forked = False  # whether this process is a fork of one that used Ray


def init(address: str | None = None, **options: Any) -> None:
    """Joins a running Ray cluster, or starts one on this machine.

    The constructors of ``gr.ray`` call it without arguments. If Ray is already initialized in this
    process, ``init`` keeps that cluster and ignores its arguments. It logs a warning if the cluster
    does not require a token. Blocks until the cluster is ready: 2 to 3 seconds for a new one.

    Args:
        address: address of the cluster to join: ``"host:port"``, or ``"auto"`` for a cluster on
            this machine; ``"local"`` starts a new cluster. Default: the address in the variable
            ``RAY_ADDRESS``; if it is not set, the cluster that ``ray start`` has started on this
            machine; if there is none, a new cluster, which ends with this process.
        options: other arguments of ``ray.init``, such as ``num_cpus`` and ``object_store_memory``
            (in bytes) of a new cluster. ``include_dashboard`` is False by default.

    Raises:
        RuntimeError: a new cluster would not require a token, because ``RAY_AUTH_MODE`` is set.
        ConnectionError: the cluster does not answer, or requires a token.
        BackendUnavailableError: this process is a fork of one that used Ray.
        ray.exceptions.AuthenticationError: the cluster requires a token, and this process has none.

    Example: see ``docs/ray.md``. In short::

        gr.ray.init(num_cpus=4)
    """
    _check_not_forked()
    with _lock:
        if not ray.is_initialized():
            _check_mode(address)
            try:
                ray.init(address, **{"include_dashboard": False, **options})
            except ConnectionError as error:
                error.add_note(
                    f"If this cluster asks for a token, start Python with {_AUTH_MODE}=token, and "
                    "with the token in ~/.ray/auth_token or RAY_AUTH_TOKEN."
                )
                raise
        _warn_if_open(ray.get_runtime_context().gcs_address)


def check_usable() -> None:
    """Raises ``BackendUnavailableError`` if this process cannot call actors."""
    _check_not_forked()
    if not ray.is_initialized():
        raise BackendUnavailableError(
            "Ray was shut down in this process: call gr.ray.init, and make the object again"
        )


def _check_not_forked() -> None:
    if _was_forked:
        raise BackendUnavailableError(
            "this process is a fork of one that used Ray, where calls to actors hang: start "
            "processes by Ray, or by multiprocessing with the start method 'spawn'"
        )


def _note_fork() -> None:
    global _was_forked
    _was_forked = ray.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def _check_mode(address: str | None) -> None:
    """Raises ``RuntimeError`` if ``ray.init`` could start a cluster that requires no token."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    mode = os.environ.get(_AUTH_MODE, "token")
    if address in (None, "local") and mode.lower() != "token":
        raise RuntimeError(
            f"{_AUTH_MODE}={mode}: anybody who reaches the ports of a new Ray cluster could run "
            f"code in it. Unset {_AUTH_MODE}, or set it to token. To join a cluster that runs, "
            "pass its address or 'auto' to gr.ray.init"
        )


@lru_cache
def _warn_if_open(cluster: str) -> None:
    """Logs a warning if a cluster requires no token; once for each cluster."""
    context = ray.get_runtime_context()
    if context.worker.mode == ray.WORKER_MODE:
        mode = os.environ.get(_AUTH_MODE)
    else:  # the driver may have another value of the variable than the cluster
        reader = ray.remote(num_cpus=0)(os.getenv)
        mode = ray.get(reader.remote(_AUTH_MODE), timeout=60)
    if mode is None or mode.lower() != "token":
        log_warning(
            __name__,
            "the Ray cluster at %s asks for no token: anybody who reaches its ports can run code "
            "in it. Start it with %s=token",
            cluster,
            _AUTH_MODE,
        )


def check_name(what: str, name: Any) -> None:
    """Raises unless a name is valid for an actor and its files.

    Args:
        what: name of the argument, for errors.
        name: 1 to 128 ASCII letters, digits, ``_``, ``-`` and single ``.``; the first character is
            a letter or a digit.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name has another form.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what}={brief(name)} must be a string")
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{what}={brief(name)} names an actor and its files: use 1 to 128 ASCII letters, "
            "digits, '_', '-' and single '.', with a letter or digit first"
        )
