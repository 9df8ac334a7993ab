"""Runs the cases that TensorFlow 1.14 computed: ``tests/data/tensorflow_cases.json``.

The file holds facts: steps in a small vocabulary, and what TensorFlow 1.14 gave for them. Its own
keys say how values, errors and tolerances are written. The modules:

* ``encoding``: the file's arrays as NumPy's, and whether what a step gave is what is expected.
* ``runner``: one case, step by step; ``world``: what the steps of a case share.
* ``aggregation``, ``accumulators``, ``reduction``, ``packing``, ``gradients``, ``agn``: a function
  for each kind of step.
* ``better``: what holds in place of TensorFlow's quirks; ``waived``: what does not hold, and why.

Three readings of ours apply to every case:

* Indices are int64 here whatever dtype they came in, so TensorFlow's int32 is read as int64.
* A static shape is the shape of the result: nothing here is known before it is there.
* A pack is read without the gaps that bring each tensor in it to a 16-byte boundary.
"""
