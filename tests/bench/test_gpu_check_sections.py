"""The sections of ``bench/gpu_check.sh``, with simulated results of their checks."""

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from bench.test_gpu_check import LIMIT_S, ROOT, STEPS

import gradreduce as gr

pytestmark = pytest.mark.repo


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    """The modules of ``bench/gpu_check``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_check.__main__ as command
    import gpu_check.child
    import gpu_check.counters
    import gpu_check.first
    import gpu_check.section
    import gpu_check.sections
    import gpu_check.setting

    found = {name: module for name, module in vars(gpu_check).items()
             if isinstance(module, ModuleType)}  # fmt: skip
    return SimpleNamespace(**found, command=command)


@pytest.fixture
def setting(tools, tmp_path):
    """The settings of a section on a machine with one GPU."""
    return tools.setting.Setting(False, tools.setting.Gpu("NVIDIA H200"), tmp_path, tmp_path)


def is_result(tools, item) -> bool:
    """Whether what a section yields needs no command."""
    return isinstance(item, tools.section.Result)


def run_checks(tools, section, setting, answer: Callable) -> list:
    """All checks of a section, if ``answer(check)`` is the result of each."""
    checks, asked = section(setting), []
    with contextlib.suppress(StopIteration):
        asked.append(next(checks))
        while True:
            last = asked[-1]
            asked.append(checks.send(last if is_result(tools, last) else answer(last)))
    return asked


def recorded(tools, section, setting, tmp_path, done=None):
    record = tools.section.Record(tmp_path / "it.json", {"section": "it"})
    tools.section.run_section(section, record, setting, tools.child.Stop(), done)
    return json.loads(record.path.read_text(encoding="utf-8"))


def passing(tools):
    """The result of every check: passed."""
    return lambda check: tools.section.Result(check.name, "passed")


@pytest.mark.parametrize(
    ("seconds", "limit", "reason", "outcomes"),
    [
        (0.2, LIMIT_S, "it hangs: its deadline of 0.2 s", ["stopped", "passed"]),
        (LIMIT_S, 0.2, "its limit of 0.2 s", ["stopped"]),
    ],
    ids=["check", "section"],
)
def test_a_check_that_hangs_is_stopped(tools, setting, tmp_path, seconds, limit, reason, outcomes):
    """The next one runs if the section has time."""

    def section(_):
        code = (sys.executable, "-c", "import signal; signal.pause()")
        yield tools.section.Check("it hangs", code, seconds)
        yield tools.section.Check("another way", (sys.executable, "-c", "print('there')"), LIMIT_S)

    found = recorded(tools, section, replace(setting, limit=limit), tmp_path)
    assert (found["status"], found["reason"]) == ("stopped", reason)
    assert [one["outcome"] for one in found["results"]] == outcomes


def test_what_has_run_before_is_not_repeated(tools, setting, tmp_path):
    """The next check gets its result."""
    earlier = tools.section.Result("NCCL's version", "passed", figures={"version": 1})
    done = {earlier.name: ("first:8-libraries", earlier)}
    seen = []

    def section(_):
        command = (sys.executable, "-c", "")
        seen.append((yield tools.section.Check("NCCL's version", ("no such program",), LIMIT_S)))
        yield tools.section.Check("one rank", command, LIMIT_S)
        yield tools.section.skipped("two ranks", "not here")

    found = recorded(tools, section, setting, tmp_path, done)
    assert seen == [earlier]
    assert [(one["outcome"], one["reason"]) for one in found["results"]] == [
        ("skipped", "first:8-libraries has run it"), ("passed", ""), ("skipped", "not here"),
    ]  # fmt: skip
    assert {name: where for name, (where, _) in done.items()} == {
        "NCCL's version": "first:8-libraries", "one rank": "it",
    }  # fmt: skip


def test_what_cannot_be_made_here_is_skipped_and_says_why(tools, setting, tmp_path):
    skips = {"ERR_1": "counters are for administrators"}

    def section(_):
        for text, status in (("ERR_1", 1), ("ERR_2", 1), ("ERR_1", 0)):
            code = f"print('{text}'); raise SystemExit({status})"
            yield tools.section.Check(text, (sys.executable, "-c", code), LIMIT_S, skips=skips)

    found = recorded(tools, section, setting, tmp_path)
    assert [(one["outcome"], one["reason"]) for one in found["results"]] == [
        ("skipped", "counters are for administrators"), ("failed", "exit status 1"), ("passed", ""),
    ]  # fmt: skip


def test_a_section_that_raises_has_failed(tools, setting, tmp_path):
    def section(_):
        yield tools.section.skipped("first", "not here")
        raise KeyError("second")

    found = recorded(tools, section, setting, tmp_path)
    assert found["status"] == "failed"
    assert "KeyError('second')" in found["reason"]
    assert "Traceback" in found["results"][-1]["tail"]


def test_the_tests_need_what_the_machine_has(tools, setting):
    names = ["tests/a.py", "tests/b/c.py"]

    def answer(check):
        return tools.section.Result(check.name, "passed", figures=dict.fromkeys(names, 3))

    one = run_checks(tools, tools.sections.tests, setting, answer)
    assert [check.name for check in one] == ["collection", *names]
    for check in one:
        assert "--require-gpu" in check.command
        assert "gpu and not multi_gpu" in check.command
    two = tools.setting.Setting(False, tools.setting.Gpu("x", 2), setting.work, setting.work)
    (check, *_) = run_checks(tools, tools.sections.tests, two, answer)
    assert "gpu or multi_gpu" in check.command


def test_no_file_of_tests_has_all_of_the_time_but_the_largest_has_most(tools, setting):
    counts = {"tests/a.py": 300, "tests/b.py": 90, "tests/c.py": 10}

    def answer(check):
        return tools.section.Result(check.name, "passed", figures=counts)

    _, *files = run_checks(tools, tools.sections.tests, setting, answer)
    assert [check.seconds for check in files] == [360, 108, 60]
    (collection, *_) = run_checks(tools, tools.sections.tests, replace(setting, part="tests/a.py"),
                              answer)  # fmt: skip
    assert collection.command[-1] == "tests/a.py"


def test_benchmarks_share_the_time(tools, setting):
    for name in ("bench_a.py", "bench_b.py", "other.py"):
        (setting.benches / name).write_text("")
    asked = run_checks(tools, tools.sections.bench, setting, passing(tools))
    assert [check.name for check in asked] == ["copy rate", "bench_a.py", "bench_b.py"]
    assert sum(check.seconds for check in asked) == setting.limit
    one = run_checks(
        tools, tools.sections.bench, replace(setting, part="bench_b.py"), passing(tools)
    )
    assert [(check.name, check.seconds) for check in one] == [
        ("copy rate", 240), ("bench_b.py", 240),
    ]  # fmt: skip


# The steps of first -------------------------------------------------------------------------------


@pytest.fixture
def complete_setting(tools, setting, monkeypatch):
    """A machine with everything: PyTorch, JAX, and CUDA's tools."""
    monkeypatch.setattr(tools.section.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tools.setting.shutil, "which", lambda name, path: f"/cuda/bin/{name}")
    return setting


