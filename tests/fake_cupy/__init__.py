"""A stand-in for CuPy and NCCL that runs the CUDA backend's own code without a GPU.

Used by a pytest process of its own: ``python -m pytest -p fake_cupy.plugin tests/backends/cuda``,
with this folder's parent on ``PYTHONPATH``. The rooms:

* ``memory``: where device and pinned memory lies, who owns which bytes, who used them last.
* ``machine``: the queues of the streams, in a seeded random legal order; happens-before clocks.
* ``recorder``: which bytes a launch reads and writes, from the shipped text built by g++.
* ``kernels``: ``RawModule`` and ``Function``; checks of arguments.
* ``surface``: ``Device``, ``Stream``, ``Event``; ``arrays``: pools, pinned memory, copies, a
  minimal ``ndarray``; ``computing``: NumPy's functions on it.
* ``graphs``: stream captures, of ours and of callers, in CUDA's three modes; CUDA graphs.
* ``nccl``: communicators and groups.
* ``plugin``: puts it in CuPy's place, one machine for each test module.
* ``__main__``: ``python -m fake_cupy SCRIPT`` runs any program so.
* ``programs``: random programs with every fence that they need; which faults in our own source
  they find is in ``tests/planted_faults``.
* ``signatures``: what CuPy 14.2 takes, recorded; compared with the fake, and with CuPy itself.

It detects a missing fence, memory reused or freed while a queue still uses it, an access out of
bounds or without peer access, a write that ``Kernel.writes`` does not declare, arguments that do
not fit the kernel, a wrong current device, an event never recorded; and for NCCL a missing group,
unequal counts or dtypes, a wrong stream, a rank left out, use after destroy or abort, a clique that
is aborted in part. A capture is invalid after what CUDA forbids to a thread meanwhile: to allocate,
free, query events or wait, or to synchronize its GPU. The pools of a GPU share its memory
(``Machine(capacity=…)``): they split, merge and run out as CuPy's do, and ``cudaFree`` waits for
the GPU. A queue can be told to be stuck (``Machine.stuck``): then a host wait for it inside of the
driver is a fault.

It does not show: speed, overlap, NVRTC's dialect, ``-ftz``, inline PTX, races between the threads
of one launch, implicit synchronisation by the legacy default stream (blocking streams are refused),
other calls that a capture forbids, NCCL's order, how its hangs come about, and what an abort does
to memory.
A copy to pageable host memory waits, as CUDA documents it, so a wait left out after it is no fault.
All host threads have one clock, so a race between two of them is seen only by what it does.
"""
