"""Exact sums over the replicas of several processes, which are threads in these tests."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reduce.test_exact import CALLS, DTYPES, PACKING, TENTH, defined, scattered, terms_of
from support.exact_data import same
from support.exact_sums import adversarial_terms, exact_sums
from support.exhaustive import examples
from support.thread_group import run_processes, run_replicas

import gradreduce as gr
from gradreduce.backends import CUDA
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import Ranks
from gradreduce.reduce.across_processes import AcrossProcesses, ExactAcrossProcesses
from gradreduce.reduce.nccl_across_processes import NcclAcrossProcesses
from gradreduce.reduce.pipeline import algorithm_of

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SPLITS = {2: [(1, 1)], 3: [(1, 2), (2, 1), (1, 1, 1)],
          6: [(1, 5), (3, 3), (2, 1, 3), (1, 1, 2, 2), (1,) * 6]}  # fmt: skip


def rows_of(call, ops, grads, op, weights):
    """The results of each replica of a process; of a reduce-scatter its part of them."""
    if call is not scattered:
        return call(ops, grads, op, weights)
    return [list(row) for row in ops.reduce_scatter(grads, op, weights=weights)]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_every_split_has_the_bits_of_the_definition(data):
    """Processes, replicas, packs, calls and orders of the replicas."""
    count = data.draw(st.sampled_from([*SPLITS]), "replicas")
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4), "dtypes")
    op = data.draw(st.sampled_from([SUM, MEAN]), "op")
    weights = None
    if data.draw(st.booleans(), "weighted"):
        some = st.sampled_from([0, 1, 2, 3] if "int16" in dtypes else [0, 1, 0.5, 3, TENTH])
        weights = data.draw(st.lists(some, min_size=count, max_size=count).filter(any), "weights")
        dtypes = ["float16" if op is MEAN and each == "int16" else each for each in dtypes]
    grads = terms_of(count, dtypes, data.draw(st.integers(0, 9999), "seed"))
    wanted = defined(op, grads, weights)
    order = data.draw(st.permutations(range(count)), "order")
    packing = data.draw(st.sampled_from(PACKING), "packing")
    call = data.draw(st.sampled_from(CALLS), "call")

    def work(mesh, replicas):
        own = [order[number] for number in replicas]
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, **packing)
        by = weights and [weights[number] for number in own]
        return rows_of(call, ops, [grads[number] for number in own], op, by)

    found = [*chain(*run_replicas(data.draw(st.sampled_from(SPLITS[count]), "split"), work))]
    if call is scattered:
        found = [[np.concatenate(parts) for parts in zip(*found, strict=True)]]
    for row in found:
        assert all(map(same, row, wanted)), call.__name__


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


def sent_bytes(counts, grads, **options):
    """What each process sends to each other one, and what it has planned to send."""

    def work(mesh, replicas):
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, **options)
        own, group = [grads[number] for number in replicas], mesh.mesh_state.processes
        before = dict(group.sent)
        ops.all_reduce(own, SUM)
        whole = {rank: sent - before.get(rank, 0) for rank, sent in group.sent.items()}
        planned = ops.plan(SUM, ops.pairs(own)).exchange_bytes
        before = dict(group.sent)
        ops.reduce_scatter(own, SUM)
        return whole, planned, {rank: sent - before[rank] for rank, sent in group.sent.items()}

    return run_replicas(counts, work)


@pytest.mark.parametrize("size", [60, 60_000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int16"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 3, 1)])
def test_processes_send_as_many_bytes_as_without_it(counts, dtype, size):
    """If they have one replica each; integers with any number of replicas."""
    grads = [[np.ones(size, dtype)] for _ in range(sum(counts))]
    plain = sent_bytes(counts, grads, reduction_groups="processes")
    exact = sent_bytes(counts, grads, exact=True)
    for whole, planned, _ in exact:
        assert planned == sum(whole.values())
    if counts == (1, 1, 1) or dtype == "int16":
        assert exact == plain
    else:
        assert exact != plain


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


def test_collectives_that_add_nothing_take_any_dtype():
    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        gathered = ops.all_gather([[np.full(1, float(each))] for each in replicas])
        (value,) = ops.broadcast(np.full(1, float(replicas[0])), mesh[0], process=1).values
        return gathered[0][0].tolist(), value.tolist()

    assert run_replicas((1, 2), work) == [([0, 1, 2], [1])] * 2


@pytest.mark.parametrize(
    ("options", "name", "values"),
    [
        ([{"exact": True}, {"all_reduce_alg": "hierarchical_copy"}], "exact", ("True", "False")),
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


def test_what_cannot_be_added_exactly_is_refused_before_anything_is_sent():
    rows = gr.IndexedSlices(np.ones((1, 3), np.float32), [0], (4, 3))

    def work(mesh, _):
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        for error, text, term in (
            (TypeError, "does not support float64 yet", np.ones(4)),
            (TypeError, "does not support complex128 yet", np.ones(4, np.complex128)),
            (ValueError, "does not support IndexedSlices", rows),
        ):
            value = gr.PerReplica([term] * len(mesh), mesh)
            with pytest.raises(error, match=text):
                ops.all_reduce([[term]] * len(mesh))
            with pytest.raises(error, match=text):
                ops.reduce(SUM, value, mesh[0])
        return sum(mesh.mesh_state.processes.sent.values())

    opened, *_ = run_replicas((1, 2), lambda mesh, _: sum(mesh.mesh_state.processes.sent.values()))
    assert run_replicas((1, 2), work)[0] == opened
