"""What users pass in and get back: arrays, Variables, PerReplica, IndexedSlices."""

from __future__ import annotations

from gradreduce.device import FlatBuffer

from . import flat_arrays

FlatBuffer.array_converter = flat_arrays
