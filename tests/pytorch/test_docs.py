"""The scripts of README, docs/pytorch.md and examples train, also in the processes of torchrun."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.libraries import torch
from support.processes import run

import gradreduce as gr

pytestmark = [pytest.mark.torch, pytest.mark.repo]
ROOT = Path(__file__).parents[2]
README, PAGE = (ROOT / name for name in ("README.md", "docs/pytorch.md"))
TRAIN_TORCH, DDP_HOOK = (
    str(ROOT / "examples" / name) for name in ("train_torch.py", "ddp_hook.py")
)
FEW = ["--backend", "sim", "--steps"]
CLIPPED = ["--clip-norm", "0.1"]  # smaller than all norms
STEPS = 40
# name, script, arguments, whether the data of process 1 are too large for float32
LAUNCHED = [
    ("before", "before.py", ["before.ckpt", STEPS], False),
    ("after", "after.py", ["after.ckpt", STEPS], False),
    ("half", "after.py", ["half.ckpt", STEPS // 2], False),
    ("resumed", "after.py", ["half.ckpt", STEPS], False),
    ("inf", "after.py", ["inf.ckpt", 1], True),
    ("transformer", TRAIN_TORCH, [*FEW, 8, *CLIPPED, "--checkpoint", "two.pt"], False),
    ("its half", TRAIN_TORCH, [*FEW, 4, *CLIPPED, "--checkpoint", "half.pt"], False),
    ("hook", DDP_HOOK, [*FEW, 8], False),
    ("one word", "word.py", ["word.pt"], False),
    ("one word of gloo", "gloo.py", ["gloo.pt"], False),
    ("exact sums", str(Path(__file__).with_name("exact_program.py")), [], False),
]


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def scripts():
    """The four scripts that have arguments: our backend, DDP, torchrun and one process."""
    return [block for block in blocks(PAGE) if "sys.argv" in block]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Runs scripts in two processes; returns their folder and printed text."""
    folder = tmp_path_factory.mktemp("launched")
    for name, script in zip(("word", "before", "after"), scripts(), strict=False):
        (folder / f"{name}.py").write_text(script, encoding="utf-8")
    (folder / "gloo.py").write_text(scripts()[0].replace('"gradreduce"', '"gloo"', 1))
    program = str(Path(__file__).with_name("program.py"))
    done = run("torchrun", 2, program, str(folder), json.dumps(LAUNCHED))
    assert done.returncode == 0, done.text
    return folder, done.text


@pytest.fixture(scope="module")
def states(launched):
    """The state of each run of a script of the docs, in each process."""
    return {
        name: [torch.load(launched[0] / f"{name}.{rank}") for rank in range(2)]
        for name, *_ in LAUNCHED[:5]
    }


def weights(state):
    return list(state["net"].values())


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.equal(other)


@pytest.fixture
def in_one_process(tmp_path, monkeypatch):
    """Runs the script for one process; returns its global names."""
    (tmp_path / "one.py").write_text(scripts()[3], encoding="utf-8")

    def train(checkpoint, steps):
        monkeypatch.setattr(sys, "argv", ["one.py", str(tmp_path / checkpoint), str(steps)])
        return runpy.run_path(str(tmp_path / "one.py"), run_name="__main__")

    return train


def initial_weights():
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    return list(torch.nn.Sequential(*layers).parameters())


def test_one_word_gives_the_weights_of_gloo(launched):
    ours, theirs = (torch.load(launched[0] / name) for name in ("word.pt", "gloo.pt"))
    assert_equal(ours.values(), theirs.values())


