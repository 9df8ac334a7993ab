"""The state of a DataParallel's replicas: loaded into all, compared, and the buffers of DDP."""

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import in_processes, open_mesh

import gradreduce as gr

pytestmark = pytest.mark.torch


MAKING = threading.Lock()  # threads that act as processes share PyTorch's random numbers


def make(seed=0):
    """A module with parameters of two dtypes, a frozen one and buffers; equal for equal seeds."""
    with MAKING:
        torch.manual_seed(seed)

        class Net(torch.nn.Sequential):
            def forward(self, x):
                return self[2](self[1](self[0](x)).double()).square().sum()

        net = Net(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).double())
        torch.nn.init.normal_(net[0].bias)
        net[1].running_mean.normal_()
    net[0].bias.requires_grad_(False)
    net.register_buffer("mask", torch.tensor([seed == 0, False]))
    net.register_buffer("columns", torch.full((3, 4), float(seed))[:, ::2])  # with gaps
    return net


def assert_same(found, wanted):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def kept(modules):
    return [copy.deepcopy(module.state_dict()) for module in modules]


def train(dp, optimizer, steps, first=0):
    for step in range(steps):
        optimizer.zero_grad()
        for index, replica in enumerate(dp.replicas):
            replica(torch.full((2, 3), 1.0 + first + index + step)).backward()
        optimizer.step()


@pytest.mark.whole_product
@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_state_is_that_of_the_module_and_is_loaded_into_all_replicas(devices, processes):
    states = [make(seed).state_dict() for seed in range(4)]
    nets = [make(0), make(1)]  # of each process

    def work(group):
        with open_mesh(devices, group) as mesh:
            dp = gr.torch.DataParallel(copy.deepcopy(nets[mesh.process_index]), mesh)
            assert_same(dp.state_dict(), states[0])
            assert dp.state_dict(keep_vars=True, prefix="a.")["a.0.weight"] is dp.module[0].weight
            for replica, other in zip(dp.replicas, (states[1], states[3]), strict=False):
                replica.load_state_dict(other)  # they differ, as after a load of one of them
            state = copy.deepcopy(states[2])
            some = {name: value for name, value in state.items() if name != "0.bias"}
            missing, unexpected = dp.load_state_dict({**some, "more": 1}, strict=False)
            assert (missing, unexpected) == (["0.bias"], ["more"])
            assert len({replica.state_dict()["0.bias"][0].item() for replica in dp.replicas}) == 1
            assert str(dp.load_state_dict(state)) == "<All keys matched successfully>"
            assert_same(state, states[2])
            dp.train()
            train(dp, torch.optim.SGD(dp.parameters(), 0.1), 3)
            dp.load_state_dict(state)
            around = torch.nn.ModuleDict({"inside": dp})
            loaded = {f"inside.{name}": value for name, value in states[0].items()}
            assert str(around.load_state_dict(loaded)) == "<All keys matched successfully>"
            assert_same(around.state_dict(), loaded)
            for found in kept(dp.replicas):
                assert_same(found, states[0])
            dp.load_state_dict(state)
            return kept(dp.replicas)

    for found in run_processes(processes, work) if processes > 1 else [work(None)]:
        assert len(found) == devices
        for state in found:
            assert_same(state, states[2])


