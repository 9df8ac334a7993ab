"""Runs everything that needs a GPU, in sections, and records the results; see gpu_check.sh.

Its own process never imports CuPy. If a GPU hangs, it blocks only a child, which has a deadline.
"""
