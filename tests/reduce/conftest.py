"""Meshes for tests of reductions."""

from support.meshes import mesh, numpy_mesh

__all__ = ["mesh", "numpy_mesh"]
