"""The backward pass: propagates gradients through the recorded nodes of a loss.

It decides the order of the nodes, and so the order of the terms that ``TermAccumulator`` adds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from gradreduce.arrays.convert_gpu import on_gpu_of

from .accumulate_terms import TermAccumulator
from .registry import like
from .tape import Node


def backward(roots: list[Node], gradient: Any, new_terms: Callable[[], TermAccumulator]) -> None:
    """Propagates a gradient from the root, and pushes terms into each leaf's accumulator.

    Args:
        roots: a list with the node of the loss. The function removes it from the list, so that each
            node can be freed when it has been processed.
        gradient: the gradient of the loss, with its shape and dtype.
        new_terms: creates the accumulator of an intermediate tensor.
    """
    root = roots.pop()
    last = root.number
    if root.terms is not None:
        root.terms.push(gradient, (last, -1), root.device)
    awaited, turns = _schedule(root)
    arrived: dict[int, TermAccumulator] = {}
    ready = [(turns[last], last, root)]
    del root
    while ready:
        _, _, node = heapq.heappop(ready)
        with on_gpu_of(node.device):
            if node.number != last:
                gradient = arrived.pop(node.number).result()
            for index, (parent, vjp) in enumerate(node.parents):
                into = parent.terms
                if into is None:
                    into = arrived.setdefault(parent.number, new_terms())
                if gradient is not None:
                    term = _as_operand(vjp(gradient), parent)
                    into.push(term, (node.number, index), parent.device)
                    del term
                awaited[parent.number] -= 1
                if not awaited[parent.number] and parent.terms is None:
                    heapq.heappush(ready, (turns[parent.number], parent.number, parent))


def _schedule(root: Node) -> tuple[dict[int, int], dict[int, int]]:
    """Computes the number of terms and the turn of each node that ``root`` depends on.

    Returns:
        Two dicts by node number: the number of terms that a node gets, and its turn. Of the nodes
        that have all their terms, the one with the smallest turn is processed first. The turn of a
        node is the number of the earliest node, among itself and the nodes that it depends on, that
        uses a tensor with several uses. If there is none, it is the number of ``root``.
    """
    awaited = {root.number: 0}
    nodes = [root]
    for node in nodes:
        for parent, _ in node.parents:
            if parent.number not in awaited:
                awaited[parent.number] = 0
                nodes.append(parent)
            awaited[parent.number] += 1
    turns: dict[int, int] = {}
    for node in sorted(nodes, key=attrgetter("number")):  # parents before their children
        turn = root.number
        for parent, _ in node.parents:
            used_from = node.number if awaited[parent.number] > 1 else turn
            turn = min(turn, turns[parent.number], used_from)
        turns[node.number] = turn
    return awaited, turns


def _as_operand(term: Any, node: Node) -> Any:
    """Converts a term to the shape and dtype of its tensor, which an operation may have changed.

    Operands of an operation are broadcast, and may have different dtypes.
    """
    if term is None:
        return None
    term = like(term, node.shape)
    return term if term.dtype == node.dtype else term.astype(node.dtype)
