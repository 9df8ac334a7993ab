"""Accumulators with ``exact=True``: real sums, rounded once, or a warning.

A gradient is indices and rows; a dense accumulator gets one row, as an array. The first test is
also that of other accumulators, whose sums of small whole numbers are not rounded.
"""

import warnings
from collections import defaultdict
from functools import partial
from itertools import product

import numpy as np
import pytest
from accumulator.kinds import KINDS, MEANS, Dense, Sparse, bits, options_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.accumulator_states import check_refused, frozen
from support.exact_data import same
from support.exact_sums import added_in, exact_reduction, exact_terms, weighted
from support.exhaustive import examples
from support.meshes import implementation
from support.threads import in_threads

import gradreduce as gr
from gradreduce.device import as_dtype

__all__ = ["implementation"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
PLACEMENTS = ((0,), (0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 1, 1, 0))
SHAPES = ((18,), (2, 9), (1,))  # of a row
WEIGHTS = (1, 1, 0.5, 3, float(np.float32(0.1)), 0)
WHOLE_WEIGHTS = (1, 1, 2, 3, 0.5, 4096, 0)  # products with whole numbers are not rounded
FORMATS = {
    Dense: "gradreduce exact accumulator 1", Sparse: "gradreduce exact sparse accumulator 1"
}  # fmt: skip


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


def opened(placement=(0, 1, 1), **options):
    return gr.open_mesh(placement, backend="sim", **{"strict": True, **options})


@pytest.fixture(
    params=[((0, 0, 1, 2), True), ((0, 0, 1, 2), False), ((0,) * 4, True)],
    ids=["peers", "copies", "one"],
)
def mesh(request):
    placement, peer_access = request.param
    with opened(placement, peer_access=peer_access) as made:
        yield made


def make(kind, dtype="float32", mean="SUM", **options):
    return kind.make(dtype, **{**options_of(kind, mean), "exact": True, **options})


def on_each(mesh, kind=Dense, mean="SUM", dtype="float32", **options):
    """An accumulator over the mesh, and one on a device of it."""
    return [make(kind, dtype, mean, device=home, **options) for home in (mesh, mesh.devices[1])]


def grad_of(kind, gradient, device=None):
    indices, rows = gradient
    values = rows if kind is Sparse else rows[0]
    values = device.upload(values) if device else values
    return gr.IndexedSlices(values, indices) if kind is Sparse else values


def row(value, dtype="float32", size=1):
    return [3], np.full((1, size), value, as_dtype(dtype))


def add(acc, gradient, step=None, *, replica=None, weight=1):
    kind = Sparse if isinstance(acc, Sparse.make) else Dense
    with gr.replica(acc.accumulator_ref.devices[0].index if replica is None else replica):
        step = acc.global_step if step is None else step
        assert gr.apply_grads([acc], [grad_of(kind, gradient)], step, weight=weight)


def add_all(acc, terms):
    for term in terms:
        add(acc, row(term))


def content(result):
    """The indices and the rows of a result, which are equal on all devices."""
    parts = result.values if isinstance(result, gr.Mirrored) else [result]
    assert len({str(bits(each)) for each in parts}) == 1
    if isinstance(parts[0], gr.IndexedSlices):
        return parts[0].indices.tolist(), parts[0].values
    return [3], np.asarray(parts[0])[None]


def taken(acc, count=1):
    return content(gr.take_grads([acc], count, output_type="numpy")[0])


def equal(found, wanted):
    return found[0] == wanted[0] and same(found[1], wanted[1])


def weigh(dtype, rows, weight):
    """In the floats that an accumulator of this dtype adds."""
    with np.errstate(all="ignore"):
        return weighted(rows.astype(added_in(dtype)), weight)


def defined(mean, dtype, gradients, weights=None):
    """The result of a take, from the definition; and the largest number of terms of a row."""
    weights, terms, by = weights or [1] * len(gradients), defaultdict(list), defaultdict(float)
    for (indices, rows), weight in zip(gradients, weights, strict=True):
        if weight:
            for index, values in zip(indices, weigh(dtype, rows, weight), strict=True):
                terms[int(index)].append(values)
            for index in set(map(int, indices)):
                by[index] += weight
    if mean == "per_gradient":
        by = dict.fromkeys(terms, sum(weights))
    sums = [
        exact_reduction(terms[at], mean=mean != "SUM", divisor=by[at], out=dtype)
        for at in sorted(terms)
    ]
    shape = gradients[0][1].shape[1:]
    most = max(map(len, terms.values()), default=0)
    return sorted(terms), np.array(sums, as_dtype(dtype)).reshape(len(terms), *shape), most


# ---- values -------------------------------------------------------------------------------------


def gradients_of(kind, seed, count, dtype, shape, out=None, *, exact=True):
    """Rows whose sums are exact; sparse gradients have some of a few indices, which may repeat."""
    num_rows, size = 5 if kind is Sparse else 1, int(np.prod(shape))
    terms = exact_terms(count * num_rows, (size,), dtype, seed, out, rounded=not exact)
    rows = np.array(terms).reshape(count, num_rows, *shape)
    if kind is Dense:
        return [([3], each) for each in rows]
    luck = np.random.default_rng(seed)
    sizes = luck.integers(0, num_rows + 1, count)
    return [(luck.integers(0, 7, n), each[:n]) for each, n in zip(rows, sizes, strict=True)]


def in_any_order(luck, gradient):
    order = luck.permutation(len(gradient[0]))
    return np.asarray(gradient[0])[order], gradient[1][order]


def added(luck, kinds, accumulators, gradients, weights, mesh, exact):
    """Adds ``gradients[accumulator][term]`` in a random order and by random calls.

    Without ``exact`` also saves and loads sums; an exact one would forget that it is inexact.
    """
    left = [list(luck.permutation(len(weights))) for _ in accumulators]

    def pop(at, home=None):
        number = left[at].pop()
        return grad_of(kinds[at], in_any_order(luck, gradients[at][number]), home), weights[number]

    while any(left):
        home = mesh.devices[luck.integers(len(mesh))]
        at_home = home if luck.random() < 0.5 else None
        chosen = [at for at in range(len(left)) if left[at] and luck.random() < 0.7]
        made = [(accumulators[at], *pop(at, at_home)) for at in chosen]
        joint = len({weight for *_, weight in made}) == 1 and luck.random() < 0.6
        for call in [made] if joint else [[each] for each in made]:
            several, grads, by = zip(*call, strict=True)
            with gr.replica(home.index):
                assert gr.apply_grads(several, grads, weight=by[0], cast=True)
        # As many gradients as devices, of one call.
        for at, acc in enumerate(accumulators):
            if len(left[at]) >= len(mesh) and luck.random() < 0.3:
                values, by = zip(*[pop(at) for _ in mesh], strict=True)
                grad = gr.PerReplica(list(values), mesh)
                assert gr.apply_grads([acc], [grad], weight=list(by), cast=True)
            if not exact and luck.random() < 0.2:
                acc.load_state_dict(acc.state_dict())


def spoil(gradients, weights):
    """Overwrites gradients with weight 0, which are not read."""
    for row in gradients:
        for (_, values), weight in zip(row, weights, strict=True):
            values.fill(np.nan) if not weight else None


def may_overflow(dtype, gradients, weights):
    """Whether a sum of some of the finite products may exceed the floats that add."""
    pairs = zip(gradients, weights, strict=True)
    made = [np.abs(weigh(dtype, rows, by)) for (_, rows), by in pairs]
    with np.errstate(all="ignore"):
        total = sum(np.where(np.isfinite(each), each, 0).sum(0) for each in made)
    return not np.isfinite(total).all()


FORMS = st.tuples(*map(st.sampled_from, ([Dense], DTYPES, SHAPES, MEANS, [False, True]))) | (
    st.tuples(*map(st.sampled_from, ([Sparse], DTYPES, SHAPES, MEANS, [False, True])))
)


def taken_together(accumulators, count):
    """The results, and the names in warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = gr.take_grads(accumulators, count, output_type="numpy")
    assert {each.category for each in caught} <= {gr.InexactSumWarning}
    return list(map(content, found)), {str(each.message).split("'")[1] for each in caught}


@settings(
    max_examples=examples(200), deadline=None, suppress_health_check=[*HealthCheck],
    phases=[Phase.generate],  # a smaller example takes minutes
)  # fmt: skip
@given(data=st.data())
def test_every_order_has_the_bits_of_the_definition(implementation, data):
    """Orders, calls, joint calls, devices and meshes; or a warning that names the sum."""
    count = data.draw(st.integers(1, 12), "gradients")
    words = data.draw(st.sampled_from([0, 0, 2, 3, 8]), "words, 0 if it is not exact")
    settings = {"exact": True, "words": words} if words else {"exact": False}
    forms = data.draw(st.lists(FORMS, min_size=1, max_size=3), "accumulators")
    some = st.lists(st.sampled_from(WEIGHTS if words else WHOLE_WEIGHTS), min_size=count)
    weights = data.draw(st.just([1] * count) | some.filter(any), "weights")[:count]
    weights[0] = weights[0] or 1
    # Gradients of another dtype are added as they are.
    other = data.draw(st.sampled_from([None, *DTYPES]), "dtype of the gradients")
    seed, kinds = data.draw(st.integers(0, 9999), "seed"), [kind for kind, *_ in forms]
    gradients = [
        gradients_of(kind, 3 * seed + number, count, other or dtype, shape,
                     None if dtype == "float64" else dtype, exact=words > 0)
        for number, (kind, dtype, shape, *_) in enumerate(forms)
    ]  # fmt: skip
    spoil(gradients, weights)
    for turn in range(2):
        luck = np.random.default_rng([seed, turn])
        placement, peers = PLACEMENTS[luck.integers(len(PLACEMENTS))], bool(luck.integers(2))
        with opened(placement, kernels=implementation, peer_access=peers) as mesh:
            ops = gr.HierarchicalCopyAllReduce(
                int(luck.integers(3)), mesh=mesh, exact=settings["exact"]
            )
            accumulators = []
            for number, (kind, dtype, _, mean, over_mesh) in enumerate(forms):
                home = mesh if over_mesh else mesh.devices[luck.integers(len(mesh))]
                options = settings | ({"cross_device_ops": ops} if over_mesh else {})
                accumulators.append(
                    make(kind, dtype, mean, name=str(number), device=home, **options)
                )
            added(luck, kinds, accumulators, gradients, weights, mesh, words > 0)
            found, warned = taken_together(accumulators, count)
        for number, (result, (_, dtype, _, mean, _)) in enumerate(zip(found, forms, strict=True)):
            wanted = defined(mean, dtype, gradients[number], weights)
            if str(number) in warned:
                assert wanted[2] > words or may_overflow(dtype, gradients[number], weights)
            elif dtype == "float64" and any(each.startswith("pack") for each in warned):
                continue  # a pack of the all-reduce, whose sums have eight words
            else:
                assert equal(result, wanted), number


def test_a_sum_is_rounded_once_and_a_mean_divided_afterwards(mesh, kind):
    """Adding from left to right, or to 16 bits over float32, gives other bits.

    Rows may have different divisors, of which some are 1.
    """
    bits_of = {"float16": (11, 24), "bfloat16": (8, 40), "float32": (24, 50), "float64": (53, 108)}
    for dtype, mean in product(DTYPES, MEANS):
        unit, least = (2.0**-bits for bits in bits_of[dtype])
        gradients = [row(each, dtype) for each in (1, unit, 0, least, 0)]
        if kind is Sparse:
            rows = np.array([[1], [unit], [least]], as_dtype(dtype))
            gradients += [([4, 4, 4], rows), ([9, 9], rows[:2]), ([9, 2], rows[1:]), ([], rows[:0])]
        wanted = defined(mean, dtype, gradients)
        for acc in on_each(mesh, kind, mean, dtype):
            for number, gradient in enumerate(gradients):
                add(acc, gradient, replica=number % 4)
            found = taken(acc, len(gradients))
            assert equal(found, wanted)
            if mean == "SUM" or (kind is Sparse and mean == "per_row"):
                once = found[1][found[0].index(4 if kind is Sparse else 3)].tolist()
                assert once == [1 + 2 * unit], "rounded twice, it is 1"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_rows_are_terms_however_they_are_split(implementation, data):
    """In any order, in any IndexedSlices, on any devices, with arrays; or a warning."""
    dtype, other = data.draw(st.tuples(*[st.sampled_from(DTYPES)] * 2), "dtypes")
    words = data.draw(st.sampled_from([2, 3, 8]), "words")
    count, num_arrays = data.draw(st.tuples(st.integers(1, 9), st.integers(0, 2)), "terms")
    weight = data.draw(st.sampled_from(WEIGHTS[:-1]), "weight")
    seed = data.draw(st.integers(0, 9999), "seed")
    luck = np.random.default_rng(seed)
    rows = exact_terms(count, (18,), other, seed, None if dtype == "float64" else dtype)
    indices = luck.integers(0, 4, count)
    arrays = list(luck.choice([0.0, -0.0, 1.5, 2.0**-9], (num_arrays, 4, 18)).astype(other))
    by_index = [
        [*np.array(rows)[indices == index], *[array[index] for array in arrays], np.zeros(18)]
        for index in range(4)
    ]
    terms_of = [
        [weigh(dtype, np.asarray(each, other), weight) for each in terms] for terms in by_index
    ]
    wanted = np.array(
        [exact_reduction(terms, mean=False, divisor=1, out=dtype) for terms in terms_of]
    )
    for turn in range(2):
        luck = np.random.default_rng([seed, turn])
        placement, peers = PLACEMENTS[luck.integers(len(PLACEMENTS))], bool(luck.integers(2))
        with opened(placement, kernels=implementation, peer_access=peers) as mesh:
            home = mesh if luck.integers(2) else mesh.devices[luck.integers(len(mesh))]
            acc = make(Dense, dtype, shape=(4, 18), device=home, words=words)
            parts = np.split(luck.permutation(count), np.sort(luck.integers(0, count + 1, 2)))
            grads = [gr.IndexedSlices(np.array(rows)[part], indices[part]) for part in parts]
            grads += arrays
            for at in luck.permutation(len(grads)):
                with gr.replica(luck.integers(len(mesh))):
                    acc.apply_grad(grads[at], weight=weight, cast=True)
            (found,), warned = taken_together([acc], len(grads))
        if warned:
            assert any(len(terms) > words + 1  # the zero is no term that needs a word
                       or may_overflow(dtype, [([0], np.asarray(each, other)) for each in terms],
                                       [weight] * len(terms))
                       for terms in by_index)  # fmt: skip
        else:
            assert same(found[1][0], wanted)


def test_rows_and_arrays_are_added_by_few_launches():
    with opened((0,)) as mesh:
        accs = [make(Dense, shape=(9, 4), mean="MEAN", device=mesh) for _ in range(2)]
        rows = gr.IndexedSlices(mesh[0].upload(np.ones((5, 4), "float32")), [5, 2, 7, 7, 7])
        array = mesh[0].upload(np.ones((9, 4), "float32"))
        for grads in ([rows, array], [rows, rows], [array, array]):
            with mesh.journal() as journal:
                gr.apply_grads(accs, grads)
            adds = ["take_rows", "add_words", "add_words", "segment_sum"] * (grads[0] is rows)
            assert [each.name for each in journal.of("launch")] == ["add_words", *adds]
            assert (journal.copies, journal.syncs) == (0, 0)
        assert taken(accs[0], 3)[1][0, 7].tolist() == [np.float32(7) / 3] * 4


def test_what_any_gradient_may_be(mesh):
    """Lists, IndexedSlices, PerReplica, Buffers, several dtypes with cast=True, empty ones."""
    rows = gr.IndexedSlices(np.float32([[1e8, 1], [0.5, 1], [0.25, 1]]), [1, 0, 1])
    for acc in on_each(mesh, shape=(2, 2)):
        acc.apply_grad(rows)
        acc.apply_grad([[0.125, 0], [-1e8, 0]])
        with gr.replica(2):
            acc.apply_grad(gr.IndexedSlices(np.float16([[2, 2]]), [1], (2, 2)), cast=True)
        acc.apply_grad(gr.PerReplica([each.upload(np.zeros((2, 2))) for each in mesh]), cast=True)
        assert taken(acc, 7)[1].tolist() == [[[0.625, 1], [2.25, 4]]]
    for acc in on_each(mesh, shape=(None, 0)):
        acc.apply_grad(np.zeros((5, 0), np.float32))
        acc.apply_grad(gr.PerReplica([np.zeros((5, 0), np.float32)] * 4, mesh))
        assert taken(acc, 5)[1].shape == (1, 5, 0)
    for acc in on_each(mesh):
        for shape in ((), (3, 2)):  # unknown until the first gradient, also after a take
            acc.apply_grad(np.ones(shape, np.float32), acc.global_step)
            assert taken(acc)[1].shape == (1, *shape)


@pytest.mark.parametrize("mean", ["SUM", "per_row"])
def test_zeros_and_numbers_that_are_not_finite(mesh, kind, mean):
    """A sum is -0 if all terms are, also where devices have no gradients; others are IEEE's."""
    minus = np.float32([[-0.0, -0.0, np.inf, np.inf, np.nan, 3e38]])
    other = np.float32([[-0.0, 0.0, 1.0, -np.inf, 1.0, -3e38]])
    wanted = np.float32([-0.0, 0, np.inf, np.nan, np.nan, 0])
    for acc in on_each(mesh, kind, mean):
        for first, second in ((minus, other), (other, minus)):
            pair = ([3], first), ([3], second)
            if kind is Sparse:
                pair = pair[0], ([3, 8, 9, 9], np.concatenate([second, minus, first, second]))
            add(acc, pair[0], replica=2)
            add(acc, pair[1], replica=3)
            indices, rows = taken(acc, 2)
            assert indices == [3, 8, 9][: len(rows)]
            assert same(rows, np.array([wanted, minus[0], wanted])[: len(rows)])
        add(acc, row(-0.0, size=6))
        assert same(taken(acc)[1], row(-0.0, size=6)[1])


def test_a_sum_that_is_too_large_overflows_only_if_the_real_sum_does():
    """Of the words of several devices; a device whose own sum overflows warns."""
    most = np.finfo(np.float32).max
    with opened((0, 1)) as mesh:
        acc = make(Dense, device=mesh, name="large")
        for replica, term in enumerate((most, -most, -1)):
            add(acc, row(term), replica=replica % 2)
        assert taken(acc, 3)[1].tolist() == [[-1]]
        for replica in (0, 0, 1):
            add(acc, row(most), replica=replica)
        with pytest.warns(gr.InexactSumWarning, match="'large'"):
            assert taken(acc, 3)[1].tolist() == [[np.inf]]


def test_threads_that_add_in_any_order_have_one_result(kind):
    terms = np.random.default_rng(3).normal(size=(48, 1, 97)).astype(np.float32)
    gradients = [([3], term) for term in terms]
    wanted = defined("per_gradient", np.float32, gradients)
    with opened((0, 0, 1)) as mesh:
        for acc in on_each(mesh, kind, "per_gradient"):

            def work(start, acc=acc):
                for number in range(start, 48, 4):
                    add(acc, gradients[number], replica=number % 3)

            in_threads(*[partial(work, start) for start in range(4)])
            assert equal(taken(acc, 48), wanted)


# ---- checkpoints --------------------------------------------------------------------------------


def saved(state):
    """The words of each device; the sign and the payload of a NaN are unspecified."""
    sums = [each if isinstance(each, dict) else {"values": each} for each in state["partial_sums"]]
    return [
        {key: bits(array) if key == "values" else list(array) for key, array in each.items()}
        for each in sums
        if each["values"] is not None
    ]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_equal_sums_have_equal_states_which_go_on_alike(implementation, kind, data):
    """In any order of the terms of a device, a state of eight words of which fewer are used."""
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    seed, count = data.draw(st.integers(0, 9999), "seed"), data.draw(st.integers(1, 6), "count")
    mean, luck = data.draw(st.sampled_from(MEANS), "mean"), np.random.default_rng(seed)
    weights = [1, *luck.choice(WEIGHTS, 2 * count - 1).tolist()]
    gradients = gradients_of(kind, seed, 2 * count, dtype, (12,))
    with np.errstate(all="ignore"):
        wide = np.abs(np.concatenate([each.astype(added_in(dtype)) for _, each in gradients]))
        total = np.where(np.isfinite(wide), wide, 0).sum(0)
        fits = total < np.finfo(wide.dtype).max / 8  # no order overflows on the way
    gradients = [(indices, rows[:, fits]) for indices, rows in gradients]
    wanted, states = defined(mean, dtype, gradients, weights), {}
    for _ in range(2):
        with opened((0, 1, 1), kernels=implementation) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.InexactSumWarning)  # where it overflows
            for home in (mesh, mesh.devices[2]):
                acc, fresh = [make(kind, dtype, mean, device=home, words=8) for _ in range(2)]
                for number in luck.permutation(count):
                    gradient = in_any_order(luck, gradients[number])
                    add(acc, gradient, replica=number % 3, weight=weights[number])
                state = acc.state_dict()
                assert states.setdefault(home is mesh, saved(state)) == saved(state)
                fresh.load_state_dict(state)
                assert saved(fresh.state_dict()) == saved(state)
                for each in (acc, fresh):
                    for number in luck.permutation(count) + count:
                        gradient = in_any_order(luck, gradients[number])
                        add(each, gradient, replica=number % 3, weight=weights[number])
                    assert equal(taken(each, 2 * count), wanted)


