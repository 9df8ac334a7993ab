"""``gr.torch.uneven``: processes with different numbers of batches."""

from contextlib import nullcontext
from functools import partial

import pytest
from support.libraries import torch
from support.torch_layers import assert_equal, batch, gradients, in_processes, layers, plain

import gradreduce as gr
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.torch


class Counted(object if torch is None else torch.nn.Module):
    """Layers with a buffer that each forward of training changes, and an embedding."""

    def __init__(self):
        super().__init__()
        self.inner = layers(2)
        self.rows = torch.nn.Embedding(4, 3, sparse=True).double()
        torch.nn.init.ones_(self.rows.weight)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen.mul_(2).add_(x[0, 0].detach())
            self.calls.add_(1)
        return self.inner(x * self.rows(x[:, 0].long() % 4))


def make_optimizer(dp):
    dense = [each for name, each in dp.named_parameters() if "rows" not in name]
    rows = [each for name, each in dp.named_parameters() if "rows" in name]
    return torch.optim.SGD(
        [{"params": dense, "momentum": 0.5}, *[{"params": rows}] * bool(rows)], 2.0**-12
    )


def state_of(dp, optimizer):
    """The parameters and buffers of all replicas, and the state of the optimizer."""
    momenta = [
        optimizer.state[each].get("momentum_buffer")
        for each in dp.parameters()
        if each in optimizer.state
    ]
    values = [each.clone() for each in (*dp.parameters(), *dp.buffers())]
    return values + [torch.zeros(1) if each is None else each.clone() for each in momenta]


def step_of(dp, optimizer, batches, weights=None):
    """A step with several micro-batches, each with a weight if there are weights."""
    dp.zero_grad(set_to_none=True)
    for number, x in enumerate(batches):
        weight = nullcontext() if weights is None else dp.weight(weights[number])
        with weight, nullcontext() if number == len(batches) - 1 else dp.no_sync():
            plain(dp, x).backward()
    optimizer.step()


