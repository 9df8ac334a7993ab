"""A kernel: one entry of a ``.cu`` file and its NumPy reference.

Also finds the shipped CUDA text, in a wheel, an editable install or a bare checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .dtypes import C_TYPES, accumulate_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from .buffer import Row

Arrays = Sequence[np.ndarray]
Template = tuple[str | int, ...]

# Of NVRTC. -fmad=false: the references round after every operation. CuPy appends -ftz=true to every
# build, so subnormals are flushed on a GPU and kept by NumPy.
OPTIONS = ("-std=c++17", "-fmad=false")


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: its CUDA source and its NumPy reference.

    A launch gives it a table of rows. A row holds the 1-D operands of one tensor, the written
    ones first; every row of a launch has the same number of operands and the same dtypes. An
    *elementwise* kernel makes element i of what it writes from elements i of what it reads, and
    the operands of a row have as many elements each. Any other one says in ``items`` how much
    work a row is; its operands may have different sizes.

    Attributes:
        name: the entry in the ``.cu`` file; the reference is ``_<name>_reference``.
        source: stem of the file in ``kernels/`` that holds the entry.
        reference: the NumPy reference: ``reference(rows, *scalars)``. The rows of an elementwise
            kernel may be cut anywhere along their elements; all others come whole. Several threads
            may call it, each with rows of its own.
        scalars: ``(name, "int64" | "float64")`` of every argument after the table, in order.
        templates: every instantiation that a host build holds, as template arguments: names of
            ``C_TYPES`` and integers. NVRTC compiles what is asked for, when it is asked for.
        writes: how many operands of each row, counted from the first, are written; or the name
            of the scalar that says so. Everything behind them is only read.
        items: the items of work that operands of these sizes make: what the chunks of the table
            count. None: elementwise, one for each element of the first operand.
        streams: whether the reference needs no scratch for a row of two operands of one dtype in
            which that is added: it goes over each of them once.
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
        """Returns how many operands of each row a launch with these scalars writes."""
        if isinstance(self.writes, int):
            return self.writes
        names = [name for name, _ in self.scalars]
        return int(scalars[names.index(self.writes)])

    def num_items(self, row: Row) -> int:
        """Returns the items of work of a row; rows without any are not launched."""
        if self.items is None:
            return row[0].size
        return self.items([operand.size for operand in row])

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

    Beside the package in a wheel, beside ``src/`` in a checkout (editable installs too).

    Raises:
        FileNotFoundError: neither place has them.
    """
    from pathlib import Path  # takes as long to import as ten modules of this package

    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels", package.parent.parent / "kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"no kernels folder beside {package} nor beside its checkout: the installation is damaged"
    )


@cache
def kernel_text(stem: str) -> str:
    """Returns ``kernels/<stem>.cu`` with the headers that it includes inlined.

    Pasted, not included, because CuPy's on-disk cache is keyed by the source text and would miss
    a changed header. ``#line`` makes the compiler's errors point into the shipped files.
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
