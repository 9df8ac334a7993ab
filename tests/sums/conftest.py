"""Meshes for tests of sums on one device."""

from support.meshes import mesh, numpy_mesh

__all__ = ["mesh", "numpy_mesh"]