@pytest.mark.whole_product
@pytest.mark.parametrize(("uses_weights", "exact"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("counts", [(3, 7), (7, 3), (0, 2), (4, 0, 2), (2, 2)])
def test_the_steps_are_those_of_one_process_with_the_same_micro_batches(
    counts, uses_weights, exact
):
    def weight_of(rank, step):
        return 1 + (rank + step) % 3 if uses_weights else 1

    def work(dp, mesh):
        rank, optimizer = mesh.process_index, make_optimizer(dp)
        given = [batch(rank, step) for step in range(counts[rank])]
        for step, x in enumerate(gr.torch.uneven(given, dp, optimizer)):
            step_of(dp, optimizer, [x], [weight_of(rank, step)] if uses_weights else None)
        return state_of(dp, optimizer), dp._reducer.num_steps

    def alone(dp, mesh):
        optimizer = make_optimizer(dp)
        for step in range(max(counts)):
            ranks = [rank for rank, count in enumerate(counts) if step < count]
            batches = [batch(rank, step) for rank in ranks]
            step_of(dp, optimizer, batches, [weight_of(rank, step) for rank in ranks])
        return state_of(dp, optimizer)

    (wanted,) = in_processes(1, alone, partial(layers, 2), exact=exact)
    for found, num_steps in in_processes(len(counts), work, partial(layers, 2), exact=exact):
        assert num_steps == max(counts)
        assert_equal(found, wanted)


@pytest.mark.whole_product
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("counts", [(3, 7), (7, 3), (0, 2)])
def test_buffers_come_from_the_lowest_process_that_runs(counts, devices):
    """Sparse gradients too; afterwards all train on, compared and with buffers of process 0."""

    def work(dp, mesh):
        rank, optimizer = mesh.process_index, make_optimizer(dp)
        for step in gr.torch.uneven(range(counts[rank]), dp, optimizer):
            dp.zero_grad()
            for net in dp.replicas:
                net = dp if devices == 1 else net
                plain(net, batch(rank, step)).backward()
            optimizer.step()
        found = [state_of(dp, optimizer)]
        for net in dp.replicas:
            plain(dp if devices == 1 else net, batch(0)).backward()
        optimizer.step()
        assert_equal(
            [each for net in dp.replicas[1:] for each in net.parameters()],
            list(dp.module.parameters()) * (devices - 1),
        )
        return [*found, state_of(dp, optimizer)]

    seen = [0.0, 0.0]  # of each process after its forward
    for step in range(max(counts)):
        sent = seen[0 if step < counts[0] else 1]
        seen = [2 * sent + batch(rank, step)[0, 0].item() for rank in range(2)]
    last = 0 if counts[0] > counts[1] else 1
    one, other = in_processes(2, work, Counted, devices)
    for first, second in zip(one, other, strict=True):
        assert_equal(first, second)
    buffers = [each.tolist() for each in one[0] if each.shape == (1,)]
    assert [seen[last]] in buffers and [max(counts)] * 2 in [each.tolist() for each in one[0]]


def test_micro_batches_without_weights_are_divided_by_the_replicas_that_run():
    def work(dp, mesh):
        rank, found = mesh.process_index, []
        optimizer = torch.optim.SGD(dp.parameters(), 0.0)
        for step in gr.torch.uneven(range(1 + rank), dp, optimizer):
            step_of(dp, optimizer, [batch(rank, step)] * 3)
            found.append(gradients(dp))
        return found

    _, (first, second) = in_processes(2, work)
    alone = []
    for replica, step in ((0, 0), (1, 0), (1, 1)):
        net = layers()
        plain(net, batch(replica, step)).backward()
        alone.append(gradients(net))
    pairs = zip(*alone[:2], strict=True)
    assert_equal(first, [3 * (one + other) / 2 for one, other in pairs])
    assert_equal(second, [3 * each for each in alone[2]])


def test_a_backward_that_fails_after_another_process_has_ended_may_be_repeated():
    def work(dp, mesh):
        rank = mesh.process_index
        optimizer = torch.optim.SGD(dp.parameters(), 0.0)
        for step in gr.torch.uneven(range(1 + rank), dp, optimizer):
            dp.zero_grad()
            if step:
                x = batch(0).requires_grad_()
                net = dp.module[3]
                net.weight.register_hook(fail_once(net))
                with pytest.raises(ZeroDivisionError):
                    plain(dp, x).backward()
                dp.zero_grad()
            plain(dp, batch(0)).backward()
        return gradients(dp)

    net = layers()
    plain(net, batch(0)).backward()
    for found in in_processes(2, work):
        assert_equal(found, gradients(net))


def fail_once(owner):
    def fail(_):
        if not hasattr(owner, "has_failed"):
            owner.has_failed = True
            raise ZeroDivisionError

    return fail


def test_weights_of_0_after_another_process_has_ended_are_an_error_of_that_process():
    def work(dp, mesh):
        rank, optimizer = mesh.process_index, make_optimizer(dp)
        for step in gr.torch.uneven(range(1 + 2 * rank), dp, optimizer):
            dp.zero_grad()
            loss = plain(dp, batch(rank))
            if step == 1:
                with dp.weight(0), pytest.raises(ValueError, match="of this step are 0"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
        return [*state_of(dp, optimizer), torch.tensor(dp._reducer.num_steps)]

    one, other = in_processes(2, work)
    assert_equal(one, other)
    assert one[-1] == 2


def test_different_calls_of_processes_that_run_are_an_error_of_all():
    def work(dp, mesh):
        optimizer = torch.optim.SGD(dp.parameters(), 0.0)
        with pytest.raises(CollectiveError) as caught:
            for _ in gr.torch.uneven(range(mesh.process_index and 2), dp, optimizer):
                if mesh.process_index == 1:
                    plain(dp, batch(0)).backward()
        return str(caught.value)

    text = "inside uneven: reduce gradients in process 1, begin a batch in process 2"
    assert all(text in each for each in in_processes(3, work))


def test_a_loop_that_all_processes_leave_ends_it():
    def work(dp, mesh):
        optimizer = torch.optim.SGD(dp.parameters(), 0.0)
        for _ in range(2):
            for number in gr.torch.uneven(range(5), dp, optimizer):
                if number == 1:
                    break
        loop = gr.torch.uneven(range(5), dp, optimizer)
        next(loop)
        with pytest.raises(RuntimeError, match="another loop over uneven uses this DataParallel"):
            next(gr.torch.uneven(range(5), dp, optimizer))
        loop.close()
        return number

    assert in_processes(2, work) == [1, 1]


def test_one_process_needs_no_exchange_and_what_cannot_be_joined_is_refused(dp, mesh):
    optimizer = torch.optim.SGD(dp.parameters(), 0.0)
    with mesh.journal() as journal:
        assert list(gr.torch.uneven("ab", dp, optimizer)) == ["a", "b"]
    assert journal.records == []
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    synced = gr.torch.DataParallel(net, mesh)
    for arguments, error, text in [
        ((synced.module, optimizer), TypeError, "is not a gr.torch.DataParallel"),
        ((dp, synced), TypeError, "is not a torch.optim.Optimizer"),
        ((synced, optimizer), ValueError, "dp contains a SyncBatchNorm"),
    ]:
        with pytest.raises(error, match=text):
            gr.torch.uneven([], *arguments)
