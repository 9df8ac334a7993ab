"""``gradreduce plan``: shapes, models, and files of which only the headers are read."""

import io
import json
import math
import re
import struct
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.cli.app import command
from gradreduce.cli.models import MODELS
from gradreduce.reduce.algorithms import ALGORITHMS


def run(*arguments: str):
    return CliRunner().invoke(command, ["plan", *arguments])


def planned(*arguments: str):
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_elements", "layer", "shape"),
    [
        ("resnet50", 161, 25_557_032, "layer4.0.downsample.0.weight", (2048, 1024, 1, 1)),
        ("gpt2", 148, 124_439_808, "h.11.attn.c_attn.weight", (768, 2304)),
        ("llama-7b", 291, 6_738_415_616, "layers.31.mlp.down_proj.weight", (4096, 11008)),
    ],
)
def test_models_have_the_parameters_of_the_published_ones(
    name, num_tensors, num_elements, layer, shape
):
    shapes = MODELS[name]()
    assert len(shapes) == num_tensors
    assert sum(map(math.prod, shapes.values())) == num_elements
    assert shapes[layer] == shape


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 2])
def test_the_plan_is_what_a_reduction_does(algorithm, num_packs):
    """The command's mesh has no memory; a simulated one runs the same reduction."""
    found = planned("5", "6x2", "3", "--devices", "0,0,1", "--op", "sum",
                    "--algorithm", algorithm, "--num-packs", str(num_packs))  # fmt: skip
    with gr.open_mesh([0, 0, 1], backend="sim") as mesh:
        shapes = [(5,), (6, 2), (3,)]
        values = [
            gr.PerReplica([np.ones(shape, np.float32) for _ in mesh], mesh) for shape in shapes
        ]
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        with mesh.journal() as journal:
            ops.batch_reduce(gr.ReduceOp.SUM, [(value, value) for value in values])
    assert found["launches"] == journal.launches
    assert found["bytes"] == journal.bytes
    assert found["collectives"] == len(journal.of("collective"))
    assert (found["num_tensors"], found["num_elements"], found["nbytes"]) == (3, 20, 80)
    assert sum(len(pack["tensors"]) for pack in found["packs"]) >= 3


def test_the_plan_of_each_process_is_what_it_sends():
    """The first of two devices exchanges, reads the second's, and copies the sum to it."""
    algorithm, size = "hierarchical_copy", 80_000
    found = planned(f"{size}", "--processes", "3", "--devices", "2", "--op", "sum")

    def sent(group):
        with gr.open_mesh(2, backend="sim", process_group=group) as mesh:
            value = gr.PerReplica([np.ones(size, np.float32) for _ in mesh], mesh)
            ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
            with mesh.journal() as journal:
                ops.batch_reduce(gr.ReduceOp.SUM, [(value, value)])
            (copied,) = [each.nbytes for each in journal.of("copy")]
        return {"0": sum(group.sent.values()) + copied, "1": 4 * size}

    totals = found["algorithms"][algorithm]
    wanted = run_processes(3, sent)
    assert totals["sent"] == wanted
    assert totals["sent_in_all"] == sum(sum(each.values()) for each in wanted)
    assert totals["ring_bytes"] == 2 * 5 * 4 * size // 6  # a ring of six devices
    assert totals["exchanges"] == 6


def test_all_algorithms_are_compared_in_one_table():
    lines = run("1000", "--devices", "4", "--processes", "2").stdout.splitlines()
    start = lines.index(next(line for line in lines if line.startswith("Algorithms")))
    found = [re.split("  +", line.strip()) for line in lines[start : lines.index("", start)]]
    assert lines[0] == "1 tensor, 1,000 elements, 4,000 bytes on each of 8 devices of 2 processes"
    assert found == [
        ["Algorithms, all processes together"],
        ["nccl", "hierarchical_copy", "a ring"],
        ["launches", "8", "4"],  # each GPU divides
        ["copies", "0", "6"],
        ["collective ranks", "8", "0"],
        ["exchanges", "0", "2"],
        ["bytes sent by device 0 of process 0-1, each", "7,000", "16,000", "7,000"],
        ["bytes sent by device 1-3 of process 0-1, each", "7,000", "4,000", "7,000"],
        ["bytes sent by all devices", "56,000", "56,000", "56,000"],
    ]


