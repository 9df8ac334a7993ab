"""Snapshots of an actor: numbered files with a checksum, each of which is written atomically."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from gradreduce import checkpoint
from gradreduce.errors import log_warning
from gradreduce.npz_file import read_header

_KEPT = 2  # the older one is loaded if the newest is damaged, or if another shard does not have it
_FINISHED, _UNFINISHED = ".snapshot", ".snapshot.tmp"
_DIGEST_BYTES = hashlib.sha256().digest_size


class Snapshots:
    """The snapshots of one actor; changes no other files in the folder.

    A file begins with the SHA-256 digest of the rest. The rest is a sequence of arrays, each in the
    format of ``np.save``. The first array is a JSON text as bytes, with the names of the other
    arrays. A snapshot of 64 MB takes 80 ms (a virtual disk, 2026-11): 45 ms to write and sync,
    36 ms to hash. Any machine can read it.

    Args:
        folder: folder of the files; it is created if it does not exist. All machines on which Ray
            may restart the actor must share it.
        name: name of the actor; no other actor of this name may use the folder. The constructor
            removes unfinished files of an earlier process of this actor.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        for number in self._numbers(_UNFINISHED):
            self._path(number, _UNFINISHED).unlink(missing_ok=True)

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Writes a snapshot; when this returns, it is on the disk.

        Keeps the previous snapshot and removes older ones. On error, earlier snapshots are
        unchanged.

        Args:
            number: number of the snapshot, at least 1; an earlier snapshot of this number is
                replaced.
            state: a state in the form of ``state_dict``, with NumPy arrays, which are not copied.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
            TypeError: the state has a value that ``state_dict`` does not return.
        """
        path, unfinished = self._path(number), self._path(number, _UNFINISHED)
        self._folder.mkdir(parents=True, exist_ok=True)  # it may have been removed
        try:
            with unfinished.open("w+b") as file:
                _write(file, state)
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        self._sync_folder()
        others = [each for each in self._numbers() if each != number]
        kept = [each for each in others if each < number][1 - _KEPT :]
        for each in set(others) - set(kept):
            self._path(each).unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """Returns the numbers of the undamaged snapshots, in ascending order.

        Reads all files, and logs a warning for each damaged one.
        """
        whole = []
        for number in self._numbers():
            with self._path(number).open("rb") as file:
                if _is_whole(file):
                    whole.append(number)
                    continue
            log_warning(__name__, "the snapshot %s is damaged, and not used", self._path(number))
        return whole

    def loadable(self) -> list[int]:
        """Returns the numbers of the states that can be loaded; see ``numbers``.

        0 means the empty state of a new actor. It can be loaded if there is at most one file, and
        no file is damaged.
        """
        whole, num_files = self.numbers(), len(self._numbers())
        return [0, *whole] if len(whole) == num_files <= 1 else whole

    def newest(self) -> int:
        """Returns the number of the newest undamaged snapshot; 0 if there are no files.

        Raises:
            ValueError: there are files, and all are damaged.
        """
        loadable = self.loadable()
        if not loadable:
            paths = ", ".join(str(self._path(number)) for number in self._numbers())
            raise ValueError(
                f"all snapshots of {self._name!r} are damaged, and were kept: {paths}. Replace one "
                "by an undamaged copy, or move all away to start with an empty state"
            )
        return loadable[-1]

    def read(self, number: int) -> dict[str, Any]:
        """Returns the state of a snapshot, with new arrays.

        Raises:
            FileNotFoundError: there is no snapshot of this number.
            ValueError: the snapshot is damaged, or was not written by this class.
        """
        path = self._path(number)
        with path.open("rb") as file:
            if not _is_whole(file):
                raise ValueError(f"the snapshot {path} is damaged")
            file.seek(_DIGEST_BYTES)
            try:
                contents = json.loads(_next_array(file).tobytes())
                tensors = {name: _next_array(file) for name in contents["names"]}
                return checkpoint.join(tensors, contents["metadata"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"the snapshot {path} is not one of this library") from error

    def remove(self, above: int = 0) -> None:
        """Removes the snapshots with numbers greater than ``above``.

        An actor calls this after it has loaded an older snapshot, because its next commands get the
        numbers of the removed snapshots.
        """
        for number in reversed(self._numbers()):  # newest first: no gap is left if this fails
            if number > above:
                self._path(number).unlink(missing_ok=True)
        self._sync_folder()

    def _path(self, number: int, ending: str = _FINISHED) -> Path:
        return self._folder / f"{self._name}.{number}{ending}"

    def _numbers(self, ending: str = _FINISHED) -> list[int]:
        """Returns the numbers of all files of this actor, damaged or not, in ascending order."""
        form = re.compile(re.escape(self._name) + r"\.([1-9][0-9]*)" + re.escape(ending))
        found = (form.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(each[1]) for each in found if each is not None)

    def _sync_folder(self) -> None:
        """Waits until the directory entries of the files are on the disk."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(file: IO[bytes], state: Mapping[str, Any]) -> None:
    """Writes the digest and the arrays of a state to a file that can be read, too."""
    tensors, metadata = checkpoint.split(state)
    contents = json.dumps({"names": list(tensors), "metadata": metadata}).encode()
    file.write(bytes(_DIGEST_BYTES))
    for array in (np.frombuffer(contents, np.uint8), *tensors.values()):
        array = np.asarray(array, order="C")
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.reshape(-1).view(np.uint8).data)  # np.save would copy it
    digest = _digest(file)
    file.seek(0)
    file.write(digest)
    file.flush()


def _next_array(file: IO[bytes]) -> np.ndarray:
    """Reads an array; raises ``ValueError`` if its header claims more bytes than the file has."""
    shape, _, dtype = read_header(file)
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or nbytes > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError(f"an array of {dtype}{list(shape)} is not in the file")
    array = np.empty(shape, dtype)
    file.readinto(array.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]  # of open("rb")
    return array


def _is_whole(file: IO[bytes]) -> bool:
    """Returns whether the digest at the beginning of a file is that of its contents."""
    digest = file.read(_DIGEST_BYTES)
    return _digest(file) == digest


def _digest(file: IO[bytes]) -> bytes:
    """Returns the digest of the contents of a file."""
    file.seek(_DIGEST_BYTES)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # of open("rb")
