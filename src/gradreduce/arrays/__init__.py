"""What users pass in and get back: arrays, Variables, PerReplica, IndexedSlices."""

from __future__ import annotations

from gradreduce.device import FlatBuffer

from .flat_arrays import FlatArrayConverter

FlatBuffer.array_converter = FlatArrayConverter()
