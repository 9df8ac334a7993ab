"""A kernel: one entry of a ``.cu`` file and its NumPy reference.

Also finds the shipped CUDA text, in a wheel, an editable install or a bare checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradreduce.device.failure.forks import cached_property
from gradreduce.device.memory.dtypes import C_TYPES, accumulate_dtype

if TYPE_CHECKING:
    from gradreduce.device.memory.buffer import Row

Arrays = Sequence[np.ndarray]
Template = tuple[str | int, ...]

# Options for NVRTC. -fmad=false: the references round after every operation.
OPTIONS = ("-std=c++17", "-fmad=false")


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: its CUDA source and its NumPy reference.

    A launch passes a table of rows to the kernel. A row holds the 1-D operands of one tensor; those
    that are written come first. All rows of a launch have the same number of operands and the same
    dtypes. An *elementwise* kernel computes element i of its outputs from elements i of its inputs,
    and all operands of a row have the same size, except that some may have one element. Any other
    kernel computes in ``items`` how much work a row is, and its operands may have different sizes.

    Attributes:
        name: the function in the ``.cu`` file; the reference is ``_<name>_reference``.
        source: the stem of the file in ``kernels/``.
        reference: the NumPy reference: ``reference(rows, *scalars)``. It may be called with parts
            of the rows of an elementwise kernel, but with whole rows of any other. Several threads
            may call it at once, with different rows.
        scalars: ``(name, "int64" | "float64")`` of every argument after the table, in order.
        templates: the template arguments of every instantiation in a host build: names of
            ``C_TYPES`` and integers. NVRTC compiles an instantiation at its first use.
        writes: how many operands of each row are written, counted from the first; or the name of
            the scalar that holds this number. The other operands are only read.
        items: a function that returns the number of work items for operands of given sizes; a
            launch divides them into chunks. None: an elementwise kernel, with one item for each
            element of the first operand.
        streams: whether the reference reads each operand once and needs no scratch memory, for a
            row of two operands whose dtype is also the accumulate dtype.
    """

    name: str
    source: str
    reference: Callable[..., None]
    scalars: tuple[tuple[str, str], ...]
    templates: tuple[Template, ...]
    writes: int | str = 1
    items: Callable[[Sequence[int]], int] | None = None
    streams: bool = False

    def num_written(self, scalars: Sequence[int | float]) -> int:
        """Returns the number of operands per row that a launch with these scalars writes."""
        if isinstance(self.writes, int):
            return self.writes
        names = [name for name, _ in self.scalars]
        return int(scalars[names.index(self.writes)])

    @cached_property
    def is_weighted(self) -> bool:
        """Whether the first scalar is a weight, by which a launch multiplies its terms."""
        return "weight" in dict(self.scalars[:1])

    def num_items(self, rows: Sequence[Row]) -> list[int]:
        """Returns the number of work items of each row; rows with 0 are not launched."""
        if self.items is None:
            return [row[0].size for row in rows]
        return [self.items([operand.size for operand in row]) for row in rows]

    def streams_row(self, row: Row) -> bool:
        """Whether the NumPy reference reads this row's operands once; see ``streams``."""
        dtype = row[-1].dtype
        alike = len(row) == 2 and row[0].dtype == dtype == accumulate_dtype(dtype)
        return self.streams and alike

    def expression(self, template: Template) -> str:
        """Returns the C++ name of one instantiation, ``add_n<float, float, 8>``."""
        arguments = [C_TYPES[part] if isinstance(part, str) else str(part) for part in template]
        return f"{self.name}<{', '.join(arguments)}>"


def kernels_folder() -> Path:
    """Returns the folder of the shipped ``.cu`` files.

    It is in the package's folder in a wheel, and beside ``src/`` in a checkout or editable install.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels", package.parent.parent / "kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"no kernels folder in {package} or in its checkout: reinstall gradreduce"
    )


@cache
def kernel_text(stem: str) -> str:
    """Returns ``kernels/<stem>.cu`` with its included headers inlined.

    Then the keys of the compile caches contain the headers, and NVRTC searches for none. ``#line``
    lets compiler errors name lines of the shipped files.
    """
    folder = kernels_folder()
    parts: list[str] = []
    names = [f"{stem}.cu"]
    while names:
        name = names.pop()
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        names += [line.split('"')[1] for line in lines if line.startswith('#include "')]
        kept = [line if not line.startswith('#include "') else "" for line in lines]
        parts.insert(0, f'#line 1 "kernels/{name}"\n' + "\n".join(kept) + "\n")
    return "".join(parts)