def test_a_state_has_canonical_words():
    """Each word is what the words before it leave, rounded; its dtype is the accumulate dtype."""
    with opened((0, 0)) as mesh:
        acc = make(Dense, "bfloat16", device=mesh)
        for term in (2.0**-30, 1, -(2.0**-60), -0.0):
            add(acc, row(term, "bfloat16", 2), replica=1)
        state = acc.state_dict()
        assert (state["format"], state["dtype"]) == (FORMATS[Dense], "bfloat16")
        nothing, words = state["partial_sums"]
        assert (nothing, state["sum_shape"]) == (None, [2])
        assert same(words, np.repeat(np.float32([[1], [2.0**-30], [-(2.0**-60)]]), 2, 1))
        for values, wanted in (
            ([-0.0, -0.0], [-0.0, -0.0, -0.0]), ([1, -1], [0, 0, 0]), ([-0.0, 0.0], [0, 0, 0]),
            ([np.inf, 1], [np.inf, 0, 0]), ([np.inf, -np.inf], [np.nan, 0, 0]),
            ([1, 2.0**-24, 2.0**-48], [1 + 2.0**-23, 2.0**-48 - 2.0**-24, 0]),
        ):  # fmt: skip
            acc = make(Dense, device=mesh.devices[0])
            add_all(acc, values)
            (words,) = acc.state_dict()["partial_sums"]
            assert same(words, np.float32(wanted)[:, None]), values


