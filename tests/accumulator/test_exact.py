"""Dense accumulators with ``exact=True``: real sums, rounded once, or a warning."""

import warnings
from functools import partial

import numpy as np
import pytest
from accumulator.kinds import bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.accumulator_states import check_refused, frozen
from support.exact_data import same
from support.exact_sums import added_in, adversarial_terms, exact_means, exact_sums
from support.exhaustive import examples
from support.meshes import implementation
from support.threads import in_threads

import gradreduce as gr
from gradreduce.device import as_dtype

__all__ = ["implementation"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
PLACEMENTS = ((0,), (0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 1, 1, 0))
SHAPES = ((18,), (2, 9), (1,))
WEIGHTS = (1, 1, 0.5, 3, float(np.float32(0.1)))
Exact = partial(gr.ConditionalAccumulator, exact=True)
FORMAT = "gradreduce exact accumulator 1"


def products(dtype, terms, weights=None):
    """In the floats that an accumulator of this dtype adds."""
    adds = added_in(dtype)
    with np.errstate(all="ignore"):
        wide = [term.astype(adds).astype(np.float64) for term in terms]
        pairs = zip(wide, weights or [1] * len(terms), strict=True)
        return [(term * weight).astype(adds) for term, weight in pairs]


def defined(reduction_type, dtype, terms, weights=None):
    """The result of a take, from the definition."""
    wide, weights = products(dtype, terms, weights), weights or [1] * len(terms)
    if reduction_type == "SUM" or sum(weights) == 1:
        return exact_sums(wide, dtype)
    return exact_means(wide, sum(weights), dtype)


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


def on_each(mesh, reduction_type="SUM", dtype="float32", **options):
    """An accumulator over the mesh, and one on a device of it."""
    options["reduction_type"] = reduction_type
    return [Exact(dtype, device=home, **options) for home in (mesh, mesh.devices[1])]


def taken(acc, count=1, **options):
    """The result of a take, which is equal on all devices."""
    found = acc.take_grad(count, **options)
    values = found.values if isinstance(found, gr.Mirrored) else [found]
    assert len({bits(each) for each in values}) == 1
    return np.asarray(values[0])


# ---- values -------------------------------------------------------------------------------------


def added(luck, accumulators, terms, weights, mesh):
    """Adds ``terms[accumulator][term]`` in a random order, by random calls, to random devices."""
    left = [list(luck.permutation(len(weights))) for _ in accumulators]
    while any(left):
        chosen = [at for at in range(len(left)) if left[at] and luck.random() < 0.7]
        places = [left[at].pop() for at in chosen]
        if len({weights[place] for place in places}) == 1 and luck.random() < 0.6:
            calls = [(chosen, places)]
        else:
            calls = [([at], [place]) for at, place in zip(chosen, places, strict=True)]
        for of_call, numbers in calls:
            grads = [terms[at][number] for at, number in zip(of_call, numbers, strict=True)]
            home = mesh.devices[luck.integers(len(mesh))]
            if luck.random() < 0.5:
                grads = [home.upload(each) for each in grads]
            with gr.replica(home.index):
                several = [accumulators[at] for at in of_call]
                assert gr.apply_grads(several, grads, weight=weights[numbers[0]], cast=True)
        # As many gradients as devices, of one call.
        for at, acc in enumerate(accumulators):
            numbers = left[at][-len(mesh) :]
            if len(numbers) == len(mesh) and luck.random() < 0.3:
                del left[at][-len(mesh) :]
                values = [terms[at][number] for number in numbers]
                by = [weights[number] for number in numbers]
                acc.apply_grad(gr.PerReplica(values, mesh), weight=by, cast=True)


def may_overflow(dtype, terms, weights):
    """Whether a sum of some of the finite products may exceed the floats that add."""
    with np.errstate(all="ignore"):
        made = [np.abs(each) for each in products(dtype, terms, weights)]
        total = sum(np.where(np.isfinite(each), each, 0) for each in made)
    return not np.isfinite(total).all()


FORMS = st.tuples(*map(st.sampled_from, (DTYPES, SHAPES, ("MEAN", "SUM"), (False, True))))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_every_order_has_the_bits_of_the_definition(implementation, data):
    """Orders, calls, joint calls, devices and meshes; or a warning that names the sum."""
    count = data.draw(st.integers(1, 12), "terms")
    words = data.draw(st.sampled_from([2, 3, 8]), "words")
    forms = data.draw(st.lists(FORMS, min_size=1, max_size=3), "accumulators")
    weights = [1] * count
    if data.draw(st.booleans(), "weighted"):
        weights = data.draw(st.lists(st.sampled_from(WEIGHTS), min_size=count, max_size=count))
    # Gradients of another dtype are added as they are.
    other = data.draw(st.sampled_from([None, *DTYPES]), "dtype of the gradients")
    seed = data.draw(st.integers(0, 9999), "seed")
    terms = [
        [term.reshape(shape) for term in adversarial_terms(
            count, int(np.prod(shape)), other or dtype, 3 * seed + number,
            None if dtype == "float64" else dtype)]
        for number, (dtype, shape, *_) in enumerate(forms)
    ]  # fmt: skip
    for turn in range(2):
        luck = np.random.default_rng([seed, turn])
        placement, peers = PLACEMENTS[luck.integers(len(PLACEMENTS))], bool(luck.integers(2))
        with opened(placement, kernels=implementation, peer_access=peers) as mesh:
            ops = gr.HierarchicalCopyAllReduce(int(luck.integers(3)), mesh=mesh, exact=True)
            accumulators = []
            for number, (dtype, _, how, over_mesh) in enumerate(forms):
                home = mesh if over_mesh else mesh.devices[luck.integers(len(mesh))]
                options = {"cross_device_ops": ops} if over_mesh else {}
                accumulators.append(
                    Exact(dtype, None, None, str(number), how, device=home, words=words, **options)
                )
            added(luck, accumulators, terms, weights, mesh)
            found, warned = taken_together(accumulators, count)
        for number, (result, (dtype, _, how, _)) in enumerate(zip(found, forms, strict=True)):
            if str(number) in warned:
                assert count > words or may_overflow(as_dtype(dtype), terms[number], weights)
            elif dtype == "float64" and any(each.startswith("pack") for each in warned):
                continue  # a pack of the all-reduce, whose sums have eight words
            else:
                wanted = defined(how, as_dtype(dtype), terms[number], weights)
                assert all(same(each, wanted) for each in result), number


def taken_together(accumulators, count):
    """The results of each device, and the names in warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = gr.take_grads(accumulators, count, output_type="numpy")
    values = [each.values if isinstance(each, gr.Mirrored) else [each] for each in found]
    return values, {str(each.message).split("'")[1] for each in caught}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_rounded_once_and_a_mean_divided_afterwards(mesh, dtype):
    """Adding from left to right, or to 16 bits over float32, gives other bits."""
    unit = 2.0 ** -{"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[dtype]
    least = 2.0 ** -{"float16": 24, "bfloat16": 40, "float32": 50, "float64": 108}[dtype]
    terms = [np.full(3, each, dtype) for each in (1, unit, 0, least, 0)]
    for how in ("SUM", "MEAN"):
        for acc in on_each(mesh, how, dtype):
            for number, term in enumerate(terms):
                with gr.replica(number % 4):
                    acc.apply_grad(term)
            found = taken(acc, 5)
            assert same(found, defined(how, as_dtype(dtype), terms))
            assert how == "MEAN" or found.tolist() == [1 + 2 * unit] * 3


def test_what_any_gradient_may_be(mesh):
    """Lists, IndexedSlices, PerReplica, Buffers, several dtypes with cast=True, empty ones."""
    rows = gr.IndexedSlices(np.float32([[1e8, 1], [0.5, 1], [0.25, 1]]), [1, 0, 1])
    for acc in on_each(mesh, shape=(2, 2)):
        acc.apply_grad(rows)
        acc.apply_grad([[0.125, 0], [-1e8, 0]])
        with gr.replica(2):
            acc.apply_grad(gr.IndexedSlices(np.float16([[2, 2]]), [1], (2, 2)), cast=True)
        acc.apply_grad(gr.PerReplica([each.upload(np.zeros((2, 2))) for each in mesh]), cast=True)
        found = taken(acc, 7)
        # to_dense adds the rows of one gradient in float32.
        assert found.tolist() == [[0.625, 1], [2, 4]]
    for acc in on_each(mesh, shape=(None, 0)):
        acc.apply_grad(np.zeros((5, 0), np.float32))
        acc.apply_grad(gr.PerReplica([np.zeros((5, 0), np.float32)] * 4, mesh))
        assert taken(acc, 5).shape == (5, 0)
    for acc in on_each(mesh):
        for shape in ((), (3, 2)):  # unknown until the first gradient, also after a take
            acc.apply_grad(np.ones(shape, np.float32), acc.global_step)
            assert taken(acc).shape == shape


@pytest.mark.parametrize("how", ["SUM", "MEAN"])
def test_zeros_and_numbers_that_are_not_finite(mesh, how):
    """A sum is -0 if all terms are, also where devices have no gradients; others are IEEE's."""
    minus = np.float32([-0.0, -0.0, np.inf, np.inf, np.nan, 3e38])
    other = np.float32([-0.0, 0.0, 1.0, -np.inf, 1.0, -3e38])
    for acc in on_each(mesh, how):
        for first, second in ((minus, other), (other, minus)):
            with gr.replica(2):
                acc.apply_grad(first, acc.global_step)
            with gr.replica(3):
                acc.apply_grad(second, acc.global_step)
            assert same(taken(acc, 2), np.float32([-0.0, 0, np.inf, np.nan, np.nan, 0]))
        acc.apply_grad(np.full(3, -0.0, np.float32), acc.global_step)
        assert same(taken(acc), np.full(3, -0.0, np.float32))


def test_a_sum_that_is_too_large_overflows_only_if_the_real_sum_does():
    """Of the words of several devices; a device whose own sum overflows warns."""
    most = np.finfo(np.float32).max
    with opened((0, 1)) as mesh:
        acc = Exact("float32", device=mesh, reduction_type="SUM", name="large")
        acc.apply_grad(gr.PerReplica([np.float32([most]), np.float32([-most])], mesh))
        with gr.replica(0):
            acc.apply_grad(np.float32([-1]))
        assert taken(acc, 3).tolist() == [-1]
        for device in (0, 0, 1):
            with gr.replica(device):
                acc.apply_grad(np.float32([most]), 1)
        with pytest.warns(gr.InexactSumWarning, match="'large'"):
            assert taken(acc, 3).tolist() == [np.inf]


def test_threads_that_add_in_any_order_have_one_result():
    terms = np.random.default_rng(3).normal(size=(48, 97)).astype(np.float32)
    wanted = defined("MEAN", np.float32, list(terms))
    with opened((0, 0, 1)) as mesh:
        for acc in on_each(mesh, "MEAN"):

            def add(start, acc=acc):
                for number in range(start, 48, 4):
                    with gr.replica(number % 3):
                        acc.apply_grad(terms[number])

            in_threads(*[partial(add, start) for start in range(4)])
            assert same(taken(acc, 48), wanted)


# ---- the warning --------------------------------------------------------------------------------

TOO_MANY = (1.0, 2.0**-30, 2.0**-60)  # for two words
FIT = (1.0, 2.0**-30, 2.0**-10)
SUM = 1 + 2.0**-10


def add_all(acc, terms, step=0):
    for term in terms:
        assert acc.apply_grad(np.float32([term]), step)


def test_the_warning_names_the_sum_that_did_not_fit_and_the_line_of_the_caller():
    with opened() as mesh:
        device = mesh.devices[0]
        accs = [Exact("float32", name=name, device=device, words=2) for name in "abcd"]
        for row in zip(FIT, TOO_MANY, FIT, TOO_MANY, strict=True):  # one block has all flags
            assert gr.apply_grads(accs, [[term] for term in row])
        with pytest.warns(gr.InexactSumWarning) as caught:
            gr.take_grads(accs, 3)
        assert [str(each.message) for each in caught] == [
            f"the exact sum of '{name}' did not fit into its words, or overflowed on the way: its "
            "bits may depend on the order of the terms. Pass a larger words= (sums of float64 in "
            "one call always have 8)"
            for name in "bd"
        ]
        assert {each.filename for each in caught} == {__file__}
        for acc in accs:  # the flag belongs to one sum
            add_all(acc, FIT, 1)
            taken(acc, 3)


def test_one_warning_for_all_devices_of_a_mesh_and_none_for_a_sum_that_was_dropped():
    with opened() as mesh:
        acc = Exact("float32", device=mesh, words=2, name="of all")
        for term in TOO_MANY:
            acc.apply_grad(gr.PerReplica([np.float32([term])] * 3, mesh))
        acc.load_state_dict(Exact("float32", device=mesh, words=2).state_dict())
        assert acc.num_accumulated() == 0
        for term in TOO_MANY:
            acc.apply_grad(gr.PerReplica([np.float32([term])] * 3, mesh))
        with pytest.warns(gr.InexactSumWarning) as caught:
            acc.take_grad(9)
        assert len(caught) == 1
        mesh.synchronize()


@pytest.mark.parametrize("wait", ["take", "numpy", "synchronize", "state_dict"])
def test_no_call_waits_for_a_flag_and_the_first_that_finds_it_warns(wait):
    """Work runs as late as the host allows."""
    with opened((0, 0), strict=False, schedule_seed=0) as mesh:
        device, other = mesh.devices
        acc, beside = [Exact("float32", name=name, device=each, words=2)
                       for name, each in (("late", device), ("beside", other))]  # fmt: skip
        with mesh.journal() as journal:
            for term in TOO_MANY:
                acc.apply_grad(device.upload(np.float32([term])))
            result = acc.take_grad(3, output_type="buffer")
            beside.apply_grad(device.upload(np.float32([1])))
            beside.take_grad(1, output_type="buffer")
        assert journal.syncs == 0
        beside.apply_grad(np.float32([1]), 1)
        calls = {
            "take": lambda: beside.take_grad(1),
            "numpy": result.numpy,
            "synchronize": mesh.synchronize,
            "state_dict": beside.state_dict,
        }
        with pytest.warns(gr.InexactSumWarning, match="'late'") as caught:
            calls[wait]()
        assert caught[0].filename == __file__
        mesh.synchronize()  # once


def test_a_checkpoint_warns_too(mesh):
    for acc in on_each(mesh, words=2):
        add_all(acc, TOO_MANY)
        with pytest.warns(gr.InexactSumWarning):
            state = acc.state_dict()
        fresh = Exact("float32", device=mesh if len(state["partial_sums"]) > 1 else mesh.devices[0],
                      reduction_type="SUM", words=2)  # fmt: skip
        fresh.load_state_dict(state)
        taken(fresh, 3)


def test_a_warning_that_raises_leaves_accumulators_usable(mesh):
    with warnings.catch_warnings(action="error"):
        for acc in on_each(mesh, words=2):
            add_all(acc, TOO_MANY)
            with pytest.raises(gr.InexactSumWarning):
                acc.take_grad(3)
            assert (acc.num_accumulated(), acc.global_step) == (0, 1)
            add_all(acc, FIT, 1)
            assert taken(acc, 3).tolist() == [SUM]


def test_a_handler_of_warnings_may_use_accumulators(monkeypatch, mesh):
    """No lock is held."""
    seen = []
    for acc in on_each(mesh, words=2):
        add_all(acc, TOO_MANY)

        def use(*_, acc=acc, **__):
            assert acc.apply_grad(np.float32([1]), 1)
            seen.append(acc.accumulator_ref.lock._is_owned())

        with warnings.catch_warnings(action="always"):
            monkeypatch.setattr(warnings, "showwarning", use)
            acc.take_grad(3)
    assert seen == [False, False]


def test_a_reset_drops_flags_of_sums_that_were_dropped():
    with opened((0,), strict=False, schedule_seed=0) as mesh:
        acc = Exact("float32", device=mesh, words=2, reduction_type="SUM")
        add_all(acc, TOO_MANY)
        acc.take_grad(3, output_type="buffer")
        mesh.mesh_state.fail("planted")
        mesh.reset(timeout=30)
        mesh.synchronize()
        assert not mesh.mesh_state.inexact.copies
        add_all(acc, FIT, 1)
        assert taken(acc, 3).tolist() == [SUM]


# ---- checkpoints --------------------------------------------------------------------------------


def saved(state):
    """The words of each device; the sign and the payload of a NaN are unspecified."""
    return bits([np.array(each) for each in state["partial_sums"] if each is not None])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 9999), dtype=st.sampled_from(DTYPES), count=st.integers(1, 6))
