"""The commands of docs/command_line.md print what the page says."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradreduce.cli import system_info
from gradreduce.cli.app import command
from gradreduce.device import FlightEntry

pytestmark = pytest.mark.repo
PAGE = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"
BLOCKS = (
    re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if PAGE.is_file()
    else []
)


def pattern_of(wanted: str) -> str:
    """Of the lines: ``...`` is any text; a line of it any lines; spaces are any number of them."""
    parts = []
    for line in wanted.splitlines():
        if line == "...":
            parts.append(r"(.*\n)*?")
            continue
        words = [re.escape(word).replace(r"\.\.\.", ".*") for word in line.split()]
        parts.append(r" *" + " +".join(words) + r" *\n")
    return "".join(parts)


@pytest.fixture
def flight(tmp_path):
    """The flight record of the page: of a process that cannot be started again."""
    entries = []
    for device in range(2):
        for kind, name, nbytes, done in (
            ("upload", "", 32, True), ("upload", "", 32, False), ("launch", "all_sum", 48, False),
        ):  # fmt: skip
            entry = FlightEntry(
                len(entries) + 1, kind, name, device, -1, nbytes, 0, "", "compute", done
            )
            entries.append(asdict(entry))
    reason = "the deadline of 30 s for batch_reduce passed: sim:1 has not joined pack 1 of 1"
    record = {"mesh": "sim, process 4711", "reason": reason, "entries": entries}
    (tmp_path / "flight.4711-1.json").write_text(json.dumps(record))


@pytest.mark.usefixtures("flight")
@pytest.mark.whole_product
@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_commands_print_what_the_page_says(block, tmp_path, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(
        system_info, "import_module", import_module
    )  # as where nothing is installed
    monkeypatch.chdir(tmp_path)
    for each in re.split(r"^\$ gradreduce ", block, flags=re.MULTILINE)[1:]:
        arguments, _, wanted = each.partition("\n")
        result = CliRunner().invoke(command, shlex.split(arguments))
        assert result.exit_code == 0, result.output
        assert re.fullmatch(pattern_of(wanted), result.stdout), result.stdout


def test_every_command_is_on_the_page():
    shown = {block.split()[2] for block in BLOCKS}
    assert shown == set(command.commands)


def test_the_page_is_compared():
    pattern = pattern_of("a  b\n...\nc ... d\n")
    assert re.fullmatch(pattern, "a b\nx\ny\nc 1 2 d\n")
    assert not re.fullmatch(pattern, "a b\nx\nc d e\n")