def steps_of(tools, setting) -> dict[str, list]:
    return {
        step: run_checks(tools, tools.first.first, replace(setting, part=step), passing(tools))
        for step in tools.first.FIRST
    }


def test_every_step_ends_in_time_even_if_all_of_it_hangs(tools, complete_setting):
    """Finding a GPU and the slowest step together take less than ten minutes."""
    steps = steps_of(tools, complete_setting)
    assert [f"first:{step}" for step in steps] == list(STEPS)
    for step, asked in steps.items():
        assert all(isinstance(one, tools.section.Check) for one in asked), step
        assert 0 < sum(check.seconds for check in asked) <= complete_setting.limit, step
    names = [check.name for asked in steps.values() for check in asked]
    assert len(set(names)) == len(names)
    assert tools.setting.LOOK_SECONDS + tools.command.LIMIT_SECONDS < 600


def test_the_commands_of_the_readme_run_all_steps_in_ten_minutes_each(tools):
    text = (ROOT / "bench/README.md").read_text("utf-8")
    shown = [line.split()[1:] for line in re.findall(r"^    bench/gpu_check\.sh .*$", text, re.M)]
    ran = []
    for words in shown:
        if "[--fake]" not in words:
            options = tools.command.parse(words)
            each = options.limit + tools.child.GRACE_SECONDS
            assert tools.setting.LOOK_SECONDS + each * len(options.asked) < 600
            ran += options.asked
    assert sorted(ran) == list(STEPS)


