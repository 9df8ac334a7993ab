"""Starts or joins clusters: ``python cluster_program.py SCENARIO HOME [ADDRESS]``."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
    os.environ.pop(name, None)
scenario, os.environ["HOME"], *arguments = sys.argv[1:]
if scenario != "token":
    os.environ["RAY_AUTH_MODE"] = "token" if scenario == "join" else "disabled"

import ray  # noqa: E402 - reads the variables

import gradreduce as gr  # noqa: E402

SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
TOKEN = Path(os.environ["HOME"], ".ray", "auth_token")


def warnings_of(function: Callable[[], object]) -> list[str]:
    """The warnings that gradreduce logs during a call."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradreduce").addHandler(handler)
    function()
    logging.getLogger("gradreduce").removeHandler(handler)
    return found


def token() -> None:
    """A new cluster asks for a token that Ray makes."""
    assert warnings_of(lambda: gr.ray.init(**SMALL)) == []
    assert warnings_of(gr.ray.init) == []
    assert TOKEN.is_file()


def open_() -> None:
    """A cluster that the caller has started open: a warning in the driver and in a worker."""
    ray.init("local", include_dashboard=False, **SMALL)
    address = ray.get_runtime_context().gcs_address
    [text] = warnings_of(gr.ray.init)
    assert text == (
        f"the Ray cluster at {address} asks for no token: anybody who reaches its ports can run "
        "code in it. Start it with RAY_AUTH_MODE=token"
    )
    assert warnings_of(gr.ray.init) == []
    assert ray.get(ray.remote(warnings_of).remote(gr.ray.init), timeout=60) == [text]


def open_for_a_driver_with_a_token() -> None:
    """Such a cluster: a warning also of a driver that has a token."""
    ray.init("local", include_dashboard=False, **SMALL)
    address = ray.get_runtime_context().gcs_address
    TOKEN.parent.mkdir()
    TOKEN.write_text("0" * 64)
    subprocess.run([sys.executable, __file__, "join", os.environ["HOME"], address], check=True)


def join() -> None:
    """A driver in token mode joins an open cluster."""
    [text] = warnings_of(lambda: gr.ray.init(*arguments))
    assert text.startswith(f"the Ray cluster at {arguments[0]} asks for no token"), text


if __name__ == "__main__":
    {
        "token": token,
        "open": open_,
        "open_for_a_driver_with_a_token": open_for_a_driver_with_a_token,
        "join": join,
    }[scenario]()
    sys.stdout.write("done\n")
    sys.stdout.flush()
