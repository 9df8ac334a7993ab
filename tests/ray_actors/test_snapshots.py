"""Snapshot files: what was stored comes back, or is known to be damaged. Needs no Ray."""

import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_cases import CASES, NUM_STEPS, bits
from support.exact_data import exact_data
from support.exhaustive import examples

import gradreduce as gr

PROGRAM = Path(__file__).with_name("snapshot_program.py")
MODULE = Path(gr.__file__).parent / "ray" / "snapshots.py"
# From its file, because the package imports Ray.
spec = importlib.util.spec_from_file_location("snapshots_without_ray", MODULE)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
Snapshots = module.Snapshots
STATE = {"w": exact_data((40, 3), "float32"), "step": 7}


@pytest.mark.parametrize("case", CASES)
def test_states_of_every_class_come_back(tmp_path, case):
    with gr.open_mesh([0, 1], backend="sim", strict=True) as mesh:
        made, fresh = CASES[case](mesh), CASES[case](mesh)
        for seed in range(NUM_STEPS):
            made.step(seed)
        Snapshots(tmp_path, "a").write(3, made.save())
        state = Snapshots(tmp_path, "a").read(3)
        assert bits(state) == bits(made.save())
        fresh.load(state)
        assert bits(fresh.save()) == bits(made.save())


def test_any_array_and_value_comes_back(tmp_path):
    values = [1, -(2**80), 0.1, float("inf"), None, True, "ä\n", [], {}]
    arrays = {
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(12, dtype=np.int64)[::-2],
        "a.b": np.zeros(1),
    }
    snapshots = Snapshots(tmp_path / "made" / "here", "a")
    snapshots.write(1, {**arrays, "a": {"b": np.ones(1)}, "values": values})
    found = snapshots.read(1)
    assert found["values"] == values
    assert list(map(type, found["values"])) == list(map(type, values))
    assert found["a"]["b"].tolist() == [1.0]
    for name, array in arrays.items():
        loaded = found[name]
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert (loaded == array).all() and loaded.flags.writeable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_two_are_kept_and_no_other_file_is_touched(tmp_path):
    others = ["a.1.0.snapshot", "a.x.snapshot", "a.01.snapshot.tmp", "b.1.snapshot.tmp", "ab.txt"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "a.4.snapshot.tmp").touch()
    snapshots, neighbour = Snapshots(tmp_path, "a"), Snapshots(tmp_path, "a.1")
    assert names(tmp_path) == sorted(others)
    assert (snapshots.newest(), snapshots.numbers()) == (0, [])
    neighbour.write(5, {"n": 0})
    Snapshots(tmp_path, "a#1").write(5, {"n": 0})  # of a shard
    others.append("a#1.5.snapshot")
    for number in (1, 2, 9, 10, 11):
        snapshots.write(number, {"n": number})
    assert snapshots.numbers() == [10, 11]
    mine = ["a.10.snapshot", "a.11.snapshot"]
    assert names(tmp_path) == sorted([*others, "a.1.5.snapshot", *mine])
    assert [snapshots.read(number)["n"] for number in (10, 11)] == [10, 11]
    snapshots.remove()
    assert names(tmp_path) == sorted([*others, "a.1.5.snapshot"])
    assert neighbour.numbers() == [5]


def test_after_loading_an_older_snapshot_there_is_one_history(tmp_path):
    snapshots = Snapshots(tmp_path / "a", "a")
    (tmp_path / "a").rmdir()  # is made again
    for number in (5, 6):
        snapshots.write(number, {"n": number})
    snapshots.remove(above=5)
    assert snapshots.numbers() == [5]
    snapshots.write(8, {"n": 8})
    snapshots.write(6, {"n": -6})  # without remove
    assert snapshots.numbers() == [5, 6]
    assert snapshots.read(6) == {"n": -6}
    with pytest.raises(FileNotFoundError):
        snapshots.read(8)