def test_a_state_of_another_kind_or_a_damaged_one_is_refused(kind):
    with opened((0,)) as mesh:
        options = {}, {"exact": True}, {"exact": True, "words": 4}
        get = partial(kind.make, "float32", device=mesh.devices[0])
        plain, three, four = (get(**each) for each in options)
        for acc in (plain, three, four):
            add_all(acc, (1, 2.0**-30))
        rounded, state, longer = (acc.state_dict() for acc in (plain, three, four))
        own, other = FORMATS[kind], rounded["format"]
        where, shape = "state['partial_sums'][0]", "float32({}, 1)"
        if kind is Sparse:
            where, shape = where + "['values']", "float32(1, {}, 1)"
        three_words, four_words = shape.format(3), shape.format(4)
        refused = [
            (plain, state, f"state['format'] is '{own}'; expected '{other}'"),
            (three, rounded, f"state['format'] is '{other}'; expected '{own}'"),
            (three, longer, f"{where} is {four_words}; expected {three_words}"),
            (four, state, f"{where} is {three_words}; expected {four_words}"),
        ]
        if kind is Dense:
            refused += [
                (three, state | {"sum_shape": [2]}, f"{where} is {three_words}; expected"),
                (three, state | {"num_accumulated": 0}, "['sum_shape'] is [1]; expected None"),
            ]
            check_refused(three, state | {"partial_sums": [[1, 2, 3]]}, TypeError,
                          f"{where} is a list; expected an array")  # fmt: skip
        for acc, wrong, text in refused:
            check_refused(acc, wrong, ValueError, text)


