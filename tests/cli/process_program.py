"""The command ``gradreduce`` in several processes: ``process_program.py WRONG ARGUMENTS...``.

WRONG is what process 1 does wrong: ``nothing``, or ``sum``: its sums are wrong.
"""

import os
import sys

import gradreduce as gr
from gradreduce.cli.app import command

RANK = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")


def wrong_sum(terms):
    total = terms[0].numpy()
    total[...] = 7
    return terms[0].device.upload(total)


wrong, *arguments = sys.argv[1:]
if RANK == "1" and wrong == "sum":
    gr.add_n = wrong_sum
try:
    command(arguments)
except SystemExit as error:
    sys.stdout.write(f"process {RANK} exits with {error.code}\n")
    raise
