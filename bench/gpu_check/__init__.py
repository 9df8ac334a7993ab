"""Runs everything that needs a GPU, in sections, and records the results; see gpu_check.sh.

The modules:

* ``__main__``: the command line, and one section after another.
* ``setting``: the settings of a section: fake or real, which GPU, how to start Python.
* ``identify``: finds the GPU and the versions, in a child process.
* ``child``: runs one command in its own process group, with a deadline, and ends all its processes.
* ``record``: the JSON file of a section, which is complete at every moment.
* ``section``: runs a section: a generator that yields checks and gets their results.
* ``sections``: all sections but ``first``, which is a list of checks in steps.
* ``programs``, ``torch_assert``, ``torch_training``, ``host_costs``, ``busy_gpu``, ``launches``,
  ``ranks``: functions that checks call, each in a process of its own; ``unpooled``: a plugin of
  pytest; ``chart``: draws what was measured.

This process never imports CuPy. If a GPU hangs, it blocks only a child, which has a deadline.
"""
