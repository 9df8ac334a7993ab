"""A fake of CuPy and NCCL that runs the CUDA backend's own code without a GPU, and checks it.

It runs in a separate pytest process: ``python -m pytest -p fake_cupy.plugin tests/backends/cuda``
with this folder's parent on ``PYTHONPATH``, or ``python -m fake_cupy SCRIPT`` for any program.
``machine`` has the queues and the clocks, ``memory`` the memory, ``recorder`` the accesses of
launches; the other modules are what callers see of CuPy, NCCL, PyTorch and JAX.

What it detects:

* two unordered uses of the same bytes, one of them a write: a missing wait
* memory reused or freed while a queue still uses it
* an access out of bounds or without peer access
* a write that ``Kernel.writes`` does not declare
* arguments that do not fit the kernel, a wrong current device, an event that was never recorded
* NCCL: a missing group, unequal counts or dtypes, a wrong stream, a missing rank, use after destroy
  or abort, an abort of only some communicators of a clique; sends and receives of unequal sizes
  between processes, which are threads, and their first exchange, in which the host waits
* captures: CUDA calls that are forbidden meanwhile (allocate, free, query an event, wait for one,
  synchronize the GPU) make the capture invalid
* lack of memory: the pools of a GPU share its memory (``Machine(capacity=…)``); they split, merge
  and run out of memory as CuPy's do, and ``cudaFree`` waits for the GPU
* hangs: a queue can be stuck (``Machine.stuck``); a host wait for it inside the driver is a fault,
  also one for a queue that is full (``Machine.queue_size``)

What it does not show:

* speed and overlap
* what only NVRTC and a GPU do: NVRTC's dialect, its options, inline PTX, races between the threads
  of one launch
* implicit synchronization by the legacy default stream (a blocking stream raises an error)
* other calls that a capture forbids
* NCCL's order of additions, how it comes to hang, and what an abort does to memory
* a missing wait after a copy to pageable host memory: that copy waits, as CUDA documents
* unordered host threads: all threads share one clock, so only the effect of such a race is seen
"""
