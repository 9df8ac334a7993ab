"""If anything fails in a call, nothing has changed, or the devices have failed."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from accumulator.kinds import KINDS, contents
from support import failing_operations as operations
from support.accumulator_states import frozen
from support.failing_operations import METHODS, InjectedError
from support.take_now import take_now

import gradreduce as gr
from gradreduce.accumulator.state import AccumulatorState
from gradreduce.backends.sim.collective import SimCollective
from gradreduce.errors import BackendUnavailableError, CancelledError

FAILURES = (InjectedError, KeyboardInterrupt)


@contextlib.contextmanager
def failing_at(mesh, number, methods=METHODS, times=1):
    """Makes the n-th operation fail; yields the names of all tried.

    The operations are those of the devices; and the first update of the counts of accumulators,
    where Ctrl-C comes after all of them.
    """
    submit, update = SimCollective._submit, AccumulatorState.update
    with (
        operations.failing_at(mesh.devices, number, methods, times) as failing,
        pytest.MonkeyPatch.context() as patch,
    ):

        def submitted(self, issue, *rest):
            return submit(self, failing(issue, "collective"), *rest)

        def updated(self, **entries):
            wrapped = failing(update, "update", KeyboardInterrupt)
            (update if "update" in failing.tried else wrapped)(self, **entries)

        patch.setattr(SimCollective, "_submit", submitted)
        if methods is METHODS:
            patch.setattr(AccumulatorState, "update", updated)
        yield failing.tried


def rows(indices, dtype="float32", value=1.0):
    return gr.IndexedSlices(np.full((len(indices), 2), value, dtype), indices)


def sparse(home, *gradients, dtype="float32"):
    acc = gr.SparseConditionalAccumulator(dtype, device=home)
    for each in gradients:
        acc.apply_indexed_slices_grad(each)
    return acc


def dense(home, *gradients, dtype="float32", **options):
    acc = gr.ConditionalAccumulator(dtype, device=home, **options)
    for each in gradients:
        acc.apply_grad(each)
    return acc


# -- what is made to fail: the accumulators, and the call -----------------------------------------


def applies(make, earlier, grad, mesh, *, home=1, **options):
    """An apply to one sum; gradients are functions of the mesh, or gradients."""
    *added, grad = [each(mesh) if callable(each) else each for each in (*earlier, grad)]
    acc = make(mesh if home is None else mesh.devices[home], *added, **options)
    return [acc], lambda: gr.apply_grads([acc], [grad], cast=True)


def takes(make, added, mesh, *, home=1, **options):
    """A take of all gradients of one sum."""
    (acc,), _ = applies(make, added, None, mesh, home=home, **options)
    return [acc], lambda: gr.take_grads([acc], acc.num_accumulated())


def uploaded(mesh):
    return gr.PerReplica([device.upload(np.ones(2, "float32")) for device in mesh.devices])


def halves(mesh):
    return gr.PerReplica([np.full(1, place, "float16") for place in range(len(mesh))], mesh)


def rows_from_all(*indices):
    return lambda mesh: gr.PerReplica([rows([place, *indices]) for place in range(3)], mesh)


def takes_now(mesh):
    accumulators = [dense(mesh.devices[1], [3.0], dtype="float16"), dense(mesh.devices[1])]
    return accumulators, lambda: take_now(accumulators, 1)


def dense_joint(mesh):
    home = mesh.devices[1]
    accumulators = [dense(home), dense(home, [1.0]), dense(home, dtype="float16")]
    return accumulators, lambda: gr.apply_grads(accumulators, [[5.0]] * 3)


def partly_filled_take(mesh):
    acc = dense(mesh)
    with gr.replica(1):
        acc.apply_grad([4.0])
    return [acc], lambda: acc.take_grad(1)


def several(mesh, sums, terms):
    home = mesh.devices[1]
    accumulators = [sparse(home, *sums), dense(home, *[np.ones(4, "float32")] * len(sums))]
    far = mesh.devices[2].upload(np.ones(4, "float32"))
    return accumulators, lambda: gr.apply_grads(accumulators, [rows(terms), far])


def new_and_old(mesh):
    """On the second GPU in place, and on the first into new memory, which is launched first."""
    acc, given = sparse(mesh[[2, 0]]), rows_from_all()(mesh)
    with gr.replica(2):
        acc.apply_indexed_slices_grad(rows([1, 2]))
    return [acc], lambda: acc.apply_indexed_slices_grad(given)


def takes_both(mesh):
    """Sparse sums are merged out of place; dense sums are divided in place, so they come last."""
    accumulators = [dense(mesh.devices[1], *np.ones((2, 4), "float32")),
                    sparse(mesh.devices[1], rows([3, 1]), rows([1]))]  # fmt: skip
    return accumulators, lambda: gr.take_grads(accumulators, 2)


def dense_take(mesh, sums, algorithm="hierarchical_copy", size=3):
    """A joint take of sums with these dtypes and counts: on a device, or over the mesh."""
    ops = gr.AllReduceCrossDeviceOps(algorithm)
    made = []
    for dtype, place, times in sums:
        home = mesh if place is None else mesh.devices[place]
        made.append(dense(home, dtype=dtype, cross_device_ops=ops))
        for value in range(1, times + 1):
            one = np.full(size, value, dtype)
            made[-1].apply_grad(gr.PerReplica([one] * len(mesh), mesh) if place is None else one)
    return made, lambda: gr.take_grads(made, 2)


class Case(NamedTuple):
    """One call.

    Attributes:
        name: of the case.
        make: returns the accumulators and the call.
        work: the operations of the devices, in order; in capitals if a failure makes them fail.
        placement: the placement of the mesh.
        peers: whether GPUs have peer access.
    """

    name: str
    make: Callable
    work: str
    placement: tuple[int, ...] = (0, 0, 1)
    peers: bool = True


exactly = partial(dense, exact=True)
F32, F16 = "float32", "float16"
TWO, TWICE = ([1.0], [3.0]), rows([3, 1, 3])  # gradients; one with two rows of one index
PLAN = "allocate upload "
FAR = "allocate copy "
WORDS = "allocate " * 4  # three, and the flag
CASES = [
    Case("dense first", partial(applies, dense, [], [1.0]), "allocate launch update"),
    Case("dense later", partial(applies, dense, [[1.0]], [100.0], dtype=F16), "launch UPDATE"),
    Case("dense upload", partial(applies, dense, [[1, 1]], np.ones(4, F32)[::2]),
         f"{PLAN}launch UPDATE"),
    Case("dense take", partial(takes, dense, TWO), "launch UPDATE"),
    Case("half take", partial(takes, dense, TWO, dtype=F16), "allocate launch update"),
    Case("take of a sum", partial(takes, dense, TWO, reduction_type="SUM"), "update"),
    Case("takes now", takes_now, "allocate launch update"),
    Case("replicas first", partial(applies, dense, [], uploaded, home=0),
         f"{FAR}allocate launch launch update", peers=False),
    Case("replicas later", partial(applies, dense, [uploaded], uploaded, home=0), "launch UPDATE"),
    Case("replicas later, copied", partial(applies, dense, [uploaded], uploaded, home=0),
         f"{FAR}launch UPDATE", peers=False),
    Case("dense joint", dense_joint, "allocate allocate launch launch launch UPDATE"),
    Case("dense across first", partial(applies, dense, [], halves, home=None, dtype=F16),
         "allocate allocate allocate launch launch update"),
    Case("dense across later", partial(applies, dense, [halves], halves, home=None, dtype=F16),
         "launch LAUNCH UPDATE"),
    Case("partly filled take", partly_filled_take,
         "allocate allocate launch COLLECTIVE LAUNCH UPDATE"),
    # Words and a flag; a take only reads the words, and downloads the flag.
    Case("exact first", partial(applies, exactly, [], [1.0]), f"{WORDS}launch update"),
    Case("exact later", partial(applies, exactly, [[1.0]], [100.0], dtype=F16), "launch UPDATE"),
    Case("exact take", partial(takes, exactly, TWO), "allocate launch update"),
    Case("exact across first", partial(applies, exactly, [], halves, home=None, dtype=F16),
         f"{WORDS * 3}launch launch update"),
    Case("exact across later", partial(applies, exactly, [halves], halves, home=None, dtype=F16),
         "launch LAUNCH UPDATE"),
    Case("exact take of all", partial(takes, exactly, [halves], home=None, dtype=F16),
         "allocate allocate allocate launch update"),
    Case("first", partial(applies, sparse, [], TWICE), f"allocate {PLAN}launch update"),
    Case("later", partial(applies, sparse, [rows([1, 2, 3])], TWICE), f"{PLAN}launch UPDATE"),
    Case("grows", partial(applies, sparse, [rows([1, 2])], TWICE),
         f"allocate launch {PLAN}launch update"),
    Case("casts", partial(applies, sparse, [rows([1, 3])], rows([3, 1], F16)),
         f"{PLAN}launch UPDATE"),
    Case("several first", partial(several, sums=[], terms=[3, 1]),
         f"allocate {PLAN}allocate launch launch update"),
    Case("several first, copied", partial(several, sums=[], terms=[3, 1]),
         f"allocate {PLAN}{FAR}allocate launch launch update", peers=False),
    Case("several later", partial(several, sums=[rows([3, 1])], terms=[1, 3]),
         f"{PLAN}launch LAUNCH UPDATE"),
    Case("several later, copied", partial(several, sums=[rows([3, 1])], terms=[1, 3]),
         f"{PLAN}{FAR}launch LAUNCH UPDATE", peers=False),
    Case("several grow", partial(several, sums=[rows([1])], terms=[1, 3]),
         f"allocate launch {PLAN}launch launch UPDATE"),
    Case("across first", partial(applies, sparse, [], rows_from_all(4, 5), home=None),
         f"allocate allocate allocate {PLAN}{PLAN}launch launch update"),
    Case("across later", partial(applies, sparse, [rows_from_all(4, 5)], rows_from_all(5),
         home=None), f"{PLAN}{PLAN}launch LAUNCH UPDATE"),
    Case("new and old", new_and_old, f"allocate {PLAN}{PLAN}{PLAN}launch launch LAUNCH UPDATE"),
    Case("takes", partial(takes, sparse, [rows([3, 1]), rows([1])]),
         f"allocate {PLAN}launch update"),
    Case("takes over a mesh", partial(takes, sparse, [rows_from_all(4, 5)], home=None),
         f"allocate launch allocate {PLAN}launch allocate allocate launch copy update"),
    Case("takes both", takes_both, f"allocate {PLAN}launch launch UPDATE"),
    # Takes of several dense sums.
    Case("side by side", partial(dense_take, sums=[(F32, 0, 2), (F32, 1, 2)]), "launch UPDATE"),
    Case("other counts", partial(dense_take, sums=[(F32, 0, 2), (F32, 1, 3)]),
         "launch LAUNCH UPDATE"),
    Case("other dtypes", partial(dense_take, sums=[(F32, 0, 2), (F16, 1, 2)]),
         "allocate launch launch UPDATE"),
    Case("other GPUs", partial(dense_take, sums=[(F32, 0, 2), ("float64", 1, 2)]),
         "launch LAUNCH UPDATE", (0, 1)),
    Case("three", partial(dense_take, sums=[(F32, 0, 2), (F16, 0, 2), (F16, 1, 2)]),
         "allocate allocate launch launch launch UPDATE", (0, 1)),
    Case("mesh", partial(dense_take, sums=[(F32, None, 2)]), "launch UPDATE", (0, 1)),
    # Two slices, one on each GPU; and without peer access, where nothing is reduced in place.
    Case("slices", partial(dense_take, sums=[(F32, None, 2)], size=20_000),
         "launch LAUNCH UPDATE", (0, 1)),
    Case("slices, copied", partial(dense_take, sums=[(F32, None, 2)], size=20_000),
         f"allocate allocate {FAR}{FAR}launch copy launch copy update", (0, 1),
         peers=False),
    # Two packs with two divisors: the first is reduced out of place, the second in place.
    Case("packs", partial(dense_take, sums=[(F32, None, 2), (F32, None, 3)]),
         "allocate allocate launch allocate allocate launch update", (0, 1)),
    # The single sum is divided last; the sums of the mesh must still be intact before.
    Case("mesh and device", partial(dense_take, sums=[(F32, None, 2), (F32, 0, 2)]),
         "allocate allocate launch launch UPDATE", (0, 1)),
    # The collective, which one of the two may have received, and their divisions.
    Case("nccl", partial(dense_take, sums=[(F32, None, 2)], algorithm="nccl"),
         "COLLECTIVE LAUNCH LAUNCH UPDATE", (0, 1)),
    Case("nccl of three", partial(dense_take, sums=[(F32, None, 2)], algorithm="nccl"),
         "launch COLLECTIVE LAUNCH LAUNCH UPDATE"),
    Case("nccl and device",
         partial(dense_take, sums=[(F32, None, 2), (F16, 1, 2)], algorithm="nccl"),
         "allocate allocate allocate collective launch launch launch update", (0, 1)),
]  # fmt: skip
LOSSES = [
    pytest.param(case, number, id=f"{case.name}-{number}")
    for case in CASES
    for number, name in enumerate(case.work.split(), 1)
    if name.isupper()
]


def opened(case):
    return gr.open_mesh(case.placement, backend="sim", strict=True, peer_access=case.peers)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_any_failure_leaves_the_state_unchanged(case):
    """Each operation of the call fails once, one after the other; then the call succeeds."""
    with opened(case) as mesh:
        accumulators, call = case.make(mesh)
        before = [frozen(acc) for acc in accumulators]
        for number, name in enumerate(case.work.split(), 1):
            if name.isupper():
                continue
            with failing_at(mesh, number), pytest.raises(FAILURES, match=name) as caught:
                call()
            assert getattr(caught.value, "__notes__", []) == []
            assert [frozen(acc) for acc in accumulators] == before, (number, name)
            assert not any(acc.accumulator_ref.queue for acc in accumulators)
        with failing_at(mesh, 0) as tried:
            found = call()
        assert tried == case.work.lower().split()
        others, call = case.make(mesh)
        assert contents(call()) == contents(found)
        assert [frozen(acc) for acc in others] == [frozen(acc) for acc in accumulators]


@pytest.mark.parametrize(("case", "number"), LOSSES)
def test_a_partly_written_accumulator_cannot_be_used(case, number):
    with opened(case) as mesh:
        accumulators, call = case.make(mesh)
        before = [frozen(acc) for acc in accumulators]
        counts = [acc.num_accumulated() for acc in accumulators]
        with failing_at(mesh, number), pytest.raises(FAILURES) as caught:
            call()
        assert "cannot be used any more" in caught.value.__notes__[0]
        lost = []
        for acc, state in zip(accumulators, before, strict=True):
            try:
                assert frozen(acc) == state, "it is on a device that was not written"
            except BackendUnavailableError as error:
                lost.append(acc)
                assert "failed half way" in str(error)
                with pytest.raises(BackendUnavailableError, match="failed half way"):
                    acc.take_grad(1)
        assert len(lost) == (2 if case.name == "three" else len(accumulators))
        assert [acc.num_accumulated() for acc in accumulators] == counts
        assert [acc.num_dropped for acc in accumulators] == [0] * len(accumulators)


# -- takes that another call completes ------------------------------------------------------------


TAKE = ("_allocate", "_upload", "_launch")  # the operations of an apply and a take, in order


@pytest.fixture
def home():
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("kind", "number"), [("dense", 2), ("dense", 3), *[("sparse", place) for place in range(4, 8)]]
)
def test_a_take_that_another_threads_apply_completes(home, call_threads, kind, number):
    """The consumer gets the error, the applier continues, and the next take is checked."""
    made = KINDS[kind]
    grad, wanted = partial(made.value, dtype=F16), made.result
    acc = made.make(F16, device=home.devices[1])
    heads = [call_threads.waiting(gr.take_grads, [acc], count) for count in (2, 2, 1)]
    gr.apply_grads([acc], [grad(1.0)])
    with failing_at(home, number, TAKE):
        assert gr.apply_grads([acc], [grad(3.0)]) is True
    assert [head.is_done for head in heads] == [True, True, False]
    with pytest.raises(InjectedError):
        heads[0].result()
    assert contents(heads[1].result()) == [wanted(2.0)]
    assert (acc.num_accumulated(), acc.global_step, acc.num_dropped) == (0, 1, 0)
    gr.apply_grads([acc], [grad(5.0)], 1)
    assert contents(heads[2].result()) == [wanted(5.0)]


@pytest.mark.parametrize("method", ["_launch", "_allocate"])
def test_a_take_that_a_timeout_completes(home, call_threads, method):
    """The next consumer gets the error, not the one whose timeout expired."""
    acc = dense(home.devices[1], [3.0], dtype=F16)
    before = frozen(acc)
    head = call_threads.expiring(acc.take_grad, 2)
    behind = call_threads.waiting(acc.take_grad, 1)
    with failing_at(home, 1, [method]):
        head.expire()
        with pytest.raises(TimeoutError):
            head.result()
        with pytest.raises(InjectedError):
            behind.result()
    assert frozen(acc) == before


@pytest.mark.parametrize("number", [3, 5, 6])  # after the two of the apply itself
def test_a_joint_take_that_an_apply_to_one_completes(home, call_threads, number):
    """The dense sum is unchanged, too, and the next take of it alone completes."""
    accumulators = sparse(home.devices[1]), dense(home.devices[1])
    both = call_threads.waiting(gr.take_grads, accumulators, 1)
    behind = call_threads.waiting(accumulators[1].take_grad, 1)
    accumulators[0].apply_indexed_slices_grad(rows([1]))
    with failing_at(home, number, TAKE):
        assert accumulators[1].apply_grad(np.ones(3, "float32")) is True
    with pytest.raises(InjectedError):
        both.result()
    assert behind.result().tolist() == [1.0] * 3
    assert [acc.num_accumulated() for acc in accumulators] == [1, 0]


def test_a_failing_take_and_the_takes_queued_behind_it_raise_the_error(home, call_threads):
    """Also if another thread's apply completes it: that apply adds its gradient and continues."""
    first, second = (dense(each, *[[1.0]] * times)
                     for each, times in zip(home.devices, (4, 2), strict=False))  # fmt: skip
    joint = call_threads.waiting(gr.take_grads, [first, second], 3)
    behind = call_threads.waiting(second.take_grad, 1)
    with failing_at(home, 3, ["_launch"]) as tried:  # the apply's own, and a division by 4
        assert second.apply_grad([1.0]) is True
    assert len(tried) == 3
    with pytest.raises(InjectedError) as caught:
        joint.result()
    assert "cannot be used any more" in caught.value.__notes__[0]
    with pytest.raises((BackendUnavailableError, CancelledError), match=r"failed|cancelled"):
        behind.result()
    assert [acc.num_accumulated() for acc in (first, second)] == [4, 3]


