"""``gr.torch.DataParallel``: errors, interrupts, what it cannot average, and changed modules."""

import copy
import gc
import re
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import (
    TINY_MB,
    assert_equal,
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
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("method", ["_end", "_reset"])
def test_ctrl_c_at_the_end_of_a_step_leaves_the_next_one_right(method, dp, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    for replica in (0, 1, 0, 1):  # before and after there are buckets
        dp.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            for index, net in enumerate(dp.replicas):
                if index == replica or method == "_reset":
                    monkeypatch.setattr(dp._reducer, method, interrupt)
                plain(net, batch(index)).backward()
        monkeypatch.undo()
        assert_steps_are_right(dp)


def assert_steps_are_right(dp, steps=1):
    for step, found in enumerate(trained(dp, plain, 0, zero, steps=steps)):
        for each in found:
            assert_equal(each, means_of(2, step))


def test_ctrl_c_while_buckets_are_made_leaves_the_next_step_right(monkeypatch, dp):
    made, hook = [], gr.torch.reducer.bucket_hook

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) == 4:
            raise KeyboardInterrupt
        return hook(*arguments)

    monkeypatch.setattr("gradreduce.torch.reducer.bucket_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(dp, plain, 0, zero, steps=1)
    assert_steps_are_right(dp, 3)


def test_a_backward_that_fails_raises_in_other_processes():
    has_failed = threading.Event()

    def work(dp, mesh):
        for _ in range(2):  # the second one compares the replicas
            plain(dp, batch(0)).backward()
        if mesh.process_index == 1:
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

    error, note = in_processes(2, work, bucket_mb=TINY_MB)
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


def test_a_second_backward_of_one_replica_is_refused_before_that_of_another(dp):
    """The next backward begins a new step, because another replica's forward may have failed."""
    plain(dp.replicas[0], batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\) was entered after .* replica 0"):
        dp.no_sync().__enter__()
    with pytest.raises(RuntimeError, match=r"second time for replica 0, before .* 1:"):
        plain(dp.replicas[0], batch(0)).backward()
    assert_steps_are_right(dp)


def test_a_gradient_after_its_bucket_was_reduced_is_refused(mesh):
    dp = gr.torch.DataParallel(layers(2), mesh[:1], bucket_mb=TINY_MB)

    def result(times):
        x = batch(0).requires_grad_()
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(dp.module[1], x, use_reentrant=True)
        return x.sum()

    result(1).backward()
    with pytest.raises(RuntimeError, match=r"1\..* got another gradient after bucket 0"):
        result(2).backward()


def test_parameters_that_one_process_has_frozen_are_named_by_all():
    def work(group):
        net = frozen(layers()) if group.rank == 1 else layers()
        with open_mesh(1, group) as mesh, pytest.raises(ValueError) as caught:
            gr.torch.DataParallel(net, mesh)
        return str(caught.value)

    first, second = run_processes(2, work)
    assert "requires_grad of 1.weight is True in process 0, False in process 1" in first
    assert "requires_grad of 1.weight is False in process 1, True in process 0" in second


def test_parameters_that_would_not_be_reduced_are_refused(mesh):
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
    with pytest.raises(ValueError, match=r"^weight has a dense gradient, but its emb") as caught:
        (dp(rows).sum() + dp.module.weight.sum()).backward()
    assert caught.value.__notes__ == ["It was about sparse gradients (weight)."]


@pytest.mark.parametrize("is_first", [True, False])
def test_parameters_that_a_module_gets_later_are_refused(is_first, mesh):
    """Also if an optimizer keeps the old parameters alive, so that nothing else shows it."""
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
    assert_steps_are_right(dp, 2)
    net[0].more = torch.nn.ModuleList()  # is watched too
    with pytest.raises(RuntimeError, match="0 cannot be added or replaced in a module"):
        net[0].more.append(torch.nn.Linear(3, 3))
    del dp, optimizer
    gc.collect()
    net.append(torch.nn.Linear(3, 3))


def test_the_module_of_a_dropped_data_parallel_gets_another(mesh):
    """The new one averages some of the parameters; all hooks of the first are removed."""
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


def test_gradients_in_other_memory_are_averaged(mesh):
    """The user has set them, or they moved with the parameters; buckets exist already."""

    def set_gradients(net):
        for parameter in net.parameters():
            parameter.grad = parameter.grad.clone().mul_(2)

    def move(net):
        net._apply(lambda tensor: tensor.clone())  # as Module.to does

    alone = layers()
    plain(alone, batch(0)).backward()
    for change in (set_gradients, move, lambda net: net.zero_grad()):
        dp = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        trained(dp, plain, 0, zero, steps=1)
        change(dp.replicas[1])
        before = means([gradients(replica) for replica in dp.replicas])
        wanted = [one + other for one, other in zip(before, gradients(alone), strict=True)]
        for replica in dp.replicas:
            plain(replica, batch(0)).backward()
        for replica in dp.replicas:
            assert_equal(gradients(replica), wanted)


def test_wrong_arguments_are_refused(mesh):
    one, ops = layers(), gr.ReductionToOneDevice()
    different = [layers(3), layers(2)]
    for nets, given, options, error, match in [
        ([one], mesh, {}, ValueError, "there are 1 replicas for 2 devices"),
        (different, mesh, {}, ValueError, r"1 has None where replica 0 has \('2.weight'"),
        (torch.nn.ReLU(), mesh, {}, ValueError, "no parameter that requires gradients"),
        ([1, 2], mesh, {}, TypeError, r"is not a torch.nn.Module"),
        (one, 2, {}, TypeError, "mesh=2 is not a Mesh"),
        (one, mesh, {"bucket_mb": 0}, ValueError, "bucket_mb=0"),
        (one, mesh, {"ops": ops}, ValueError, r"ops=.* is not an AllReduceCrossDeviceOps"),
    ]:
        with pytest.raises(error, match=match):
            gr.torch.DataParallel(nets, given, **options)
    with pytest.raises(RuntimeError, match="there are 2 replicas in this process"):
        gr.torch.DataParallel(layers(), mesh)(batch(0))
    given = torch.nn.ModuleList([layers(), layers()])
    assert list(gr.torch.DataParallel(given, mesh).replicas) == list(given)
    for name, hint in HINTS.items():
        with pytest.raises(TypeError) as caught:  # also without a mesh, as DDP is called
            gr.torch.DataParallel(layers(), **{name: 1})
        assert str(caught.value) == f"DataParallel has no argument {name!r}: {hint}"


HINTS = {
    "find_unused_parameters": "leave it out, unused parameters are found in every step",
    "static_graph": "leave it out, no graph needs to be static",
    "gradient_as_bucket_view": "leave it out, gradients are always views of buckets",
    "device_ids": "leave it out, the mesh has the devices (gr.open_mesh)",
    "output_device": "leave it out, each replica returns outputs on its own device",
    "bucket_cap_mb": "pass bucket_mb=",
    "process_group": "pass it to gr.open_mesh(process_group=...), and pass that mesh",
}


def test_modules_without_values_are_refused_in_one_sentence(mesh):
    lazy = "of a lazy module has no shape yet: run a forward of the module before this"
    meta = "is on the meta device and has no values: call module.to_empty(device=...), and "
    meta += "initialize or load the module, before this"
    norm = torch.nn.LazyBatchNorm1d(affine=False)
    nets = {
        f"the parameter '1.weight' {lazy}": torch.nn.Sequential(layers(1), torch.nn.LazyLinear(3)),
        f"the buffer '1.running_mean' {lazy}": torch.nn.Sequential(layers(1), norm),
        f"the parameter '0.weight' {meta}": layers(1).to("meta"),
    }
    getter = gr.AGNCustomGetter(mesh[:1])
    with mesh.journal() as journal:
        for text, net in nets.items():
            calls = [lambda net: gr.torch.DataParallel(net, mesh[:1])]
            if "parameter" in text:
                calls += [
                    lambda net: gr.torch.variables(net, mesh[:1]),
                    lambda net: gr.torch.functional(net, getter),
                    lambda net: gr.torch.Optimizer(gr.AdamOptimizer(), net.named_parameters()),
                ]
            for call in calls:
                with pytest.raises(ValueError) as caught:
                    call(net)
                assert str(caught.value) == text
            assert all(not each._post_accumulate_grad_hooks for each in net.parameters())
    assert journal.records == []
    net = torch.nn.Sequential(torch.nn.LazyLinear(3))
    net(torch.ones(2, 4))
    assert gr.torch.DataParallel(net, mesh[:1]).module[0].weight.shape == (3, 4)


def test_no_sync_looks_at_backward_and_not_at_the_forward(mesh):
    dp = gr.torch.DataParallel(layers(1), mesh)

    def losses():
        return [net(batch(index)).sum() for index, net in enumerate(dp.replicas)]

    with dp.no_sync():
        made = losses()
    for loss in made:
        loss.backward()
    assert [net[0].weight.grad[0, 0].item() for net in dp.replicas] == [3.0, 3.0]  # (2 + 4) / 2
    dp.zero_grad()
    made = losses()
    with dp.no_sync():
        for loss in made:
            loss.backward()
    assert [net[0].weight.grad[0, 0].item() for net in dp.replicas] == [2.0, 4.0]


def test_two_modules_share_the_thread_of_their_mesh():
    """A backward through both reduces their buckets in one order."""

    def work(one, mesh):
        other = gr.torch.DataParallel(layers(), mesh, bucket_mb=TINY_MB)
        for step in range(5):
            one.zero_grad(set_to_none=step % 2 == 0)
            other.zero_grad()
            one(other(batch(mesh.process_index))).sum().backward()
        return gradients(one) + gradients(other)

    alone = []
    for rank in range(2):
        nets = layers(), layers()
        nets[0](nets[1](batch(rank))).sum().backward()
        alone.append(gradients(nets[0]) + gradients(nets[1]))
    for found in in_processes(2, work, bucket_mb=TINY_MB):
        assert_equal(found, means(alone))


def test_modules_that_are_dropped_are_freed(mesh):
    dp = gr.torch.DataParallel(layers(), mesh)
    trained(dp, plain, 0, zero)
    parameter, grad = weakref.ref(dp.module[0].weight), weakref.ref(dp.module[0].weight.grad)
    del dp
    gc.collect()
    assert parameter() is None and grad() is None
    assert torch.is_grad_enabled()


NO_VALUES = (
    "a DataParallel averages values, which a FakeTensor does not have: make it, and call backward, "
    "outside FakeTensorMode"
)


def raises(text):
    return pytest.raises(RuntimeError, match=f"^{re.escape(text)}$")


def test_compiled_autograd_is_refused_before_anything_is_averaged(mesh):
    dp = gr.torch.DataParallel(torch.nn.Linear(3, 1, bias=False), mesh)

    def backward():
        dp.zero_grad()
        for index, net in enumerate(dp.replicas):
            net(torch.full((1, 3), 1.0 + index)).sum().backward()

    text = (
        "a DataParallel does not work with compiled autograd, which does not say when a backward "
        "ends: set torch._dynamo.config.compiled_autograd = False, or call backward outside the "
        "compiled function"
    )
    for _ in range(2):  # before and after there are buckets
        with torch._dynamo.config.patch(compiled_autograd=True), raises(text):
            torch.compile(backward, backend="eager")()
        backward()
        assert [net.weight.grad.tolist() for net in dp.replicas] == [[[1.5] * 3]] * 2


@pytest.mark.usefixtures("one_process")
def test_the_reducer_of_ddp_in_python_is_refused(mesh):
    hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh[:1]))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = torch.nn.parallel.DistributedDataParallel(layers())
        ddp.register_comm_hook(None, hook)
        with raises(
            "comm_hook averages DDP's buckets, but DDP's python_reducer passes parameters: set "
            "torch._dynamo.config.optimize_ddp to another reducer, before DDP is made"
        ):
            plain(ddp, batch(0)).backward()


def test_tensors_without_values_are_refused(dp, mesh):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_tensors, net = partial(FakeTensorMode, allow_non_fake_inputs=True), layers()
    with fake_tensors():
        faked = torch.nn.Linear(3, 3)
        with raises(NO_VALUES):
            gr.torch.DataParallel(net, mesh)
    with raises(NO_VALUES):
        gr.torch.DataParallel(faked, mesh)
    for _ in range(2):  # before and after there are buckets
        with fake_tensors():
            loss = plain(dp.module, batch(0))
            with raises(NO_VALUES):
                loss.backward()
        dp.zero_grad(set_to_none=True)
        assert_steps_are_right(dp)