@pytest.mark.parametrize("stage", ["array", "fsync", "replace"])
def test_a_failed_write_leaves_the_others_as_they_were(tmp_path, monkeypatch, stage):
    snapshots = Snapshots(tmp_path, "a")
    for number in (1, 2):
        snapshots.write(number, {**STATE, "n": number})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    state = {**STATE, "n": 3}
    with monkeypatch.context() as patch:
        if stage == "array":
            state["last"] = {1, 2}
        else:
            patch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[stage], fail)
        with pytest.raises((OSError, TypeError), match=r"disk full|\bset\b"):
            snapshots.write(3, state)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    snapshots.write(3, {**STATE, "n": 3})
    assert snapshots.numbers() == [2, 3]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Path, bytes]:
    """A snapshot file, and what is in it."""
    folder = tmp_path_factory.mktemp("stored")
    Snapshots(folder, "a").write(1, STATE)
    [path] = folder.iterdir()
    return path, path.read_bytes()


@settings(max_examples=examples(200), deadline=None, database=None)
@given(data=st.data())
def test_a_changed_byte_is_found(stored, data):
    path, text = stored
    changed = bytearray(text)
    places = st.sets(st.integers(0, len(text) - 1), min_size=1, max_size=3)
    for place in data.draw(places):
        changed[place] ^= data.draw(st.integers(1, 255))
    lengths = (0, 1, 31, 32, 33, len(text) // 2, len(text) - 1)
    shorter = text[: data.draw(st.sampled_from(lengths))]
    for damaged in (changed, shorter, text + b"\0"):
        path.write_bytes(damaged)
        snapshots = Snapshots(path.parent, "a")
        assert snapshots.numbers() == []
        with pytest.raises(ValueError, match=rf"^the snapshot {re.escape(str(path))} is damaged$"):
            snapshots.read(1)


@pytest.mark.parametrize(
    ("text", "shape"),
    [(b'{"names": ["w"], "metadata": {}}', (1 << 40,)), (b"[" * 5000, ()), (b"7", ())],
    ids=["size", "depth", "type"],
)
def test_a_file_with_a_right_digest_and_wrong_contents_is_refused(tmp_path, text, shape):
    file = io.BytesIO()
    np.save(file, np.frombuffer(text, np.uint8))
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    path, content = tmp_path / "a.1.snapshot", file.getvalue()
    path.write_bytes(hashlib.sha256(content).digest() + content)
    snapshots = Snapshots(tmp_path, "a")
    assert snapshots.newest() == 1
    tracemalloc.start()
    try:
        refused = f"^the snapshot {re.escape(str(path))} is not one of this library$"
        with pytest.raises(ValueError, match=refused):
            snapshots.read(1)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_the_empty_state_is_none_of_an_actor_whose_files_are_damaged(tmp_path, caplog):
    def check_all_damaged(*paths):
        text = (
            f"all snapshots of 'a' are damaged, and were kept: {', '.join(map(str, paths))}. "
            "Replace one by an undamaged copy, or move all away to start with an empty state"
        )
        snapshots = Snapshots(tmp_path, "a")
        assert snapshots.loadable() == []
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            snapshots.newest()

    snapshots, files = Snapshots(tmp_path, "a"), [tmp_path / f"a.{n}.snapshot" for n in (1, 2)]
    assert (snapshots.loadable(), snapshots.newest()) == ([0], 0)
    snapshots.write(1, STATE)
    assert (snapshots.loadable(), snapshots.newest()) == ([0, 1], 1)
    files[0].write_bytes(b"")
    check_all_damaged(files[0])
    snapshots.write(2, STATE)
    assert (snapshots.loadable(), snapshots.newest()) == ([2], 2)
    assert set(caplog.messages) == {f"the snapshot {files[0]} is damaged, and not used"}
    files[1].write_bytes(b"")
    check_all_damaged(*files)
    assert sorted(tmp_path.iterdir()) == files


def test_a_killed_writer_leaves_a_whole_snapshot(tmp_path):
    """At every line of ``write``, and at 20 random moments; see the program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(MODULE), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    num_lines, num_moments = map(int, done.stdout.split())
    assert num_lines > 40
    assert num_moments == 20