def test_the_other_sections_have_the_names_of_what_first_has_run(tools, complete_setting):
    """Otherwise they would run again."""
    first = {check.name for asked in steps_of(tools, complete_setting).values() for check in asked}

    def answer(check):
        paths = {"tests/backends/cuda/test_ops.py": 1, "tests/device/test_contract.py": 1}
        return tools.section.Result(check.name, "passed", figures=paths)

    for section, again in {
        tools.sections.tests: {"tests/backends/cuda/test_ops.py", "tests/device/test_contract.py"},
        tools.sections.nccl: {"NCCL's version", "one process, 1 rank",
                              "a process for each of 2 ranks"},
        tools.sections.sanitize: {"memcheck"},
    }.items():  # fmt: skip
        asked = {check.name for check in run_checks(tools, section, complete_setting, answer)}
        assert asked & first == again
        assert asked - first


def test_what_is_not_installed_is_skipped(tools, setting, monkeypatch):
    monkeypatch.setattr(tools.section.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tools.setting.shutil, "which", lambda name, path: None)
    reasons = [one.reason for asked in steps_of(tools, setting).values() for one in asked
               if not isinstance(one, tools.section.Check)]  # fmt: skip
    assert {"not installed: torch", "not installed: jax", "ncu is not installed",
            "compute-sanitizer is not installed"} <= set(reasons)  # fmt: skip