def test_a_load_that_fails_changes_no_replica_of_any_process():
    good = make(1).state_dict()
    wrong = {**good, "2.weight": torch.ones(5, 5)}  # after others that fit
    several = {name: value for name, value in wrong.items() if name != "mask"}

    def work(dp, mesh):
        before, texts = kept(dp.replicas), []
        for state, options in (
            (wrong, {}),
            ({**several, "more": 1}, {}),
            (wrong, {"strict": False}),
            (wrong if mesh.process_index else good, {}),
            (good, {"assign": True}),
        ):
            with pytest.raises(RuntimeError) as caught:
                dp.load_state_dict(state, **options)
            texts.append(str(caught.value))
            for found, wanted in zip(kept(dp.replicas), before, strict=True):
                assert_same(found, wanted)
        with pytest.raises(TypeError, match="dict-like"):
            dp.load_state_dict([1])
        dp.load_state_dict(good)
        assert_same(dp.replicas[1].state_dict(), good)
        return texts

    size = "size mismatch for 2.weight: copying a param with shape torch.Size([5, 5])"
    only = "load_state_dict raised an error in process 1: nothing was loaded in any process"
    for rank, texts in enumerate(in_processes(2, work, make, devices=2)):
        assert size in texts[0] and size in texts[2]
        for part in ('Missing key(s) in state_dict: "mask"', "Unexpected key(s) in", '"more"'):
            assert part in texts[1] and part not in texts[0]
        assert texts[3].startswith(only) if rank == 0 else size in texts[3]
        assert texts[4].startswith("load_state_dict(assign=True) would replace the parameters")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_checksums_of_permuted_and_negated_matrices_differ(dtype):
    from gradreduce.torch.module_state import _checksum

    for rows in (torch.eye(64).tolist(), [[1, 2], [2, 1]], [[1, -1], [-1, 1]]):
        matrix = torch.tensor(rows, dtype=getattr(torch, dtype))
        others = matrix.clone(), matrix.roll(1, 0), -matrix
        sums = [int(_checksum(torch.nn.ParameterList([each]))) for each in (matrix, *others)]
        assert sums[0] == sums[1]
        assert sums[0] not in sums[2:]


def exchange_rows(weight):
    weight.copy_(weight.flip(0).clone())


WRONG = {  # what the last process does; the text after "the parameters of the replicas differ: "
    "a state that one replica has": (
        lambda dp: dp.module.load_state_dict(make(1).state_dict()), "'0.weight'[0, 0] differs: ",
    ),
    "the last element of the last one": (
        lambda dp: dp.replicas[-1][2].bias.data[1].add_(1), "'2.bias'[1] differs: ",
    ),
    "elements in another order": (
        lambda dp: exchange_rows(dp.replicas[-1][2].weight.data), "'2.weight'[0, 0] differs: ",
    ),
    "a frozen parameter": (
        lambda dp: dp.replicas[-1][0].bias.data[3].add_(1), "'0.bias'[3] differs: ",
    ),
}  # fmt: skip


@pytest.mark.whole_product
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_replicas_that_differ_are_found_at_the_second_forward(fault, devices, processes):
    change, first = WRONG[fault]

    def work(dp, mesh):
        optimizer, x = torch.optim.SGD(dp.parameters(), 0.0), torch.ones(2, 3)
        if mesh.process_index == processes - 1:
            change(dp)
        for _ in range(2):  # micro-batches
            with dp.no_sync():
                for replica in dp.replicas:
                    replica(x).backward()
        train(dp, optimizer, 1)
        with torch.no_grad():
            dp.module(x)  # in one process: nothing is exchanged
        dp.module.eval()(x)
        dp.train()
        texts = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                dp.replicas[-1](x)
            texts.append(str(caught.value))
        return texts

    (text,) = {text for texts in in_processes(processes, work, make, devices) for text in texts}
    assert text.startswith(f"the parameters of the replicas differ: {first}")
    assert "Make the optimizer from dp.parameters(), and load a state by dp.load" in text


def test_an_optimizer_of_one_replica_is_found_at_the_second_forward(mesh):
    dp = gr.torch.DataParallel(make(), mesh)
    train(dp, torch.optim.SGD(dp.module.parameters(), 0.1), 1)
    with pytest.raises(RuntimeError, match=r"replicas differ: '1.bias'\[0\] differs: "):
        dp.replicas[0](torch.ones(2, 3))


def test_parameters_are_compared_once_or_every_n_steps(mesh):
    def count(dp, mesh):
        optimizer, found = torch.optim.SGD(dp.parameters(), 0.0), []
        for index, replica in enumerate(dp.replicas):  # NaN equals NaN, with any bits
            bits = replica[0].bias.data.view(torch.int32)
            bits[0] = 0x7FC00000 + 2 * mesh.process_index + index
        for _ in range(6):
            optimizer.zero_grad()
            dp.zero_grad()
            with mesh.journal() as journal:
                losses = [each(torch.ones(2, 3)) for each in dp.replicas]
            found.append(len(journal.of("exchange")) > 0)
            sum(losses).backward()
        return found

    options = {"broadcast_buffers": False}
    assert in_processes(2, count, make, **options) == [[0, 1, 0, 0, 0, 0]] * 2
    found = in_processes(2, count, make, devices=2, check_replicas=2, **options)
    assert found == [[0, 1, 0, 1, 0, 1]] * 2
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=rf"^check_replicas={wrong} must be a "):
            gr.torch.DataParallel(make(), mesh, check_replicas=wrong)
    with pytest.raises(TypeError, match=r"^broadcast_buffers=1 must be True or False$"):
        gr.torch.DataParallel(make(), mesh, broadcast_buffers=1)


