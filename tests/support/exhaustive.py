"""The tier ``exhaustive``: all parameter combinations, and all examples of hypothesis tests.

This is a pytest plugin. If a test has several parameters, the plain run takes a sample of the
cases: each value of each parameter at least once, and as many pairs of values as so many cases can
have. Cases with different needs (g++, a GPU) are covered separately. The other cases belong to the
tier. A plain run does not create them, because tens of thousands of cases take seconds and hundreds
of megabytes. The sample depends only on the test and its parameters.

* A test with the mark ``whole_product`` has all its cases in the plain run.
* A test or parameter with the mark ``exhaustive`` belongs to the tier.
* A test that uses several seeds takes them as a parameter from ``seeds(few, all_of_them)``.
* A hypothesis test with ``settings(max_examples=examples(number))`` belongs to both: the tier runs
  all its examples, the plain run some of them.

``-m exhaustive`` runs the tier, ``-m faults`` its tests that plant faults in processes.
``--sample-exhaustive=SEED:COUNT`` runs that many tests of the tier. A case named on the command
line (``test_x.py::test_y[0-float32]``) always exists.
"""

import random
import re
import zlib
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations

import pytest

FEWER_EXAMPLES = 4
FEWEST = 4  # a product has at least so many cases in the plain run

Value = tuple[Hashable, Hashable]  # a parameter, and the index of one of its values
_tier = pytest.StashKey[bool]()
_left_out = pytest.StashKey[int]()
_all_examples = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample-exhaustive",
        metavar="SEED:COUNT",
        help="run COUNT tests of the tier exhaustive; the same for the same SEED and tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Checks the option, and stores which kind of run this is."""
    config.stash[_left_out] = 0
    asked = config.getoption("--sample-exhaustive")
    if asked is not None and not re.fullmatch(r"[0-9]+:[0-9]+", asked):
        raise pytest.UsageError(f"--sample-exhaustive={asked}: expected SEED:COUNT, two integers")
    expression = config.option.markexpr or ""
    in_tier = asked is not None or bool(re.search(r"(?<!not )\b(exhaustive|faults)\b", expression))
    config.stash[_tier] = in_tier
    global _all_examples
    _all_examples = in_tier


def examples(number: int) -> int:
    """The number of examples of a hypothesis test in this run; in the tier it is ``number``."""
    return number if _all_examples else max(1, number // FEWER_EXAMPLES)


def seeds(few: int, all_of_them: int) -> list:
    """Parameters: the seeds of a plain run, from 0, and those of the tier."""
    return [
        pytest.param(range(few), id=f"0-{few - 1}"),
        pytest.param(
            range(few, all_of_them), id=f"{few}-{all_of_them - 1}", marks=pytest.mark.exhaustive
        ),
    ]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Marks the cases of the tier, or leaves them out."""
    made = yield
    config, function = metafunc.config, metafunc.definition
    if function.get_closest_marker("whole_product") is not None:
        return made
    # pytest has no public name for the cases that other hooks have made.
    cases = metafunc._calls
    by_needs: dict[frozenset[str], list[int]] = {}
    for number, case in enumerate(cases):
        by_needs.setdefault(frozenset(mark.name for mark in case.marks), []).append(number)
    # A machine may lack what some cases need, so cases with the same needs are covered separately.
    chosen = set[int]()
    for needs, numbers in by_needs.items():
        if "exhaustive" not in needs:
            seed = zlib.crc32(" ".join([function.nodeid, *sorted(needs)]).encode())
            values = [tuple(cases[number].indices.items()) for number in numbers]
            chosen.update(numbers[place] for place in covering(values, seed))
    rest = [number for number in range(len(cases)) if number not in chosen]
    if config.stash[_tier]:
        for number in rest:
            cases[number].marks.append(pytest.mark.exhaustive.mark)
        return made
    named = _named(config)
    left_out = {n for n in rest if f"{function.nodeid}[{cases[n].id}]" not in named}
    config.stash[_left_out] += len(left_out)
    cases[:] = [case for number, case in enumerate(cases) if number not in left_out]
    return made


def pytest_itemcollected(item: pytest.Item) -> None:
    """Adds hypothesis tests to the tier if the tier is run."""
    law = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if law and item.config.stash[_tier]:
        item.add_marker("exhaustive")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests with the mark out of a plain run, or draws the sample."""
    asked = config.getoption("--sample-exhaustive")
    of_tier = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    if asked is not None:
        seed, count = map(int, asked.split(":"))
        kept = set(random.Random(seed).sample(of_tier, min(count, len(of_tier))))
    elif config.stash[_tier]:
        return
    else:
        named = _named(config)
        kept = set(items) - {item for item in of_tier if item.nodeid not in named}
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Prints how many cases of the tier were not created."""
    count = config.stash[_left_out]
    return f"{count} cases of products left out (-m exhaustive)" if count else ""


def _named(config: pytest.Config) -> set[str]:
    return {argument.replace("\\", "/") for argument in config.args}


def covering(cases: Sequence[Sequence[Value]], seed: int, fewest: int = FEWEST) -> set[int]:
    """Indices of at least ``fewest`` cases that together cover every value of every parameter.

    Each next case adds the most new values. Among equal ones it adds the most new pairs of values,
    and among these it is the first in an order that the seed determines.
    """
    left = list(range(len(cases)))
    random.Random(seed).shuffle(left)
    missing = {value for case in cases for value in case}
    pairs = [set(combinations(case, 2)) for case in cases]
    seen: set[tuple[Value, Value]] = set()
    chosen = set[int]()
    while left and (missing or len(chosen) < fewest):
        gains = {number: len(missing.intersection(cases[number])) for number in left}
        most = max(gains.values())
        best = [number for number in left if gains[number] == most]
        number = max(best, key=lambda number: len(pairs[number] - seen))
        left.remove(number)
        chosen.add(number)
        missing.difference_update(cases[number])
        seen |= pairs[number]
    return chosen
