"""Fixtures: the implementations of a kernel."""

from support.implementations import ASKED, device, geometric_device, implementation

__all__ = ["device", "geometric_device", "implementation"]

# On builds of their own, whichever implementation was asked for: the plain run has had them.
collect_ignore = ["test_one_template.py", "test_streamed.py", "test_traffic.py"] if ASKED else []
