"""Training continues from its checkpoint when a node joins and when it fails."""

import random
import re
import socket
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from support.processes import PROGRAM, end_all, result_of, run, start

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "elastic_training.py"
WAIT_S = 100.0


def free_port():
    """A free port below the range that the system assigns to programs."""
    while True:
        with socket.socket() as tried:
            try:
                tried.bind(("localhost", port := random.randrange(20000, 30000)))
            except OSError:
                continue
            return port


def start_agent(port, run_id, folder, **variables):
    is_host = "GUEST" not in variables
    conf = {"is_host": int(is_host), "join_timeout": 100, "last_call_timeout": 1}
    conf |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}
    options = {
        "nnodes": "1:2",
        "nproc-per-node": "1",
        "max-restarts": "3",
        "monitor-interval": "0.1",
        "rdzv-backend": "c10d",
        "rdzv-id": run_id,
        "rdzv-endpoint": f"localhost:{port}",
        "local-addr": "localhost",
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in conf.items()),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += [f"--{name}={value}" for name, value in options.items()]
    script = [str(PROGRAM), "elastic", "torchrun", str(folder)]
    # Agents that join later look for a store other than the first agent's.
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return start([*torchrun, *script], run_id, **variables)


@pytest.mark.repo
@pytest.mark.torch
@pytest.mark.faults
@pytest.mark.exhaustive
def test_training_continues_when_an_agent_joins_and_when_it_is_killed(tmp_path):
    port, run_id = free_port(), uuid.uuid4().hex
    try:
        host = start_agent(port, run_id, tmp_path)
        end = time.monotonic() + WAIT_S
        while not (tmp_path / "waits").exists() and time.monotonic() < end:
            time.sleep(0.01)
        guest = start_agent(port, run_id, tmp_path, GUEST="1")
        done = result_of(host, run_id)
    finally:
        end_all(run_id)
    guest_text, _ = guest.communicate(timeout=WAIT_S)
    text = done.text + guest_text
    assert (done.returncode, guest.returncode) == (0, -9), text
    begun = re.findall(r"4 replicas in (\d) process\(es\), from step (\d+)", text)
    assert sorted(begun, key=lambda each: int(each[1])) == [("1", "0"), ("2", "20"), ("1", "40")]
    undisturbed = run(
        "none", 1, str(EXAMPLE), "--checkpoint", str(tmp_path / "whole.ckpt"), "--steps", "70",
        "--output", str(tmp_path / "whole.png"),
    )  # fmt: skip
    assert undisturbed.returncode == 0, undisturbed.text
    wanted, found = (dict(np.load(tmp_path / name)) for name in ("whole.ckpt", "c.ckpt"))
    np.testing.assert_equal(found, wanted)
