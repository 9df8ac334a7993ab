"""``gr.torch.DataParallel``: one process with several devices, and processes that are threads."""

import copy
import gc
import io
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import (
    TINY_MB,
    assert_equal,
    autocast,
    batch,
    frozen,
    gradients,
    in_processes,
    layers,
    means,
    means_of,
    open_mesh,
    plain,
    trained,
    zero,
)

import gradreduce as gr

pytestmark = pytest.mark.torch
TABLES = ("all", "last", "never", "at first")


def zeroed_in_place(first, second):
    """The gradients of a step that begins with zeros where the step before had gradients."""
    return [
        one * 0 if other is None and one is not None else other
        for one, other in zip(first, second, strict=True)
    ]


def checkpointed(reentrant):
    def run(net, x, *_):
        checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)

        def twice(x):  # the last layer is in two checkpoints
            return checkpoint(net[3], net[2](checkpoint(net[3], x)))

        x.requires_grad_()
        return checkpoint(lambda x: twice(net[1](net[0](x))), x).sum()

    return run


def more_often(net, x, _, step):
    """A layer is in one checkpoint first, later in two, while another bucket waits."""
    run = partial(torch.utils.checkpoint.checkpoint, net[2], use_reentrant=True)
    x = run(net[1](net[0](x)))
    return (run(x) if step else net[3](x)).sum()


def tied(net):
    net[2].weight = net[0].weight
    return net


def compiled(net):
    return torch.compile(net, backend="aot_eager")


def penalized(net, x, *_):
    """Computes gradients inside the loss."""
    (inner,) = torch.autograd.grad(net(x).sum(), net[0].weight, create_graph=True)
    return net(x).sum() + inner.sum()


