"""Which clusters ``gr.ray.init`` starts and joins."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import processes
from support.libraries import ray

import gradreduce as gr

pytestmark = pytest.mark.ray
PROGRAM = Path(__file__).with_name("cluster_program.py")


@pytest.fixture
def asked(monkeypatch) -> list[str | None]:
    """The addresses of which Ray is asked to join or start a cluster; it does neither."""
    addresses: list[str | None] = []

    def init(address, **options):
        assert options == {"include_dashboard": False, "num_cpus": 2}
        addresses.append(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1"))
    monkeypatch.setattr(gr.ray.cluster, "_warn_if_open", lambda cluster: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return addresses


@pytest.mark.parametrize("mode", ["disabled", "", "none"])
@pytest.mark.parametrize(
    ("address", "variable"), [(None, None), ("local", None), (None, "local"), ("local", "h:1")]
)
def test_a_cluster_that_asks_for_no_token_is_not_started(
    asked, monkeypatch, address, variable, mode
):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    text = (
        f"RAY_AUTH_MODE={mode}: anybody who reaches the ports of a new Ray cluster could run code "
        "in it. Unset RAY_AUTH_MODE, or set it to token. To join a cluster that runs, pass its "
        "address or 'auto' to gr.ray.init"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        gr.ray.init(address, num_cpus=2)
    assert not asked


@pytest.mark.parametrize(
    ("address", "variable", "mode"),
    [
        *[(address, None, mode) for address in (None, "local") for mode in (None, "token")],
        *[(address, None, "disabled") for address in ("auto", "h:1")],
        *[(None, "h:1", "disabled"), ("auto", "h:1", "disabled"), (None, None, "Token")],
    ],
)
def test_any_other_cluster_is_started_or_joined(asked, monkeypatch, address, variable, mode):
    for name, value in {"RAY_ADDRESS": variable, "RAY_AUTH_MODE": mode}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    gr.ray.init(address, num_cpus=2)
    assert asked == [address]


def test_a_cluster_that_does_not_answer_may_ask_for_a_token(asked, monkeypatch):
    def init(address, **options):
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError, match="Failed to connect") as raised:
        gr.ray.init("h:1")
    [note] = raised.value.__notes__
    assert "start Python with RAY_AUTH_MODE=token, and with the token in" in note


def test_threads_start_one_cluster(asked, monkeypatch):
    both = threading.Barrier(2)

    def init(address, **options):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # for a second call of this function
        asked.append(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(asked))
    with ThreadPoolExecutor(4) as pool:
        for running in [pool.submit(gr.ray.init) for _ in range(4)]:
            running.result(60)
    assert asked == [None]
    assert both.broken


def test_actors_import_the_tested_source(cluster):
    def source() -> str:
        import gradreduce

        return gradreduce.__file__

    assert ray.get(ray.remote(source).remote(), timeout=60) == gr.__file__


STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
JOINER = """
import sys
import gradreduce as gr
assert gr.ray.ConditionalAccumulator("float32", [3], sys.argv[1]).apply_grad([1.0, 2.0, 3.0])
"""


def test_other_programs_join_the_cluster_with_its_token_only(unique_name):
    address = ray.get_runtime_context().gcs_address
    member = {**os.environ, "RAY_ADDRESS": address}
    stranger = {**member, "RAY_AUTH_MODE": "disabled"}
    del stranger["RAY_AUTH_TOKEN"]
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with (
        gr.ray.ConditionalAccumulator("float32", [3], unique_name) as shared,
        start([sys.executable, "-c", STRANGER, address], env=stranger) as refused,
        start([sys.executable, "-c", JOINER, unique_name], env=member) as joined,
    ):
        try:
            assert "AuthenticationError" in refused.communicate(timeout=60)[0]
            text = joined.communicate(timeout=60)[0]
            assert joined.returncode == 0, text
            assert "asks for no token" not in text
        finally:
            refused.kill()
            joined.kill()
        assert shared.take_grad(1, timeout=60).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("scenario", [
    "open", *[pytest.param(each, marks=pytest.mark.exhaustive)
              for each in ("token", "open_for_a_driver_with_a_token")],
])  # fmt: skip
def test_a_cluster_of_its_own(tmp_path, scenario):
    """See the scenarios of the program."""
    done = processes.run("none", 1, str(PROGRAM), scenario, str(tmp_path))
    assert done.returncode == 0, done.text
