"""One Ray cluster for all tests of a run: a pytest plugin."""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.signal_injection import alarm

START_S = 60.0  # a start takes 2 to 3 seconds on an idle machine


def expire(*_: object) -> None:
    raise TimeoutError(f"the cluster has not started within {START_S} s")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster of 4 CPUs on this machine; its processes import this gradreduce and these tests."""
    import ray

    import gradreduce as gr

    root = Path(__file__).parents[2]
    sources = map(str, (Path(gr.__file__).parents[1], root / "examples", root / "tests"))
    with pytest.MonkeyPatch.context() as patch:
        # Ray's processes have the environment of the one that starts them.
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*sources, path])))
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 starves actors on a busy machine
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # not that of the user, in ~/.ray
        try:
            with alarm(START_S, expire):
                gr.ray.init("local", num_cpus=4, object_store_memory=300_000_000)
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def unique_name(request: pytest.FixtureRequest, cluster: None) -> str:
    """A name for an actor that no other test has, in the cluster."""
    test = re.sub(r"\W+", "-", request.node.name)[:80].strip("-")
    return f"{test}-{uuid.uuid4().hex[:8]}"


def in_actor(name: str, function: Callable[[Any], Any]) -> Any:
    import ray

    actor = ray.get_actor(name, namespace="gradreduce")
    return ray.get(actor.__ray_call__.remote(function), timeout=START_S)
