"""Types of public signatures: arrays of any library, nests of them, and names of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

OutputType = Literal["numpy", "cupy", "torch", "jax", "buffer"]
AllReduceAlg = Literal["nccl", "hierarchical_copy"]
ReductionType = Literal["MEAN", "SUM"]
SparseMean = Literal["per_row", "per_gradient"]


class Array(Protocol):
    """An array of NumPy, CuPy, PyTorch or JAX, or a Buffer.

    IndexedSlices and Variables are not.
    """

    @property
    def shape(self) -> Any:
        """The extents."""

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""


class Gradient(Protocol):
    """An ``Array`` or IndexedSlices."""

    @property
    def shape(self) -> Any:
        """The extents of the whole array, if they are known."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""


Nest = Gradient | None | Sequence["Nest"] | Mapping[Any, "Nest"]
ArrayT = TypeVar("ArrayT", bound=Array)
OptionalT = TypeVar("OptionalT", bound=Gradient | None)
NestT = TypeVar("NestT", bound=Sequence[Nest])