def test_two_processes_compute_the_bits_of_ddp_also_when_resumed(states):
    for state in (*states["before"], *states["after"], *states["resumed"]):
        assert_equal(weights(state), weights(states["before"][0]))
    assert all(state["first"] == STEPS // 2 for state in states["resumed"])
    assert not weights(states["half"][0])[0].equal(weights(states["after"][0])[0])
    for state in states["inf"]:  # of one process: all skip the step
        assert_equal(weights(state), initial_weights())
        assert state["scaler"]["scale"] == 2.0**15  # half


def test_one_process_computes_the_bits_of_two_and_resumes(states, in_one_process):
    in_one_process("w.ckpt", STEPS // 2)
    names = in_one_process("w.ckpt", STEPS)
    assert names["loss"] < 0.1
    for net in names["nets"]:
        assert_equal(net.parameters(), weights(states["after"][0]))


def test_all_replicas_of_one_process_skip_a_step_if_one_has_an_inf(in_one_process, monkeypatch):
    randn, calls = torch.randn, []

    def too_large(*shape, **options):  # for replica 1
        calls.append(shape)
        return torch.full(shape, 1e38) if len(calls) > 2 else randn(*shape, **options)

    monkeypatch.setattr(torch, "randn", too_large)
    names = in_one_process("w.ckpt", 1)
    for net in names["nets"]:
        assert_equal(net.parameters(), initial_weights())
    assert names["scaler"].get_scale() == 2.0**15


def trained_block(words, steps):
    """Trains with the block of the page that contains these words."""
    (block,) = [block for block in blocks(PAGE) if words in block]
    names = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    return names["train"](steps=steps)


@pytest.mark.usefixtures("one_process")
def test_the_script_with_the_hook_trains():
    weight = trained_block("register_comm_hook", 60)
    assert ((weight - 1).abs() < 0.1).all()


def test_the_script_with_the_optimizer_trains():
    one, other = trained_block("gr.torch.Optimizer", 120)
    assert one.equal(other)
    assert ((one - 1).abs() < 0.1).all()


@pytest.fixture
def transformer(tmp_path, monkeypatch, capsys):
    """Runs examples/train_torch.py in this process; returns exit status and printed text."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("train_torch")
    threads = torch.get_num_threads()

    def train(steps, *flags):
        status = script.main([*FEW, str(steps), "--checkpoint", "w.pt", *flags])
        return status, capsys.readouterr().out

    yield train
    torch.set_num_threads(threads)


def test_the_example_computes_the_same_bits_in_two_processes_and_when_resumed(
    transformer, launched
):
    folder, text = launched
    for rank, status in enumerate((1, 0)):
        assert f"transformer: status {status} of process {rank}" in text
    assert text.count("8 steps of a transformer with PyTorch") == 1  # process 0 reports
    assert (folder / "train_torch.png").read_bytes().startswith(b"\x89PNG")
    wanted = torch.load(folder / "two.pt")
    for flags in ([], ["--resume", str(folder / "half.pt")]):
        transformer(8, *CLIPPED, *flags)
        found = torch.load("w.pt")
        assert found["step"] == wanted["step"] == 8
        assert_equal(found["module"].values(), wanted["module"].values())
    with pytest.raises(SystemExit, match=r"half.pt is of step 4: pass a larger --steps"):
        transformer(4, "--resume", str(folder / "half.pt"))


def test_the_example_learns_and_says_whether_it_has_reached_the_goal(transformer):
    status, text = transformer(30, "--precision", "float32")
    first, _, held_out = map(float, re.findall(r"\b\d\.\d{4}\b", text)[:3])
    assert first > 4.5 and held_out < 3.5
    assert status == 1 and f"The held-out loss {held_out:.4f} is not below 2.3.\n" in text
    assert "100%" in text and Path("train_torch.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_compares_the_hook_with_ddp(launched):
    folder, text = launched
    assert "hook: status 1 of process 0" in text and "hook: status 0 of process 1" in text
    assert re.search(r"weights of DDP and hook\s*│\s*the same bits", text)
    ddp, hook, half = map(int, re.findall(r"(\d+) bytes sent per step", text))
    assert 0 < ddp <= hook < ddp + 100  # the first call is compared with the other process's
    assert ddp // 2 <= half < ddp // 2 + 100
    assert (folder / "ddp_hook.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_with_the_hook_says_how_to_start_it(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("ddp_hook").main([])
    assert stopped.value.code == 2
    assert "torchrun --nproc-per-node 2 examples/ddp_hook.py" in capsys.readouterr().err


def test_two_processes_have_the_exact_sums_of_one(launched):
    """Of all micro-batches; with the hook of DDP and FSDP2, of one in each process."""
    program = runpy.run_path(str(Path(__file__).with_name("exact_program.py")))
    with gr.open_mesh(1, backend="sim") as mesh:
        whole = program["data_parallel"](mesh, [[5, 2, 7, 0, 1, 6, 4, 3]])
    with gr.open_mesh(2, backend="sim") as mesh:
        two = program["data_parallel"](mesh, [[1], [0]], weighted=False)
    found = re.findall(r"exact sums: ([^:\n]+): ([0-9a-f]{64})", launched[1])
    assert len(found) == 2 * 5
    for way, bits in found:
        assert bits == (whole if way == "DataParallel" else two), way
