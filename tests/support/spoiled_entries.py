"""Ways to spoil a file of the cache of compiled kernels, none of which may be loaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradreduce.backends import kernel_cache


def _replace(path: Path, content: bytes) -> None:
    """Replaces the file, because changing a loaded one would crash the process."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def _as_another(path: Path) -> None:
    """The same bytes as the build of another kernel."""
    content = path.read_bytes()[:-32]
    _replace(path, content + kernel_cache._checksum(b"another key", content))


SPOILED: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda path: _replace(path, path.read_bytes()[:1000]),
    "empty": lambda path: _replace(path, b""),
    "of another kernel": _as_another,
    "written by others": lambda path: path.chmod(0o622),
    "written by a group": lambda path: path.chmod(0o660),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("there"))),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}
