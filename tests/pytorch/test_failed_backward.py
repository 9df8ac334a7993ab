"""A ``backward`` of a DataParallel that Ctrl-C or the user's error ends."""

import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import (
    TINY_MB,
    assert_equal,
    batch,
    gradients,
    in_processes,
    layers,
    means_of,
    plain,
)

import gradreduce as gr
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.torch
BY_THE_USER = " by ValueError('of the user')"


def loss_of(net, value):
    return net(torch.full((2, 3), float(value), dtype=torch.float64)).sum()


def interrupted_twice(call, delay, gap):
    """Calls; raises KeyboardInterrupt inside after ``delay`` seconds, and again after ``gap``."""
    left = [gap, 0.0]

    def interrupt(*_):
        signal.setitimer(signal.ITIMER_REAL, left.pop(0))
        raise KeyboardInterrupt

    def stop():
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    signal.signal(signal.SIGALRM, interrupt)
    with suppress(KeyboardInterrupt):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                call()
            finally:
                stop()
        finally:  # the second one has interrupted the first `stop`
            stop()


@pytest.mark.parametrize(
    ("seed", "times"),
    [(0, 60), *[pytest.param(seed, 300, marks=pytest.mark.exhaustive) for seed in range(1, 11)]],
)
def test_two_ctrl_c_within_microseconds_leave_the_next_step_right(seed, times, monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    before = signal.getsignal(signal.SIGALRM)
    wanted = {step: means_of(2, step) for step in range(2)}
    choose = random.Random(seed)
    try:
        with gr.open_mesh(2, backend="sim") as mesh:
            for number in range(times):
                if number % 20 == 0:  # some are interrupted before there are buckets
                    dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)

                def step(step, dp=dp):
                    dp.zero_grad(set_to_none=step == 1)
                    losses = [plain(net, batch(i, step)) for i, net in enumerate(dp.replicas)]
                    losses.pop().backward()
                    losses.pop().backward()

                begin = time.perf_counter()
                if number % 20:
                    step(0)
                seconds = max(1e-3, time.perf_counter() - begin)
                delay, gap = choose.uniform(1e-6, seconds), choose.uniform(1e-6, 3e-5)
                interrupted_twice(partial(step, 0), delay, gap)
                for after in (1, 0):
                    try:
                        step(after)
                    except RuntimeError as error:  # it came between the two backwards
                        assert after == 1 and "was called a second time" in str(error)
                        step(after)
                    for net in dp.replicas:
                        assert_equal(gradients(net), wanted[after])
    finally:
        signal.signal(signal.SIGALRM, before)


def failing_at(net, index, error):
    """Makes the next ``backward`` of a layer raise; returns the handle of its hook."""

    def fail(_):
        handle.remove()
        raise error

    handle = net[index].weight.register_hook(fail)
    return handle


def failing_backward(dp, index):
    """Fails at a layer; -1: after the gradients of all layers."""

    def fail(_):
        raise ValueError("of the user")

    if index >= 0:
        dp.module[index].weight.register_hook(fail)
        loss_of(dp, 1).backward()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    x.register_hook(fail)
    dp(x * 1.0).sum().backward()


@pytest.mark.parametrize(("has_buckets", "exact"), [(False, False), (True, False), (True, True)])
def test_an_error_before_anything_is_launched_loses_nothing(has_buckets, exact):
    """The same process calls ``backward`` again, while the other one waits."""

    def work(dp, mesh):
        for _ in range(has_buckets):
            loss_of(dp, 1).backward()
        dp.zero_grad()
        if mesh.process_index == 1:
            failing_at(dp.module, 3, MemoryError("of the user"))
            with pytest.raises(MemoryError):
                loss_of(dp, 9).backward()
            dp.zero_grad()
        loss_of(dp, 1 + mesh.process_index).backward()
        return gradients(dp)

    for found in in_processes(2, work, bucket_mb=TINY_MB, exact=exact):
        assert_equal(found, means_of(2))


def test_an_error_in_the_middle_of_a_bucket_leaves_the_next_step_right(mesh):
    dp = gr.torch.DataParallel(layers(), mesh)
    for index in (1, 0, 1, 0):
        failing_at(dp.replicas[index], 1, MemoryError("of the user"))
        with pytest.raises(MemoryError) as kept:  # the error keeps its traceback
            loss_of(dp.replicas[index], 9).backward()
        for parameter in dp.parameters():  # as an optimizer of PyTorch does
            parameter.grad = None
        for number, net in enumerate(dp.replicas):
            loss_of(net[3], 1 + number).backward()  # fewer gradients than were missing
        for net in dp.replicas:
            assert net[3].weight.grad.eq(3.0).all()  # 2 and 4
        assert kept.value.__traceback__ is not None


def of_another_version(*_):
    """A function of PyTorch that does something else than in the tested version."""
    return "nothing"


