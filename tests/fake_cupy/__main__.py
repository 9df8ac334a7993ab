"""Runs a program with the fake instead of CuPy: ``python -m fake_cupy SCRIPT …`` or ``-m MODULE``.

A fault that the program has caused ends the process with status 1, whatever it returned.
"""

import runpy
import sys

from . import machine, plugin


def main(arguments: list[str]) -> None:
    """Runs the program as ``__main__``, then the work that is left in the queues."""
    plugin.declare_launches()
    plugin.fresh()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        machine.current().settle()


if __name__ == "__main__":
    main(sys.argv[1:])
