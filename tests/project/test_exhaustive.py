"""The tier ``exhaustive``, tested on a small suite, and the sample that covers a product."""

import itertools

import pytest
from support.exhaustive import FEWEST, covering

pytest_plugins = ("pytester",)

SUITE = """
import pytest

@pytest.fixture(params="mno")
def letter(request):
    return request.param

@pytest.mark.parametrize("number", range(4))
def test_product(letter, number): pass

@pytest.mark.whole_product
@pytest.mark.parametrize("number", range(4))
def test_whole(letter, number): pass

@pytest.mark.parametrize("kernels", ["numpy", pytest.param("compiled", marks=pytest.mark.host)])
@pytest.mark.parametrize("number", range(5))
def test_needs(number, kernels): pass

@pytest.mark.parametrize("rounds", [3, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_by_hand(rounds): pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """The names of the tests that a run of the small suite has."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive:\n    whole_product:\n    host:")
    pytester.makepyfile(test_small=SUITE)

    def names(*arguments: str) -> list[str]:
        collect = ("-p", "support.exhaustive", "--strict-markers", "--collect-only", "-q")
        result = pytester.runpytest_inprocess(*collect, *arguments)
        found = [line.partition("::")[2] for line in result.outlines if "::" in line]
        return found or result.errlines

    return names


def test_a_run_has_every_value_of_a_product_and_the_tier_has_the_rest(run):
    plain, tier = run(), run("-m", "exhaustive")
    assert len(plain + tier) == len({*plain, *tier}) == 12 + 12 + 10 + 2
    product = [name for name in plain if name.startswith("test_product")]
    assert len(product) == FEWEST
    assert {value for name in product for value in name[13:-1].split("-")} == {*"mno", *"0123"}
    assert sum(name.startswith("test_whole") for name in plain) == 12
    assert [name for name in plain if "by_hand" in name] == ["test_by_hand[3]"]
    # A machine without what one implementation needs has every number too.
    assert {name for name in plain if "needs" in name} == {
        f"test_needs[{number}-{kernels}]"
        for number in range(5)
        for kernels in ("numpy", "compiled")
    }
    assert run("-m", "not exhaustive") == plain
    assert sorted(run("-m", "exhaustive or not exhaustive")) == sorted(plain + tier)


def test_a_case_that_is_named_exists(run):
    tier = run("-m", "exhaustive")
    for name in tier:
        assert run(f"test_small.py::{name}") == [name]


def test_a_sample_is_the_same_for_the_same_seed(run):
    tier = run("-m", "exhaustive")
    first = run("--sample-exhaustive", "1:5")
    assert len(first) == 5
    assert set(first) < set(tier)
    assert run("--sample-exhaustive", "1:5") == first
    assert run("--sample-exhaustive", "2:5") != first
    assert run("--sample-exhaustive", "1:500") == tier


@pytest.mark.parametrize("asked", ["5", "x:1", "1:", "1:-1"])
def test_a_sample_that_cannot_be_drawn_is_refused(run, asked):
    assert "expected SEED:COUNT" in run("--sample-exhaustive", asked)[0]


def test_a_sample_has_every_value_and_many_pairs():
    sizes = (7, 5, 3, 2)
    cases = [list(enumerate(case)) for case in itertools.product(*map(range, sizes))]
    chosen = covering(cases, 0)
    assert len(chosen) == max(sizes)
    assert {value for number in chosen for value in cases[number]} == {
        (place, value) for place, size in enumerate(sizes) for value in range(size)
    }
    pairs = {pair for number in chosen for pair in itertools.combinations(cases[number], 2)}
    assert len(pairs) > 0.9 * max(sizes) * 6
    assert covering(cases, 0) == chosen != covering(cases, 1)
