"""The fixtures of the faces."""

from faces import device, face, geometric_device

__all__ = ["device", "face", "geometric_device"]
