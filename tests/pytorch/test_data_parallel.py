"""``gr.torch.DataParallel``: one process with several devices, and processes that are threads."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.torch
TINY_MB = 2**-20 * 100  # a bucket of 12 float64: a layer
TABLES = ("all", "last", "never", "at first")


def layers(count=4, size=3):
    """Linear layers with integers, so that all gradients are exact; equal at each call."""
    import torch

    net = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(count)]).double()
    for number, parameter in enumerate(net.parameters()):
        torch.nn.init.constant_(parameter, 1.0 + number % 2)
    return net


def batch(replica, step=0, size=3):
    import torch

    return torch.full((2, size), 1.0 + replica + 3 * step, dtype=torch.float64)


def open_mesh(devices, group=None):
    return gr.open_mesh(devices, backend="sim", process_group=group)


def gradients(module):
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


def means(rows):
    """The means of the gradients, with zeros for a replica without; None if no replica has one."""
    import torch

    made = []
    for column in zip(*rows, strict=True):
        like = next((each for each in column if each is not None), None)
        terms = [0.0 if each is None else each for each in column]
        made.append(None if like is None else torch.as_tensor(sum(terms) / len(terms)))
    return made


def zeroed_in_place(first, second):
    """The gradients of a step that begins with zeros where the step before had gradients."""
    return [
        one * 0 if other is None and one is not None else other
        for one, other in zip(first, second, strict=True)
    ]


def assert_equal(found, wanted):
    import torch

    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one, other), (one, other)


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


def autocast(net, x, *_):
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        return net(x.float()).sum()


def tied(net):
    net[2].weight = net[0].weight
    return net


def frozen(net):
    net[1].requires_grad_(False)
    return net


def compiled(net):
    import torch

    return torch.compile(net, backend="aot_eager")


def penalized(net, x, *_):
    """Computes gradients inside the loss."""
    import torch

    (inner,) = torch.autograd.grad(net(x).sum(), net[0].weight, create_graph=True)
    return net(x).sum() + inner.sum()


def plain(net, x, *_):
    return net(x).sum()


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


def trained(dp, run, first, begin, steps=3):
    """Computes gradients as training loops do; returns those of all replicas."""
    import torch

    found = []
    for step in range(steps):
        begin(dp, step)
        losses = []
        for index, replica in enumerate(dp.replicas):
            losses.append(run(replica, batch(first + index, step), first + index, step))
            if step == 1:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
        found.append([gradients(replica) for replica in dp.replicas])
    return found


def zero(dp, step):
    """Zeroes the gradients in one of three ways."""
    if step == 1:
        dp.zero_grad()
    else:
        for parameter in dp.parameters():
            parameter.grad = None


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
    import torch

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
    import torch

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
    import torch

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
    import torch

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
    import torch

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
        wanted = []
        for index in range(2):
            net = layers()
            net(batch(index)).sum().backward()
            wanted.append(gradients(net))
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
                assert_equal(gradients(replica), means(wanted))


def test_parameters_and_buffers_are_those_of_process_0_and_the_optimizer_keeps_them_alike():
    import torch

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
    import torch

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


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_round_that_an_error_interrupts_is_dropped():
    import torch

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise MemoryError("out of memory")

    alone = []
    for index in range(2):
        alone.append(layers())
        plain(alone[index], batch(index)).backward()
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        for replica in (0, 1):  # before and after there are buckets
            for _ in range(2):
                net = dp.replicas[replica]
                x = Fails.apply(net[1](net[0](batch(0))))
                with pytest.raises(MemoryError, match="out of memory"):
                    net[3](net[2](x)).sum().backward()
            dp.zero_grad()
            for index, net in enumerate(dp.replicas):
                plain(net, batch(index)).backward()
            for net in dp.replicas:
                assert_equal(gradients(net), means(map(gradients, alone)))


@pytest.mark.parametrize("method", ["_end", "_reset"])
def test_ctrl_c_at_the_end_of_a_step_leaves_the_next_one_right(method, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        for replica in (0, 1, 0, 1):  # before and after there are buckets
            dp.zero_grad()
            with pytest.raises(KeyboardInterrupt):
                for index, net in enumerate(dp.replicas):
                    if index == replica or method == "_reset":
                        monkeypatch.setattr(dp._reducer, method, interrupt)
                    plain(net, batch(index)).backward()
            monkeypatch.undo()
            alone = [layers(), layers()]
            for found in trained(dp, plain, 0, zero, steps=1):
                for index, net in enumerate(alone):
                    plain(net, batch(index)).backward()
                for each in found:
                    assert_equal(each, means(map(gradients, alone)))


def test_ctrl_c_while_buckets_are_made_leaves_the_next_step_right(monkeypatch):
    from gradreduce.torch import reducer

    made = []

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) == 4:
            raise KeyboardInterrupt
        return hook(*arguments)

    hook = reducer._hook
    monkeypatch.setattr(reducer, "_hook", interrupted)
    alone = [layers(), layers()]
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        with pytest.raises(KeyboardInterrupt):
            trained(dp, plain, 0, zero, steps=1)
        for step in range(3):
            dp.zero_grad()
            for index, net in enumerate(alone):
                net.zero_grad()
                plain(net, batch(index, step)).backward()
                plain(dp.replicas[index], batch(index, step)).backward()
            for net in dp.replicas:
                assert_equal(gradients(net), means(map(gradients, alone)))


def test_a_backward_that_fails_raises_in_other_processes():
    has_failed = threading.Event()

    def work(group):
        with open_mesh(1, group) as mesh:
            dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
            for _ in range(2):  # the second one compares the replicas
                plain(dp, batch(0)).backward()
            if group.rank == 1:
                dp.module[0].weight.grad = None
                dp.module.float()
                with pytest.raises(ValueError, match="float32") as caught:
                    plain(dp, batch(0).float()).backward()
                has_failed.set()
                return "".join(caught.value.__notes__)
            with pytest.raises(CollectiveError) as caught:
                plain(dp, batch(0)).backward()
            assert has_failed.wait(10)
            return str(caught.value)

    error, note = run_processes(2, work)
    assert "bucket 0 (3.bias, 3.weight)" in note
    assert error.startswith("bucket 0 (3.bias, 3.weight): ")
    assert "a backward of process 1 of 2 failed" in error


def test_ctrl_c_ends_the_wait_for_another_process():
    has_ended = threading.Event()

    def work(group):
        mesh = open_mesh(1, group)
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        for _ in range(2):  # the second one compares the replicas
            plain(dp, batch(0)).backward()
        if group.rank == 1:
            assert has_ended.wait(10)
            return
        dp._reducer._worker = SimpleNamespace(submit=lambda *arguments: Interrupted())
        with pytest.raises(KeyboardInterrupt):
            plain(dp, batch(0)).backward()
        with pytest.raises(CollectiveError, match=r"of process 0 of 2 failed: KeyboardInterrupt"):
            plain(dp, batch(0)).backward()
        has_ended.set()

    class Interrupted:
        def wait(self):
            raise KeyboardInterrupt

    run_processes(2, work)


def test_a_second_backward_of_one_replica_is_refused_before_that_of_another():
    """The next backward begins a new step, because another replica's forward may have failed."""
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh)
        plain(dp.replicas[0], batch(0)).backward()
        with pytest.raises(RuntimeError, match=r"no_sync\(\) was entered after .* replica 0"):
            dp.no_sync().__enter__()
        with pytest.raises(RuntimeError, match=r"second time for replica 0, before .* 1:"):
            plain(dp.replicas[0], batch(0)).backward()
        for found in trained(dp, plain, 0, zero, steps=1):
            assert_equal(found[0], found[1])


