"""Runs everything that needs a GPU, in sections, and keeps what it saw; started by gpu_check.sh.

The rooms:

* ``__main__``: the command line, and one section after another.
* ``setting``: what a section is told: fake or real, which GPU, how to start Python.
* ``identify``: which GPU and which versions there are; the program that looks is a child.
* ``child``: one command in a process group of its own, with a deadline; nothing survives it.
* ``record``: the JSON file of a section, true at every moment.
* ``section``: drives a section: a generator of checks that is told how each has ended.
* ``run_tests``, ``run_nccl``, ``run_example``, ``run_bench``, ``run_sanitize``: the sections.
* ``ranks``, ``copy_rate``, ``unpooled``: programs and a plugin that the sections start.

This process never imports CuPy: a GPU that hangs hangs a child, which has a deadline.
"""
