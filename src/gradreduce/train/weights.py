"""Weights of a training step: one for each replica and micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradreduce.accumulator.state import AccumulatorState, Addend, PendingGradient
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.errors import brief
from gradreduce.sums.aggregators import aggregate_buffers, scaled
from gradreduce.sums.slices import concatenate_slices
from gradreduce.weights import ONE, as_weight, sum_weights


class TermWeights:
    """The checked ``weights`` of a ``SyncStep``.

    Args:
        weights: ``weights[replica]``: a number for each micro-batch, or one number; not checked.
        num_replicas: the number of replicas of this process.

    Attributes:
        of_replicas: ``[replica][term]``.
        kept: ``[replica][variable]``: the weights of the terms that ``read`` has left.
        total: the exact sum of the weights of all processes; set by ``SyncStep``.

    Raises:
        TypeError: ``weights`` or an entry is not a list, or a weight not a number on the host.
        ValueError: a length is wrong, or a weight is negative or not finite.
    """

    def __init__(self, weights: Any, num_replicas: int) -> None:
        if not isinstance(weights, list | tuple):
            raise TypeError(f"weights={brief(weights)} must be a list with one entry per device")
        if len(weights) != num_replicas:
            raise ValueError(
                f"weights has {len(weights)} entries; expected {num_replicas}, one per device"
            )
        self.of_replicas = [_as_row(f"weights[{index}]", row) for index, row in enumerate(weights)]
        self.kept: list[list[list[float]]] = []
        self.total = sum_weights([each for row in self.of_replicas for each in row])

    @property
    def unread(self) -> set[int]:
        """The replicas of which no term is read."""
        return {replica for replica, row in enumerate(self.of_replicas) if not any(row)}

    def read(
        self, terms: Sequence[Sequence[Any]], variables: Sequence[Variable]
    ) -> list[list[Any]]:
        """Returns ``terms[replica][variable]`` without the terms that are None or have weight 0."""
        left: list[list[Any]] = []
        for replica, (row, weights) in enumerate(zip(terms, self.of_replicas, strict=True)):
            if replica in self.unread:
                left.append([None] * len(variables))
                self.kept.append([[] for _ in variables])
                continue
            pairs = [
                _left(of_one, weights, f"terms of replica {replica} for {variable.name!r}")
                for of_one, variable in zip(row, variables, strict=True)
            ]
            left.append([terms for terms, _ in pairs])
            self.kept.append([kept for _, kept in pairs])
        return left

    def check_total(self, states: Sequence[AccumulatorState]) -> None:
        """Raises ``ValueError`` if all weights of a sum would be 0, in all processes."""
        if not self.total and not all([state.weight() for state in states]):
            raise ValueError(
                "the sum of all weights is 0: at least one gradient must have a weight"
            )

    def pending(
        self, state: AccumulatorState, index: int, placed: Sequence[Sequence[Part]], count: int
    ) -> PendingGradient:
        """Returns the terms of a variable as one gradient per replica.

        Args:
            state: the accumulator of the variable.
            index: the index of the variable.
            placed: the terms that were read, ``[replica][term]``.
            count: the number of replicas of all processes.
        """
        parts: list[Addend] = []
        for replica, (terms, kept) in enumerate(zip(placed, self.kept, strict=True)):
            device, weights = state.devices[replica], kept[index] or [1.0] * len(terms)
            if state.storage.is_sparse and len(terms) > 1:  # they count as one gradient
                rows: list[Any] = [_scale(*each) for each in zip(terms, weights, strict=True)]
                terms, weights = [concatenate_slices(rows, device)], [1.0]
            elif not terms and state.totals[replica] is None:  # each replica has a sum
                shape = tuple([extent or 0 for extent in state.shape or ()])
                # Only -0.0 changes no exact sum.
                sign = -1.0 if state.storage.num_words > 1 else 1.0
                terms, weights = [device.zeros(shape, state.dtype)], [sign]
            for term, weight in zip(terms, weights, strict=True):
                if isinstance(term, IndexedSlices):
                    parts.append(state.storage.to_addend(state, term)._replace(weight=weight))
                else:
                    parts.append(Addend(replica, term, term.shape, weight=weight))
        for dtype in {part.values.dtype for part in parts}:
            state.storage.rehearse(state, dtype, 2)
        excess = self.total - count * ONE
        return PendingGradient(state, tuple(parts), "buffer", len(placed), excess)

    def products(
        self, placed: Mapping[int, Sequence[Sequence[Part]]]
    ) -> dict[int, list[Sequence[Part]]]:
        """Multiplies terms in the accumulate dtype. Afterwards each has weight 1.

        Args:
            placed: the terms that were read, ``[replica][term]`` of each variable.
        """
        made: dict[int, list[Sequence[Part]]] = {}
        for index, of_one in placed.items():
            made[index] = [
                [term if weight == 1 else _scale(term, weight)
                 for term, weight in zip(terms, kept[index] or [1.0] * len(terms), strict=True)]
                for terms, kept in zip(of_one, self.kept, strict=True)
            ]  # fmt: skip
        self.kept = [[[] for _ in row] for row in self.kept]
        return made

    def sum_terms(
        self,
        placed: Mapping[int, Sequence[Sequence[Part]]],
        variables: Sequence[Variable],
        *,
        tree: bool,
    ) -> dict[int, list[Sequence[Part]]]:
        """Multiplies terms and adds those of a replica, in the accumulate dtype.

        Afterwards each replica has one term for each variable, with weight 1.

        Args:
            placed: the terms that were read, ``[replica][term]`` of each variable.
            variables: the variables of the step.
            tree: see ``aggregate_buffers``.
        """
        sums: dict[int, list[Sequence[Part]]] = {index: [] for index in placed}
        for index, of_one in placed.items():
            variable = variables[index]
            for terms, kept, device in zip(of_one, self.kept, variable.devices, strict=True):
                pairs = zip(terms, kept[index], strict=False)  # none for IndexedSlices without rows
                products: list[Any] = [_scale(*pair) for pair in pairs] or list(terms)
                if not products:
                    total: Part = device.zeros(variable.shape, accumulate_dtype(variable.dtype))
                elif isinstance(products[0], IndexedSlices):
                    total = concatenate_slices(products, device)
                else:
                    (total,) = aggregate_buffers([products], device, tree=tree)
                sums[index].append([total])
        self.kept = [[[] for _ in row] for row in self.kept]
        return sums


def _scale(term: Any, weight: float) -> Any:
    """Returns a term times its weight, in the accumulate dtype."""
    if isinstance(term, Buffer):
        return scaled(term, weight)
    return term._with_values(scaled(term.values, weight))


def _as_row(name: str, row: Any) -> tuple[float, ...]:
    if not isinstance(row, list | tuple):
        return (as_weight(name, row),)
    if not row:
        raise ValueError(f"{name} is empty: pass a number for each micro-batch")
    return tuple([as_weight(f"{name}[{index}]", each) for index, each in enumerate(row)])


def _left(terms: Any, weights: Sequence[float], where: str) -> tuple[Any, list[float]]:
    """Returns the terms of a list that are read, and their weights; None if there are none."""
    if not isinstance(terms, list | tuple):
        return terms, []
    if len(terms) != len(weights):
        raise ValueError(f"{where}: {len(terms)} gradients have {len(weights)} weights")
    pairs = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight]
    read = [(term, weight) for term, weight in pairs if term is not None]
    return [term for term, _ in read] or None, [weight for _, weight in read]
