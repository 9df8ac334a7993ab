"""Reduce-scatter and all-gather of ``grads[device][tensor]``, and the frame of such calls.

Source: own; the collectives have the names of NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.distributed import Part, ReduceOp, arrays_of
from gradreduce.arrays.types import NestT, OutputType
from gradreduce.backends import default_mesh
from gradreduce.device import Buffer

from .algorithms import Settings
from .arguments import Request, check_exact, check_op, requests_of, shapes_by_rows
from .checked_call import validate_call
from .cross_device_ops import CrossDeviceOps
from .nests import Nests
from .pipeline import algorithm_of
from .requests import copy_to_out
from .shares import all_gather, reduce_scatter
from .weighting import validate_weights, weighting_of


class NestedCalls(CrossDeviceOps):
    """The calls of ``AllReduceCrossDeviceOps`` on ``grads[device][tensor]``, but ``all_reduce``.

    Attributes:
        settings: the settings of the reductions.
    """

    settings: Settings

    def _validate_nests(self, grads: Any, unread: Sequence[int] = ()) -> Nests:
        """Checks ``grads[device][tensor]``, and that the devices can be reduced."""
        mesh = self.mesh or default_mesh()
        nests = Nests(grads, mesh, unread)
        algorithm_of(self.settings, mesh.devices)
        return nests

    @overload
    def reduce_scatter(
        self,
        grads: NestT,
        op: ReduceOp = ReduceOp.MEAN,
        *,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> NestT: ...
    @overload
    def reduce_scatter(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
    def reduce_scatter(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Combines ``grads[device][tensor]`` over the replicas; each gets its share of the rows.

        A tensor has n * k rows (its first dimension), where n is the number of replicas in all
        processes. Replica r gets the rows r * k to (r + 1) * k - 1 of the sum or mean. For
        ``"hierarchical_copy"`` they have the bits of ``all_reduce``. This transfers half the bytes
        of an all-reduce by a ring.

        Args:
            grads: see ``all_reduce``; arrays of shape (n * k, …), which are not written.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``; see ``batch_reduce``.
            output_type: see ``all_reduce``.
            out: see ``all_reduce``; none of the arrays overlaps another or ``grads``.
            weights: see ``all_reduce``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of shape (k, …) with the dtypes of ``all_reduce``, nested like ``grads``, each on
            its replica's own device. When the call waits, see ``all_reduce``.

        Raises:
            ValueError: a tensor is a scalar, or its number of rows is not a multiple of n; or as
                ``all_reduce``. Nothing was launched.
            TypeError: a tensor is IndexedSlices (pass ``.to_dense()``), or has a dtype that cannot
                be added.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> grads = [[np.array([1.0, 2, 3, 4])], [np.array([10.0, 20, 30, 40])]]
            >>> ops.reduce_scatter(grads, gr.ReduceOp.SUM)
            [[array([11., 22.])], [array([33., 44.])]]
        """
        check_op("op", op)

        def run(requests: list[Request]) -> list[tuple[Buffer, ...]]:
            if self.settings.exact:
                check_exact(requests, self.settings)
            weighting = None if weights is None else weighting_of(requests, op, weights)
            return reduce_scatter(self.settings, op, requests, weighting)

        return self._run_nested(
            "reduce_scatter", op, grads, output_type, out, deadline, run, weights
        )

    @overload
    def all_gather(self, grads: NestT, *, deadline: float | None = None) -> NestT: ...
    @overload
    def all_gather(
        self,
        grads: Sequence[Any],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
    def all_gather(
        self,
        grads: Sequence[Any],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Concatenates ``grads[device][tensor]`` of all replicas on every replica.

        Each of the n replicas in all processes passes k rows; row r * k + i of a result is row i of
        replica r. Arrays are copied unchanged: ``wire_dtype`` has no effect.

        Args:
            grads: see ``all_reduce``; arrays of shape (k, …), such as the results of
                ``reduce_scatter``, which are not written.
            output_type: see ``all_reduce``.
            out: see ``all_reduce``; none of the arrays overlaps another or ``grads``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of shape (n * k, …), nested like ``grads``. When the call waits, see
            ``all_reduce``.

        Raises:
            ValueError: a tensor is a scalar; and what ``all_reduce`` raises. Nothing was launched.
            TypeError: a tensor is IndexedSlices (pass ``.to_dense()``), or has a dtype that is not
                supported.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> ops.all_gather([[np.zeros(2)], [np.ones(2)]])
            [[array([0., 0., 1., 1.])], [array([0., 0., 1., 1.])]]
        """
        run = partial(all_gather, self.settings)
        return self._run_nested("all_gather", ReduceOp.SUM, grads, output_type, out, deadline, run)

    @StreamScope()
    def _run_nested(  # noqa: PLR0913  # what the calls differ in
        self,
        name: str,
        op: ReduceOp,
        grads: Sequence[Any],
        output_type: str | None,
        out: Sequence[Any] | None,
        deadline: float | None,
        run: Callable[[list[Request]], Sequence[tuple[Part, ...]]],
        weights: Any = None,
    ) -> Any:
        """Runs a call on ``grads[device][tensor]``, and nests its results like ``grads``."""
        unread: Sequence[int] = ()
        if weights is not None:
            own = validate_weights(weights, len((self.mesh or default_mesh()).devices))
            unread = [index for index, weight in enumerate(own) if not weight]
        nests = self._validate_nests(grads, unread)
        outs = None if out is None else nests.outs_of(out)
        shared = {"reduce_scatter": True, "all_gather": False}.get(name)  # None: an all-reduce
        requests = requests_of(nests.values, elementwise=shared is None, out=outs)
        shapes = None if shared is None else shapes_by_rows(requests, shared=shared)
        call = validate_call(requests, op, output_type, outs, shapes)
        with call.running(name, deadline):
            reduced = run(call.requests)
            if call.outs:
                reduced = copy_to_out(call.requests, reduced)
        results = call.finish(reduced)
        return out if out is not None else nests.nest_results(arrays_of(results))
