"""``gradreduce check``."""

import json

import pytest
from click.testing import CliRunner

import gradreduce as gr
from gradreduce.cli.app import command
from gradreduce.cli.check import CHECKS


def run(*arguments: str):
    return CliRunner().invoke(command, ["check", "--backend", "sim", *arguments])


@pytest.mark.parametrize("devices", ["1", "0,0,1"])
def test_everything_works_on_simulated_devices(devices):
    result = run("--devices", devices, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [each["what"] for each in found["checks"]] == list(CHECKS)
    outcomes = [each["outcome"] for each in found["checks"]]
    assert outcomes == ["works"] * (len(CHECKS) - 1) + ["skipped"]
    assert found["works"] is True


def wrong_sum(terms):
    device = terms[0].device
    total = terms[0].numpy()
    total[3] += 1
    return device.upload(total)


def broken_sum(terms):
    raise gr.BackendUnavailableError("the compiler is missing")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (wrong_sum, "AssertionError: got ["),
        (broken_sum, "BackendUnavailableError: the compiler is missing"),
    ],
)
def test_what_does_not_work_is_named_and_the_rest_runs(monkeypatch, broken, says):
    monkeypatch.setattr(gr, "add_n", broken)
    result = run("--devices", "2")
    assert result.exit_code == 1
    assert says in result.output
    assert result.output.count(" works ") == len(CHECKS) - 2
    assert "this does not work: sum of terms (add_n)." in result.output


def test_devices_that_cannot_be_opened_are_an_error(monkeypatch):
    monkeypatch.setenv("GRADREDUCE_SIM_THREADS", "none")
    result = run()
    assert result.exit_code == 1
    assert "GRADREDUCE_SIM_THREADS='none' must be a number" in result.output
