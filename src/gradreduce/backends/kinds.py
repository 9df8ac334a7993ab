"""The kinds of backends."""

from __future__ import annotations

from gradreduce.device import BackendKind

SIMULATION = BackendKind("sim", shares_host_memory=True, has_streams=False)
CUDA = BackendKind("cuda", shares_host_memory=False, has_streams=True)