def test_equal_sums_have_equal_states_which_go_on_alike(implementation, seed, dtype, count):
    """In any order of the terms of a device, a state of eight words of which fewer are used."""
    terms = np.array(adversarial_terms(2 * count, 30, dtype, seed))
    wanted = defined("MEAN", as_dtype(dtype), list(terms))
    with np.errstate(all="ignore"):
        wide = np.abs(terms.astype(added_in(terms.dtype)))
        total = np.where(np.isfinite(wide), wide, 0).sum(0)
        fits = total < np.finfo(wide.dtype).max / 2  # no order overflows on the way
    luck, states = np.random.default_rng(seed), {}
    for _ in range(2):
        with opened((0, 1, 1), kernels=implementation) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.InexactSumWarning)  # where it overflows
            for home in (mesh, mesh.devices[2]):
                acc, fresh = [Exact(dtype, device=home, words=8) for _ in range(2)]
                for number in luck.permutation(count):
                    with gr.replica(number % 3):
                        acc.apply_grad(terms[:, fits][number])
                state = acc.state_dict()
                assert states.setdefault(home is mesh, saved(state)) == saved(state)
                fresh.load_state_dict(state)
                assert saved(fresh.state_dict()) == saved(state)
                for each in (acc, fresh):
                    for number in luck.permutation(count):
                        with gr.replica(number % 3):
                            each.apply_grad(terms[:, fits][count + number])
                    assert same(taken(each, 2 * count), wanted[fits])


