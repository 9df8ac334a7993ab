"""Exact sums over the replicas of several processes, which are threads in these tests."""

import warnings
from itertools import chain

import numpy as np
import pytest
from reduce.test_exact import DTYPES
from support.exact_data import same
from support.exact_sums import added_in, adversarial_terms, exact_reduction, exact_sums
from support.thread_group import run_processes, run_replicas

import gradreduce as gr
from gradreduce.backends import CUDA
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import Ranks, as_dtype
from gradreduce.reduce.across_processes import AcrossProcesses, ExactAcrossProcesses
from gradreduce.reduce.nccl_across_processes import NcclAcrossProcesses
from gradreduce.reduce.pipeline import algorithm_of

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


@pytest.mark.parametrize("words", [2, 3])
@pytest.mark.parametrize("dtype", [*DTYPES[:-1]])
@pytest.mark.parametrize("counts", [(9, 1), (8, 9, 7)])
def test_words_hold_the_sum_of_many_replicas(counts, dtype, words):
    """The sums cancel, so that a process's rounded sum would be seen; none leaves a rest."""
    rng, adds = np.random.default_rng(7), added_in(dtype)
    terms = rng.standard_normal((sum(counts), 200)).astype(adds)
    terms[-2] = -terms[:-2].sum(0)
    terms[:, 0], terms[0, 1], terms[:2, 2], terms[1, 3] = -0.0, np.inf, [np.inf, -np.inf], np.nan
    dtype = as_dtype(dtype)
    terms = terms.view(dtype) if dtype.kind == "c" else terms.astype(dtype)
    for op in (SUM, MEAN):

        def work(mesh, replicas, op=op):
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, words=words)
            return ops.all_reduce([[terms[number]] for number in replicas], op)

        wanted = exact_reduction(list(terms), mean=op is MEAN)
        assert all(same(row[0], wanted) for row in chain(*run_replicas(counts, work)))


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "prepare"])
def test_a_process_warns_of_a_sum_that_does_not_fit_into_the_words(call):
    """At the end of each call that has such a sum. The processes agree in the result."""
    fits, too_wide = [1.0] * 5, [2.0**100, 1, 2.0**-100, 2.0**-50, 3]

    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        grads = [np.zeros(20, np.float32) for _ in replicas]
        value = gr.PerReplica(grads, mesh)
        step = ops.prepare(SUM, [(value, value)]) if call == "prepare" else None
        sums, num_warnings = [], []
        for terms in (fits, too_wide, too_wide, fits):
            for grad, number in zip(grads, replicas, strict=True):
                grad.fill(terms[number])
            if step is not None:
                sums.append(step()[0].values[0][0].item())
            else:
                sums.append(getattr(ops, call)([[grad] for grad in grads], SUM)[0][0][0].item())
            num_warnings.append(len(caught))
        return sums, num_warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (first, num_warnings), (second, _) = run_replicas((4, 1), work)
    assert first == second == [5, 2.0**100, 2.0**100, 5]
    assert num_warnings == [0, 1, 2, 2]
    assert {each.category for each in caught} == {gr.InexactSumWarning}
    packs = "packs 1 to 5 of 5" if call == "reduce_scatter" else "pack 1 of 1"
    wanted = f"the exact sum of '{packs} (tensor 0)' did not fit into its words"
    assert [str(each.message).partition(",")[0] for each in caught] == [wanted] * 2


def test_more_words_hold_more():
    terms = np.float32([2.0**100, 1, 2.0**-50, 2.0**-100, 2.0**-149, -(2.0**100), -1, 0])

    def work(mesh, replicas):
        grads = [[terms[number : number + 1]] for number in replicas]
        return gr.all_reduce(grads, SUM, mesh=mesh, exact=True, words=5)[0][0].tolist()

    assert run_replicas((6, 2), work) == [[2.0**-50]] * 2


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_step_keeps_as_many_words(shard_optimizer):
    micro_batches = [2.0**100, 1, 2.0**-50, 2.0**-100, 0], [-(2.0**100), -1, 0, 0, 0]

    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, words=4)
        variables = [gr.Variable(np.zeros(6, np.float32), name, device=mesh) for name in "ab"]
        step = gr.SyncStep(
            variables, gr.GradientDescentOptimizer(1.0), ops, shard_optimizer=shard_optimizer
        )
        terms = [np.full(6, term, np.float32) for term in micro_batches[replicas[0]]]
        step([[terms, terms]])
        return [variable.numpy().tolist() for variable in variables]

    assert run_replicas((1, 1), work) == [[[-(2.0**-51)] * 6] * 2] * 2


