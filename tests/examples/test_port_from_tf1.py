"""The port of TensorFlow 1 trainings: each of its calls stands above ours, and all four learn."""

import re
from pathlib import Path

import port_from_tf1
import pytest

pytestmark = pytest.mark.repo
CALLS = (
    "AGNCustomGetter AGNOptimizer AggregationMethod AllReduceCrossDeviceOps ConditionalAccumulator "
    "GradientDescentOptimizer MomentumOptimizer PerReplica SyncReplicasOptimizer add_n apply_grad "
    "apply_gradients batch_reduce compute_gradients get_variable gradients make_session_run_hook "
    "minimize num_accumulated set_global_step take_grad"
)
RENAMED = {
    "SyncReplicasOptimizer": "SyncStep",
    "apply_gradients": "step",  # of SyncStep
    "get_variable": "Variable",  # without a getter
    "gradients": "compute_gradients",
}


def test_the_four_trainings_learn(capsys, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_BACKEND", "sim")
    status = port_from_tf1.main(["--steps", "30", "--output", "ported.png"])
    text = capsys.readouterr().out
    names = ("mirrored", "conditional_accumulators", "sync_replicas", "agn")
    found = {name: float(re.findall(rf"│ {name} +│ (\S+)", text)[0]) for name in names}
    assert min(found.values()) > 0.7, found
    assert status == (min(found.values()) < 0.95)
    assert [re.findall(rf"{name} +\S+ 100%", text) != [] for name in names] == [True] * 4
    assert Path("ported.png").read_bytes().startswith(b"\x89PNG")


def test_each_call_of_tensorflow_stands_above_ours():
    lines = Path(port_from_tf1.__file__).read_text(encoding="utf-8").splitlines()
    found = set()
    for number, line in enumerate(lines):
        _, is_theirs, call = line.partition("# tf: ")
        ours = re.findall(r"\w+", " ".join(lines[number + 1 : number + 4]))
        for name in re.findall(rf"\b({CALLS.replace(' ', '|')})\b", call if is_theirs else ""):
            found.add(name)
            assert {name, RENAMED.get(name)} & {*ours}, line
    assert found == set(CALLS.split())