def test_a_gradient_after_its_bucket_was_reduced_is_refused():
    from torch.utils.checkpoint import checkpoint

    with open_mesh(1) as mesh:
        dp = gr.torch.DataParallel(layers(2), mesh, bucket_mb=TINY_MB)
        for times in (1, 2):
            x = batch(0).requires_grad_()
            for _ in range(times):
                x = checkpoint(dp.module[1], x, use_reentrant=True)
            if times == 1:
                x.sum().backward()
                continue
            with pytest.raises(RuntimeError, match=r"1\..* got another gradient after bucket 0"):
                x.sum().backward()


def test_parameters_that_one_process_has_frozen_are_named_by_all():
    def work(group):
        net = frozen(layers()) if group.rank == 1 else layers()
        with open_mesh(1, group) as mesh, pytest.raises(ValueError) as caught:
            gr.torch.DataParallel(net, mesh)
        return str(caught.value)

    first, second = run_processes(2, work)
    assert "requires_grad of 1.weight is True in process 0, False in process 1" in first
    assert "requires_grad of 1.weight is False in process 1, True in process 0" in second


def test_parameters_that_would_not_be_reduced_are_refused():
    import torch

    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(frozen(layers()), mesh)
        dp.replicas[1][1].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"^1.weight, 1.bias did not require gradients"):
            plain(dp.replicas[0], batch(0)).backward()
        del dp.replicas[1][0].weight
        dp.replicas[1][0].weight = dp.replicas[0][0].weight.detach()
        with pytest.raises(RuntimeError, match="a parameter of replica 1 was replaced"):
            plain(dp.replicas[1], batch(0)).backward()
        with pytest.raises(ValueError, match=r"0.weight is already a parameter of another Data"):
            gr.torch.DataParallel(dp.module, mesh)
        dp, rows = gr.torch.DataParallel(torch.nn.Embedding(4, 2), mesh[:1]), torch.tensor([1])
        with pytest.raises(ValueError, match=r"layout torch.sparse_coo") as caught:
            torch.nn.functional.embedding(rows, dp.module.weight, sparse=True).sum().backward()
        assert caught.value.__notes__ == ["It was about bucket 0 (weight)."]
        dp = gr.torch.DataParallel(torch.nn.Embedding(4, 2, sparse=True), mesh[:1])
        with pytest.raises(
            ValueError, match=r"^weight has a dense gradient, but its emb"
        ) as caught:
            (dp(rows).sum() + dp.module.weight.sum()).backward()
        assert caught.value.__notes__ == ["It was about sparse gradients (weight)."]


