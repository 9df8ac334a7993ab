"""The messages between processes when one of them fails, leaves or ends."""

import numpy as np
import pytest
from support.thread_group import SharedQueues, ThreadGroup, run_processes

import gradreduce as gr
from gradreduce.comm import launchers
from gradreduce.comm.description import Description
from gradreduce.comm.replicas import Replicas, abort_others_on_error
from gradreduce.errors import CollectiveError

CALL = "call 0 (reduction, tensors: float64[3])"


def opened(group):
    mesh = gr.open_mesh(1, backend="sim", process_group=group)
    return mesh, gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)


def test_a_process_that_opens_no_mesh_tells_the_others_why():
    def work(group):
        number = 0 if group.rank == 0 else 1
        error = ValueError if group.rank == 0 else CollectiveError
        with pytest.raises(error) as found:
            gr.open_mesh(backend="sim", devices_per_process=number, process_group=group)
        return str(found.value)

    own, *others = run_processes(3, work, timeout=3.0)
    assert own == "devices_per_process=0 must be a number from 1 to 1024"
    for text in others:
        assert f"process 0: opens no mesh: ValueError: {own}" in text


@pytest.mark.parametrize("method", ["departure_reason", "next_tag"])
def test_an_interrupted_comparison_is_seen_at_once(method):
    def work(group):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        mesh, ops = opened(group)
        if group.rank == 1:
            setattr(group, method, interrupted)
        error = KeyboardInterrupt if group.rank == 1 else CollectiveError
        with pytest.raises(error) as found:
            ops.all_reduce([[np.ones(3)]])
        vars(group).pop(method, None)
        mesh.close()
        return str(found.value)

    text, _ = run_processes(2, work, timeout=3.0)
    assert f"process 1: stopped in {CALL}: KeyboardInterrupt()" in text


def test_a_process_that_ends_without_closing_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(launchers.sys, "last_value", KeyError("of the user"), raising=False)

    def work(group):
        mesh, ops = opened(group)
        if group.rank == 1:
            groups = {group: launchers._open_groups[group]}
            with monkeypatch.context() as patched:
                patched.setattr(launchers, "_open_groups", groups)
                launchers._leave_at_exit()
            return mesh, ""
        with pytest.raises(CollectiveError) as found:
            ops.all_reduce([[np.ones(3)]])
        return mesh, str(found.value)

    (_, text), _ = run_processes(2, work, timeout=3.0)
    assert text == (
        f"process 1 of 2 has not come to {CALL}: process 1: ended by KeyError('of the user') after "
        "0 calls"
    )


def test_close_names_the_process_that_does_not_close():
    def work(group):
        mesh, _ = opened(group)
        if group.rank == 0:
            with pytest.raises(ValueError, match=r"deadline=0 must be a number of seconds above 0"):
                mesh.close(deadline=0)
            mesh.synchronize()  # it is still open
            late = r"process 1 of 2 .* close within 0.\d* s, but is not known to have ended"
            with pytest.raises(CollectiveError, match=late):
                mesh.close(deadline=0.1)
            mesh.close()
        return mesh

    run_processes(2, work, timeout=30.0)


def test_a_call_is_confirmed_when_all_processes_have_told_it():
    shared = SharedQueues()
    first, second = [ThreadGroup(shared, rank, 2) for rank in range(2)]
    description = Description.of({"call": "reduction", "tensors": []})
    for group in (first, second):
        group._known[description.digest] = 0  # so that it does not wait
    confirmed = []
    for caller in (first, second):
        caller.agree(description, 1.0)
        first._next_look = 0.0  # look now
        assert first.look() is None
        confirmed.append(first.confirmed)
    assert confirmed == [-1, 0]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_known_call_without_an_exchange_sends_its_notice(prepared):
    """A group may delay its notice until the call waits for others; this call never waits."""

    def work(group):
        posted = []
        group.post_soon = lambda *notice: posted.append(notice)
        group.post_kept = lambda: posted.append("told")
        mesh, ops = opened(group)
        value = gr.PerReplica([mesh[0].zeros((0,), "float32")], mesh)
        pairs = [(value, value)]
        call = ops.prepare(gr.ReduceOp.SUM, pairs) if prepared else None
        for _ in range(2):
            call() if call else ops.batch_reduce(gr.ReduceOp.SUM, pairs)
        del group.post_soon, group.post_kept
        mesh.close()
        return posted

    for posted in run_processes(2, work):
        assert len(posted) > 1 and posted[-1] == "told"


def test_a_launched_group_of_one_process_is_like_a_mesh_of_one_process():
    def counts(mesh):
        values = gr.PerReplica([np.float32([1, 2]), np.float32([3, 4])], mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        with mesh.journal() as journal:
            total = ops.reduce(gr.ReduceOp.SUM, values, mesh)
        assert total.values[1].tolist() == [4, 6]
        return [(each.kind, each.name, each.device, each.nbytes) for each in journal.records]

    def work(group):
        with gr.open_mesh(2, backend="sim", process_group=group) as mesh:
            gr.ConditionalAccumulator(np.float32, device=mesh).close()
            found = counts(mesh)
            mesh.mesh_state.fail("for a test")
            mesh.reset()
            assert counts(mesh) == found
        return found

    (found,) = run_processes(1, work)
    with gr.open_mesh(2, backend="sim") as mesh:
        group = mesh.mesh_state.processes
        assert (group.rank, group.size, group.counts, group.others) == (0, 1, (2,), [])
        assert counts(mesh) == found


def test_one_process_exchanges_nothing_and_tells_nobody_of_an_error():
    with gr.open_mesh(2, backend="sim") as mesh:
        own, replicas = mesh[0].upload(np.ones(2)), Replicas(mesh.devices)
        with mesh.journal() as journal, pytest.raises(KeyError), abort_others_on_error(mesh[0]):
            assert replicas.exchange_all([own], [[(2,)]]) == [own]
            assert replicas.exchange_numbers([3, 4]) == [[3, 4]]
            raise KeyError
        assert not journal.records
        assert mesh.mesh_state.reason is None
