"""One derivative rule per operation; importing this fills the tape's tables."""

from __future__ import annotations

from . import elementwise, indexing, linear, losses, reductions, shapes

__all__ = ["elementwise", "indexing", "linear", "losses", "reductions", "shapes"]
