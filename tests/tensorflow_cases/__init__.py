"""Runs the cases that TensorFlow 1.14 computed: ``tests/data/tensorflow_cases.json``.

``runner`` runs a case step by step; ``world`` is what its steps share; ``encoding`` reads and
compares values; ``better`` is what holds in place of TensorFlow's quirks; ``waived`` what does not
hold, and why. The other modules have a function for each kind of step.

Indices are int64 here, so TensorFlow's int32 is read as int64. A static shape is the shape of the
result. A pack is read without the gaps that bring each tensor in it to a 16-byte boundary.
"""