def test_an_algorithm_is_planned_if_it_is_in_the_table_of_algorithms(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "mine", ALGORITHMS["hierarchical_copy"])
    found = planned("5", "--devices", "2")["algorithms"]
    assert list(found) == list(ALGORITHMS)
    assert found["mine"] == found["hierarchical_copy"] != found["nccl"]


def test_a_model_that_no_machine_could_hold_is_planned():
    found = planned("llama-7b", "--devices", "16", "--num-packs", "8", "--dtype", "bfloat16")
    assert found["nbytes"] == 2 * 6_738_415_616
    assert len(found["packs"]) == 8
    assert {pack["dtype"] for pack in found["packs"]} == {"bfloat16"}


def header(entries, *, size=None) -> bytes:
    """A safetensors file of its header alone: a reader that wants a tensor finds the end."""
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


def test_of_a_safetensors_file_the_header_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 2_000_000]}
    path.write_bytes(header({"__metadata__": {"format": "pt"}, "head.weight": entry}))
    found = planned(str(path))
    assert (found["num_tensors"], found["nbytes"]) == (1, 2_000_000)
    assert found["names"] == ["head.weight"]
    assert planned(str(path), "--dtype", "float32")["nbytes"] == 4_000_000
    assert "head.weight" in run(str(path)).output


@pytest.mark.parametrize(
    ("dtype", "options", "status"),
    [("F32", (), 0), ("F8_E4M3", (), 1), ("F32", ("--dtype", "float8\x1b"), 2)],
)
def test_control_characters_are_escaped(tmp_path, dtype, options, status):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"w\x1b[2J\u202e": {"dtype": dtype, "shape": [2]}}))
    result = run(str(path), *options)
    assert result.exit_code == status, result.output
    assert not {"\x1b", "\u202e"} & set(result.output)
    assert r"\x1b" in result.output


def test_of_an_npz_file_the_headers_are_read(tmp_path):
    path = tmp_path / "model.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, version in (("w", (1, 0)), ("b", (2, 0))):
            with archive.open(f"{name}.npy", "w") as member:
                header = {"descr": "<f2", "fortran_order": False, "shape": (30, 4)}
                write = getattr(np.lib.format, f"write_array_header_{version[0]}_0")
                write(member, header)
    found = planned(str(path))
    assert (found["names"], found["nbytes"]) == (["w", "b"], 480)


def spoiled_npz(place: int, value: int) -> bytes:
    """An archive whose headers have another byte at a place."""
    file = io.BytesIO()
    np.savez(file, w=np.ones(3))
    content = bytearray(file.getvalue())
    for start, offset in ((b"PK\3\4", place), (b"PK\1\2", place + 2)):
        content[content.index(start) + offset] = value
    return bytes(content)


def tensor(**entry: object) -> bytes:
    return header({"w": {"dtype": "F32", **entry}})


WRONG_FILES = {
    "a dtype": (tensor(dtype="F8_E4M3", shape=[2]), "F8_E4M3"),
    "a size": (tensor(shape=[-2]), "shape=(-2,) has a negative extent"),
    "no shape": (tensor(), "'shape'"),
    "a boolean": (tensor(shape=[True]), "shape=[True] must be a list of integers"),
    "too large": (tensor(shape=[10**4000] * 2), "has 2**63 elements or more"),
    "a surrogate": (header({"\ud800": {"dtype": "F32", "shape": [2]}}), "surrogates not allowed"),
    "a list": (header([]), "not a valid .safetensors file"),
    "nested": (struct.pack("<Q", 20_000) + b"[" * 20_000, "not a valid .safetensors file"),
    "a large header": (header({}, size=1 << 60), "the size of its header would be"),
    "an early end": (header({}, size=4096), "ends inside its header"),
    "encrypted": (spoiled_npz(6, 1), "password required"),
    "a method": (spoiled_npz(8, 99), "compression method is not supported"),
    "a folder": (None, "Is a directory"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_one_line(tmp_path, name):
    content, says = WRONG_FILES[name]
    path = tmp_path / ("w.npz" if content is None or content[:2] == b"PK" else "w.safetensors")
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    result = run(str(path))
    assert (result.exit_code, says in result.output) == (1, True), result.output
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
