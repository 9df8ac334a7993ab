"""``BackendOptions``: how the backend ``"gradreduce"`` of ``torch.distributed`` adds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from gradreduce.arrays.types import AllReduceAlg
from gradreduce.backends import Kernels, check_kernels
from gradreduce.device import as_deadline
from gradreduce.errors import brief
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of a process group of the backend ``"gradreduce"``.

    Pass them as ``pg_options`` to ``init_process_group`` or ``new_group``, in every process of the
    group with the same values. A group without options has those of the default group. If that
    has none either, the environment variables ``GRADREDUCE_EXACT``, ``GRADREDUCE_ALL_REDUCE_ALG``,
    ``GRADREDUCE_WIRE_DTYPE``, ``GRADREDUCE_DEADLINE`` and ``GRADREDUCE_KERNELS`` give the options.

    Example: see ``docs/pytorch.md``.

    Args:
        exact: see ``AllReduceCrossDeviceOps``.
        all_reduce_alg: see ``AllReduceCrossDeviceOps``.
        wire_dtype: see ``AllReduceCrossDeviceOps``.
        deadline: the most seconds for a collective. Default: the ``timeout`` of the group.
        kernels: for tensors on the CPU; see ``open_mesh``.

    Raises:
        TypeError, ValueError: what ``AllReduceCrossDeviceOps`` and ``open_mesh`` raise; or
            ``deadline`` is not a number above 0.
    """

    exact: bool = False
    all_reduce_alg: AllReduceAlg = "hierarchical_copy"
    wire_dtype: str | None = None
    deadline: float | None = None
    kernels: Kernels = "numpy"

    def __post_init__(self) -> None:
        as_deadline(self.deadline)
        check_kernels(self.kernels)
        self.make_ops(None)

    def __repr__(self) -> str:
        default = BackendOptions.__dataclass_fields__
        passed = {
            name: value for name, value in asdict(self).items() if value != default[name].default
        }
        return f"BackendOptions({', '.join(f'{name}={passed[name]!r}' for name in passed)})"

    def make_ops(self, mesh: Any) -> AllReduceCrossDeviceOps:
        """Returns the ``AllReduceCrossDeviceOps`` over a mesh; called by the backend."""
        return AllReduceCrossDeviceOps(
            self.all_reduce_alg, mesh=mesh, wire_dtype=self.wire_dtype, exact=self.exact
        )


def options_from(environment: Mapping[str, str] = os.environ) -> BackendOptions:
    """Returns the options that environment variables give.

    Raises:
        ValueError: a variable has a wrong value; the error names it.
    """
    found: dict[str, Any] = {}
    for field in fields(BackendOptions):
        variable = f"GRADREDUCE_{field.name.upper()}"
        text = environment.get(variable, "")
        if not text:
            continue
        try:
            value = _READERS.get(field.name, str)(text)
            BackendOptions(**{field.name: value})
        except (KeyError, ValueError) as error:
            raise ValueError(f"{variable}={brief(text)}: {_reason(error)}") from None
        found[field.name] = value
    return BackendOptions(**found)


_READERS: dict[str, Any] = {"exact": {"0": False, "1": True}.__getitem__, "deadline": float}


def _reason(error: Exception) -> str:
    return "must be 0 or 1" if isinstance(error, KeyError) else str(error)


def check_equal(texts: Sequence[str]) -> None:
    """Compares the options of all processes of a group.

    Args:
        texts: the ``repr`` of the options of each process, or of an error, in the order of ranks.

    Raises:
        ValueError: they differ.
    """
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                "the processes of a group have different options for the backend 'gradreduce': "
                f"{texts[0]} in process 0, {text} in process {rank}"
            )
