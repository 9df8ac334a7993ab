"""The flight record: the operations of a mesh, their labels, and which are done."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.hanging_devices import TEST_TIMEOUT, clock, late_waits, resume, stall

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.device import FlightEntry, PackInfo
from gradreduce.device.log import op_log
from gradreduce.errors import CollectiveError

from .contract import FLOAT, SIZE, add, data, uploaded

__all__ = ["clock", "late_waits"]

pytestmark = pytest.mark.usefixtures("late_waits")


@pytest.fixture
def mesh(one_gpu_mesh):
    return one_gpu_mesh


def summaries(entries: list[FlightEntry]) -> list[tuple]:
    return [
        (each.kind, each.name, each.device, each.source, each.nbytes, each.queue, each.num_rows)
        for each in entries
    ]


def test_the_flight_record_has_all_records_of_a_journal(mesh):
    """It has every kind of operation, numbered in the order of the calls, without a journal."""
    first, second = mesh.devices[:2]
    with mesh.journal() as journal:
        buffer = uploaded(first, 1)
        beside = second.upload(data((SIZE,)), queue="transfer")
        total = second.zeros((SIZE,), FLOAT)
        second.copy(total, buffer)
        add(second, total, total, beside)
        mesh.collective.all_reduce([total])
        gr.add_n([np.ones(3, np.float32)] * 2)
        total.numpy()
        mesh.synchronize()
    entries = mesh.flight_record()
    assert summaries(entries) == [dataclasses.astuple(each)[:7] for each in journal.records]
    assert [each.sequence for each in entries] == list(range(1, len(entries) + 1))
    assert all(each.done for each in entries)
    assert mesh[0:1].flight_record() == entries
    mesh.close()
    assert mesh.flight_record() == entries


def test_it_keeps_the_last_thousand(mesh):
    device = mesh.devices[0]
    one, other = uploaded(device, 1), uploaded(device, 2)
    for _ in range(1004):
        device.copy(one, other)
    entries = mesh.flight_record()
    assert [each.sequence for each in entries] == list(range(7, 1007))


def test_it_names_the_call_of_each_thread(mesh):
    device = mesh.devices[0]
    buffer = uploaded(device, 1)
    travel = PackInfo((5, 6, 7), (3,), 8)
    with device.mesh_state.pack_scope(travel):
        device.copy(buffer, uploaded(device, 2))
    with pytest.raises(KeyError), device.mesh_state.pack_scope(PackInfo((0,))):
        raise KeyError
    device.copy(buffer, uploaded(device, 2))
    said = [each.tensors for each in mesh.flight_record()]
    assert said == ["", *["pack 3 of 8 (tensors 5 to 7)"] * 2, "", ""]


def test_records_are_done_when_known_to_be_complete():
    with open_mesh(2, backend="sim", schedule_seed=1) as mesh:
        stuck = mesh.devices[1]
        buffers = [uploaded(device, 1) for device in mesh.devices]
        stuck.queue_mark()  # any mark shows what has finished before it
        stall(stuck)
        for device, buffer in zip(mesh.devices, buffers, strict=True):
            device.copy(buffer, device.empty((SIZE,), FLOAT))
        stuck.copy(buffers[1], stuck.upload(data((SIZE,)), queue="transfer"), queue="transfer")
        entries = mesh.flight_record()
        late = [(each.kind, each.queue) for each in entries if not each.done]
        assert late == [("copy", "compute"), ("upload", "transfer"), ("copy", "transfer")]
        assert all(each.device == stuck.index for each in entries if not each.done)
        resume(stuck)
        stuck.synchronize(deadline=TEST_TIMEOUT)
        assert all(each.done for each in mesh.flight_record())


def test_what_the_host_has_waited_for_is_done_without_a_mark():
    """That is known for each queue of a GPU, which its devices share."""
    with open_mesh([0, 1, 0], backend="sim", schedule_seed=1) as mesh:
        idle, stuck, beside = mesh.devices
        mesh.synchronize()
        uploaded(beside, 2)
        for device in (idle, stuck):
            uploaded(device, 1).numpy()
        stall(stuck)
        stuck.zeros((SIZE,), FLOAT)
        with pytest.raises(CollectiveError):
            mesh.synchronize(deadline=5)
        late = [(each.kind, each.device) for each in mesh.flight_record() if not each.done]
        assert late == [("fill", 1), ("sync", 1)]


def test_what_a_reset_drops_is_never_done():
    with open_mesh(2, backend="sim", schedule_seed=1) as mesh:
        stuck = mesh.devices[1]
        for wait in (stuck.synchronize, mesh.synchronize):
            stuck.zeros((SIZE,), FLOAT)
            wait()
            stall(stuck)
            stuck.zeros((SIZE,), FLOAT)
            mark = stuck.queue_mark()
            with pytest.raises(CollectiveError):
                stuck.synchronize(deadline=5)
            mesh.reset(timeout=TEST_TIMEOUT)
            assert stuck._is_done(mark.event)
        mesh.synchronize()
        entries = [each for each in mesh.flight_record() if each.device == stuck.index]
        late = [each.sequence for each in entries if not each.done]
        kinds = [each.kind for each in entries]
        assert late == [3, 4, 8, 9], kinds


@pytest.mark.parametrize(
    ("travel", "text"),
    [
        (PackInfo((4,)), "tensor 4"),
        (PackInfo((0, 1, 2), (1, 2), 2), "packs 1 to 2 of 2 (tensors 0 to 2)"),
        (PackInfo((1, 3, 4), (7,), 9), "pack 7 of 9 (tensors 1, 3, 4)"),
        (PackInfo(tuple(range(0, 40, 2))), "tensors 0, 2, 4, 6, 8 and 15 more"),
    ],
)
def test_transfers_are_described_in_short(travel, text):
    assert str(travel) == text


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    path = tmp_path / "flight.json"
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(path))
    return path


def opened_and_failed(reason: str) -> None:
    with open_mesh(1, backend="sim") as mesh:
        mesh.mesh_state.fail(reason)
        assert mesh.mesh_state.failure_reported.wait(TEST_TIMEOUT)


def test_each_mesh_writes_a_file_of_its_own(wanted):
    opened_and_failed("one")
    opened_and_failed("another")
    reasons = [json.loads(path.read_text())["reason"] for path in wanted.parent.iterdir()]
    assert sorted(reasons) == ["another", "one"]
    assert not wanted.exists()


def test_special_files_are_written_directly(wanted, caplog):
    """A write that fails is reported, and keeps the file."""
    os.mkfifo(wanted)
    reader = os.open(wanted, os.O_RDONLY | os.O_NONBLOCK)
    try:
        opened_and_failed("broken")
        assert json.loads(os.read(reader, 1 << 16))["reason"] == "broken"
    finally:
        os.close(reader)
    assert wanted.is_fifo()
    assert list(wanted.parent.iterdir()) == [wanted]
    wanted.unlink()
    wanted.symlink_to("/dev/full")
    opened_and_failed("broken")
    assert f"{wanted} was not written: [Errno 28]" in caplog.text
    assert wanted.is_symlink()


def test_a_full_disk_leaves_no_file_behind(wanted, monkeypatch, caplog):
    with open_mesh(1, backend="sim") as mesh:

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(op_log.os, "fsync", full)
        mesh.mesh_state.fail("broken")
        with pytest.raises(CollectiveError, match="broken"):
            mesh.synchronize()
    assert "No space left on device" in caplog.text
    assert list(wanted.parent.iterdir()) == []


def test_no_link_is_followed(wanted, monkeypatch):
    """Symbolic links at the record's name or at its temporary name are not followed."""
    victim = wanted.with_name("victim")
    victim.write_text("mine")
    with open_mesh(1, backend="sim") as mesh:
        record = Path(mesh.mesh_state.flight_path)
        record.symlink_to(victim)
        mesh.mesh_state.fail("broken")
    assert json.loads(record.read_text())["reason"] == "broken"
    assert not record.is_symlink()
    monkeypatch.setattr(op_log.os, "urandom", lambda nbytes: b"\0")
    wanted.with_name("other.00.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        op_log.replace_file(wanted.with_name("other"), b"x", mode=0o600)
    assert victim.read_text() == "mine"


def test_an_odd_path_is_an_error_when_the_mesh_opens(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    odd = {
        str(tmp_path): "it is a folder",
        f"{tmp_path}/new/": "it is a folder",
        str(tmp_path / "missing" / "flight.json"): "No such file or directory",
        str(tmp_path / "file" / "flight.json"): "Not a directory",
        str(tmp_path / "link"): "symbolic link; name the file itself",
        str(tmp_path / ("x" * 300)): "File name too long",
    }
    for path, why in odd.items():
        monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", path)
        with pytest.raises(ValueError, match=f"GRADREDUCE_FLIGHT_RECORD=.*{why}.*name a file"):
            open_mesh(1, backend="sim")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
