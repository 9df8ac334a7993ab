"""Code above ``device/`` and ``backends/`` neither orders queues nor compares backends."""

import ast
from collections.abc import Iterable, Iterator

METHODS = {"queue_mark", "queue_wait", "wait_for_uses", "add_work"}
OF_DEVICES = {"_mark", "_wait", "_order", "_submit", "compute", "queues"}  # not of ``self``


def ordered_by_hand(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The expressions that use the order of queues."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in METHODS | OF_DEVICES | {"order"}:
            owner = ast.unparse(node.value)
            if (
                node.attr in METHODS
                or (node.attr in OF_DEVICES and owner != "self")
                or (node.attr == "order" and owner.endswith("mesh_state"))
            ):
                yield f"line {node.lineno}: {owner}.{node.attr}"


def compared_backends(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The expressions that compare the name of a backend."""
    for node in nodes:
        for side in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
            if isinstance(side, ast.Attribute) and side.attr == "backend":
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_above_devices_orders_queues_or_compares_backends(sources):
    above = {path: nodes for path, nodes in sources.items() if not path.startswith("backends/")}
    found = {path: [*compared_backends(nodes)] for path, nodes in above.items()}
    for path, nodes in above.items():
        if not path.startswith("device/"):
            found[path] += ordered_by_hand(nodes)
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_is_forbidden_is_found_and_other_attributes_are_left_alone():
    for planted in (
        "mark = device.queue_mark('transfer')",
        "self._devices[0].queue_wait(mark)",
        "order = self._mesh_state.order",
        "device.mesh_state.order.wait_for_uses(blocks)",
        "order.add_work(queue)",
        "device._order(command, work)",
        "partial(job.device._wait, mark)",
        "Work(device.compute, rows, 1)",
    ):
        assert [*ordered_by_hand(ast.walk(ast.parse(planted)))], planted
    allowed = "self._order = [2, 1]; self._wait(); variable.order; done.wait(); thread.join()"
    assert [*ordered_by_hand(ast.walk(ast.parse(allowed)))] == []
    for planted in ("if a.b.backend != 'sim': b()", "if 'cuda' == mesh.backend: c()"):
        assert [*compared_backends(ast.walk(ast.parse(planted)))], planted
