"""The cache of compiled kernels: ``$XDG_CACHE_HOME/gradreduce`` (``~/.cache/gradreduce``).

A *key* is all that a file's content depends on. A file ends with a checksum of its key and content.
The folder and each file must belong to this user and be writable by nobody else. Where there is no
such folder, every process compiles its own kernels.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from gradreduce.device import replace_file
from gradreduce.errors import log_warning


def file_name(stem: str, key: bytes, suffix: str) -> str:
    """Returns the name of the file for this key."""
    return f"{stem}-{hashlib.sha256(key).hexdigest()[:24]}{suffix}"


def cache_folder() -> Path:
    """Returns ``gradreduce`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; makes it if missing.

    Raises:
        OSError: there is no home, or the folder cannot be made.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))  # ignored if relative
    try:
        folder = (named if named.is_absolute() else Path.home() / ".cache") / "gradreduce"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    if not folder.is_absolute():
        raise FileNotFoundError("HOME is not the path of a folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def open_cache(*, plain_path: bool = False) -> Iterator[Path]:
    """Opens the cache folder by a path that stays valid when folders are renamed.

    Args:
        plain_path: open it by its own path.

    Raises:
        OSError: there is no folder, or another user can write it and may have put files there.
    """
    folder = cache_folder()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if not _is_ours(status):
            raise PermissionError(
                f"{folder} is owned by user {status.st_uid} and has mode "
                f"{status.st_mode & 0o7777:o}: it must be owned by user {os.geteuid()} and "
                "writable by nobody else"
            )
        opened = Path(f"/proc/self/fd/{descriptor}")
        yield opened if not plain_path and opened.exists() else folder
    finally:
        os.close(descriptor)


def read_entry(path: Path, key: bytes) -> bytes | None:
    """Returns the content of a file; None unless it is complete, ours and of this key.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    # Non-blocking: opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not _is_ours(os.fstat(descriptor)):
            return None
        stored = file.read()
    size = len(stored) - hashlib.sha256().digest_size
    content = stored[:size]
    return content if stored[size:] == _checksum(key, content) else None


def write_entry(path: Path, key: bytes, content: bytes) -> None:
    """Writes a file, completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, content + _checksum(key, content), mode=0o600)


def warn_not_cached(error: OSError) -> None:
    """Logs, once for each reason, why kernels are not kept."""
    # Without the random name of a temporary file.
    path = "" if error.filename is None else str(error.filename)
    where = f": {path}" if path and not path.endswith(".part") else ""
    _warn_once((error.strerror or str(error)) + where)


@cache
def _warn_once(why: str) -> None:
    log_warning(
        __name__, "compiled kernels are not cached, and every process builds its own: %s", why
    )


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user can write a file or folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(key: bytes, content: bytes) -> bytes:
    """Returns the checksum of key and content, stored at a file's end."""
    return hashlib.sha256(hashlib.sha256(key).digest() + content).digest()
