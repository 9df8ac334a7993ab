"""Sparse accumulators with ``exact=True``: real sums of rows, rounded once, or a warning."""

import warnings
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
from accumulator.kinds import MEANS, Sparse, bits, options_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.accumulator_states import check_refused, frozen
from support.compiled_first import check_compiled_first
from support.exact_data import same
from support.exact_sums import adversarial_terms, exact_means, exact_sums
from support.exhaustive import examples
from support.meshes import implementation

import gradreduce as gr
from gradreduce.device import as_dtype

__all__ = ["implementation"]

DTYPES = ("float16", "bfloat16", "float32")
PLACEMENTS = ((0,), (0, 0), (0, 1, 1), (0, 0, 1, 1, 0))
WEIGHTS = (1, 1, 0.5, 3, float(np.float32(0.1)), 0)
FORMAT = "gradreduce exact sparse accumulator 1"
Exact = partial(gr.SparseConditionalAccumulator, exact=True)


def opened(placement=(0, 1, 1), **options):
    return gr.open_mesh(placement, backend="sim", **{"strict": True, **options})


@pytest.fixture(params=[((0, 0, 1, 2), True), ((0, 0, 1, 2), False)], ids=["peers", "copies"])
def mesh(request):
    placement, peer_access = request.param
    with opened(placement, peer_access=peer_access) as made:
        yield made


def product(rows, weight):
    """Rounded to float32, but for the weight 1."""
    with np.errstate(all="ignore"):
        wide = rows.astype(np.float32)
        return wide if weight == 1 else (wide.astype(np.float64) * weight).astype(np.float32)


def defined(mean, dtype, gradients, weights=None):
    """The result of a take, from the definition; and the number of terms of each row."""
    weights = weights or [1] * len(gradients)
    terms, by = defaultdict(list), defaultdict(float)
    for (indices, rows), weight in zip(gradients, weights, strict=True):
        if weight:
            for index, row in zip(indices, product(rows, weight), strict=True):
                terms[int(index)].append(row)
            for index in set(map(int, indices)):
                by[index] += weight
    found = sorted(terms)
    if mean == "per_gradient":
        by = dict.fromkeys(found, sum(weights))
    dtype = as_dtype(dtype)
    sums = [
        exact_sums(terms[index], dtype)
        if mean == "SUM" or by[index] == 1
        else exact_means(terms[index], by[index], dtype)
        for index in found
    ]
    width = gradients[0][1].shape[1]
    counts = [len(terms[index]) for index in found]
    return found, np.array(sums, dtype).reshape(len(found), width), counts


def gradients_of(seed, num_gradients, dtype, width=3, num_rows=5):
    """Adversarial rows of a few indices, some of which repeat; ``(indices, rows)`` each."""
    luck = np.random.default_rng(seed)
    terms = np.array(adversarial_terms(num_gradients * num_rows, width * 6, dtype, seed))
    rows = terms[:, ::6][:, :width].reshape(num_gradients, num_rows, width)
    return [
        (luck.integers(0, 7, count), np.ascontiguousarray(of_one[:count]))
        for of_one, count in zip(rows, luck.integers(0, num_rows + 1, num_gradients), strict=True)
    ]


def slices_of(luck, gradient, device=None):
    """A gradient with its rows in a random order."""
    indices, rows = gradient
    order = luck.permutation(len(indices))
    values = np.ascontiguousarray(rows[order])
    return gr.IndexedSlices(device.upload(values) if device else values, indices[order])


def added(luck, acc, gradients, weights, mesh):
    """Adds gradients in a random order, by random calls, to random devices."""
    left = list(luck.permutation(len(gradients)))
    while left:
        number = len(mesh) if len(left) >= len(mesh) and luck.random() < 0.3 else 1
        chosen, left = left[:number], left[number:]
        home = mesh.devices[luck.integers(len(mesh))]
        at_home = home if number == 1 and luck.random() < 0.5 else None
        made = [slices_of(luck, gradients[at], at_home) for at in chosen]
        by = [weights[at] for at in chosen]
        with gr.replica(home.index):
            grad = made[0] if number == 1 else gr.PerReplica(made, mesh)
            assert acc.apply_indexed_slices_grad(
                grad, weight=by[0] if number == 1 else by, cast=True
            )


