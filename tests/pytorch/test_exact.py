"""``gr.torch.DataParallel`` with exact sums: equal bits on any layout."""

import gc
import hashlib
import math
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from support.exact_sums import added_in, exact_means
from support.exact_sums import weighted as scaled
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import assert_equal, gradients

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.torch
DTYPES = ("float32", "bfloat16", "float16", "float64")
COUNT = 24  # micro-batches of a step
NAN = float("nan")


class Net(object if torch is None else torch.nn.Module):
    """Layers of which one is never used, and one only for some inputs."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 9), torch.nn.Linear(9, 2)
        self.sometimes, self.never = torch.nn.Linear(5, 2), torch.nn.Linear(2, 2)
        rng = np.random.default_rng(1)  # PyTorch's belongs to all threads
        for parameter in self.parameters():
            parameter.data = torch.tensor(rng.standard_normal(parameter.shape) / 2)
        self.to(getattr(torch, dtype))

    def forward(self, x):
        out = self.last(self.first(x).relu())
        return out + self.sometimes(x) if x[0, 0] > 0.8 else out


def data_of(number, dtype="float32"):
    made = np.random.default_rng(number).standard_normal((2, 5)) * 2.0 ** (number % 5 - 4)
    return torch.tensor(made, dtype=getattr(torch, dtype))


def weight_of(number):
    """The weights of some micro-batches are 0, and 0.1 is no float32."""
    return (1.0, 0.1, 3.0, 0.0)[number % 4]


def loss_of(net, number, weighted=False, dtype="float32"):
    loss = net(data_of(number, dtype)).square().mean()
    return loss * NAN if weighted and weight_of(number) == 0 else loss


def ops_of(mesh, exact=True, **options):
    return gr.AllReduceCrossDeviceOps(
        None if exact else "hierarchical_copy", mesh=mesh, exact=exact, **options
    )


def make(net, mesh, exact=True, **options):
    return gr.torch.DataParallel(net, mesh, ops=ops_of(mesh, exact), **options)


def run_step(dp, rows, weighted=False, dtype="float32"):
    """A step of which each replica has a row of micro-batches."""
    for micro in range(len(rows[0])):
        with nullcontext() if micro == len(rows[0]) - 1 else dp.no_sync():
            for net, row in zip(dp.replicas, rows, strict=True):
                number = row[micro]
                with dp.weight(weight_of(number)) if weighted else nullcontext():
                    loss_of(net, number, weighted, dtype).backward()


def digest(arrays):
    raw = [b"none" if each is None else each.double().numpy().tobytes() for each in arrays]
    return hashlib.sha256(b"".join(raw)).hexdigest()


def trained(devices, processes=1, order=None, exact=True, weighted=False, dtype="float32"):
    """Trains on the same micro-batches; returns the digests of all replicas."""
    numbers = list(range(COUNT)) if order is None else list(order)
    rows = np.reshape(numbers, (processes, devices, -1)).tolist()

    def work(group):
        with gr.open_mesh(devices, backend="sim", process_group=group) as mesh:
            dp = make(Net(dtype), mesh, exact)
            optimizer = torch.optim.SGD(dp.parameters(), 0.1, momentum=0.9)
            for step in range(3):
                if step == 1:
                    dp.zero_grad()
                else:
                    optimizer.zero_grad()
                run_step(dp, rows[mesh.process_index], weighted, dtype)
                optimizer.step()
            assert all(net.never.bias.grad is None for net in dp.replicas)
            return [digest([*gradients(net), *net.parameters()]) for net in detached(dp)]

    found = run_processes(processes, work) if processes > 1 else [work(None)]
    return [each for row in found for each in row]


def detached(dp):
    return [net.requires_grad_(False) for net in dp.replicas]


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "weights of 1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_changes_no_bit(dtype, weighted):
    """All weights of a step, or all sums of gradients divided by the number of replicas."""
    rng = np.random.default_rng(0)
    layouts = [(1, 1), (2, 1), (3, 1), (8, 1), (24, 1), (1, 2), (3, 2)]
    run = partial(trained, weighted=True, dtype=dtype) if weighted else one_weight(dtype)
    found = [run(*layout, order=rng.permutation(COUNT)) for layout in layouts]
    assert {each for row in found for each in row} == {run(1)[0]}
    assert len({run(devices, exact=False)[0] for devices in (1, 3)}) == 2


def one_weight(dtype):
    """Trains with weights that are all 1."""

    def run(*layout, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "weight_of", lambda _: 1.0)
            return trained(*layout, weighted=True, dtype=dtype, **options)

    return run


def rows_of(number, dtype):
    """The indices and the gradients of the rows of a micro-batch."""
    luck = np.random.default_rng(number)
    rows = luck.standard_normal((3, 2)) * np.exp2(luck.integers(-9, 9, (3, 2)))
    return luck.integers(0, 5, 3), rows.astype(as_dtype(dtype))


def means_of_rows(numbers, dtype):
    """The mean of the rows of these micro-batches for each index, divided by all weights."""
    terms, by = {}, math.fsum(map(weight_of, range(12)))
    for number in numbers:
        for index, row in zip(*rows_of(number, dtype), strict=True):
            if weight_of(number):
                terms.setdefault(int(index), []).append(scaled(row, weight_of(number)))
    return {index: exact_means(rows, by, dtype).astype(float).tolist()
            for index, rows in terms.items()}  # fmt: skip


def run_rows(dp, rows, dtype):
    """A step of ``[replica][micro-batch]``; the table "b" is used by number 0 alone."""
    for micro, column in enumerate(rows.T):
        is_last = micro == rows.shape[1] - 1
        for net, number in zip(dp.replicas, column, strict=True):
            indices, rows_here = rows_of(number, dtype)
            indices, factors = torch.tensor(indices), torch.tensor(rows_here.astype(float))
            factors = factors.to(net["a"].weight.dtype)
            tables = [net[name] for name in ("ab" if number == 0 else "a")]
            with nullcontext() if is_last else dp.no_sync(), dp.weight(weight_of(number)):
                sum((table(indices) * factors).sum() for table in tables).backward()


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_of_an_embedding_is_a_term(dtype, devices, processes):
    """Of each backward, also where it is repeated, or where a replica or a process has none."""
    numbers = np.random.default_rng(devices).permutation(12).reshape(processes, devices, -1)

    def work(group):
        with gr.open_mesh(devices, backend="sim", process_group=group) as mesh:
            options = {"sparse": True, "dtype": getattr(torch, dtype)}
            net = torch.nn.ModuleDict({name: torch.nn.Embedding(5, 2, **options) for name in "abc"})
            dp, found = make(net, mesh), []
            for _ in range(2):
                run_rows(dp, numbers[mesh.process_index], dtype)
                found += [[as_rows(net[name].weight.grad) for name in "abc"] for net in dp.replicas]
                dp.zero_grad(set_to_none=True)
            return found

    wanted = [means_of_rows(range(12), dtype), means_of_rows([0], dtype), None]
    for found in run_processes(processes, work) if processes > 1 else [work(None)]:
        assert found == [wanted] * (2 * devices)


def as_rows(grad):
    if grad is None:
        return None
    assert grad.is_sparse
    return dict(zip(grad._indices()[0].tolist(), grad._values().tolist(), strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_gradients_are_sums_rounded_once(devices, processes, weighted, dtype):
    replicas = devices * processes
    rows = np.arange(5 * replicas).reshape(processes, devices, -1)

    def work(group):
        with gr.open_mesh(devices, backend="sim", process_group=group) as mesh:
            dp = make(Net(dtype), mesh)
            run_step(dp, rows[mesh.process_index].tolist(), weighted, dtype)
            return [gradients(net) for net in dp.replicas]

    columns = []
    for number in rows.ravel().tolist():
        net, weight = Net(dtype), weight_of(number) if weighted else 1.0
        if weight:
            loss_of(net, number, dtype=dtype).backward()
        columns.append([weight, *gradients(net)])
    weights, *columns = zip(*columns, strict=True)
    total = sum(weights) if weighted else replicas
    for found in run_processes(processes, work):
        for row in found:
            for grad, column in zip(row, columns, strict=True):
                terms = [
                    (each.double().numpy() * weight).astype(added_in(dtype))
                    for each, weight in zip(column, weights, strict=True)
                    if each is not None
                ]
                if not terms:
                    assert grad is None or not (weighted and grad.any())
                    continue
                wanted = exact_means(terms, total, as_dtype(dtype)).astype(np.float64)
                assert np.array_equal(grad.double().numpy(), wanted)


# ---- what is kept, and what is dropped ----------------------------------------------------------


def run_all(dp, number=0, weighted=False):
    run_step(dp, [[number], [number + 1]], weighted)
    return gradients(dp)


def fails(_):
    raise MemoryError("of the user")


def test_the_zero_grad_of_an_optimizer_drops_no_sums(mesh):
    dp = make(Net(), mesh)
    run_step(dp, [[0, 2], [1, 3]])
    wanted = gradients(dp)
    dp.zero_grad()
    for micro in (0, 2):
        with dp.no_sync() if micro == 0 else nullcontext():
            for number, net in enumerate(dp.replicas):
                loss_of(net, number + micro).backward()
            torch.optim.SGD(dp.parameters()).zero_grad() if micro == 0 else None
    assert_equal(gradients(dp), wanted)


def test_a_micro_batch_of_weight_0_changes_no_bit_of_a_sum(mesh):
    """Neither -0.0, nor gradients that were not zeroed."""
    net = torch.nn.Linear(1, 1, bias=False)
    dp = make(net, mesh)
    for weights in ([0, 2], [2, 0]):
        dp.zero_grad(set_to_none=True)
        with dp.no_sync(), dp.weight(0):
            (dp.replicas[0].weight * NAN).sum().backward()
        for weight, replica in zip(weights, dp.replicas, strict=True):
            with dp.weight(weight):
                (replica.weight * (-0.0 if weight else NAN)).sum().backward()
        assert [str(each.weight.grad.item()) for each in dp.replicas] == ["-0.0"] * 2
    for replica in dp.replicas:
        replica.weight.grad = torch.tensor([[4.0]])
    for replica, weight in zip(dp.replicas, (0, 2), strict=True):
        with dp.weight(weight):
            replica.weight.sum().backward()
    assert dp.module.weight.grad.item() == (4 + 2 * (4 + 1)) / 2


# ---- modules ------------------------------------------------------------------------------------


def test_replicas_may_run_in_threads(mesh, monkeypatch):
    """The first replica moves its gradients after the backward of the second one has ended."""
    dp = make(Net(), mesh)
    wanted, entered, ended = run_all(dp), threading.Event(), threading.Event()
    reducer = gr.torch.exact_reducer.ExactReducer
    add = reducer._add

    def late(self, replica, *arguments):
        if replica.index == 0:
            entered.set()
            assert ended.wait(60)
        add(self, replica, *arguments)

    monkeypatch.setattr(reducer, "_add", late)
    dp.zero_grad(set_to_none=True)

    def run(index):
        if index == 1:
            assert entered.wait(60)
        loss_of(dp.replicas[index], index).backward()
        if index == 1:
            ended.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert_equal(gradients(dp), wanted)


def test_replicas_are_compared_and_states_are_loaded(mesh):
    dp = make(Net(), mesh, check_replicas=1)
    wanted, state = run_all(dp), {key: each.clone() for key, each in dp.state_dict().items()}
    torch.optim.SGD(dp.module.parameters(), 0.1).step()  # of one replica only
    with pytest.raises(RuntimeError, match="the parameters of the replicas differ"):
        loss_of(dp.module, 0)
    dp.load_state_dict(state)
    dp.zero_grad()
    assert_equal(run_all(dp), wanted)


# ---- errors -------------------------------------------------------------------------------------


REFUSED = {
    "complex": (
        lambda: torch.nn.Linear(5, 2, dtype=torch.complex64), TypeError,
        "weight is complex64: exact=True supports parameters of float64, float32, float16 and "
        "bfloat16",
    ),
    "wire": (
        lambda: torch.nn.Linear(5, 5).double(), ValueError,
        "wire_dtype='float32' cannot be combined with exact=True for float64: terms would be "
        "rounded on the way; pass None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_exact_sum_is_refused_and_nothing_changed(case, mesh):
    module, error, text = REFUSED[case]
    nets = [module(), module()]
    other = gr.torch.DataParallel(nets, mesh)
    copied = [each.detach().clone() for each in nets[1].parameters()]
    with pytest.raises(error) as caught:
        gr.torch.DataParallel(nets, mesh, ops=ops_of(mesh, wire_dtype="float32"))
    assert str(caught.value) == text
    assert_equal([each.detach() for each in nets[1].parameters()], copied)
    del other, caught
    gr.torch.DataParallel(nets, mesh)  # no hook is left


def test_a_gradient_of_another_layout_is_refused(mesh):
    dp = make(torch.nn.Embedding(5, 2), mesh)
    loss = torch.nn.functional.embedding(torch.tensor([1]), dp.module.weight, sparse=True).sum()
    text = "the gradient of weight has layout torch.sparse_coo; only dense gradients are allowed"
    with pytest.raises(ValueError, match=text):
        loss.backward()
    dp = make(torch.nn.Embedding(5, 2, sparse=True), mesh)
    with pytest.raises(ValueError, match="weight has a dense gradient, but its embedding has"):
        dp.module.weight.sum().backward()


def test_a_sum_that_does_not_fit_names_its_parameter(mesh):
    net = torch.nn.ModuleDict({"a/b": torch.nn.Linear(1, 1, bias=False)})
    dp = gr.torch.DataParallel(net, mesh, ops=ops_of(mesh, words=2))
    for scale in (2.0**100, 2.0**40, 1.0):
        with dp.no_sync() if scale > 1 else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("error")
            if scale == 1:
                (dp.replicas[0]["a/b"].weight * scale).sum().backward()
                break
            for replica in dp.replicas:
                (replica["a/b"].weight * scale).sum().backward()
    loss = (dp.replicas[1]["a/b"].weight * 1.0).sum()
    with pytest.warns(gr.InexactSumWarning, match=r"the exact sum of 'a/b\.weight' did not fit"):
        loss.backward()
    assert dp.module["a/b"].weight.grad.item() == 2.0**100


def test_a_warning_that_is_an_error_leaves_the_step_ended():
    """The other process gets no warning, and both go on."""

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            net = torch.nn.Linear(1, 1, bias=False)
            dp = gr.torch.DataParallel(net, mesh, ops=ops_of(mesh, words=2))
            for scale in (2.0**100, 2.0**40):
                with dp.no_sync():
                    (net.weight * scale * (1 - group.rank)).sum().backward()
            loss, warns = net.weight.sum(), pytest.raises(gr.InexactSumWarning)
            with warns if group.rank == 0 else nullcontext():
                loss.backward()
            assert net.weight.grad.item() == 2.0**99
            dp.zero_grad()
            net.weight.sum().backward()
            return net.weight.grad.item()

    assert run_processes(2, work) == [1.0, 1.0]


def test_another_data_parallel_may_use_the_parameters(mesh):
    dp = make(Net(), mesh)
    wanted = run_all(dp, 4)
    with dp.no_sync():
        loss_of(dp.replicas[0], 9).backward()
    states = [weakref.ref(state) for state in dp._reducer._states]
    nets = list(dp.replicas)
    del dp
    gc.collect()
    dp = make(nets, mesh)
    gc.collect()
    assert {state() for state in states} == {None}
    dp.zero_grad()
    assert_equal(run_all(dp, 4), wanted)


def test_a_step_after_a_failed_reduction_is_right():
    """The mesh of one process stays usable; that of several processes fails, with the reason."""

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            dp = make(Net(), mesh)
            loss_of(dp, mesh.process_index).backward()
            wanted = gradients(dp)
            dp.zero_grad()
            with dp.no_sync():
                loss_of(dp, 9).backward()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dp._reducer, "_take", lambda *_: fails(_))
                with pytest.raises((MemoryError, CollectiveError)):
                    loss_of(dp, 9).backward()
            if group is not None:
                with pytest.raises(CollectiveError, match="MemoryError"):
                    loss_of(dp, 9).backward()
                return
            mesh.reset()
            dp.zero_grad()
            loss_of(dp, mesh.process_index).backward()
            assert_equal(gradients(dp), wanted)

    work(None)
    run_processes(2, work)
