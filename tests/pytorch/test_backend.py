"""The backend ``"gradreduce"`` in one process: its methods, options and errors."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch

ENUM = {"BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"}
# Methods of ProcessGroup that are not overridden, and why they work.
INHERITED = {
    **dict.fromkeys(("rank", "size"), "of the constructor"),
    **dict.fromkeys(
        ("_get_backend", "_device_types", "_set_default_backend", "_register_backend",
         "_backend_id", "_id", "bound_device_id"),
        "about the backends that the group shares with its inner group",
    ),
    **dict.fromkeys(
        ("group_name", "group_desc", "_set_group_name", "_set_group_desc"), "names of the group"
    ),
    **dict.fromkeys(
        ("_get_sequence_number_for_group", "_set_sequence_number_for_group",
         "_enable_collectives_timing", "_has_hooks", "_register_on_completion_hook",
         "_wait_for_pending_works"),
        "done by, or refused by, the default backend of the inner group",
    ),
    **dict.fromkeys(("boxed", "unbox", "_pybind11_conduit_v1_"), "of the binding to C++"),
    "use_pg_for_symm_mem_rendezvous": "no call of a backend",
}  # fmt: skip


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    import gradreduce.torch.backend  # noqa: F401  # registers it

    dist = torch.distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gradreduce", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_every_method_of_process_group_is_overridden_or_explained():
    from gradreduce.torch.backend import GradreduceGroup

    theirs = torch.distributed.ProcessGroup
    names = {name for name in dir(theirs) if not name.startswith("__")} - ENUM
    own = {name for name in names if getattr(GradreduceGroup, name) is not getattr(theirs, name)}
    assert names - own == set(INHERITED)
    assert not own & set(INHERITED)


def test_a_group_of_one_process_sums_and_copies(group):
    dist = torch.distributed
    tensor = torch.arange(3.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(tensor, op)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert (group.rank(), group.size(), group.name()) == (0, 1, "gradreduce")
    assert dist.get_backend_config() == "cpu:gradreduce,cuda:gradreduce"
    assert group._get_backend(torch.device("cpu")).name() == "gloo"


def test_a_mesh_over_a_group_sums(group):
    """The other classes of gr.torch work over such a group too."""
    with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
        assert gr.all_reduce([[torch.ones(2)]], mesh=mesh)[0][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["monitored_barrier", "split_group", "merge_remote_group"])
def test_what_the_backend_cannot_do_is_one_sentence(group, name):
    advice = "call barrier" if name == "monitored_barrier" else "call new_group"
    with pytest.raises(RuntimeError, match=f"^the backend 'gradreduce' has no {name}: {advice}$"):
        getattr(group, name)([0])


def test_options_are_those_of_the_call_the_default_group_or_the_environment(group, monkeypatch):
    from gradreduce.torch.backend_options import options_from

    dist = torch.distributed
    given = gr.torch.BackendOptions(exact=True, deadline=7)
    subgroup = dist.new_group([0], pg_options=given)
    assert subgroup.options is given
    assert dist.new_group([0]).options is group.options == gr.torch.BackendOptions()
    assert repr(given) == "BackendOptions(exact=True, deadline=7)"
    monkeypatch.setenv("GRADREDUCE_EXACT", "1")
    monkeypatch.setenv("GRADREDUCE_DEADLINE", "7")
    assert options_from() == given
    environment = {"GRADREDUCE_ALL_REDUCE_ALG": "nccl", "GRADREDUCE_WIRE_DTYPE": "bfloat16"}
    options = gr.torch.BackendOptions(all_reduce_alg="nccl", wire_dtype="bfloat16")
    assert options_from({**environment, "GRADREDUCE_EXACT": "0"}) == options
    assert options_from({"GRADREDUCE_KERNELS": "compiled"}).kernels == "compiled"


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("EXACT", "yes", "must be 0 or 1"),
        ("DEADLINE", "soon", "could not convert string to float"),
        ("DEADLINE", "-1", "deadline=-1.0 must be"),
        ("WIRE_DTYPE", "int8", "wire_dtype='int8'"),
        ("ALL_REDUCE_ALG", "ring", "all_reduce_alg='ring' is not one of"),
        ("KERNELS", "cuda", "kernels='cuda' is not one of"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, reason):
    from gradreduce.torch.backend_options import options_from

    message = f"^GRADREDUCE_{variable}='{text}': .*{re.escape(reason)}"
    with pytest.raises(ValueError, match=message):
        options_from({f"GRADREDUCE_{variable}": text})


def test_options_that_contradict_each_other_raise():
    with pytest.raises(ValueError, match="cannot be combined with exact=True"):
        gr.torch.BackendOptions(exact=True, all_reduce_alg="nccl")
    with pytest.raises(TypeError, match="exact=1"):
        gr.torch.BackendOptions(exact=1)


def test_a_failed_call_changes_nothing(group):
    dist = torch.distributed
    options = gr.torch.BackendOptions(exact=True, wire_dtype="float32")  # would round float64
    exact = dist.new_group([0], pg_options=options)
    tensor = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        dist.all_reduce(tensor, group=exact)
    work = dist.all_reduce(tensor, group=exact, async_op=True)
    with pytest.raises(ValueError, match="float64"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), ValueError)
    assert tensor.tolist() == [1.0, 1.0]
    dist.all_reduce(other := torch.ones(2), group=exact)
    assert other.tolist() == [1.0, 1.0]


def test_the_memory_of_prepared_sums_is_bounded(group):
    for _ in range(3):
        for size in range(1, 80):
            torch.distributed.all_reduce(tensor := torch.full((size,), float(size)))
            assert tensor.eq(size).all()
    assert len(group._sums._steps) == 64


def test_tensors_of_inference_mode_are_summed(group):
    with torch.inference_mode():
        for shape in ((3,), (20000,), (2, 3)):
            tensor = torch.ones(shape).t() if len(shape) == 2 else torch.ones(shape)
            for _ in range(3):
                torch.distributed.all_reduce(tensor)
            assert tensor.is_inference() and tensor.eq(1).all()


def test_timeouts_become_shorter(group):
    seconds = datetime.timedelta(seconds=1)
    assert group._deadline(None) is None
    group.set_timeout(9 * seconds)
    assert (group._deadline(None), group._deadline(-seconds)) == (9.0, 9.0)
    assert (group._deadline(20 * seconds), group._deadline(3 * seconds)) == (9.0, 3.0)
    subgroup = torch.distributed.new_group([0], pg_options=gr.torch.BackendOptions(deadline=5))
    subgroup.set_timeout(9 * seconds)
    assert subgroup._deadline(None) == 5


def test_wait_on_gpus_is_one_wait_of_the_current_stream(monkeypatch):
    from gradreduce.torch.backend import GroupWork
    from gradreduce.torch.worker import BackwardWorker

    waits = []

    class Stream:  # has no method by which the host waits
        def __init__(self, device: str) -> None:
            self.device = device

        def wait_stream(self, other: Any) -> None:
            waits.append((self, other))

    user = Stream("cuda:0")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: user)
    worker = BackwardWorker(in_thread=True)
    future = torch.futures.Future()
    for _ in range(2):  # buckets
        waits.clear()
        assert GroupWork(worker.submit(lambda: None, [user]), future, []).wait()
        (own, before), (after, again) = waits
        assert before is after is user and own is again is not user


def test_an_aborted_group_can_be_destroyed(group):
    torch.distributed.all_reduce(torch.ones(2))
    group.abort()


def test_a_failed_sum_ends_a_backward_of_ddp_by_its_error(group, monkeypatch):
    """DDP reads the value of a future in C++, where an error is no tensor."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    ddp(torch.ones(1, 3)).sum().backward()

    def fail(*_, **__):
        raise SystemExit("no memory")  # not even an Exception may be lost

    monkeypatch.setattr(group._sums, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="SystemExit") as caught:
        ddp(torch.ones(1, 3)).sum().backward()
    assert re.fullmatch(r"It was about all_reduce \d+ of .*", caught.value.__notes__[0])