def taken(acc, count=1, **options):
    """The indices and the rows of a take, which are equal on all devices."""
    found = acc.take_indexed_slices_grad(count, output_type="numpy", **options)
    parts = found.values if isinstance(found, gr.Mirrored) else [found]
    assert len({str(bits(each)) for each in parts}) == 1
    return parts[0].indices.tolist(), parts[0].values


def equal(found, wanted):
    return found[0] == wanted[0] and same(found[1], wanted[1])


# ---- values -------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_every_order_has_the_bits_of_the_definition(implementation, data):
    """Orders of gradients and of their rows, calls, devices and meshes; or a warning."""
    count = data.draw(st.integers(1, 8), "gradients")
    words = data.draw(st.sampled_from([2, 3, 8]), "words")
    mean = data.draw(st.sampled_from(MEANS), "mean")
    dtype, other = data.draw(st.tuples(*[st.sampled_from(DTYPES)] * 2), "dtypes")
    seed = data.draw(st.integers(0, 9999), "seed")
    weights = [1] * count
    if data.draw(st.booleans(), "weighted"):
        weights = data.draw(st.lists(st.sampled_from(WEIGHTS), min_size=count, max_size=count))
        weights[0] = weights[0] or 1
    gradients = gradients_of(seed, count, other)
    wanted = defined(mean, dtype, gradients, weights)
    with np.errstate(all="ignore"):
        large = [np.abs(product(rows, weight)) for (_, rows), weight
                 in zip(gradients, weights, strict=True)]  # fmt: skip
        sizes = [np.where(np.isfinite(each), each, 0).sum(dtype=np.float32) for each in large]
        may_overflow = not np.isfinite(np.float32(sum(sizes)))
    for turn in range(2):
        luck = np.random.default_rng([seed, turn])
        placement, peers = PLACEMENTS[luck.integers(len(PLACEMENTS))], bool(luck.integers(2))
        with opened(placement, kernels=implementation, peer_access=peers) as mesh:
            home = mesh if luck.integers(2) else mesh.devices[luck.integers(len(mesh))]
            acc = Exact(dtype, device=home, words=words, **options_of(Sparse, mean))
            added(luck, acc, gradients, weights, mesh)
            with warnings.catch_warnings(record=True, action="always") as caught:
                found = taken(acc, count)
        if caught:
            assert {each.category for each in caught} == {gr.InexactSumWarning}
            assert max(wanted[2]) > words or may_overflow
        else:
            assert equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", MEANS)
def test_a_row_is_rounded_once_and_a_mean_divided_afterwards(mesh, dtype, mean):
    """Also where rows have different divisors, of which some are 1."""
    unit = 2.0 ** -{"float16": 11, "bfloat16": 8, "float32": 24}[dtype]
    least = {"float16": 2.0**-24, "bfloat16": 2.0**-40, "float32": 2.0**-50}[dtype]
    rows = np.array([[1], [unit], [least]], dtype)
    gradients = [([4, 4, 4], rows), ([9, 9], rows[:2]), ([9, 2], rows[1:]), ([], rows[:0]),
                 *[([7], rows[place : place + 1]) for place in range(3)]]  # fmt: skip
    wanted = defined(mean, dtype, gradients)
    for home in (mesh, mesh.devices[1]):
        acc = Exact(dtype, device=home, **options_of(Sparse, mean))
        for number, (indices, values) in enumerate(gradients):
            with gr.replica(number % 4):
                acc.apply_grad(indices, values)
        found = taken(acc, 7)
        assert equal(found, wanted)
        if mean != "per_gradient":
            assert found[1][1].tolist() == [1 + 2 * unit], "rounded twice, it is 1"