CASES = {
    "plain": (layers, plain),
    "tied weights": (lambda: tied(layers()), plain),
    "frozen layer": (lambda: frozen(layers()), plain),
    "never used": (layers, lambda net, x, *_: net[2](net[0](x)).sum()),
    "used in turns": (layers, lambda net, x, replica, step: net[(replica + step) % 2](x).sum()),
    "used later": (layers, lambda net, x, _, step: net[1](net[0](x) if step else x).sum()),
    "checkpoint": (layers, checkpointed(False)),
    "reentrant checkpoint": (layers, checkpointed(True)),
    "reentrant checkpoints, later two": (layers, more_often),
    "autocast": (lambda: layers().float(), autocast),
    "penalty": (layers, penalized),
    "bfloat16": (lambda: layers(2).bfloat16(), lambda net, x, *_: net(x.bfloat16()).sum()),
    "two dtypes": (
        lambda: layers(1).append(layers(1)[0].float()),
        lambda net, x, *_: net[1](net[0](x).float()).sum(),
    ),
    "compiled": (lambda: compiled(layers()), plain),
    "compiled replicas": (layers, lambda net, x, *_: compiled(net)(x).sum()),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.whole_product
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_gradients_are_the_means_of_all_replicas(case, devices, processes):
    make, run = CASES[case]
    num_replicas = devices * processes
    alone = []
    for step in range(3):
        rows = []
        for replica in range(num_replicas):
            net = make()
            run(net, batch(replica, step), replica, step).backward()
            rows.append(gradients(net))
        alone.append(means(rows))
    alone[1] = zeroed_in_place(*alone[:2])

    def work(dp, mesh):
        return trained(dp, run, mesh.process_index * devices, zero)

    sizes = {"devices": devices, "bucket_mb": devices * TINY_MB}  # a bucket holds a layer, or two
    for found in in_processes(processes, work, make, **sizes):
        for step in range(3):
            for replica in range(devices):
                assert_equal(found[step][replica], alone[step])


@pytest.mark.whole_product
@pytest.mark.parametrize("has_others", [True, False])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_sparse_gradients_are_averaged_and_stay_sparse(has_others, devices, processes, exact):
    """Rows of several replicas, an embedding that one replica uses, and one that none uses."""
    n = devices * processes

    def work(dp, mesh):
        first, found = mesh.process_index * devices, []
        for step in range(4):
            dp.zero_grad(set_to_none=step == 2)
            for replica, net in enumerate(dp.replicas, first):
                names = ["all", *["last"] * (replica == n - 1), *["at first"] * (step == 0)]
                rows = torch.tensor([2, 2, 3 if replica else 0])
                sum(net["-"](net[name](rows)).sum() for name in names).backward()
            found.append(
                [[of_column(net[each].weight.grad) for each in TABLES] for net in dp.replicas]
            )
        return found

    shared = [1 / n, 0.0, 2.0, (n - 1) / n, 0.0]
    one = [1.0, 0.0, 2.0, 0.0, 0.0] if n == 1 else [0.0, 0.0, 2 / n, 1 / n, 0.0]
    make = partial(embeddings, has_others)
    for found in in_processes(processes, work, make, devices, exact=exact):
        for step, rows in enumerate(found):
            at_first = {0: shared, 1: [0.0] * 5}.get(step)
            assert rows == [[shared, one, None, at_first]] * devices


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sparse_gradient_without_rows_is_added_to(processes, exact):
    def work(dp, _):
        for names in (["all"], []):  # a mean with rows, then one of the zeroed gradient
            dp.zero_grad(set_to_none=False)
            for net in dp.replicas:
                terms = [net[name](torch.tensor([1])).sum() for name in names]
                (sum(terms) + net["-"](torch.ones(2)).sum()).backward()
        with dp.no_sync():
            for net in dp.replicas:
                net["all"](torch.tensor([1])).sum().backward()
            assert not exact or net["all"].weight.grad is None  # moved to the sum
        for net in dp.replicas:
            (0 * net["all"](torch.tensor([1]))).sum().backward()
        return [of_column(net["all"].weight.grad) for net in dp.replicas]

    found = in_processes(processes, work, partial(embeddings, True), devices=2, exact=exact)
    assert found == [[[0.0, 1.0, 0.0, 0.0, 0.0]] * 2] * processes


def embeddings(has_others):
    net = torch.nn.ModuleDict()
    for name in TABLES:
        net[name] = torch.nn.Embedding(5, 2, sparse=True)
    net["-"] = torch.nn.Linear(2, 2, bias=False) if has_others else torch.nn.Identity()
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return net


def of_column(grad):
    """A column of a sparse gradient, with one row for each index."""
    if grad is None:
        return None
    assert grad.is_sparse and grad._nnz() <= 3
    return grad.to_dense()[:, 0].tolist()


def test_every_bucket_but_the_last_is_launched_before_the_last_backward_ends():
    def work(dp, mesh):
        def run(last):
            """``last`` is called when all layers have their gradients."""
            xs = [batch(index).requires_grad_() for index in range(len(mesh))]
            xs[0].register_hook(last)  # PyTorch begins with the last replica
            sum(net(x * 1.0).sum() for net, x in zip(dp.replicas, xs, strict=True)).backward()

        for _ in range(2):  # the second one compares the replicas
            run(torch.clone)
        with mesh.journal() as journal:
            run(torch.clone)
        before_last, seen = len(journal.records) * 3 // 4, []  # of 4 buckets alike
        with mesh.journal() as journal:

            def wait(_):  # for the thread that reduces
                end = time.monotonic() + 10
                while len(journal.records) < before_last and time.monotonic() < end:
                    threading.Event().wait(1e-4)
                seen.append(len(journal.records) >= before_last)

            run(wait)
        assert seen == [True]
        return [bucket.name for bucket in dp._reducer._buckets]

    for devices, processes in ((2, 1), (1, 2)):
        for names in in_processes(processes, work, devices=devices, bucket_mb=TINY_MB):
            assert len(names) == 4
            assert names[0] == "bucket 0 (3.bias, 3.weight)"


def test_the_order_of_buckets_is_that_of_process_0():
    def work(dp, mesh):
        one, other = dp.module[:: -1 if mesh.process_index else 1]
        for _ in range(2):
            one(other(batch(mesh.process_index))).sum().backward()
        return [bucket.name for bucket in dp._reducer._buckets]

    one, other = in_processes(2, work, partial(layers, 2), bucket_mb=TINY_MB)
    assert one == other
    assert "0.weight" in one[0] and "1.weight" in one[1]  # of process 1 the other way round


def test_gradients_stay_views_of_one_memory(mesh):
    dp = gr.torch.DataParallel(layers(), mesh)
    parameters = list(dp.parameters())
    trained(dp, plain, 0, lambda dp, step: dp.zero_grad(), steps=2)
    views = [each.grad for each in parameters]
    trained(dp, plain, 0, lambda dp, step: dp.zero_grad(), steps=2)
    assert all(each.grad is view for each, view in zip(parameters, views, strict=True))
    assert all(len(each._post_accumulate_grad_hooks) == 1 for each in parameters)
    flat = dp._reducer._buckets[0].flat
    for buffer, replica in zip(flat.buffers, dp.replicas, strict=True):
        for parameter in replica.parameters():
            assert 0 <= parameter.grad.data_ptr() - buffer.address < buffer.nbytes


def test_gradients_that_are_replaced_between_two_backwards_are_averaged(dp):
    """For example by clipping out of place; those of the other replica are None or zero."""
    for step in range(4):
        dp.zero_grad(set_to_none=step % 2 == 0)
        plain(dp.replicas[0], batch(0)).backward()
        for parameter in dp.replicas[0].parameters():
            parameter.grad = parameter.grad * 3
        wanted = gradients(dp.replicas[0])
        plain(dp.replicas[1], batch(0)).backward()
        for replica in dp.replicas:
            assert_equal(gradients(replica), [each * 4 / 6 for each in wanted])


def test_little_more_than_one_copy_of_the_gradients_is_held():
    """Flat buffers, and new gradients of backward: those of one bucket and one more."""

    def work(group):
        with open_mesh(1, group) as mesh:
            net = layers(6)
            loose, most = [], []

            def count(parameter):  # before the hook of DataParallel
                loose.append(weakref.ref(parameter.grad))
                inside = [bucket.flat.buffers[0] for bucket in dp._reducer._buckets]
                views = [range(each.address, each.address + each.nbytes) for each in inside]
                alive = {id(each()): each() for each in loose if each() is not None}.values()
                outside = [each for each in alive if not any(each.data_ptr() in v for v in views)]
                most[-1] = max(most[-1], sum(each.nbytes for each in outside))

            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(count)
            dp = gr.torch.DataParallel(net, mesh, bucket_mb=TINY_MB)
            for _ in range(3):
                most.append(0)
                trained(dp, plain, group.rank, zero, steps=1)
            return most

    layer = 12 * 8  # bytes
    for first, *others in run_processes(2, work):
        assert first == 6 * layer  # no flat buffer is there yet
        assert max(others) <= layer


@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_a_mesh_holds_one_copy_of_the_gradients_and_one_bucket(devices, processes, monkeypatch):
    from gradreduce.backends.sim.device import SimDevice

    blocks = []
    allocate = SimDevice._allocate

    def noted(device, nbytes):
        block = allocate(device, nbytes)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(SimDevice, "_allocate", noted)

    def work(group):
        with open_mesh(devices, group) as mesh:
            widths = [200, 160, 128, 96]  # no bucket is sent whole; the last ones are larger
            net = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in pairwise(widths)])
            dp = gr.torch.DataParallel(net.double(), mesh, bucket_mb=TINY_MB)
            trained(dp, lambda net, x, *_: net(batch(0, size=200)).sum(), 0, zero, steps=2)
            gc.collect()
            buckets = [each.flat.buffers for each in dp._reducer._buckets]
            flat = sum(each.nbytes for buffers in buckets for each in buffers)
            found = [each() for each in blocks]
            held = [each.nbytes for each in found if each and each.device.mesh is mesh]
            return sum(held) - flat, max(each[0].nbytes for each in buckets), len(buckets)

    for more, largest, count in run_processes(processes, work) if processes > 1 else [work(None)]:
        assert count == 6
        assert more <= (devices * largest if processes > 1 else 0)


