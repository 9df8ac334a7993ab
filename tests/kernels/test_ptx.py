"""What NVRTC makes of every kernel is executed: the PTX gives the bits of the NumPy reference.

``ptx/`` has the interpreter, the launches and the planted mutants. A launch fails if it reaches an
unknown instruction, accesses memory outside of its operands, off its alignment or of another
thread, or does not end. Registers that nothing wrote have random bits.
"""

from concurrent.futures import Future

import numpy as np
import pytest
from kernels.nvrtc import WHEELS, compiled
from kernels.ptx.launches import Geometry, Launch, launches, operand
from kernels.ptx.machine import Machine, PtxError
from kernels.ptx.mutants import mutants
from kernels.ptx.text import parsed
from kernels.sass import ARCHITECTURES
from support.exact_data import same
from support.exact_sums import COUNTS, adversarial_rows, exact_sums
from support.exhaustive import covering
from support.skip_rules import find_compiler

from gradreduce.device.run.kernel import kernel_text
from gradreduce.ops import KERNELS, RuleKernel
from gradreduce.ops.add_words import ADD_WORDS
from gradreduce.ops.exact_sum import EXACT_SUM

pytestmark = [pytest.mark.nvrtc, pytest.mark.host]

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
HALF, BRAIN, SINGLE, DOUBLE = "float16", "bfloat16", "float32", "float64"
# Every kernel's loops, conversions and roundings are in one of these.
MUTATED = (
    ("add_n", (BRAIN, BRAIN, 3)), ("add_n", (SINGLE, SINGLE, 1)),
    ("accumulate_n", (SINGLE, SINGLE)), ("all_sum", (HALF, HALF, 4)),
    ("all_sum", (SINGLE, SINGLE, 0)), ("pack", (BRAIN, SINGLE)), ("pack", (DOUBLE, DOUBLE)),
    ("divide", (SINGLE, "int8")), ("divide", (DOUBLE, "uint64")),
    ("segment_sum", (SINGLE, SINGLE)), ("take_rows", ("uint16",)), ("square_sum", (DOUBLE,)),
    ("clip", (DOUBLE,)), ("distance_scale", (SINGLE,)), ("adam", (BRAIN, SINGLE)),
    ("local_momentum", (SINGLE, SINGLE)), ("global_momentum", (BRAIN, SINGLE)),
    ("nesterov", (DOUBLE, DOUBLE)), ("rmsprop_centered", (SINGLE, SINGLE)),
    ("adagrad", (SINGLE, SINGLE)), ("exact_sum", (SINGLE, SINGLE, 4)),
    ("exact_sum", (HALF, SINGLE, 0)), ("add_words", (SINGLE, BRAIN, 3)),
    ("add_words", (DOUBLE, DOUBLE, 0)),
)  # fmt: skip
NUMBER = 10  # of mutants of each
MORE = ((90, 2), (90, 3), (100, 1), (100, 2), (100, 3))  # sm_80 has the texts of sm_90
PLAIN = (
    "distance_scale",
    "take_rows",
    "adam",
)  # in a plain run; CI runs all kernels in its compile tier
MISSED = 0.05  # share of the mutants: some change only the speed, or bits that have no meaning


def few(kernel):
    """Templates in which every dtype occurs; of update.cu, which has 27 kernels, one for each."""
    if isinstance(kernel, RuleKernel):
        return (kernel.templates[KERNELS.index(kernel) % len(kernel.templates)],)
    values = [tuple(enumerate(template)) for template in kernel.templates]
    return tuple(kernel.templates[n] for n in sorted(covering(values, 0, fewest=1)))


def programs(version, name, archs, templates):
    """The different entries that NVRTC makes for these architectures: template, entry."""
    kernel = BY_NAME[name]
    names = {template: kernel.expression(template) for template in templates}
    made = [compiled(kernel_text(kernel.source), list(names.values()), arch, version)
            for arch in archs]  # fmt: skip
    found = {}
    for template, expression in names.items():
        for program in made:
            entry = program.entries[expression]
            found[template, entry.parameters, entry.body] = template, entry
    return list(found.values())


def problems(version, name, archs, templates):
    """What the launches of a kernel do that its reference does not."""
    found = []
    for template, program in programs(version, name, archs, templates):
        machine = Machine(parsed(program.parameters, program.body))
        for number, launch in enumerate(launches(BY_NAME[name], template)):
            try:
                problem = launch.problem(machine)
            except PtxError as error:
                problem = str(error)
            if problem:
                found.append(f"{template}, launch {number}: {problem}")
    return found