@pytest.mark.parametrize("over_mesh", [True, False])
def test_zeros_and_numbers_that_are_not_finite(mesh, over_mesh):
    """A row is -0 if all its terms are, also beside devices without it; others are IEEE's."""
    minus = np.float32([[-0.0, -0.0, np.inf, np.inf, np.nan, 3e38]])
    other = np.float32([[-0.0, 0.0, 1.0, -np.inf, 1.0, -3e38]])
    acc = Exact("float32", device=mesh if over_mesh else mesh.devices[1])
    for first, second in ((minus, other), (other, minus)):
        acc.apply_grad([3, 3], np.concatenate([first, second]), None, acc.global_step)
        with gr.replica(2):
            acc.apply_grad([5], first, None, acc.global_step)
        with gr.replica(3):
            acc.apply_grad([5, 8], np.concatenate([second, minus]), None, acc.global_step)
        indices, rows = taken(acc, 3)
        wanted = np.float32([-0.0, 0, np.inf, np.nan, np.nan, 0])
        assert indices == [3, 5, 8]
        assert same(rows, np.array([wanted, wanted, minus[0]]))


def test_an_index_may_occur_many_times(mesh):
    """As the padding of sentences; rows that few have in between."""
    luck = np.random.default_rng(0)
    indices = np.minimum(luck.zipf(1.4, 700), 40)
    rows = luck.standard_normal((700, 2)).astype(np.float32)
    wanted = defined("SUM", "float32", [(indices, rows)])
    assert max(wanted[2]) > 200
    for home in (mesh, mesh.devices[3]):
        acc = Exact("float32", device=home, reduction_type="SUM")
        for part in np.array_split(np.arange(700), [0, 500, 503, 650]):
            acc.apply_grad(indices[part], rows[part])
        assert equal(taken(acc, 5), wanted)
        acc.apply_grad([7] * 100, np.full((100, 1), -0.0, "float32"), None, 1)
        assert same(taken(acc)[1], np.float32([[-0.0]]))


def test_a_sum_that_grows_keeps_its_words(mesh):
    """Of rows without elements, too."""
    acc = Exact("float32", (200, 1), device=mesh.devices[1], reduction_type="SUM")
    for values in ([1e8, 0.5], [-1e8]):
        for index in range(200):
            acc.apply_grad([index] * len(values), np.float32(values)[:, None])
    assert acc.accumulator_ref.totals[0].arrays[0].shape == (200, 1)
    assert taken(acc, 400)[1].tolist() == [[0.5]] * 200
    acc = Exact("float32", device=mesh)
    acc.apply_grad([4, 4], np.empty((2, 0), "float32"))
    acc.apply_grad([], np.empty((0, 0), "float32"))
    assert taken(acc, 2)[1].shape == (1, 0)


def test_joint_calls_with_dense_sums(mesh):
    dense = gr.ConditionalAccumulator("float32", device=mesh, exact=True, reduction_type="SUM")
    accs = [dense, *[Exact("float32", device=mesh, reduction_type="SUM") for _ in range(2)]]
    for value in (1e8, 0.5, -1e8):
        one, two = (gr.IndexedSlices(np.float32([[value]] * count), [3] * count, (4, 1))
                    for count in (1, 2))  # fmt: skip
        assert gr.apply_grads(accs, [[value], one, two])
    found = gr.take_grads(accs, 3)
    assert [each.values[-1].tolist() for each in found[:1]] == [[0.5]]
    assert [each.values[-1].values.tolist() for each in found[1:]] == [[[0.5]], [[1.0]]]


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_launches_of_a_gradient_and_a_take(repeats):
    """A gather, one addition for each number of rows of an index, and a scatter."""
    with opened((0,)) as mesh:
        accs = [Exact("float32", device=mesh) for _ in range(2)]
        rows = mesh.devices[0].put(np.ones((2 + repeats, 4), "float32"))
        grad = gr.IndexedSlices(rows, [5, 2, *[7] * repeats])
        gr.apply_grads(accs, [grad] * 2)
        with mesh.journal() as journal:
            gr.apply_grads(accs, [grad] * 2)
        adds = ["add_words"] * (1 + (repeats > 1))
        assert [each.name for each in journal.of("launch")] == ["take_rows", *adds, "segment_sum"]
        assert (journal.uploads, journal.copies, journal.syncs) == (2, 0, 0)
        with mesh.journal() as journal:
            accs[0].take_indexed_slices_grad(1)
        names = [each.name for each in journal.of("launch")]
        assert names == ["take_rows", "exact_sum", "segment_sum"]


