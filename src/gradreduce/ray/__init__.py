"""Accumulators and AGN centers that processes and machines share, as actors of Ray.

Imported only when asked for, as ``gr.ray``: ``import gradreduce`` does not import Ray.
"""

from __future__ import annotations

from gradreduce.ray.cluster import init

__all__ = ["init"]