def survivors(name, template, arch, seed):
    """The mutants of an instantiation that no launch shows.

    A launch shows a mutant by other bits than the reference, or by an error.
    """
    ((_, program),) = programs(12, name, [arch], [template])
    entry = parsed(program.parameters, program.body)
    machine, tried, limits, reached = Machine(entry), launches(BY_NAME[name], template), [], set()
    for launch in tried:
        assert launch.problem(machine) == ""
        limits.append(4 * machine.num_steps)
        reached |= machine.executed
    rounds = SINGLE in template[-1:] or template[0] in (SINGLE, DOUBLE)
    made = mutants(entry, reached, rounds=rounds, seed=seed, number=NUMBER)
    assert len(made) == NUMBER
    changed = Machine(entry, [(each.start, text) for each, text in made])

    def survives(number):
        changed.mutant = number
        try:
            return not any(map(lambda one, most: one.problem(changed, most), tried, limits))
        except PtxError:
            return False

    return [
        f"{name}: {each.text} -> {text}"
        for number, (each, text) in enumerate(made)
        if survives(number)
    ]


@pytest.fixture(scope="module")
def found(request, pool) -> dict[tuple, Future]:
    """(version, name, archs, templates) -> ``problems``; those of all tests are made ahead."""
    wanted = {}
    for item in request.session.items:
        if item.module is request.module and "found" in item.fixturenames:
            params = item.callspec.params
            if find_compiler(WHEELS[params["version"]]):
                wanted[tuple(params[name] for name in PARAMETERS)] = None
    return {case: pool.submit(problems, *case) for case in wanted}


SLOW = (pytest.mark.exhaustive, pytest.mark.slow)
PARAMETERS = ("version", "name", "archs", "templates")
CASES = [
    pytest.param(12, kernel.name, (ARCHITECTURES[number % len(ARCHITECTURES)],), few(kernel),
                 id=f"{kernel.name}-few",
                 marks=() if kernel.name in PLAIN else pytest.mark.exhaustive)
    for number, kernel in enumerate(KERNELS)
]  # fmt: skip
CASES += [
    pytest.param(version, kernel.name, ARCHITECTURES, kernel.templates,
                 id=f"{kernel.name}-{version}",
                 marks=(*SLOW, pytest.mark.nvrtc(WHEELS[version])))
    for version in WHEELS for kernel in KERNELS
]  # fmt: skip


@pytest.mark.whole_product
@pytest.mark.parametrize(PARAMETERS, CASES)
def test_the_ptx_gives_the_bits_of_the_reference(found, version, name, archs, templates):
    assert found[version, name, archs, templates].result() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arch", "seed"), [(90, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_mutants_are_caught(pool, arch, seed):
    futures = [pool.submit(survivors, *case, arch, seed) for case in MUTATED]
    missed = [change for future in futures for change in future.result()]
    assert len(missed) <= MISSED * NUMBER * len(MUTATED), "\n".join(missed)


MANY_BLOCKS = 10**9  # of instructions: the elements that go on to the integer take thousands


MANY_TERMS = pytest.mark.parametrize(
    ("counts", "share"),
    [
        ((3, 9), 40),
        pytest.param(tuple(COUNTS), 1, marks=[pytest.mark.exhaustive, pytest.mark.slow]),
    ],
    ids=["500", "100000"],
)


@MANY_TERMS
def test_exact_sums_are_those_of_integers(counts, share):
    """Of adversarial terms; the oracle is Python's integers."""
    for count, terms in zip(COUNTS, adversarial_rows(SINGLE, 0, share), strict=True):
        if count not in counts:
            continue
        template = (SINGLE, SINGLE, count if 2 <= count <= 8 else 0)
        ((_, program),) = programs(12, "exact_sum", [90], [template])
        out = np.full(terms[0].size, np.nan, np.float32)
        rows = [[operand(each) for each in (out, *terms)]]
        launch = Launch(EXACT_SUM, rows, (1, count, 1.0), Geometry(False, 32))
        assert same(launch.expected[0], exact_sums(terms))
        machine = Machine(parsed(program.parameters, program.body))
        assert launch.problem(machine, MANY_BLOCKS) == ""


@MANY_TERMS
def test_added_words_are_those_of_the_reference(counts, share):
    """Of adversarial terms; tests/ops compares the reference with Python's integers."""
    ((_, program),) = programs(12, "add_words", [90], [(SINGLE, SINGLE, 3)])
    machine = Machine(parsed(program.parameters, program.body))
    for count, terms in zip(COUNTS, adversarial_rows(SINGLE, 0, share), strict=True):
        if count in counts:
            words = [operand(np.full(terms[0].size, np.nan, np.float32)) for _ in range(3)]
            flag = operand(np.zeros(1, np.int32))._replace(several=True)
            rows = [[*words, flag, *map(operand, terms)]]
            launch = Launch(ADD_WORDS, rows, (4, count, 1), Geometry(False, 32))
            assert launch.problem(machine, MANY_BLOCKS) == ""