@pytest.mark.parametrize("repeats", [2, 100])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("over_mesh", [True, False])
def test_no_call_compiles_after_its_first_launch(over_mesh, dtype, repeats):
    """However many rows have the same index, and on however many devices."""

    def calls(mesh):
        home = mesh if over_mesh else mesh.devices[1]
        acc = Exact(dtype, device=home, reduction_type="SUM")
        yield
        for device in range(4):
            with gr.replica(device):
                indices = [*[9] * repeats, *range(device)]
                acc.apply_grad(indices, np.ones((len(indices), 2), dtype))
            yield
        acc.take_indexed_slices_grad(4)
        yield

    with opened((0, 0, 1, 2), strict=False) as mesh:
        check_compiled_first(mesh, calls)


# ---- the warning --------------------------------------------------------------------------------

TOO_MANY = (1.0, 2.0**-30, 2.0**-60)  # for two words
FIT = (1.0, 2.0**-30, 2.0**-10)


def add_all(acc, terms, step=0):
    for term in terms:
        assert acc.apply_grad([3, 6], np.float32([[0], [term]]), None, step)


def test_the_warning_names_the_sum_that_did_not_fit():
    """Of all terms of a row of one gradient, or of several; also after the memory has grown."""
    with opened() as mesh:
        accs = [Exact("float32", name=name, device=mesh, words=2) for name in "abc"]
        for acc, terms in zip(accs, (FIT, TOO_MANY, TOO_MANY), strict=True):
            if acc.name == "c":
                acc.apply_grad([1] * 3, np.float32(terms)[:, None])
                acc.apply_grad([8, 9], np.ones((2, 1), "float32"))
            else:
                add_all(acc, terms)
        with pytest.warns(gr.InexactSumWarning) as caught:
            gr.take_grads(accs, 2)
        assert [str(each.message).split("'")[1] for each in caught] == ["b", "c"]
        assert {each.filename for each in caught} == {__file__}
        for acc in accs:  # the flag belongs to one sum
            add_all(acc, FIT, 1)
            taken(acc, 3)


def test_words_of_several_devices_are_added_without_a_limit():
    with opened((0, 1)) as mesh:
        acc = Exact("float32", device=mesh, words=2, reduction_type="SUM")
        for device, terms in enumerate(((1.0, 2.0**-30), (2.0**-60, 2.0**-90, -1.0))):
            with gr.replica(device):
                acc.apply_grad([4] * len(terms), np.float32(terms)[:, None])
        # Device 1 has -1 + 2**-60 + 2**-90, which three words hold.
        with pytest.warns(gr.InexactSumWarning):
            taken(acc, 2)
        for device, terms in enumerate(((1.0, 2.0**-30), (2.0**-60, -1.0))):
            with gr.replica(device):
                acc.apply_grad([4] * len(terms), np.float32(terms)[:, None], None, 1)
        assert taken(acc, 2) == ([4], np.float32([[2.0**-30]]))


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", MEANS)
def test_equal_sums_have_equal_states_which_go_on_alike(implementation, dtype, mean):
    """In any order of the gradients of a device."""
    gradients, weights = gradients_of(5, 6, dtype), [1, 2, 1, 0.5, 1, 1]
    gradients = [(indices, np.nan_to_num(rows.astype("f4"), posinf=1, neginf=0).astype(rows.dtype))
                 for indices, rows in gradients]  # fmt: skip
    wanted, states, luck = defined(mean, dtype, gradients, weights), {}, np.random.default_rng(0)
    for _ in range(2):
        with opened((0, 1, 1), kernels=implementation) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.InexactSumWarning)  # where it overflows
            for home in (mesh, mesh.devices[2]):
                make = partial(Exact, dtype, device=home, words=8, **options_of(Sparse, mean))
                acc, fresh = make(), make()
                for number in luck.permutation(4):
                    with gr.replica(number % 3):
                        grad = slices_of(luck, gradients[number])
                        acc.apply_indexed_slices_grad(grad, weight=weights[number])
                state = acc.state_dict()
                assert states.setdefault(home is mesh, frozen(acc)[1]) == frozen(acc)[1]
                fresh.load_state_dict(state)
                assert frozen(fresh) == frozen(acc)
                for each in (acc, fresh):
                    for number in luck.permutation(2) + 4:
                        with gr.replica(number % 3):
                            grad = slices_of(luck, gradients[number])
                            each.apply_indexed_slices_grad(grad, weight=weights[number])
                    assert equal(taken(each, 6), wanted)


