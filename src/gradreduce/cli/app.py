"""The ``gradreduce`` command and its subcommands."""

from __future__ import annotations

import click

from gradreduce import __version__

from .bench import bench
from .check import check
from .info import info
from .plan import plan
from .trace import trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def command() -> None:
    """Sums gradients on GPUs or simulated devices: inspect, plan, check and measure."""


for each in (info, plan, check, bench, trace):
    each.short_help = (each.help or "").partition("\n\n")[0]  # click would cut it
    command.add_command(each)
