"""A wrong flag of an example is one line, which says what is allowed."""

import importlib
import re
import shlex
import sys

import pytest

import gradreduce as gr

pytestmark = pytest.mark.repo


# A script; what is allowed; arguments, of which the last flag is wrong.
BAD_FLAGS = {
    "train_digits": {
        "1 to 64": [
            "--devices 0", "--devices 2.5", "--devices", "--mode agn --workers 2 --devices 3",
            "--mode agn --workers 0", "--mode agn --engine ray --devices 4",
            "--mode agn --replicas 0", "--mode agn --workers 9 --replicas 9", "--micro-batches 0",
        ],
        "sync, agn": ["--mode async"],
        "threads, ray": ["--mode agn --engine mpi", "--engine ray"],
        "agn, mean, staleness-scaled": ["--mode agn --rule nesterov"],
        "1 to 10000": ["--mode agn --period 0", "--steps 0"],
        "auto, sim, cuda": ["--backend gpu"],
        "each device": ["--placement 0,0,1", "--devices 3 --placement 0,0,1,1"],
        "0 to 63": ["--placement 0,a,1,1", "--placement 0,0,-1,1", "--placement ''"],
        "numpy, compiled": ["--kernels cuda"],
        "add_n, tree, accumulate_n": ["--aggregation sum"],
        "hierarchical_copy, nccl": ["--all-reduce 'a\nb'"],
        "0 to 1000": ["--num-packs -1"],
        "1e-6 to 10": ["--learning-rate nan", "--learning-rate 0"],
        "sgd": ["--optimizer lbfgs"],
        "0 to 4294967295": ["--seed -1"],
        ".png": ["--output 'no such folder/digits.png'", "--output .", "--output digits.jpg"],
        ".npz": ["--save-weights weights.npy"],
        "--num-packs": ["--num-pack 1", "red"],
    },
    "sync_replicas": {
        "1 to 64": ["--workers 0", "--replicas-to-aggregate 0"],
        "backup workers": [
            "--stragglers -1", "--stragglers 2", "--replicas-to-aggregate 5 --stragglers 1",
        ],
        "1 to 10000": ["--late-every 0", "--lag 0", "--steps 0"],
        "auto, sim, cuda": ["--backend gpu"],
        "each worker": ["--placement 0,0,1,1"],
        "numpy, compiled": ["--kernels cuda"],
        "1e-6 to 10": ["--learning-rate nan"],
        "0 to 4294967295": ["--seed -1"],
        ".png": ["--output digits.jpg"],
    },
    "agn_study": {
        "1 to 100000": ["--steps 0"],
        "1 to 100": ["--seeds x"],
        "1 to 64": ["--processes 0"],
        ".png": ["--output study.jpg"],
    },
    "staleness_study": {
        "digits, characters": ["--model images"],
        "multiples of 990 up to 99000": ["--steps 100", "--steps 99990"],
        "2 to 100": ["--seeds 1"],
        "some of 0,2,8,32": ["--staleness 3", "--staleness 2,2", "--staleness x"],
        "1 to 64": ["--processes 0"],
        ".png": ["--output study.jpg"],
    },
    "goodput_study": {
        "1 to 100": ["--seeds 0"],
        "1 to 64": ["--processes 0"],
        ".png": ["--output study.jpg"],
    },
}  # fmt: skip


def stopped_by(script, arguments, capsys) -> str:
    """The one line on stderr of a run that ends with status 2."""
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert re.fullmatch(r"[^\n]+\n", answer.err), answer.err
    return answer.err


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_bad_flag_gets_one_line_and_status_2(name, capsys):
    script, flags = importlib.import_module(name), set()
    for allowed, lines in BAD_FLAGS[name].items():
        for line in lines:
            arguments = shlex.split(line)
            flag = [word for word in arguments if word.startswith("--") or word == "red"][-1]
            error = stopped_by(script, arguments, capsys)
            assert flag in error
            assert allowed in error.partition("allowed: ")[2]
            flags.add(flag)
    assert set(script.make_parser().allowed) <= flags
    if name == "train_digits":
        error = stopped_by(script, ["--all-reduce", "foo"], capsys)
        assert error.endswith(": --all-reduce: got 'foo'; allowed: hierarchical_copy, nccl\n")


@pytest.mark.parametrize(
    "name", ["train_digits", pytest.param("agn_torch", marks=pytest.mark.torch)]
)
def test_without_ray_the_engine_is_a_bad_flag(name, capsys, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "agn_ray", raising=False)
    flags, hint = [], "pip install 'gradreduce[ray]'"
    if name == "train_digits":
        flags, hint = ["--mode", "agn"], f"{hint} (in a clone: pip install '.[ray]')"
    error = stopped_by(script, [*flags, "--engine", "ray"], capsys)
    assert f"{hint}; allowed: threads, ray\n" in error


@pytest.mark.parametrize("flags", [["--backend", "cuda"], []])
def test_a_backend_that_is_not_there_is_a_bad_flag(flags, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise gr.errors.BackendUnavailableError("no GPU here;\ninstall one")

    script = importlib.import_module("train_digits")
    monkeypatch.setattr(gr, "open_mesh", refuse)
    error = stopped_by(script, flags, capsys)
    assert re.search(r"--backend.*no GPU here; install one.*allowed: auto, sim, cuda", error)
