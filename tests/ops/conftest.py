"""Fixtures: the implementations of a kernel."""

from support.implementations import device, geometric_device, implementation

__all__ = ["device", "geometric_device", "implementation"]
