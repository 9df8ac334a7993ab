"""Reads ``.npz`` files of others: what their headers claim is checked before it is allocated."""

from __future__ import annotations

import math
import sys
import zlib
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

_COMPRESSIONS = (0, 8)  # ZIP_STORED and ZIP_DEFLATED of zipfile; the others can expand much more
_MOST_EXPANDED = 1032  # bytes for each byte that is compressed by deflate
_PART_BYTES = 2**16


def reading_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Returns what reading an array of a damaged file raises, and others.

    Whoever has opened a file has imported ``zipfile``, whose import takes as long as ten modules of
    this package.
    """
    # RuntimeError: it is encrypted, or compressed by an unknown method (NotImplementedError).
    bad_zip = sys.modules["zipfile"].BadZipFile
    return (ValueError, TypeError, RuntimeError, EOFError, bad_zip, zlib.error, *others)


def check_disjoint(store: Any) -> None:
    """Raises ``ValueError`` if ``store`` is an open file whose entries share bytes.

    All of them would be decompressed, so that a small file would take much memory.
    """
    archive: Any = store.zip if isinstance(store, NpzFile) else None
    if archive and sum([each.compress_size for each in archive.infolist()]) > archive.start_dir:
        raise ValueError("the entries of the file overlap")


def read_array(file: NpzFile, name: str) -> np.ndarray:
    """Reads an array of an open file. NumPy alone would allocate what its header claims.

    Raises:
        KeyError: there is no array of this name.
        ValueError: it cannot be read, or its header claims another size than the file has.
    """
    archive: Any = file.zip
    info = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
    try:
        if info.compress_type not in _COMPRESSIONS:
            raise ValueError("it is not compressed as np.savez_compressed does it")
        with archive.open(info) as member:
            shape, order, dtype = read_header(member)
            nbytes = math.prod(shape) * dtype.itemsize
            stored = min(info.compress_size, archive.start_dir)  # members end before start_dir
            if nbytes != info.file_size - member.tell() or nbytes > _MOST_EXPANDED * stored:
                raise ValueError("its header claims another size than the file has")
            if dtype.hasobject or not dtype.itemsize:
                raise ValueError(f"its dtype is {dtype}")
            array = np.empty(shape, dtype, order)
            _read_into(array.reshape(-1, order="A").view(np.uint8), member)
    except reading_errors(OSError) as error:
        raise ValueError(f"the array {name!r} cannot be read: {error}") from None
    return array


def _read_into(content: np.ndarray, member: IO[bytes]) -> None:
    """Reads all bytes, in small parts: a large one would exist twice."""
    begin = 0
    while part := member.read(_PART_BYTES):
        content[begin : begin + len(part)] = np.frombuffer(part, np.uint8)
        begin += len(part)
    if begin != len(content):
        raise EOFError("the file ends too early")


def read_header(member: IO[bytes]) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype]:
    """Reads the shape, order and dtype of an array that ``np.save`` has stored.

    Raises:
        ValueError: the header cannot be read.
    """
    try:
        read = npy.read_array_header_1_0
        if npy.read_magic(member) != (1, 0):
            read = npy.read_array_header_2_0
        shape, is_fortran, dtype = read(member)
    except Exception as error:  # also of Python's tokenizer, which NumPy uses for a header
        raise ValueError(f"its header is wrong: {error}") from None
    return shape, "F" if is_fortran else "C", dtype