def test_a_state_has_canonical_words():
    """Each word is what the words before it leave, rounded; its dtype is the accumulate dtype."""
    with opened((0, 0)) as mesh:
        acc = Exact("bfloat16", device=mesh)
        with gr.replica(1):
            for term in (2.0**-30, 1, -(2.0**-60), -0.0):
                acc.apply_grad(np.full(2, term, as_dtype("bfloat16")))
        state = acc.state_dict()
        assert (state["format"], state["dtype"], state["sum_shape"]) == (FORMAT, "bfloat16", [2])
        nothing, words = state["partial_sums"]
        assert nothing is None
        assert same(words, np.repeat(np.float32([[1], [2.0**-30], [-(2.0**-60)]]), 2, 1))
        for values, wanted in (
            ([-0.0, -0.0], [-0.0, -0.0, -0.0]), ([1, -1], [0, 0, 0]), ([-0.0, 0.0], [0, 0, 0]),
            ([np.inf, 1], [np.inf, 0, 0]), ([np.inf, -np.inf], [np.nan, 0, 0]),
            ([1, 2.0**-24, 2.0**-48], [1 + 2.0**-23, 2.0**-48 - 2.0**-24, 0]),
        ):  # fmt: skip
            acc = Exact("float32", device=mesh.devices[0])
            add_all(acc, values)
            (words,) = acc.state_dict()["partial_sums"]
            assert same(words, np.float32(wanted)[:, None]), values


