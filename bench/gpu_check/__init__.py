"""Runs everything that needs a GPU, in sections, and records the results; see gpu_check.sh.

* ``__main__``: the command line, and one section after another.
* ``setting``: their settings, the GPU and its versions. ``child``: runs one command.
* ``section``: runs a section, a generator of checks, and writes its JSON file.
* ``sections``: all sections but ``first``, which is a list of checks in steps.
* ``programs``, ``torch_assert``, ``torch_training``, ``busy_gpu``, ``ranks``: functions that checks
  call, each in a process of its own; ``unpooled``: a plugin of pytest.

This process never imports CuPy. If a GPU hangs, it blocks only a child, which has a deadline.
"""
