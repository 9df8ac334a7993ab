"""The fixtures of the faces."""

from support.implementations import device, geometric_device, implementation

__all__ = ["device", "geometric_device", "implementation"]
