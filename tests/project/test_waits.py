"""Only ``device/`` and ``backends/`` order queues: code above them makes no marks and no waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradreduce

PACKAGE = Path(gradreduce.__file__).parent
BELOW = ("device", "backends")
METHODS = {"queue_mark", "queue_wait", "wait_for_uses", "add_work"}
OF_DEVICES = {"_mark", "_wait", "_order", "_submit", "compute", "queues"}  # not of ``self``


def ordered_by_hand(source: ast.AST) -> Iterator[str]:
    """The expressions that use the order of queues."""
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (
                node.attr in METHODS
                or (node.attr in OF_DEVICES and owner != "self")
                or (node.attr == "order" and owner.endswith("mesh_state"))
            ):
                yield f"line {node.lineno}: {owner}.{node.attr}"


def test_nothing_above_devices_orders_queues():
    paths = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    found = {
        str(path): [*ordered_by_hand(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))]
        for path in paths
        if path.parts[0] not in BELOW
    }
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "mark = device.queue_mark('transfer')",
        "self._devices[0].queue_wait(mark)",
        "order = self._mesh_state.order",
        "device.mesh_state.order.wait_for_uses(blocks)",
        "order.add_work(queue)",
        "device._order(command, work)",
        "partial(job.device._wait, mark)",
        "Work(device.compute, rows, 1)",
    ],
)
def test_a_wait_by_hand_is_found(planted):
    assert len([*ordered_by_hand(ast.parse(planted))]) >= 1


def test_other_attributes_are_left_alone():
    allowed = "self._order = [2, 1]; self._wait(); variable.order; done.wait(); thread.join()"
    assert [*ordered_by_hand(ast.parse(allowed))] == []