@pytest.mark.parametrize("is_first", [True, False])
def test_parameters_that_a_module_gets_later_are_refused(is_first):
    """Also if an optimizer keeps the old parameters alive, so that nothing else shows it."""
    import torch

    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh)
        optimizer = torch.optim.SGD(dp.parameters(), 0.1)
        if not is_first:
            trained(dp, plain, 0, zero, steps=1)
        net = dp.replicas[1]
        state = {name: each.clone() for name, each in net.state_dict().items()}
        for change in (
            lambda: setattr(net[0], "weight", torch.nn.Parameter(net[0].weight.detach())),
            lambda: net.append(torch.nn.Linear(3, 3)),
            lambda: net.load_state_dict(state, assign=True),
        ):
            with pytest.raises(RuntimeError, match="make a new DataParallel from the changed"):
                change()
        net.load_state_dict(state)
        net[0].weight = net[0].weight  # the same one
        net[0].extra = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        del net[0].extra
        copy.deepcopy(net).append(torch.nn.Linear(3, 3))
        for found in trained(dp, plain, 0, zero, steps=2):
            assert_equal(found[0], found[1])
        del dp, optimizer
        gc.collect()
        net.append(torch.nn.Linear(3, 3))


def test_an_added_module_is_watched_like_the_modules_around_it():
    import torch

    with open_mesh(1) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh)
        dp.module.more = torch.nn.ModuleList()
        with pytest.raises(RuntimeError, match="0 cannot be added or replaced in a module"):
            dp.module.more.append(torch.nn.Linear(3, 3))