def test_a_callback_may_call_its_own_group(group, monkeypatch):
    """It runs in the thread of the group, before the calls that were submitted meanwhile."""
    dist, call, attached = torch.distributed, group._sums.all_reduce, threading.Event()

    def late(*arguments):
        assert attached.wait(60)
        return call(*arguments)

    monkeypatch.setattr(group._sums, "all_reduce", late)
    order, (one, two, three) = [], [torch.full((2,), each) for each in (1.0, 2.0, 3.0)]

    def then(_):
        dist.all_reduce(two, async_op=True).wait(datetime.timedelta(seconds=20))
        order.append("two")
        return two

    after = dist.all_reduce(one, async_op=True).get_future().then(then)
    last = dist.all_reduce(three, async_op=True).get_future().then(lambda _: order.append("three"))
    attached.set()
    assert after.wait() is two
    last.wait()
    assert order == ["two", "three"]


def test_a_group_ends_although_its_last_call_fails(group, monkeypatch):
    dist = torch.distributed
    other = dist.new_group([0])

    def fail():
        raise ValueError("not closed")

    monkeypatch.setattr(other._sums, "close", fail)
    with pytest.raises(ValueError, match="not closed"):
        other.shutdown()
    assert other.inner_group not in dist.distributed_c10d._world.pg_group_ranks
