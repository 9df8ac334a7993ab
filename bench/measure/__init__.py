"""Code that benchmarks share: clocks, peers, tables and floors.

The modules:

* ``clock``: the time of a call, on the host or on a GPU, and of a copy of as many bytes.
* ``peers``: the same work by other libraries, or why a library is missing.
* ``case``: the measurements of one operation, as a table and as JSON.
* ``floors``: the limits that a benchmark must keep.
* ``report``: the end of a benchmark: the JSON file and the exit status.
* ``random_values``: the operands of benchmarks.
* ``resnet50``: the shapes of ResNet-50's gradients.
* ``reduced``: the measurements of an all-reduce, with bandwidths as nccl-tests define them.
* ``all_reduce_peers``: all-reduce by other libraries; ``all_reduce_gpu``: ours, on GPUs.
"""
