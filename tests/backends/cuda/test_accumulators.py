"""A kernel that does not compile leaves an accumulator unchanged.

The constructor compiles all that an accumulator launches, so nobody meets this later, unless what
was compiled is gone (``mesh.reset``).
"""

from __future__ import annotations

import numpy as np
import pytest
from support.accumulator_states import frozen

import gradreduce as gr
from gradreduce.backends.cuda import compile

pytestmark = pytest.mark.fake_cupy


class InjectedError(RuntimeError):
    """The error that a test raises on purpose."""


@pytest.fixture
def refuse(monkeypatch):
    """Drops compiled kernels, and raises for kernels of this name until it is called again."""
    load = compile._load

    def inject_error(name=""):
        def refusing(kernel, *rest):
            if kernel.name == name:
                raise InjectedError(name)
            return load(kernel, *rest)

        monkeypatch.setattr(compile, "_functions", {})
        monkeypatch.setattr(compile, "_load", refusing)

    return inject_error


def check_refused(acc, refuse, kernel, call, *arguments, **options):
    before = frozen(acc)
    refuse(kernel)
    with pytest.raises(InjectedError, match=kernel):
        call(*arguments, **options)
    assert frozen(acc) == before
    assert not acc.accumulator_ref.queue
    refuse()
    return call(*arguments, **options)


@pytest.mark.parametrize("algorithm", ["", "hierarchical_copy", "nccl"])
def test_a_dense_accumulator(mesh, refuse, algorithm):
    """Float16, whose takes always launch, also with a single gradient."""
    home = mesh if algorithm else mesh.devices[0]
    ops = gr.AllReduceCrossDeviceOps(algorithm) if algorithm else None
    options = {"device": home, "cross_device_ops": ops, "reduction_type": "SUM"}
    for kernel in ("add_n", "accumulate_n", "all_sum"):
        refuse(kernel)
        with pytest.raises(InjectedError, match=kernel):
            gr.ConditionalAccumulator("float16", (3,), **options)
    refuse()
    acc, ones = gr.ConditionalAccumulator("float16", (3,), **options), np.ones(3, "float16")
    for kernel in ("add_n", "accumulate_n"):
        assert check_refused(acc, refuse, kernel, acc.apply_grad, ones)
    wide = ones.astype("float64")  # which is cast before the check for stale gradients
    assert check_refused(acc, refuse, "accumulate_n", acc.apply_grad, wide, cast=True)
    taken = check_refused(acc, refuse, "all_sum", acc.take_grad, 3, output_type="buffer")
    for buffer in taken.buffers if algorithm else [taken]:
        assert buffer.numpy().tolist() == [3, 3, 3]


def test_a_sparse_accumulator(mesh, refuse):
    acc = gr.SparseConditionalAccumulator("float16", device=mesh)
    ones = gr.PerReplica([gr.IndexedSlices(np.ones((2, 3), "float16"), [5, place])
                          for place in range(3)], mesh)  # fmt: skip
    acc.apply_indexed_slices_grad(ones)
    for kernel, index in (("segment_sum", 5), ("pack", 9), ("segment_sum", 10)):
        more = gr.IndexedSlices(np.ones((1, 3), "float16"), [index])
        check_refused(acc, refuse, kernel, acc.apply_indexed_slices_grad, more)
    for kernel in ("pack", "segment_sum", "all_sum"):
        state = acc.state_dict()
        indices, values, _ = check_refused(acc, refuse, kernel, acc.take_grad, 6)
        assert indices.tolist() == [0, 1, 2, 5, 9, 10]
        assert all((array.get() == 1).all() for array in values.values)
        acc.load_state_dict(state)