def test_the_module_of_a_dropped_data_parallel_gets_another():
    """The new one averages some of the parameters; all hooks of the first are removed."""
    with open_mesh(2) as mesh:
        nets = [layers(), layers()]
        dp = gr.torch.DataParallel(nets, mesh)
        for pair in (nets, [layers(), nets[1]]):
            with pytest.raises(ValueError, match="of another DataParallel: delete that one"):
                gr.torch.DataParallel(pair, mesh)
        trained(dp, plain, 0, zero, steps=2)
        del dp
        inner = gr.torch.DataParallel([net[:2] for net in nets], mesh)
        alone = [layers(), layers()]
        for step in range(3):
            for net, other, index in zip(nets, alone, range(2), strict=True):
                for each in (net, other):
                    each.zero_grad()
                    plain(each, batch(index, step)).backward()
        wanted = means(map(gradients, alone))
        for net, other, part in zip(nets, alone, inner.replicas, strict=True):
            assert_equal(gradients(part), wanted[:4])
            assert_equal(gradients(net)[4:], gradients(other)[4:])


def test_gradients_in_other_memory_are_averaged():
    """The user has set them, or they moved with the parameters; buckets exist already."""

    def set_gradients(net):
        for parameter in net.parameters():
            parameter.grad = parameter.grad.clone().mul_(2)

    def move(net):
        net._apply(lambda tensor: tensor.clone())  # as Module.to does

    with open_mesh(2) as mesh:
        for change in (set_gradients, move, lambda net: net.zero_grad()):
            dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
            trained(dp, plain, 0, zero, steps=1)
            change(dp.replicas[1])
            before = means([gradients(replica) for replica in dp.replicas])
            for replica in dp.replicas:
                plain(replica, batch(0)).backward()
            alone = layers()
            plain(alone, batch(0)).backward()
            for replica in dp.replicas:
                pairs = zip(before, gradients(alone), strict=True)
                assert_equal(gradients(replica), [one + other for one, other in pairs])


def test_an_infinite_gradient_of_one_replica_skips_the_step_of_all():
    """Autocast with GradScaler, in two processes."""
    import torch

    def work(group):
        with open_mesh(1, group) as mesh:
            dp = gr.torch.DataParallel(layers().float(), mesh, bucket_mb=TINY_MB)
            optimizer = torch.optim.SGD(dp.parameters(), 1.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            found = []
            for step in range(3):
                optimizer.zero_grad()
                loss = autocast(dp, batch(group.rank))
                is_infinite = step == 1 and group.rank == 1
                scaler.scale(loss * torch.inf if is_infinite else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append([each.detach().clone() for each in dp.parameters()])
            assert scaler.get_scale() == 4.0
            return found

    one, other = run_processes(2, work)
    for step in range(3):
        assert_equal(one[step], other[step])
    assert_equal(one[1], one[0])  # skipped
    assert not one[2][0].equal(one[1][0])


def test_wrong_arguments_are_refused():
    import torch

    with open_mesh(2) as mesh:
        with pytest.raises(ValueError, match="there are 1 replicas for 2 devices"):
            gr.torch.DataParallel([layers()], mesh)
        with pytest.raises(ValueError, match=r"1 has None where replica 0 has \('2.weight'"):
            gr.torch.DataParallel([layers(3), layers(2)], mesh)
        with pytest.raises(ValueError, match="no parameter that requires gradients"):
            gr.torch.DataParallel(torch.nn.ReLU(), mesh)
        with pytest.raises(TypeError, match=r"is not a torch.nn.Module"):
            gr.torch.DataParallel([1, 2], mesh)
        with pytest.raises(TypeError, match="mesh=2 is not a Mesh"):
            gr.torch.DataParallel(layers(), 2)
        with pytest.raises(ValueError, match="bucket_mb=0"):
            gr.torch.DataParallel(layers(), mesh, bucket_mb=0)
        with pytest.raises(ValueError, match=r"ops=.* is not an AllReduceCrossDeviceOps"):
            gr.torch.DataParallel(layers(), mesh, ops=gr.ReductionToOneDevice())
        with pytest.raises(RuntimeError, match="there are 2 replicas in this process"):
            gr.torch.DataParallel(layers(), mesh)(batch(0))
        given = torch.nn.ModuleList([layers(), layers()])
        assert list(gr.torch.DataParallel(given, mesh).replicas) == list(given)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("find_unused_parameters", "leave it out, unused parameters are found in every step"),
        ("static_graph", "leave it out, no graph needs to be static"),
        ("gradient_as_bucket_view", "leave it out, gradients are always views of buckets"),
        ("device_ids", "leave it out, the mesh has the devices (gr.open_mesh)"),
        ("output_device", "leave it out, each replica returns outputs on its own device"),
        ("bucket_cap_mb", "pass bucket_mb="),
        ("process_group", "pass it to gr.open_mesh(process_group=...), and pass that mesh"),
    ],
)
def test_an_argument_of_ddp_is_refused_with_what_to_do(name, hint):
    with pytest.raises(TypeError) as caught:  # also without a mesh, as DDP is called
        gr.torch.DataParallel(layers(), **{name: 1})
    assert str(caught.value) == f"DataParallel has no argument {name!r}: {hint}"


