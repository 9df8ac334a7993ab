"""A kernel that does not compile leaves an accumulator unchanged, in every thread.

The constructor compiles all that an accumulator launches, so nobody meets this later, unless what
was compiled is gone (``mesh.reset``).
"""

from __future__ import annotations

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator import multi, take_queue
from gradreduce.backends.cuda import compile

pytestmark = pytest.mark.fake_cupy


class InjectedError(RuntimeError):
    """The error that a test raises on purpose."""


@pytest.fixture
def refuse(monkeypatch):
    """Drops compiled kernels, and raises for kernels of these names from now on."""
    compiled = compile._load

    def inject_error(*names):
        def refusing(kernel, *rest):
            if kernel.name in names:
                raise InjectedError(kernel.name)
            return compiled(kernel, *rest)

        monkeypatch.setattr(compile, "_functions", {})
        monkeypatch.setattr(compile, "_load", refusing)

    yield inject_error
    monkeypatch.undo()


@pytest.fixture(params=[([0], "device"), ([0, 1], "hierarchical_copy"), ([0, 0, 1], "nccl")],
                ids=str)  # fmt: skip
def make(request, new_machine):
    """Makes float16 accumulators, whose takes always launch, also with a single gradient."""
    new_machine(0, num_gpus=2)
    placement, algorithm = request.param
    with gr.open_mesh(placement, backend="cuda") as mesh:
        home = mesh.devices[0] if algorithm == "device" else mesh
        ops = None if algorithm == "device" else gr.AllReduceCrossDeviceOps(algorithm)
        yield lambda: gr.ConditionalAccumulator(
            "float16", (3,), device=home, cross_device_ops=ops, reduction_type="SUM"
        )


def ones(value=1):
    return np.full(3, value, "float16")


def state_of(acc):
    """Their counts, steps, dropped gradients and sums."""
    totals = acc.accumulator_ref.totals
    return (
        acc.num_accumulated(), acc.global_step, acc.num_dropped,
        [None if total is None else total.numpy().tolist() for total in totals],
    )  # fmt: skip


def taken(acc):
    result = acc.take_grad(1, timeout=0, output_type="buffer")
    buffers = result.buffers if isinstance(result, gr.Mirrored) else [result]
    (values,) = {tuple(buffer.numpy().tolist()) for buffer in buffers}
    return values


@pytest.mark.parametrize("name", ["add_n", "accumulate_n", "all_sum"])
def test_the_constructor_raises_the_error(make, refuse, name):
    refuse(name)
    with pytest.raises(InjectedError, match=name):
        make()


def test_an_apply(make, refuse):
    acc = make()
    for count, name in enumerate(("add_n", "accumulate_n")):
        before = state_of(acc)
        refuse(name)
        with pytest.raises(InjectedError, match=name):
            acc.apply_grad(ones(100))
        assert state_of(acc) == before
        refuse()
        assert acc.apply_grad(ones())
        assert acc.num_accumulated() == count + 1
    assert taken(acc) == (2, 2, 2)


def test_a_gradient_that_is_cast(make, refuse):
    """Validation casts it before the check for stale gradients."""
    acc = make()
    refuse("accumulate_n")
    with pytest.raises(InjectedError, match="accumulate_n"):
        acc.apply_grad(np.ones(3, "float64"), cast=True)
    assert state_of(acc)[:3] == (0, 0, 0)
    refuse()
    assert acc.apply_grad(np.ones(3, "float64"), cast=True)
    assert taken(acc) == (1, 1, 1)


def test_a_take(make, refuse):
    acc = make()
    acc.apply_grad(ones())
    before = state_of(acc)
    refuse("all_sum")
    with pytest.raises(InjectedError, match="all_sum"):
        acc.take_grad(1, timeout=0)
    assert state_of(acc) == before
    assert not acc.accumulator_ref.queue
    refuse()
    assert taken(acc) == (1, 1, 1)


def test_a_take_that_an_apply_completes(make, refuse):
    """The take raises the error, and the apply continues."""
    acc = make()
    ticket = multi.PendingTake((acc.accumulator_ref,), 2)
    ticket.in_call.acquire()
    take_queue.join(ticket)
    assert acc.apply_grad(ones())
    refuse("all_sum")
    assert acc.apply_grad(ones()) is True
    with pytest.raises(InjectedError, match="all_sum"):
        take_queue.await_take(ticket, 0)
    assert state_of(acc)[:3] == (2, 0, 0)
    assert not acc.accumulator_ref.queue
    refuse()
    assert taken(acc) == (2, 2, 2)
