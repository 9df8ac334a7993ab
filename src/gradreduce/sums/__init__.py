"""Sums of the terms of one device: add_n, accumulate_n, and IndexedSlices."""