def test_no_sync_adds_and_the_next_backward_averages_the_sums():
    def work(dp, mesh):
        x = batch(mesh.process_index)
        for _ in range(2):  # before and after there are buckets
            dp.zero_grad()
            with mesh.journal() as journal, dp.no_sync(), dp.no_sync():
                dp(x).sum().backward()
                assert dp.module[0].bias.grad.tolist() == [2.0, 2.0, 2.0]
            assert journal.of("exchange") == []
            dp(x).sum().backward()
            found = dp.module[0].weight.grad[0, 0].item()
            assert found == (4.0 + 8.0) / 2
            dp(x).sum().backward()  # adds to the mean
            assert dp.module[0].weight.grad[0, 0].item() == found + 3.0

    in_processes(2, work, partial(layers, 1))


def test_replicas_may_run_in_threads(dp):
    def run(index):
        dp.replicas[index](batch(index)).sum().backward()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            dp.zero_grad()
            list(pool.map(run, range(2), timeout=10))
            for replica in dp.replicas:
                assert_equal(gradients(replica), means_of(2))


def test_parameters_and_buffers_are_those_of_process_0_and_the_optimizer_keeps_them_alike():
    def work(group):
        torch.manual_seed(group.rank)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.Flatten(),
            torch.nn.Linear(12, 2),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        net.register_buffer("mask", torch.tensor([group.rank == 0, False]))
        net.register_buffer("scale", torch.ones(2).div(group.rank + 1).to(torch.float8_e5m2))
        with open_mesh(2, group) as mesh:
            dp = gr.torch.DataParallel(net, mesh, bucket_mb=TINY_MB)
            states = [[each.double() for each in net.state_dict().values()] for net in dp.replicas]
            optimizer = torch.optim.SGD(dp.parameters(), 0.1, momentum=0.9)
            random = torch.Generator().manual_seed(group.rank)
            for _ in range(3):
                xs = torch.randn(2, 4, 2, 2, 2, generator=random)
                losses = [net(x).square().mean() for net, x in zip(dp.replicas, xs, strict=True)]
                optimizer.zero_grad()
                sum(losses).backward()
                for replica in dp.replicas:
                    torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
                optimizer.step()
            return states, [[each.detach() for each in net.parameters()] for net in dp.replicas]

    found = run_processes(2, work)
    for rows in zip(*found, strict=True):
        first, *others = [each for row in rows for each in row]
        for each in others:
            assert_equal(each, first)
    assert [1.0, 0.0] in [each.tolist() for each in found[1][0][1]]  # the mask


