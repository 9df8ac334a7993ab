"""``tools/flight_to_torch.py`` converts the flight records of several processes."""

import json
import pickle

import pytest
from flight_to_torch import convert, main

pytestmark = pytest.mark.repo

DESCRIPTIONS = {
    "a": {"call": "reduction", "divisor": 2, "tensors": ["float32[3, 5]", "bfloat16[]"]},
    "b": {"call": "reduction of IndexedSlices", "tensors": ["int16 rows of [7], dense_shape None"]},
    "c": {"call": "broadcast", "process": 1, "tensors": ["float64[2]"]},
    "d": {"call": "a SyncStep", "tensors": [0, 2]},
}


def record(process: int, digests: str, *, first: int = 0, num_processes: int = 3) -> dict:
    """A record as in the file of ``GRADREDUCE_FLIGHT_RECORD``; the last call is not done."""
    calls = [
        {"number": number, "digest": digest, "done": number < first + len(digests) - 1}
        for number, digest in enumerate(digests, first)
    ]
    return {
        "mesh": "sim, process 1", "reason": "planted", "entries": [], "process": process,
        "num_processes": num_processes, "calls": calls, "descriptions": DESCRIPTIONS,
    }  # fmt: skip


def shown(dump: dict, *keys: str) -> list[tuple]:
    return [tuple(each[key] for key in keys) for each in dump["entries"]]


SUMMARY = ("collective_seq_id", "profiling_name", "state")


def test_each_call_is_one_collective():
    (dump,) = convert([record(0, "dabc", num_processes=1)]).values()
    assert shown(dump, *SUMMARY) == [
        (0, "nccl:barrier", "completed"),
        (1, "nccl:all_reduce", "completed"),
        (2, "nccl:all_reduce", "completed"),
        (3, "nccl:broadcast", "started"),
    ]
    for side in ("input", "output"):
        assert shown(dump, f"{side}_sizes", f"{side}_dtypes") == [
            ([], []),
            ([[3, 5], []], ["float32", "bfloat16"]),
            ([[7]], ["int16"]),
            ([[2]], ["float64"]),
        ]
    last = {"enqueued": 3, "started": 3, "completed": 2}
    assert dump["pg_status"] == {"0": {f"last_{key}_collective": last[key] for key in last}}


def test_a_process_without_a_file_joined_what_another_has_completed():
    dumps = convert([record(2, "aab", first=4), record(0, "aa", first=4)])
    assert sorted(dumps) == [0, 1, 2]
    assert [len(dumps[rank]["entries"]) for rank in range(3)] == [2, 2, 3]
    assert shown(dumps[1], *SUMMARY) == [
        (number, "nccl:all_reduce", "completed") for number in (4, 5)
    ]
    assert {dump["pg_config"]["0"]["ranks"] for dump in dumps.values()} == {"[0, 1, 2]"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record(0, "a"), record(0, "a")], "of another process each"),
        ([record(0, "a"), record(1, "a", num_processes=2)], "of one mesh"),
        ([{"mesh": "sim, process 1", "reason": "planted", "entries": []}], "not open in several"),
    ],
)
def test_other_files_are_refused(records, message, tmp_path, capsys):
    files = [tmp_path / str(index) for index in range(len(records))]
    for path, content in zip(files, records, strict=True):
        path.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "folder"), *map(str, files)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


def test_one_file_of_each_process_is_written(tmp_path, capsys):
    path = tmp_path / "flight.json"
    path.write_text(json.dumps(record(1, "aa", num_processes=2)))
    main([str(tmp_path / "folder"), str(path)])
    assert "no file of process 0" in capsys.readouterr().out
    dumps = [pickle.loads((tmp_path / "folder" / f"rank_{rank}").read_bytes()) for rank in (0, 1)]
    assert [len(each["entries"]) for each in dumps] == [1, 2]