# -- what is new and what is old in one call ------------------------------------------------------


def test_a_new_sum_of_several_gradients_beside_one_in_place(home):
    """The first gradient shares a launch with the other sum; the second has the next launch."""
    acc = gr.SparseConditionalAccumulator("float32", device=home[:2], reduction_type="SUM")
    with gr.replica(1):
        acc.apply_indexed_slices_grad(rows([5]))
    given = gr.PerReplica([rows([1], value=10), rows([5], value=20), rows([1], value=30)], home)
    acc.apply_indexed_slices_grad(given)
    indices, values, _ = acc.take_grad(4)
    assert indices.tolist() == [1, 5]
    assert values.primary.tolist() == [[40.0] * 2, [21.0] * 2]


def test_a_gradient_without_rows_is_refused_if_the_device_failed_or_closed():
    """They launch nothing on an existing sum, but must not be reported as added."""
    for lose in (True, False):
        with gr.open_mesh([0, 1], backend="sim") as mesh:
            acc, none = sparse(mesh, rows([1])), mesh.devices[0].upload(np.ones((0, 2), "float32"))
            if lose:
                mesh.devices[0].mark_failed("for a test")
            else:
                mesh.close()
            for step in (0, -1):
                text = "for a test" if lose else "closed"
                with pytest.raises(BackendUnavailableError, match=text):
                    acc.apply_grad([], none, None, step)
            assert (acc.num_accumulated(), acc.num_dropped) == (1, 0)
