"""Runs everything that needs a GPU, in sections, and records the results; see gpu_check.sh.

The modules:

* ``__main__``: the command line, and one section after another.
* ``setting``: the settings of a section: fake or real, which GPU, how to start Python.
* ``identify``: finds the GPU and the versions, in a child process.
* ``child``: runs one command in its own process group, with a deadline, and ends all its processes.
* ``record``: the JSON file of a section, which is complete at every moment.
* ``section``: runs a section: a generator that yields checks and gets their results.
* ``run_first``: the steps of the first section, as a list of checks; ``run_tests``, ``run_nccl``,
  ``run_example``, ``run_bench``, ``run_sanitize``: the other sections, whose checks it shares;
  ``run_ncu``: the counters of a profiler.
* ``versions``, ``smoke``, ``compile_kernels``, ``torch_assert``, ``torch_training``,
  ``host_costs``, ``busy_gpu``, ``launches``, ``ranks``, ``copy_rate``: programs that the sections
  start; ``unpooled``: a plugin of pytest; ``chart``: draws what was measured.

This process never imports CuPy. If a GPU hangs, it blocks only a child, which has a deadline.
"""
