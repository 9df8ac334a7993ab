"""Runs scripts one after the other in each process of torchrun, and saves the network they train.

The arguments are a folder with the scripts, and a list of ``[name, script, arguments, inf]`` as
JSON. ``inf``: the data of process 1 are too large for float32.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def too_large(*shape: int, generator: object) -> torch.Tensor:
    return torch.full(shape, 1e38)


def own_store(name: str, *arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """A store like PyTorch's rendezvous, without keys of earlier default groups."""
    for store, rank, size in dist.rendezvous(*arguments, **options):
        yield dist.PrefixStore(name, store), rank, size


def main(folder: str, runs: str) -> None:
    os.chdir(folder)
    for name, script, arguments, inf in json.loads(runs):
        sys.argv = [script, *map(str, arguments)]
        with ExitStack() as patches:
            if inf and RANK == 1:
                patches.enter_context(mock.patch("torch.randn", too_large))
            own = partial(own_store, name)
            patches.enter_context(mock.patch("torch.distributed.distributed_c10d.rendezvous", own))
            status, names = run(script)
        print(f"{name}: status {status} of process {RANK}", flush=True)  # noqa: T201
        if "net" in names:
            state = {each: names[each].state_dict() for each in ("net", "scaler")}
            torch.save({**state, "first": names["first"]}, f"{name}.{RANK}")


def run(script: str) -> tuple[object, dict[str, Any]]:
    """Runs a script like torchrun; returns its exit status and its global names."""
    sys.path.insert(0, str(Path(script).parent))
    try:
        return 0, runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code, {}
    finally:
        del sys.path[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