@pytest.mark.parametrize(
    ("index", "version"), [(1, ""), (-1, ""), (1, "without"), (1, "with another")]
)
def test_an_error_after_a_launch_is_in_the_errors_of_all_processes(index, version, monkeypatch):
    """Also in that of a process that has not failed, and in that of a later backward.

    Index -1: after the last launch. The other process then waits in the next backward. A version of
    PyTorch without the function that finds the error, or with another one, only leaves it out.
    """
    if version == "without":
        monkeypatch.delattr("torch._C._get_obj_in_tls")
    elif version:
        monkeypatch.setattr("torch._C._get_obj_in_tls", of_another_version)
    has_raised = threading.Barrier(2, timeout=60)
    groups = {}

    def work(group):
        groups[group.rank] = group
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        loss_of(dp, 1).backward()
        if group.rank == 1:
            with pytest.raises(ValueError, match="of the user"):
                failing_backward(dp, index)
            end = time.monotonic() + 10
            while groups[0].rounds._computed != [1 + (index < 0)] and time.monotonic() < end:
                threading.Event().wait(1e-3)
        elif index < 0:
            loss_of(dp, 1).backward()
        with pytest.raises(CollectiveError) as caught:
            loss_of(dp, 1).backward()
        has_raised.wait()
        return str(caught.value)

    for text in run_processes(2, work):
        wanted = (
            f"a backward of process 1 of 2 was interrupted{'' if version else BY_THE_USER}: other "
            "processes wait in the same step"
        )
        assert wanted in text, text


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_does_not_come_to_a_failed_step_is_not_said_to_have_ended(has_ended):
    has_raised = threading.Barrier(2, timeout=60)

    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        dp = gr.torch.DataParallel(layers(), mesh)
        if group.rank == 1:
            if has_ended:
                group.tell_end("ended by KeyError()")
            has_raised.wait()
            return ""
        with pytest.raises(ValueError, match="of the user"):
            failing_backward(dp, -1)
        with pytest.raises(CollectiveError) as caught:
            loss_of(dp, 1).backward()
        has_raised.wait()
        return str(caught.value)

    text, _ = run_processes(2, work, timeout=5.0 if has_ended else 0.3)
    wanted = f"a backward of process 0 of 2 was interrupted{BY_THE_USER}: process 1 of 2 has not "
    why = " within 0.3 s, but is not known to have ended"
    if has_ended:
        why = ": ended by KeyError() after 1 calls"
    assert f"{wanted}come to this step{why}" in text, text


ZEROES = {
    "dp.zero_grad": lambda dp: dp.zero_grad(),
    "in place": lambda dp: [each.grad.zero_() for each in dp.parameters() if each.grad is not None],
    "set_to_none": lambda dp: dp.zero_grad(set_to_none=True),
    "optimizer": lambda dp: [setattr(each, "grad", None) for each in dp.parameters()],
}
NOT_ZEROED = (
    "3.bias got a gradient while reductions of a step that has failed still wrote into it: call "
    "zero_grad() of the DataParallel after such a step"
)


@pytest.mark.whole_product
@pytest.mark.parametrize("calls", ["dp", "dp.module"])
@pytest.mark.parametrize("zeroes", ZEROES)
@pytest.mark.parametrize(("has_buckets", "layers_of"), [
    (False, [1, 2]), (True, [1, 1]), (True, [3, 0]), (True, [1, 3]), (True, [3, 3]),
])  # fmt: skip
def test_the_next_backward_works_if_that_of_all_processes_has_failed(
    has_buckets, layers_of, zeroes, calls
):
    """At other layers, so that another number of reductions has started in each process.

    They end later than the gradients are zeroed, and must not write into those of the next step.
    """
    zero, places = ZEROES[zeroes], {0: layers_of, 1: layers_of[::-1]}

    def work(dp, mesh):
        net, rank, found = dp if calls == "dp" else dp.module, mesh.process_index, []
        for _ in range(1 + has_buckets):
            loss_of(net, 1).backward()
            zero(dp)
        for step in range(4):
            failing_at(dp.module, places[step % 2][rank], MemoryError("no memory"))
            with pytest.raises(MemoryError):
                loss_of(net, 9).backward()
            if step == 1 and calls == "dp":  # fails twice; dp itself prepares its forward
                continue
            zero(dp)
            try:
                loss_of(net, 1 + rank).backward()
            except RuntimeError as error:
                assert str(error).startswith(NOT_ZEROED), error
                assert (zeroes, calls) == ("in place", "dp.module")
                dp.zero_grad()
                loss_of(net, 1 + rank).backward()
            found.append(gradients(dp.module))
            zero(dp)
        return found

    wanted = means_of(2)
    for found in in_processes(2, work, bucket_mb=TINY_MB):
        assert len(found) == 4 - (calls == "dp")
        for each in found:
            assert_equal(each, wanted)


