"""What benchmarks share: clocks, peers, the table of a case, floors; measures nothing by itself.

The rooms:

* ``clock``: how long a call takes, on the host or on a GPU, and a copy of as many bytes beside it.
* ``peers``: the same work by other libraries; those that are not installed say so.
* ``case``: what was found out about one operation, as a table and as JSON.
* ``floors``: the bounds that a benchmark keeps.
* ``report``: how a benchmark ends.
* ``resnet50``: the shapes of the gradients of a model that everybody knows.
* ``reduced``: what was found out about an all-reduce, with bandwidths as nccl-tests define them.
* ``all_reduce_peers``: all-reduce by other libraries; ``all_reduce_gpu``: ours, on GPUs.
"""