def test_a_state_has_canonical_words_in_the_order_of_the_indices():
    with opened((0, 0)) as mesh:
        acc = Exact("bfloat16", device=mesh)
        with gr.replica(1):
            for indices, value in (([9], 2.0**-30), ([4, 9], 1), ([9], -(2.0**-60))):
                acc.apply_grad(indices, np.full((len(indices), 2), value, as_dtype("bfloat16")))
        state = acc.state_dict()
        assert (state["format"], state["dtype"]) == (FORMAT, "bfloat16")
        nothing, total = state["partial_sums"]
        assert nothing is None
        assert (total["indices"].tolist(), total["num_touches"].tolist()) == ([4, 9], [1, 3])
        words = np.float32([[1, 0, 0], [1, 2.0**-30, -(2.0**-60)]])
        assert same(total["values"], np.repeat(words[:, :, None], 2, 2))


def test_a_state_of_another_kind_or_a_damaged_one_is_refused():
    with opened((0,)) as mesh:
        make = partial(gr.SparseConditionalAccumulator, "float32", device=mesh.devices[0])
        plain, three, four = make(), make(exact=True), make(exact=True, words=4)
        for acc in (plain, three, four):
            add_all(acc, FIT)
        states = [acc.state_dict() for acc in (plain, three, four)]
        rows, where = "gradreduce sparse accumulator 1", "state['partial_sums'][0]"
        shapes = "['values'] is float32(2, {}, 1); expected float32(2, {}, 1)"
        for acc, state, text in (
            (plain, states[1], f"state['format'] is '{FORMAT}'; expected '{rows}'"),
            (three, states[0], f"state['format'] is '{rows}'; expected '{FORMAT}'"),
            (three, states[2], where + shapes.format(4, 3)),
            (four, states[1], where + shapes.format(3, 4)),
        ):
            check_refused(acc, state, ValueError, text)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"words": 1}, ValueError, "words=1 must be at least 2, and at most 8"),
        ({"words": 9, "exact": False}, ValueError, "words=9 must be at least 2, and at most 8"),
        ({"exact": "yes"}, TypeError, "exact='yes' must be True or False"),
        ({"dtype": "float64"}, TypeError,
         "exact=True does not support float64 for IndexedSlices yet"),
        ({"cross_device_ops": gr.AllReduceCrossDeviceOps()}, ValueError,
         "adds partial sums with exact=False, but the accumulator has exact=True"),
        ({"cross_device_ops": gr.HierarchicalCopyAllReduce(exact=True), "exact": False},
         ValueError, "adds partial sums with exact=True, but the accumulator has exact=False"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_launched(mesh, options, error, text):
    given = {"dtype": "float32", "exact": True, "device": mesh, **options}
    with mesh.journal() as journal, pytest.raises(error) as raised:
        gr.SparseConditionalAccumulator(**given)
    assert text in str(raised.value)
    assert journal.records == []


def test_a_shared_name_has_one_number_of_words():
    with opened((0,)) as mesh:
        make = partial(gr.SparseConditionalAccumulator, "float32", None, "s", None, "SUM",
                       device=mesh.devices[0])  # fmt: skip
        first = make(exact=True)
        add_all(make(exact=True), FIT)
        assert taken(first, 3)[0] == [3, 6]
        for options, text in (({}, "format"), ({"exact": True, "words": 4}, "words")):
            with pytest.raises(ValueError, match=text):
                make(**options)


def test_a_gradient_that_does_not_fit_changes_nothing(mesh):
    for home in (mesh, mesh.devices[1]):
        acc = Exact("float32", (7, 1), device=home)
        add_all(acc, FIT)
        before = frozen(acc)
        for indices, rows, text in (
            ([7], [[1]], "exceeded limits of shape"),
            ([1], [[1, 2]], "expected values dim 1 to be 1, got 2"),
            ([1], np.ones((1, 1)), "float64"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                acc.apply_grad(indices, rows)
        assert frozen(acc) == before