def test_a_state_of_another_kind_or_a_damaged_one_is_refused():
    with opened((0,)) as mesh:
        make = partial(gr.ConditionalAccumulator, "float32", device=mesh.devices[0])
        plain, three, four = make(), make(exact=True), make(exact=True, words=4)
        for acc in (plain, three, four):
            add_all(acc, FIT)
        states = [acc.state_dict() for acc in (plain, three, four)]
        dense, where = "gradreduce dense accumulator 1", "state['partial_sums'][0]"
        for acc, state, text in (
            (plain, states[1], f"state['format'] is '{FORMAT}'; expected '{dense}'"),
            (three, states[0], f"state['format'] is '{dense}'; expected '{FORMAT}'"),
            (three, states[2], f"{where} is float32(4, 1); expected float32(3, 1)"),
            (four, states[1], f"{where} is float32(3, 1); expected float32(4, 1)"),
            (three, states[1] | {"sum_shape": [2]}, f"{where} is float32(3, 1); expected"),
            (three, states[1] | {"num_accumulated": 0}, "['sum_shape'] is [1]; expected None"),
        ):
            check_refused(acc, state, ValueError, text)
        check_refused(three, states[1] | {"partial_sums": [[1, 2, 3]]}, TypeError,
                      f"{where} is a list; expected an array")  # fmt: skip


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"words": 1}, ValueError, "words=1 must be at least 2, and at most 8"),
        ({"words": 9}, ValueError, "words=9 must be at least 2, and at most 8"),
        ({"words": 9, "exact": False}, ValueError, "words=9 must be at least 2, and at most 8"),
        ({"words": 2.5}, ValueError, "words=2.5 must be a non-negative integer"),
        ({"exact": "yes"}, TypeError, "exact='yes' must be True or False"),
        ({"dtype": "float64", "cross_device_ops":
          gr.AllReduceCrossDeviceOps(exact=True, wire_dtype="float32")},
         ValueError, "wire_dtype='float32' cannot be combined with exact=True for float64: terms"),
        ({"cross_device_ops": gr.AllReduceCrossDeviceOps()}, ValueError,
         "adds partial sums with exact=False, but the accumulator has exact=True"),
        ({"cross_device_ops": gr.ReductionToOneDevice()}, ValueError,
         "adds partial sums with exact=False, but the accumulator has exact=True"),
        ({"cross_device_ops": gr.HierarchicalCopyAllReduce(exact=True), "exact": False},
         ValueError, "adds partial sums with exact=True, but the accumulator has exact=False"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_launched(mesh, options, error, text):
    given = {"dtype": "float32", "exact": True, "device": mesh, **options}
    with mesh.journal() as journal, pytest.raises(error) as raised:
        gr.ConditionalAccumulator(**given)
    assert text in str(raised.value)
    assert journal.records == []


def test_a_shared_name_has_one_number_of_words():
    with opened((0,)) as mesh:
        make = partial(
            gr.ConditionalAccumulator, "float32", None, "s", None, "SUM", device=mesh.devices[0]
        )
        first = make(exact=True)
        add_all(make(exact=True), FIT)
        assert taken(first, 3).tolist() == [SUM]
        for options, text in (({}, "format"), ({"exact": True, "words": 4}, "words")):
            with pytest.raises(ValueError, match=text):
                make(**options)


def test_a_gradient_that_does_not_fit_changes_nothing(mesh):
    for acc in on_each(mesh, shape=(2,)):
        acc.apply_grad([1, 2])
        before = frozen(acc)
        for grad, options, text in (
            ([1, 2, 3], {}, "incompatible"),
            (np.ones(2), {}, "float64"),
            ([1, 2], {"weight": np.inf}, "weight"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                acc.apply_grad(grad, **options)
        assert frozen(acc) == before