def normalized(seed):
    """A module whose buffers are broadcast before a forward."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    )


@pytest.mark.parametrize("failing", [[0, 1], [1]])
def test_a_failed_step_is_ended_before_the_next_forward_exchanges(failing):
    """Process 1 alone begins the step again, in which process 0 waits."""
    nets = [normalized(0) for _ in range(4)]
    batches = torch.arange(24.0).reshape(2, 4, 3).square()

    def train(group, fails):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            net = nets[group.rank + 2 * fails]
            dp, found = gr.torch.DataParallel(net, mesh, bucket_mb=TINY_MB), []
            for step in range(4):
                if fails and step == 2 and group.rank in failing:
                    failing_at(net, [0, 2][group.rank] if len(failing) > 1 else 2, MemoryError())
                    with pytest.raises(MemoryError):
                        dp(batches[group.rank]).square().sum().backward()
                for parameter in net.parameters():
                    parameter.grad = None
                dp(batches[group.rank] + step).square().sum().backward()
                found += gradients(net)
            return found

    results = [run_processes(2, partial(train, fails=fails)) for fails in (False, True)]
    for found in results[1]:
        assert_equal(found, results[0][0])


def with_embeddings():
    """Layers and embeddings with sparse gradients, of which each forward uses some."""

    class Net(torch.nn.ModuleDict):
        fails = False

        def forward(self, *names):
            def fail(_):
                self.fails = False
                raise MemoryError("of the user")

            x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
            if self.fails:  # after the gradients of all that is used
                x.register_hook(fail)
            y = x * 1.0
            for name in names:
                of_rows = isinstance(self[name], torch.nn.Embedding)
                y = y + self[name](torch.zeros(1, dtype=torch.int64) if of_rows else x)
            return y.sum()

    net = Net({name: torch.nn.Linear(2, 2) for name in ("always", "one", "other", "never")})
    rows = {name: torch.nn.Embedding(3, 2, sparse=True) for name in ("row", "no row")}
    return Net({**net, **rows}).double()


@pytest.mark.parametrize("zeroes", ZEROES)
@pytest.mark.parametrize("has_buckets", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_after_a_failed_step_all_replicas_have_the_same_gradients_of_none(
    processes, has_buckets, zeroes
):
    """Otherwise weight decay changes a parameter of some replicas only."""
    devices = 2 // processes

    def work(dp, mesh):
        for net in dp.replicas[: devices * has_buckets]:
            net("always").backward()
        dp.zero_grad(set_to_none=True)
        for index, net in enumerate(dp.replicas, mesh.process_index * devices):
            net.fails = processes > 1 or index == 1
            with suppress(MemoryError):
                net("always", *(["other"] if index else ["one", "row"])).backward()
        ZEROES[zeroes](dp)
        for net in dp.replicas:
            net("always").backward()
        return [{name: grad_of(each) for name, each in net.items()} for net in dp.replicas]

    def grad_of(layer):
        grad = layer.weight.grad
        return None if grad is None else grad.to_dense().sum().item()

    zero = None if zeroes in ("set_to_none", "optimizer") else 0.0
    wanted = {"always": 4.0, "one": zero, "other": zero, "never": None, "row": zero, "no row": None}
    results = in_processes(processes, work, with_embeddings, devices, bucket_mb=TINY_MB)
    assert results == [[wanted] * devices] * processes


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_of_no_index_leave_an_empty_gradient_in_all_replicas(processes):
    """Otherwise ``SparseAdam`` counts a step of some replicas only."""
    devices = 2 // processes

    def work(dp, mesh):
        for index, net in enumerate(dp.replicas, mesh.process_index * devices):
            rows = net["row"](torch.zeros(0, dtype=torch.int64)).sum()
            (net("always") + (0 if index else rows)).backward()
        grads = [[net[name].weight.grad for name in ("row", "no row")] for net in dp.replicas]
        return [[one.is_sparse, one._nnz(), other] for one, other in grads]

    found = in_processes(processes, work, with_embeddings, devices)
    assert found == [[[True, 0, None]] * devices] * processes


def test_a_step_that_ends_by_an_error_leaves_none_where_it_was(mesh):
    """The error comes when the gradients are in the flat buffers, with zeros for None."""
    dp = gr.torch.DataParallel(with_embeddings(), mesh, bucket_mb=TINY_MB)
    for net in dp.replicas:
        net("always").backward()
    dp.zero_grad(set_to_none=True)
    indices = torch.zeros(1, dtype=torch.int64)
    loss = torch.nn.functional.embedding(indices, dp.module["row"].weight).sum()
    with pytest.raises(ValueError, match="has a dense gradient"):
        (loss + dp.module("always") + dp.replicas[1]("always")).backward()
    dp.zero_grad()
    for net in dp.replicas:
        assert [net[name].weight.grad is None for name in ("always", "never")] == [False, True]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_zero_grad_drops_a_step_that_not_all_replicas_have_begun(processes, set_to_none):
    """Memory may be missing for the first gradient of a backward; process 1 waits meanwhile."""

    def work(dp, mesh):
        first = 1 + 2 * mesh.process_index
        for _ in range(2):  # before and after there are buckets
            dp.zero_grad()
            if first == 1:
                loss_of(dp.module, 9).backward()
                dp.zero_grad(set_to_none=set_to_none)
            for index, net in enumerate(dp.replicas):
                loss_of(net, first + index).backward()
        return [gradients(net) for net in dp.replicas]

    wanted = means_of(2 * processes)
    for found in in_processes(processes, work, devices=2):
        for each in found:
            assert_equal(each, wanted)