def test_the_words_of_a_replica_are_terms_of_its_process():
    """As in a sum of gradients that come one by one; they have no order and are not rounded."""
    terms = adversarial_terms(9, 50, "float16", 3)
    wanted = exact_sums(terms)

    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        words = [
            device.upload(terms[3 * number + word].astype(np.float32))
            for device, number in zip(mesh, replicas, strict=True)
            for word in range(3)
        ]
        half = as_dtype("float16")
        found = ops.reduce_buffers([words], weight=1.0, out_dtypes=[half], num_words=3)
        return [buffer.numpy() for buffer in found[0]]

    for found in chain(*run_replicas((2, 1), work)):
        assert same(found, wanted)


@pytest.mark.parametrize("size", [7, 40_000])
def test_large_and_small_packs_are_added_by_one_kernel(size):
    terms = adversarial_terms(4, size, "float32", 5)
    wanted = exact_sums(terms)

    def work(mesh, replicas):
        grads = [[terms[number]] for number in replicas]
        with mesh.journal() as journal:
            found = gr.all_reduce(grads, SUM, mesh=mesh, exact=True)
        names = {each.name for each in journal.of("launch")}
        assert names - {"pack"} == {"exact_sum"}
        return found

    for row in chain(*run_replicas((1, 3), work)):
        assert same(row[0], wanted)


def sent_bytes(call, counts, dtype, size, **options):
    """What each process sends to each other one, which is what an all-reduce has planned."""

    def work(mesh, replicas):
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, **options)
        grads, group = [[np.ones(size, dtype)] for _ in replicas], mesh.mesh_state.processes
        before = dict(group.sent)
        with mesh.journal() as journal:
            getattr(ops, call)(grads, SUM)
        found = {rank: sent - before.get(rank, 0) for rank, sent in group.sent.items()}
        if call == "all_reduce":
            plan = ops.plan(SUM, ops.pairs(grads))
            assert plan.exchange_bytes == sum(found.values())
            assert (plan.launches, plan.copies) == (journal.launches, journal.copies)
            assert journal.syncs == 0
        return found

    return run_replicas(counts, work)


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [60, 60_000])
@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(name, (1, 1, 1)) for name in ("float32", "float16", "complex64")] + [("int16", (2, 3, 1))],
)
def test_processes_send_as_many_bytes_as_without_it(call, counts, dtype, size):
    """If they have one replica each; integers with any number of replicas."""
    plain = sent_bytes(call, counts, dtype, size, reduction_groups="processes")
    assert sent_bytes(call, counts, dtype, size, exact=True) == plain


@pytest.mark.parametrize("size", [60, 60_000])
@pytest.mark.parametrize(
    ("dtype", "count", "like"),
    [("float32", 4, 3), ("complex64", 9, 3), ("float16", 7, 6), ("float16", 6, 6), ("int32", 9, 1)],
)
def test_a_process_with_more_replicas_than_words_sends_the_words(dtype, count, like, size):
    """As many bytes as ``like`` replicas: the words of 16-bit terms are float32."""
    found = sent_bytes("all_reduce", (count, 1), dtype, size, exact=True)
    assert found == sent_bytes("all_reduce", (like, 1), dtype, size, exact=True)
    if like > 1:
        assert found != sent_bytes("all_reduce", (like - 1, 1), dtype, size, exact=True)


def test_it_is_never_added_by_the_library_of_the_processes():
    ranks = Ranks.of_gpus([(0, 1), (0, 1)], 0)
    mesh = DryRunMesh((0, 1), CUDA, True, (0, (2, 2)), ranks).mesh
    for options, wanted in (
        ({"all_reduce_alg": "nccl"}, NcclAcrossProcesses),
        ({"all_reduce_alg": "hierarchical_copy"}, AcrossProcesses),
        ({"exact": True}, ExactAcrossProcesses),
    ):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **options)
        assert type(algorithm_of(ops.settings, mesh.devices)) is wanted


@pytest.mark.parametrize(
    ("options", "name", "values"),
    [
        ([{"exact": True}, {"all_reduce_alg": "hierarchical_copy"}], "exact", ("True", "False")),
        ([{"exact": True}, {"exact": True, "words": 4}], "words", ("3", "4")),
        ([{"exact": True}, {}], "all_reduce_alg", ("hierarchical_copy", "nccl")),
    ],
)
def test_processes_that_differ_in_it_are_named(options, name, values):
    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **options[group.rank])
            with pytest.raises(ValueError) as raised:
                ops.all_reduce([[np.ones(3, np.float32)]], deadline=10.0)
        return str(raised.value)

    here, there = values
    assert run_processes(2, work) == [
        f"the processes make different calls: {name} is {here} in process 0, {there} in process 1",
        f"the processes make different calls: {name} is {there} in process 1, {here} in process 0",
    ]