def batch(index, number):
    return torch.arange(6.0).reshape(2, 3) ** (1 + index) + number


def buffers_of_ddp(num_replicas):
    """The buffers after 4 steps of 2 micro-batches."""
    nets = [make() for _ in range(num_replicas)]
    for number in range(8):
        for net in nets[1:] * (number % 2 == 0):
            net[1].load_state_dict(nets[0][1].state_dict())
        for index, net in enumerate(nets):
            net(batch(index, number))
    return [dict(net[1].named_buffers()) for net in nets]


@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_each_step_begins_with_the_buffers_of_process_0s_first_replica(devices, processes):
    """With one device the DataParallel itself has the bits of DDP: see ``ddp_cases.py``."""

    def work(dp, mesh):
        for number in range(8):
            with nullcontext() if number % 2 else dp.no_sync():
                for index, replica in enumerate(dp.replicas, mesh.process_index * devices):
                    replica(batch(index, number)).backward()
        return [dict(replica[1].named_buffers()) for replica in dp.replicas]

    found = [each for row in in_processes(processes, work, make, devices) for each in row]
    for one, other in zip(found, buffers_of_ddp(len(found)), strict=True):
        assert_same(one, other)


def test_a_checkpoint_that_runs_a_forward_again_exchanges_nothing():
    again = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def work(dp, mesh):
        counts = []
        for call in (dp, partial(again, dp)):
            for _ in range(3):
                loss = call(torch.ones(2, 3))
                with mesh.journal() as journal:
                    loss.backward()
            counts.append(len(journal.of("exchange")))
        return counts

    for without, with_checkpoint in in_processes(2, work, make):
        assert without == with_checkpoint


def test_replicas_in_threads_exchange_once_for_each_step():
    def work(dp, mesh):
        optimizer, barrier = torch.optim.SGD(dp.parameters(), 0.1), threading.Barrier(3)
        counts = []

        def run(index):
            for step in range(4):
                barrier.wait(10)
                dp.replicas[index](torch.full((2, 3), 1.0 + step + index))
                loss = dp.replicas[index](torch.full((2, 3), 2.0 + step + index))
                barrier.wait(10)
                barrier.wait(10)  # the journal is closed
                loss.backward()
                barrier.wait(10)

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(run, index) for index in range(2)]
            for _ in range(4):
                optimizer.zero_grad()
                with mesh.journal() as journal:
                    barrier.wait(10)
                    barrier.wait(10)
                counts.append(len(journal.of("exchange")))
                barrier.wait(10)
                barrier.wait(10)
                optimizer.step()
            for each in running:
                each.result(10)
        gr.assert_mirrored(dp, mesh)
        return counts

    for counts in in_processes(2, work, make, devices=2):
        assert counts == [0, 2, 1, 1]  # checksums and buffers, then buffers


def test_a_module_keeps_its_hook_only_while_it_is_needed(mesh):
    for makes_buffers in (False, True):
        net = make() if makes_buffers else torch.nn.Linear(3, 1)
        dp = gr.torch.DataParallel(net, mesh)
        counts = []
        for _ in range(3):
            sum(replica(torch.ones(2, 3)).sum() for replica in dp.replicas).backward()
            counts.append([len(replica._forward_pre_hooks) for replica in dp.replicas])
        assert counts == [[1, 1]] * 3 if makes_buffers else [[1, 1], [0, 0], [0, 0]]
        del dp
        gc.collect()
        assert not net._forward_pre_hooks


def test_a_compiled_replica_broadcasts_buffers(mesh):
    rows = []
    for compiles in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        dp = gr.torch.DataParallel(net, mesh)
        for step in range(3):
            dp.zero_grad()
            for index, replica in enumerate(dp.replicas):
                run = torch.compile(replica, backend="eager") if compiles else replica
                run(batch(index + step, 0)).sum().backward()
        rows.append(kept(dp.replicas))
    for found, wanted in zip(*rows, strict=True):
        assert_same(found, wanted)
    torch._dynamo.reset()
