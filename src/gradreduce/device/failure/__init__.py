"""Failures: deadlines, Ctrl-C, forks, and the end of a process."""
