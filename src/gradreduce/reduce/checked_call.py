"""The checked arguments of a reduction, and the arrays for its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gradreduce.arrays.convert import as_result_kind
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Mirrored, Part, ReduceOp
from gradreduce.arrays.outputs import Out, release_outputs
from gradreduce.device import Buffer, Device, as_deadline, cached_property, deadline_scope
from gradreduce.errors import brief

from .arguments import Request, with_outs

_NOTHING: AbstractContextManager[object] = nullcontext()
_PARTIAL = "The call failed half way: the arrays of `out` may contain a part of the results."


@dataclass
class CheckedCall:
    """The checked arguments of a reduction, and the arrays for its results.

    Attributes:
        requests: one for each value.
        kinds: the kind of each result's arrays.
        outs: the arrays of ``out`` for each request; empty without ``out``.
    """

    requests: list[Request]
    kinds: list[Kind]
    outs: list[list[Out]]

    @cached_property
    def devices(self) -> list[Device]:
        """The devices of all values and results, each once."""
        rows = [
            each for request in self.requests for each in (request.value.devices, request.devices)
        ]
        return list(dict.fromkeys(chain.from_iterable(rows)))

    def running(self, name: str, deadline: float | None) -> AbstractContextManager[object]:
        """Context manager: applies the deadline; errors say if ``out`` may be partial.

        Args:
            name: the name of the call in deadline errors.
            deadline: seconds from now, not checked; None: no limit.
        """
        seconds = None if deadline is None else as_deadline(deadline)
        return _NOTHING if seconds is None and not self.outs else self._running(name, seconds)

    @contextmanager
    def _running(self, name: str, seconds: float | None) -> Iterator[None]:
        of_mesh = self.devices[0].mesh_state
        partial = of_mesh.on_partial_failure(lambda error: error.add_note(_PARTIAL))
        with deadline_scope(name, seconds, self.devices), partial if self.outs else _NOTHING:
            yield

    def results(self, reduced: Sequence[tuple[Part, ...]]) -> list[Mirrored]:
        """Returns arrays of ``kinds``: those of ``out``, or arrays on ``reduced``."""
        results = [
            Mirrored.of(parts, kind, request.form, request.devices)
            for request, parts, kind in zip(self.requests, reduced, self.kinds, strict=True)
        ]
        for result, row in zip(results, self.outs, strict=bool(self.outs)):
            if row[0].kind == "buffer" or not isinstance(row[0].array, Buffer):
                result._keep_arrays([each.array for each in row])
        return results

    def finish(self, reduced: Sequence[tuple[Part, ...]]) -> list[Mirrored]:
        """Returns the results; users of the results wait for all launched work."""
        if self.outs:
            release_outputs(chain.from_iterable(self.outs))
        results = self.results(reduced)
        for request in self.requests[:1]:
            inexact = request.devices[0].mesh_state.inexact
            if inexact.copies:
                inexact.warn()
        return results


def validate_call(
    requests: list[Request],
    reduce_op: ReduceOp,
    output_type: str | None,
    out: Any,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> CheckedCall:
    """Checks ``output_type`` and ``out`` of requests; launches nothing.

    Args:
        requests: checked requests.
        reduce_op: determines the dtypes of the results.
        output_type: see ``CrossDeviceOps.batch_reduce``.
        out: see ``CrossDeviceOps.batch_reduce``.
        shapes: the shapes of the results; default: those of the values.

    Raises:
        ValueError: ``output_type`` is unknown, or passed together with ``out``.
        ValueError, DeviceMismatchError, TypeError: see ``with_outs``.
    """
    if out is None:
        kinds = [request.value.kind for request in requests]
        if output_type is not None:
            kinds = [
                as_result_kind(output_type, request.value.kind, request.devices[0])
                for request in requests
            ]
        return CheckedCall(requests, kinds, [])
    if output_type is not None:
        raise ValueError(
            f"output_type={brief(output_type)} cannot be combined with out, whose arrays are "
            "the results"
        )
    requests, outs = with_outs(requests, out, reduce_op, shapes)
    return CheckedCall(requests, [row[0].kind for row in outs], outs)
