"""What users pass in and get back: arrays, Variables, PerReplica, IndexedSlices."""
