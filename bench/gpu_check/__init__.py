"""Runs everything that needs a GPU, in sections, and records the results; see gpu_check.sh.

The modules:

* ``__main__``: the command line, and one section after another.
* ``setting``: what a section is told: fake or real, which GPU, how to start Python.
* ``identify``: which GPU and which versions there are; the program that looks is a child.
* ``child``: one command in a process group of its own, with a deadline; nothing survives it.
* ``record``: the JSON file of a section, true at every moment.
* ``section``: drives a section: a generator of checks that is told how each has ended.
* ``run_first``: the steps of the first section, as a list of checks; ``run_tests``, ``run_nccl``,
  ``run_example``, ``run_bench``, ``run_sanitize``: the other sections, whose checks it shares;
  ``run_ncu``: what a profiler counts.
* ``versions``, ``smoke``, ``torch_assert``, ``torch_training``, ``host_costs``, ``launches``,
  ``ranks``, ``copy_rate``: programs that the sections start; ``unpooled``: a plugin of pytest.

This process never imports CuPy: a GPU that hangs hangs a child, which has a deadline.
"""