def test_modules_without_values_are_refused_in_one_sentence():
    import torch

    lazy = "of a lazy module has no shape yet: run a forward of the module before this"
    meta = "is on the meta device and has no values: call module.to_empty(device=...), and "
    meta += "initialize or load the module, before this"
    nets = {
        f"the parameter '1.weight' {lazy}": torch.nn.Sequential(layers(1), torch.nn.LazyLinear(3)),
        f"the buffer '1.running_mean' {lazy}": torch.nn.Sequential(
            layers(1), torch.nn.LazyBatchNorm1d(affine=False)
        ),
        f"the parameter '0.weight' {meta}": layers(1).to("meta"),
    }
    with open_mesh(1) as mesh, mesh.journal() as journal:
        for text, net in nets.items():
            calls = [lambda net: gr.torch.DataParallel(net, mesh)]
            if "parameter" in text:
                calls.append(lambda net: gr.torch.variables(net, mesh))
                calls.append(
                    lambda net: gr.torch.Optimizer(gr.AdamOptimizer(), net.named_parameters())
                )
            for call in calls:
                with pytest.raises(ValueError) as caught:
                    call(net)
                assert str(caught.value) == text
            assert all(not each._post_accumulate_grad_hooks for each in net.parameters())
    assert journal.records == []
    with open_mesh(1) as mesh:
        net = torch.nn.Sequential(torch.nn.LazyLinear(3))
        net(torch.ones(2, 4))
        assert gr.torch.DataParallel(net, mesh).module[0].weight.shape == (3, 4)


def test_no_sync_looks_at_backward_and_not_at_the_forward():
    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(1), mesh)
        with dp.no_sync():
            losses = [net(batch(index)).sum() for index, net in enumerate(dp.replicas)]
        for loss in losses:
            loss.backward()
        assert [net[0].weight.grad[0, 0].item() for net in dp.replicas] == [3.0, 3.0]  # (2 + 4) / 2
        dp.zero_grad()
        losses = [net(batch(index)).sum() for index, net in enumerate(dp.replicas)]
        with dp.no_sync():
            for loss in losses:
                loss.backward()
        assert [net[0].weight.grad[0, 0].item() for net in dp.replicas] == [2.0, 4.0]


def test_two_modules_share_the_thread_of_their_mesh():
    """A backward through both reduces their buckets in one order."""

    def work(group):
        with open_mesh(1, group) as mesh:
            one, other = (
                gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB) for _ in range(2)
            )
            for step in range(5):
                one.zero_grad(set_to_none=step % 2 == 0)
                other.zero_grad()
                one(other(batch(group.rank))).sum().backward()
            return gradients(one) + gradients(other)

    alone = []
    for rank in range(2):
        nets = layers(), layers()
        nets[0](nets[1](batch(rank))).sum().backward()
        alone.append(gradients(nets[0]) + gradients(nets[1]))
    for found in run_processes(2, work):
        assert_equal(found, means(alone))


def test_modules_that_are_dropped_are_freed():
    import torch

    with open_mesh(2) as mesh:
        dp = gr.torch.DataParallel(layers(), mesh)
        trained(dp, plain, 0, zero)
        parameter, grad = weakref.ref(dp.module[0].weight), weakref.ref(dp.module[0].weight.grad)
        del dp
        gc.collect()
        assert parameter() is None and grad() is None
        assert torch.is_grad_enabled()