def test_the_module_can_be_copied_and_saved(dp, mesh):
    trained(dp, plain, 0, zero, steps=2)
    with mesh.journal() as journal:
        average = copy.deepcopy(dp.module)
        plain(average, batch(0)).backward()
    assert journal.records == []
    file = io.BytesIO()
    torch.save(dp.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(loaded.parameters(), dp.module.parameters())
    gr.torch.DataParallel(loaded, mesh)
    with pytest.raises(TypeError, match=r"^DataParallel objects .* copied; copy its module$"):
        copy.deepcopy(dp)


def test_a_bucket_has_one_dtype_and_is_filled_in_the_order_of_readiness():
    """Its place is that of its last parameter."""
    from gradreduce.torch.replica import plan_buckets

    one = [("f", 4), ("f", 4), ("f", 9), ("f", 1), ("f", 4)]
    two = [("f", 4), ("h", 2), ("f", 4), ("h", 2)]
    for sizes, order, most, wanted in [
        (one, [4, 3, 2, 1, 0], 8, [[4, 3], [2], [1, 0]]),
        (one, [4, 3, 2, 1, 0], 100, [[4, 3, 2, 1, 0]]),
        (two, [0, 1, 2, 3], 8, [[0, 2], [1, 3]]),
        (two, [1, 3, 0, 2], 4, [[1, 3], [0], [2]]),
        (two, [1, 0, 2, 3], 4, [[0], [2], [1, 3]]),
        ([("f", 3)] * 3, [0, 1, 2], 8, [[0, 1], [2]]),
        ([], [], 8, []),
    ]:
        parameters = [SimpleNamespace(dtype=dtype, nbytes=nbytes) for dtype, nbytes in sizes]
        assert plan_buckets(parameters, order, most) == wanted


def test_exact_sums_have_as_many_words_as_the_cross_device_ops():
    with gr.open_mesh(1, backend="sim", strict=True) as mesh:
        net = torch.nn.Linear(1, 1, bias=False)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, words=4)
        model = gr.torch.DataParallel(net, mesh, ops=ops)
        with model.no_sync():
            for term in (2.0**100, 1.0, 2.0**-50, 2.0**-100, -(2.0**100)):
                model(torch.tensor([[term]])).sum().backward()
        model(torch.tensor([[-1.0]])).sum().backward()
        assert net.weight.grad.item() == 2.0**-50
