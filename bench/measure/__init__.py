"""What benchmarks share: clocks, peers, the table of a case, floors; measures nothing by itself.

The rooms:

* ``clock``: how long a call takes, on the host or on a GPU, and a copy of as many bytes beside it.
* ``peers``: the same work by other libraries; those that are not installed say so.
* ``case``: what was found out about one operation, as a table and as JSON.
* ``floors``: the bounds that a benchmark keeps.
"""