# ---- what is refused ----------------------------------------------------------------------------

ADDS_OTHERWISE = "adds partial sums with exact={}, but the accumulator has exact={}"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"words": 9, "exact": False}, ValueError, "words=9 must be at least 2, and at most 8"),
        ({"exact": "yes"}, TypeError, "exact='yes' must be True or False"),
        ({"dtype": "float64", "cross_device_ops":
          gr.AllReduceCrossDeviceOps(exact=True, wire_dtype="float32")},
         ValueError, "wire_dtype='float32' cannot be combined with exact=True for float64: terms"),
        ({"cross_device_ops": gr.AllReduceCrossDeviceOps()}, ValueError,
         ADDS_OTHERWISE.format(False, True)),
        ({"cross_device_ops": gr.ReductionToOneDevice()}, ValueError,
         ADDS_OTHERWISE.format(False, True)),
        ({"cross_device_ops": gr.HierarchicalCopyAllReduce(exact=True), "exact": False},
         ValueError, ADDS_OTHERWISE.format(True, False)),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_launched(mesh, kind, options, error, text):
    given = {"dtype": "float32", "device": mesh, **options}
    with mesh.journal() as journal, pytest.raises(error) as raised:
        make(kind, **given)
    assert text in str(raised.value)
    assert journal.records == []


