"""Fixtures: the implementations of a kernel."""

from support.implementations import ASKED, device, geometric_device, implementation

__all__ = ["device", "geometric_device", "implementation"]

# With their own builds, for any requested implementation; the plain run tests the others.
collect_ignore = ["test_one_template.py", "test_streamed.py", "test_traffic.py"] if ASKED else []