def test_libraries_without_gpus_are_skipped(tools, complete_setting):
    """They are recognized by their errors, because importing them here would take seconds."""
    asked = {
        check.name: check for one in steps_of(tools, complete_setting).values() for check in one
    }
    paths = tools.sections.LIBRARIES
    names = ("a failed assertion of PyTorch", "training by PyTorch")
    for name, library in {**paths, **dict.fromkeys(names, "torch")}.items():
        (reason,) = asked[name].skips.values()
        assert reason == f"{library} is built without GPUs"
    for path, library in paths.items():
        assert f"--require={library}" in asked[path].command


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("first:4", ["first:4-faults"]),
        ("first:kernels", ["first:2-kernels"]),
        ("first", list(STEPS)),
        ("nccl", ["nccl"]),
        ("tests:tests/backends/cuda", ["tests:tests/backends/cuda"]),
        ("bench:bench_ops.py", ["bench:bench_ops.py"]),
    ],
)
def test_a_part_of_a_section_can_be_asked_for(tools, word, names):
    asked = tools.command.asked_by(word, ROOT / "bench")
    assert asked == names
    assert all({"/", ":"}.isdisjoint(tools.command.stem_of(name)) for name in asked)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--limit", "0"], "0"),
        (["--limit", "long"], "long"),
        (["cuda"], "no section cuda"),
        (["first:10"], "its steps are 1-versions"),
        (["tests:tests/none.py"], "tests/none.py"),
        (["bench:bench_none.py"], "bench_none.py"),
        (["nccl:version"], "section nccl has no part version"),
    ],
)
def test_unknown_arguments_are_refused(tools, capsys, arguments, named):
    with pytest.raises(SystemExit) as stopped:
        tools.command.parse(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_the_environment_sets_the_limit(tools, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_CHECK_LIMIT", "3")
    assert tools.command.parse([]).limit == 3
    assert tools.command.parse(["--limit", "5"]).limit == 5


NCU = (
    '==PROF== Profiling "add_n" - 0: 0%....50%....100% - 8 passes\n'
    '"ID","Process ID","Kernel Name","Context","Section Name","Metric Name","Metric Unit",'
    '"Metric Value"\n'
)


def test_counters_are_read_from_ncus_table(tools):
    """Of each kernel the last launch counts; names are those of the functions."""
    metrics = tools.counters.METRICS
    rows = [
        f'"{launch}","7","void {function}<float>(Table)","1","Command line","{name}","%",'
        f'"1,{launch}{place}0.5"'
        for function in tools.counters.functions().values()
        for launch in (0, 1)
        for place, name in enumerate(metrics.values())
    ]
    found = tools.counters.metrics_of(NCU + "\n".join(rows))
    assert list(found) == list(tools.counters.LAUNCHES)
    for figures in found.values():
        assert figures["dram_percent"] == 1100.5
        assert set(figures) == {*metrics, "duration_unit"}
    with pytest.raises(ValueError, match=r"printed no .* of local_update"):
        tools.counters.metrics_of(NCU + "\n".join(rows[: -2 * len(metrics)]))


def test_ncu_finds_the_functions_of_the_launched_kernels(tools, complete_setting):
    """Every name of LAUNCHES is an entry of a .cu file; another one would profile nothing."""
    check = tools.counters.counters(complete_setting, 60)
    words = check.command
    pattern = re.compile(words[words.index("--kernel-name") + 1].removeprefix("regex:"))
    text = "".join(path.read_text("utf-8") for path in (ROOT / "kernels").glob("*.cu"))
    declared = set(re.findall(r"(\w+)\(\s*TABLE_ARGUMENT", text))
    functions = tools.counters.functions()
    assert list(functions) == list(tools.counters.LAUNCHES)
    assert set(functions.values()) <= declared
    assert {name for name in declared if pattern.search(name)} == set(functions.values())
    assert "gpu_check.counters:launched" in words
    assert "ERR_NVGPUCTRPERM" in check.skips


def test_each_launch_is_one_of_the_kernel_of_its_name(tools):
    with gr.open_mesh(1, backend="sim") as mesh:
        launches = tools.counters.prepare(mesh, tools.counters.QUICK_SIZE)
        assert list(launches) == list(tools.counters.LAUNCHES)
        for name, launch in launches.items():
            with mesh.journal() as journal:
                launch()
            assert [record.name for record in journal.of("launch")] == [name]


@pytest.mark.parametrize(("version", "shares"), [(22809, False), (23000, True), (None, False)])
def test_two_ranks_share_a_gpu_in_one_process_from_nccl_2_30_on(tools, setting, version, shares):
    def answer(check):
        figures = {"version": version} if version else {}
        return tools.section.Result(check.name, "passed" if version else "failed", figures=figures)

    asked = run_checks(tools, tools.sections.nccl, setting, answer)
    named = {item.name: item for item in asked}
    assert "NCCL's version" in named
    shared = named["one process, 2 ranks on one GPU"]
    if shares:
        assert shared.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert shared.environment["NCCL_NVLS_ENABLE"] == "0"
    else:
        assert shared.outcome == "skipped"
    assert "a process for each of 2 ranks" in named
    commands = [item for item in asked if isinstance(item, tools.section.Check)]
    assert sum(item.seconds for item in commands) <= 480


def test_memory_without_a_pool_has_what_our_device_asks_of_a_pool():
    """This memory is used only under the sanitizer."""
    device = (ROOT / "src/gradreduce/backends/cuda/device.py").read_text("utf-8")
    asked = set(re.findall(r"_pool\.(\w+)\(", device))
    text = (ROOT / "bench/gpu_check/unpooled.py").read_text("utf-8")
    assert {"malloc", "free_all_blocks"} <= asked <= set(re.findall(r"def (\w+)\(self", text))