def test_a_shared_name_has_one_number_of_words(kind):
    with opened((0,)) as mesh:
        get = partial(kind.make, "float32", None, "s", None, "SUM", device=mesh.devices[0])
        first = get(exact=True)
        add_all(get(exact=True), (1, 0.5))
        assert taken(first, 2)[1].tolist() == [[1.5]]
        for options, text in (({}, "format"), ({"exact": True, "words": 4}, "words")):
            with pytest.raises(ValueError, match=text):
                get(**options)


def test_a_gradient_that_does_not_fit_changes_nothing(mesh, kind):
    shape = (7, 2) if kind is Sparse else (2,)
    wrong = ([7], [[1, 2]]) if kind is Sparse else ([3], [[1, 2, 3]])
    for acc in on_each(mesh, kind, shape=shape):
        add(acc, row(1, size=2))
        before = frozen(acc)
        for (indices, rows), options, text in (
            ((wrong[0], np.float32(wrong[1])), {}, "incompatible|exceeded limits of shape"),
            (row(1, size=3), {}, "incompatible|expected values dim 1 to be 2, got 3"),
            (row(1, "float64", 2), {}, "float64"),
            (row(1, size=2), {"weight": np.inf}, "weight"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                add(acc, (indices, rows), **options)
        assert frozen(acc) == before
