"""Finds the libnccl files of this process, and the last error text of NCCL.

CuPy exposes neither. This module reads ``/proc/self/maps``, and loads no further library. On
systems without that file it finds nothing.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MAPS, _NAME = Path("/proc/self/maps"), "libnccl.so"


def error_details() -> str:
    """Returns details for an NCCL error: its last text, and whether several libnccl are loaded."""
    found = list(libraries())
    texts = dict.fromkeys(text for _, text in found if text)
    return "".join(f"; last NCCL error: {text}" for text in texts) + several_text(found)


@cache
def warn_of_several() -> None:
    """Warns once if this process has loaded several libnccl files."""
    text = several_text(list(libraries()))
    if text:
        warnings.warn(f"NCCL may fail or hang{text}", RuntimeWarning, stacklevel=2)


def several_text(libraries: list[tuple[str, str]]) -> str:
    """Returns a warning about several files; empty for one or none."""
    if len(libraries) < 2:
        return ""
    files = ", ".join(file for file, _ in libraries)
    return (
        f"; this process has loaded {len(libraries)} libnccl files: {files}; "
        "make CuPy and PyTorch load the same one"
    )


def libraries() -> Iterator[tuple[str, str]]:
    """Yields for each file its path with version, and the text of its last error."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    paths = [line[line.find("/") :] for line in lines if _NAME in line]
    for path in dict.fromkeys(path for path in paths if Path(path).name.startswith(_NAME)):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)  # never loads it a second time
            version, text = ctypes.c_int(), library.ncclGetLastError
            library.ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):  # the file was replaced; NCCL before 2.13
            yield path, ""
            continue
        text.argtypes, text.restype = (ctypes.c_void_p,), ctypes.c_char_p
        major, rest = divmod(version.value, 10_000)
        said = (text(None) or b"").decode(errors="replace")
        yield f"{path} ({major}.{rest // 100}.{rest % 100})", said
