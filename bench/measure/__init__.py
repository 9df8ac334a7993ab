"""Code that benchmarks share.

* ``runner``: runs a benchmark: devices, cases, floors, the JSON file and the exit status.
* ``clock``: the time of calls in turns, on the host or on a GPU, and of a copy of as many bytes.
* ``case``: the measurements of one operation, as a table, and the limits that it must keep.
* ``peers``: the same work by other libraries, also whole all-reduces.
* ``reductions``: our own all-reduces; ``all_reduce_gpu``: the cases of them on GPUs.
* ``model_steps``: optimizer steps over a model; ``torch_modules``: models of PyTorch.
* ``in_processes``: calls a function in other processes.
* ``operands``: random numbers and shapes; ``stub_cupy``: a CuPy whose calls do nothing.
"""
