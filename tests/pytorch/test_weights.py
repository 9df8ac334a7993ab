"""Weights of micro-batches in ``gr.torch.DataParallel``: in one process, and in processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product

import pytest
from pytorch.test_data_parallel import CASES
from support.libraries import torch
from support.torch_layers import (
    TINY_MB,
    assert_equal,
    batch,
    gradients,
    in_processes,
    layers,
    means_of,
    plain,
    zero,
)

import gradreduce as gr
from gradreduce.errors import CollectiveError, InvalidArgumentError

pytestmark = pytest.mark.torch
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # devices, processes
MICRO_BATCHES, NAN = 3, float("nan")


def embedding():
    net = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)).double()
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 2.0)
    return net


MODULES = {
    **{name: CASES[name] for name in (
        "plain", "tied weights", "frozen layer", "never used", "used in turns",
        "reentrant checkpoint", "two dtypes", "compiled",
    )},
    "sparse": (embedding, lambda net, x, replica, step: net(torch.tensor([step, 3])).sum()),
}  # fmt: skip


def weight_of(replica, step, micro):
    """None: the backward is in no context. The last micro-batch of replica 0 counts 0 in step 2."""
    if step == 1 or (step == 3 and micro == 1):
        return None
    return 0 if (replica, step, micro) == (0, 2, 2) else 1 + (2 * replica + step + 3 * micro) % 5


def batch_of(replica, step, micro):
    return batch(replica + 4 * micro, step)


def run_step(dp, run, first, step, data=batch_of):
    """Each replica has several micro-batches, of which the last one ends the step."""
    for micro in range(MICRO_BATCHES):
        is_last = micro == MICRO_BATCHES - 1
        with nullcontext() if is_last else dp.no_sync():
            for replica, net in enumerate(dp.replicas, first):
                loss = run(net, data(replica, step, micro), replica, step)
                weight = weight_of(replica, step, micro)
                loss = loss * NAN if weight == 0 else loss
                with nullcontext() if weight is None else dp.weight(weight):
                    loss.backward()


def weighted_mean(make, run, num_replicas, step):
    """The mean over all micro-batches, or without weights that of the sums of each replica."""
    weights, rows = [], []
    for replica in range(num_replicas):
        for micro in range(MICRO_BATCHES):
            net = make()
            run(net, batch_of(replica, step, micro), replica, step).backward()
            rows.append([None if each is None else each.to_dense() for each in gradients(net)])
            weights.append(weight_of(replica, step, micro))
    total = num_replicas if set(weights) == {None} else sum(1 if w is None else w for w in weights)
    factors = [1 if each is None else each for each in weights]
    return [
        None
        if all(each is None for each in column)
        else sum(w * g for w, g in zip(factors, column, strict=True) if g is not None) / total
        for column in zip(*rows, strict=True)
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.whole_product
@pytest.mark.parametrize("case", MODULES)
@pytest.mark.parametrize(
    ("devices", "processes", "exact"), [*[(*size, False) for size in SIZES], (1, 2, True)]
)
def test_gradients_are_means_over_all_micro_batches(case, devices, processes, exact):
    if exact and case == "sparse":
        return  # is refused
    make, run = MODULES[case]

    def work(dp, mesh):
        found = []
        for step in (0, 1, 2, 3):
            zero(dp, step if step != 1 else 0)
            run_step(dp, run, mesh.process_index * devices, step)
            found.append([gradients(replica) for replica in dp.replicas])
        return found

    wanted = [weighted_mean(make, run, devices * processes, step) for step in range(4)]
    for found in in_processes(processes, work, make, devices, bucket_mb=TINY_MB, exact=exact):
        for step, rows in enumerate(found):
            for row in rows:
                row = [None if each is None else each.to_dense() for each in row]
                assert_equal(row, wanted[step])


@pytest.mark.parametrize(("devices", "processes"), SIZES)
def test_weights_of_1_change_no_bit_and_add_no_launch(devices, processes):
    """A third of an odd sum is rounded; several processes add one exchange of the weights."""

    def work(dp, mesh):
        found = []
        for weight in (None, 1, None, 1):
            dp.zero_grad()
            with mesh.journal() as journal, nullcontext() if weight is None else dp.weight(weight):
                torch.stack(
                    [plain(net, batch(mesh.process_index)) / 3 for net in dp.replicas]
                ).sum().backward()
            found.append((journal.launches, gradients(dp)))
        return found

    for found in in_processes(processes, work, devices=devices):
        (_, first), (_, second), (launches, third), (more, fourth) = found
        assert launches == more  # the first step makes the buckets
        for each in (second, third, fourth):
            assert_equal(first, each)


@pytest.mark.parametrize("processes", [1, 2])
def test_replicas_in_threads_have_weights_of_their_own(processes):
    """The second step begins with gradients that were zeroed in place."""

    def work(dp, mesh):
        barrier = threading.Barrier(2)

        def run(index):
            replica = 2 * mesh.process_index + index
            with dp.weight(1 + replica):
                barrier.wait(60)
                plain(dp.replicas[index], batch(replica)).backward()
                barrier.wait(60)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
            first = gradients(dp)
            torch._foreach_zero_([each.grad for each in dp.parameters()])
            list(pool.map(run, range(2)))
        return [*first, *gradients(dp)]

    rows = []
    for replica in range(2 * processes):
        net = layers()
        plain(net, batch(replica)).backward()
        rows.append([(1 + replica) * each for each in gradients(net)])
    total = sum(range(2 * processes + 1))
    wanted = [sum(column) / total for column in zip(*rows, strict=True)]
    for found in in_processes(processes, work, devices=2):
        assert_equal(found, wanted * 4)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("begun", "exact"), [(False, False), (True, False), (False, True)])
def test_weights_of_0_are_an_error_that_changes_nothing(processes, begun, exact):
    """Before the buckets are made, and afterwards; the next step works."""

    def work(dp, mesh):
        x = batch(mesh.process_index)
        if begun:
            plain(dp, x).backward()
        for parameter in dp.module[:2].parameters():
            parameter.grad = torch.full_like(parameter, -0.0 if exact else 7.0)
        for parameter in dp.module[2:].parameters():
            parameter.grad = None
        before = gradients(dp)
        with pytest.raises(ValueError, match="all micro-batches of this step are 0") as caught:
            with dp.no_sync(), dp.weight(0):
                plain(dp, x).backward()
            with dp.weight(0.0):
                (plain(dp, x) * NAN).backward()
        assert type(caught.value) is ValueError
        assert str(gradients(dp)) == str(before)  # -0.0
        (dp.module if exact else dp).zero_grad(set_to_none=True)
        with dp.weight(2 * (1 - mesh.process_index)):  # an exact step has no sums of the others
            (dp.module[0].bias.sum() if exact else plain(dp, batch(0))).backward()
        return gradients(dp)

    ones = [None, torch.ones(3).double(), *[None] * 6]
    for found in in_processes(processes, work, bucket_mb=TINY_MB, exact=exact):
        assert_equal(found, ones if exact else means_of(1))


def test_what_is_no_weight_is_refused(dp):
    with pytest.raises(ValueError, match=r"^weight=-1 must be a finite number of at least 0$"):
        dp.weight(-1)
    with pytest.raises(TypeError, match="must be a number on the host"):
        dp.weight(torch.tensor(2.0))


@pytest.mark.parametrize("exact", [False, True])
def test_a_sum_above_float64_is_an_error_in_all_processes(exact):
    def work(dp, mesh):
        with dp.weight(1.7e308), pytest.raises(ValueError, match="exceeds the largest float64"):
            plain(dp, batch(0) * 0).backward()
        dp.zero_grad()
        plain(dp, batch(0)).backward()
        return gradients(dp)

    for found in in_processes(2, work, exact=exact):
        assert_equal(found, means_of(1))


def test_the_sum_of_weights_is_exact():
    """Added as float64, 1 + 2**-53 + 2**-53 is 1."""

    def work(dp, mesh):
        bias = dp.module[0].bias
        for _ in range(2 * mesh.process_index):
            with dp.no_sync(), dp.weight(2**-53):
                (bias.sum() * 0).backward()
        with dp.weight(1 - mesh.process_index):
            bias.sum().backward()
        return bias.grad

    for found in in_processes(2, work):
        assert (found == 1.0 / (1 + 2**-52)).all()


def test_a_large_sum_of_weights_loses_no_gradient():
    """In float16 the inverse of the sum is 0; each process uses another parameter."""

    def work(dp, mesh):
        for _ in range(2):
            dp.zero_grad(set_to_none=True)
            with dp.weight(2**27):
                (dp.module[mesh.process_index].bias.sum() * 2**-20).backward()
        return [layer.bias.grad.tolist() for layer in dp.module]

    assert in_processes(2, work, lambda: layers(2).half()) == [[[2**-21] * 3] * 2] * 2


DROPS = ("zero_grad", "set_to_none", "an error", "the optimizer")  # which drops no exact sums


@pytest.mark.whole_product
@pytest.mark.parametrize(
    ("drops", "exact"), [*product(DROPS, [False]), *product(DROPS[:3], [True])]
)
def test_micro_batches_that_are_dropped_are_not_counted(drops, exact):
    in_processes(1, lambda dp, _: drop_and_check(dp, drops), devices=2, exact=exact)


def drop_and_check(dp, drops):
    optimizer = torch.optim.SGD(dp.parameters(), 0.0)
    for step in range(2):
        with dp.no_sync(), dp.weight(5):
            for net in dp.replicas:
                x = batch(0).requires_grad_()
                loss = plain(net, x)
                if drops == "an error":
                    x.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        loss.backward()
                else:
                    loss.backward()
        if drops == "the optimizer":
            optimizer.zero_grad()
        else:
            dp.zero_grad(set_to_none=drops == "set_to_none")
        for replica, net in enumerate(dp.replicas):
            with dp.weight(1 + 2 * replica):
                plain(net, batch(replica, step)).backward()
        nets = [layers(), layers()]
        for replica, net in enumerate(nets):
            plain(net, batch(replica, step)).backward()
        rows = [gradients(net) for net in nets]
        wanted = [(one + 3 * other) / 4 for one, other in zip(*rows, strict=True)]
        for net in dp.replicas:
            assert_equal(gradients(net), wanted)
        optimizer.zero_grad()


def fail(_):
    raise ZeroDivisionError


def test_a_failed_backward_inside_no_sync_is_followed_by_others(dp):
    for _ in range(2):
        with dp.no_sync(), dp.weight(3):
            for net in dp.replicas:
                x = batch(0).requires_grad_()
                x.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    plain(net, x).backward()
            dp.zero_grad()
            for net in dp.replicas:
                plain(net, batch(0)).backward()
        with dp.weight(2):
            for net in dp.replicas:
                plain(net, batch(0)).backward()
        assert_equal(gradients(dp), means_of(1) * 2)


def test_weights_in_some_processes_only_are_an_error():
    def work(dp, mesh):
        context = nullcontext() if mesh.process_index else dp.weight(2)
        with context, pytest.raises((CollectiveError, InvalidArgumentError)) as caught:
            plain(dp, batch(0)).backward()
        return str(caught.value)

    texts = in_processes(2, work)
    assert any("the sum of the weights, which all processes use in a step, or none" in each
               for each in texts)  # fmt: skip


def test_two_data_parallels_have_weights_of_their_own():
    with gr.open_mesh(1, backend="sim") as mesh:
        one, other = (gr.torch.DataParallel(layers(), mesh) for _ in range(2))
        with one.weight(4):
            with one.no_sync(), other.no_sync():
                (plain(one, batch(0)) + plain(other, batch(0))).backward()
            (plain(one, batch(0)) + plain(other, batch(0))).backward()
        plain(one, batch(0)).backward()
        assert_equal(gradients(other), [2 * each for each in means_of(1)])
