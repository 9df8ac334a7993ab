"""Checks a file of trace events against the Trace Event Format."""

from typing import Any

NAMED = {"process_name", "thread_name"}


def check_trace(content: Any) -> list[dict[str, Any]]:
    """Checks every event by the format's document; returns the complete events.

    In the JSON object format, ``traceEvents`` is a list and ``displayTimeUnit`` is ``ms`` or
    ``ns``. Each event has a name, a phase, a process, a thread and a time in microseconds. A
    complete event (``X``) has a duration too, and metadata (``M``) has the name as an argument.
    Every process has a name.
    """
    assert set(content) == {"displayTimeUnit", "traceEvents"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    complete, named = [], set()
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert isinstance(event["args"], dict)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in NAMED
            assert isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert event["dur"] >= 0
            complete.append(event)
    for event in complete:
        assert {(event["pid"], None), (event["pid"], event["tid"])} <= named
    return complete
