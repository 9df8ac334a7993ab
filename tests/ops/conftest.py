"""The fixtures of the faces."""

from support.implementations import device, face, geometric_device

__all__ = ["device", "face", "geometric_device"]
