"""``gr.torch.DataParallel``: one process with several devices, and processes that are threads."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from itertools import pairwise

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
        from torch.utils.checkpoint import checkpoint

        def twice(x):  # the last layer is in two checkpoints
            return checkpoint(net[3], net[2](checkpoint(net[3], x, use_reentrant=reentrant)),
                              use_reentrant=reentrant)  # fmt: skip

        x.requires_grad_()
        return checkpoint(lambda x: twice(net[1](net[0](x))), x, use_reentrant=reentrant).sum()

    return run


def more_often(net, x, _, step):
    """A layer is in one checkpoint first, later in two, while another bucket waits."""
    from torch.utils.checkpoint import checkpoint

    def run(x):
        return checkpoint(net[2], x, use_reentrant=True)

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

    def work(group):
        with open_mesh(devices, group) as mesh:
            # A bucket holds a layer, or two.
            dp = gr.torch.DataParallel(make(), mesh, bucket_mb=devices * TINY_MB)
            return trained(dp, run, mesh.process_index * devices, zero)

    for found in run_processes(processes, work) if processes > 1 else [work(None)]:
        for step in range(3):
            for replica in range(devices):
                assert_equal(found[step][replica], alone[step])


@pytest.mark.whole_product
@pytest.mark.parametrize("has_others", [True, False])
@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_sparse_gradients_are_averaged_and_stay_sparse(has_others, devices, processes):
    """Rows of several replicas, an embedding that one replica uses, and one that none uses."""
    num_replicas = devices * processes

    def work(group):
        with open_mesh(devices, group) as mesh:
            dp = gr.torch.DataParallel(embeddings(has_others), mesh)
            first, found = mesh.process_index * devices, []
            for step in range(4):
                dp.zero_grad(set_to_none=step == 2)
                for replica, net in enumerate(dp.replicas, first):
                    names = ["all", *["last"] * (replica == num_replicas - 1)]
                    names += ["at first"] * (step == 0)
                    rows = torch.tensor([2, 2, 3 if replica else 0])
                    sum(net["-"](net[name](rows)).sum() for name in names).backward()
                found.append([[of_column(net[each].weight.grad) for each in TABLES]
                              for net in dp.replicas])  # fmt: skip
            return found

    n = num_replicas
    shared = [1 / n, 0.0, 2.0, (n - 1) / n, 0.0]
    one = [1.0, 0.0, 2.0, 0.0, 0.0] if n == 1 else [0.0, 0.0, 2 / n, 1 / n, 0.0]
    for found in run_processes(processes, work) if processes > 1 else [work(None)]:
        for step, rows in enumerate(found):
            at_first = {0: shared, 1: [0.0] * 5}.get(step)
            assert rows == [[shared, one, None, at_first]] * devices


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sparse_gradient_without_rows_is_added_to(processes):
    def work(group):
        with open_mesh(2, group) as mesh:
            dp = gr.torch.DataParallel(embeddings(True), mesh)
            for names in (["all"], []):  # a mean with rows, then one of the zeroed gradient
                dp.zero_grad(set_to_none=False)
                for net in dp.replicas:
                    terms = [net[name](torch.tensor([1])).sum() for name in names]
                    (sum(terms) + net["-"](torch.ones(2)).sum()).backward()
            with dp.no_sync():
                for net in dp.replicas:
                    net["all"](torch.tensor([1])).sum().backward()
            return [of_column(net["all"].weight.grad) for net in dp.replicas]

    for found in run_processes(processes, work) if processes > 1 else [work(None)]:
        assert found == [[0.0, 1.0, 0.0, 0.0, 0.0]] * 2


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
    class LastNode(torch.autograd.Function):
        """The last node of backward; waits for the reductions that the layers must have started."""

        @staticmethod
        def forward(context, x, wait):
            context.wait = wait
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            context.wait()
            return gradient, None

    def work(group):
        devices = 2 if group is None else 1
        with open_mesh(devices, group) as mesh:
            dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)

            def run(wait):
                xs = [batch(index).requires_grad_() for index in range(devices)]
                losses = [
                    replica(LastNode.apply(x, wait if index == 0 else lambda: None)).sum()
                    for index, (x, replica) in enumerate(zip(xs, dp.replicas, strict=True))
                ]
                sum(losses).backward()  # PyTorch begins with the last replica

            run(lambda: None)
            run(lambda: None)  # compares the replicas
            seen = []
            with mesh.journal() as journal:
                run(lambda: None)
            wanted = len(journal.records)
            with mesh.journal() as journal:

                def wait():  # at the end of backward, for the thread that reduces
                    before_last = wanted * 3 // 4  # of 4 buckets alike
                    end = time.monotonic() + 10
                    while len(journal.records) < before_last and time.monotonic() < end:
                        threading.Event().wait(1e-4)
                    seen.append(len(journal.records) >= before_last)

                run(wait)
            assert seen == [True]
            return [bucket.name for bucket in dp._reducer._buckets]

    for names in [work(None), *run_processes(2, work)]:
        assert len(names) == 4
        assert names[0] == "bucket 0 (3.bias, 3.weight)"


def test_the_order_of_buckets_is_that_of_process_0():
    def work(group):
        with open_mesh(1, group) as mesh:
            dp = gr.torch.DataParallel(layers(2), mesh, bucket_mb=TINY_MB)
            net = dp.module
            for _ in range(2):
                x = batch(group.rank)
                (net[1](net[0](x)) if group.rank else net[0](net[1](x))).sum().backward()
            return [bucket.name for bucket in dp._reducer._buckets]

    one, other = run_processes(2, work)
    assert one == other
    assert "0.weight" in one[0] and "1.weight" in one[1]  # of process 1 the other way round


def test_gradients_stay_views_of_one_memory():
    with open_mesh(2) as mesh:
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


def test_gradients_that_are_replaced_between_two_backwards_are_averaged():
    """For example by clipping out of place; those of the other replica are None or zero."""
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
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
                alive = [each() for each in loose if each() is not None]
                most[-1] = max(
                    most[-1],
                    sum(
                        each.nbytes
                        for each in {id(each): each for each in alive}.values()
                        if not any(each.data_ptr() in view for view in views)
                    ),
                )

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
    def work(group):
        with open_mesh(1, group) as mesh:
            dp = gr.torch.DataParallel(layers(1), mesh)
            for _ in range(2):  # before and after there are buckets
                dp.zero_grad()
                with mesh.journal() as journal, dp.no_sync(), dp.no_sync():
                    dp(batch(group.rank)).sum().backward()
                    assert dp.module[0].bias.grad.tolist() == [2.0, 2.0, 2.0]
                assert journal.of("exchange") == []
                dp(batch(group.rank)).sum().backward()
                found = dp.module[0].weight.grad[0, 0].item()
                assert found == (4.0 + 8.0) / 2
                dp(batch(group.rank)).sum().backward()  # adds to the mean
                assert dp.module[0].weight.grad[0, 0].item() == found + 3.0

    run_processes(2, work)


def test_replicas_may_run_in_threads():
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        for _ in range(20):
            dp.zero_grad()

            def run(index):
                dp.replicas[index](batch(index)).sum().backward()

            threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
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
        torch.nn.init.normal_(net[1].running_mean)
        with open_mesh(2, group) as mesh:
            dp = gr.torch.DataParallel(net, mesh, bucket_mb=TINY_MB)
            states = [[each.double() for each in replica.state_dict().values()]
                      for replica in dp.replicas]  # fmt: skip
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer = torch.optim.SGD(dp.parameters(), 0.1, momentum=0.9)
            random = torch.Generator().manual_seed(group.rank)
            for _ in range(3):
                losses = [
                    replica(torch.randn(4, 2, 2, 2, generator=random)).square().mean()
                    for replica in dp.replicas
                ]
                optimizer.zero_grad()
                scaler.scale(sum(losses)).backward()
                scaler.unscale_(optimizer)
                for replica in dp.replicas:
                    torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 1024.0
            after = [[each.detach() for each in replica.parameters()] for replica in dp.replicas]
            return states, after

    found = run_processes(2, work)
    states = [each for states, _ in found for each in states]
    after = [each for _, after in found for each in after]
    for index in range(1, 4):
        assert_equal(states[index], states[0])
        assert_equal(after[index], after[0])
    assert [1.0, 0.0] in [each.tolist() for each in states[3]]  # the mask


def test_the_module_can_be_copied_and_saved():
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh)
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
