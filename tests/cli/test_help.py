"""``--help`` of each command, at any width."""

import re

import click
import pytest
from click.testing import CliRunner

from gradreduce.cli.app import command

WIDTHS = (30, 60, 80, 200)


def words(text: str) -> str:
    """The text without line breaks and spaces, at which lines are broken."""
    return re.sub(r"\s", "", text)


def shown(width: int, *arguments: str) -> str:
    result = CliRunner().invoke(command, [*arguments, "--help"], terminal_width=width)
    assert result.exit_code == 0, result.output
    return words(result.output)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_commands_has_whole_sentences(width):
    found = shown(width)
    for name, each in command.commands.items():
        first = each.help.partition("\n\n")[0]
        assert first.endswith(".")
        assert words(name + first) in found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", command.commands)
def test_the_help_of_a_command_has_whole_sentences(name, width):
    found = shown(width, name)
    each = command.commands[name]
    assert words(each.help) in found
    for option in each.params:
        if isinstance(option, click.Option):
            assert option.help.endswith("."), option.name
            assert words(option.help) in found


WRONG = {
    "": ["nonsense"],
    "info": ["extra", "--nonsense"],
    "trace": ["missing.json"],
    "check": ["--backend tpu", "--devices 0", "4"],
    "bench": [
        "nothing", "--min-bytes 0", "--min-bytes many", "--min-bytes 2K --max-bytes 1K",
        "--factor 1", "--plot bench.txt", "--plot missing/bench.png", "--rounds 0",
        "--against missing.json",
    ],
    "plan": [
        "", "nothing", "missing.npz", "5 --devices 0", "5 --devices 2000", "5 --devices a,b",
        "5 --devices \u0663", "\u0663x2", "9" * 4000 + "x" + "9" * 4000, "9" * 5000,
        "5 --dtype float99", "5 --num-packs -1", "5 --algorithm ring", "5 --processes 0",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_the_parsers_error(name):
    for arguments in WRONG[name]:
        result = CliRunner().invoke(command, [*name.split(), *arguments.split()])
        assert result.exit_code == 2, arguments
        assert "Usage: " in result.output
