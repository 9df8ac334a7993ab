"""Floating-point errors on simulated devices give no warnings, as on a GPU."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from support.background_runs import environment

import gradreduce as gr
from gradreduce.backends.sim.fp_warnings import without_warnings

# CPython 3.11 collects garbage inside ContextVar.set, and crashes if a finalizer sets another.
FINALIZERS = """
import gc
from contextvars import ContextVar
import numpy as np
import gradreduce as gr

ContextVar("a variable of the user").set(1)
mesh = gr.open_mesh(2, backend="sim")
one = np.ones(8, np.float32)

def reduce():
    gr.add_n([one, one])
    gr.all_reduce([[one]] * 2, mesh=mesh)

class Garbage:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        reduce()

for threshold in range(2, 60):
    gc.set_threshold(threshold, 10_000, 10_000)
    for _ in range(20):
        Garbage()
        reduce()
"""


def test_no_warning_is_raised_and_the_callers_settings_are_kept():
    def work(divisor: int) -> np.ndarray:
        return np.ones(2) / divisor

    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = np.geterr()
        assert np.isinf(without_warnings(work, 0)).all()
        assert np.geterr() == before
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        work(0)


def test_finalizers_may_use_devices():
    """They may run at any allocation of another call."""
    subprocess.run(
        [sys.executable, "-c", FINALIZERS],
        env={**environment(), "PYTHONMALLOC": "debug"},
        check=True,
        timeout=60,
    )


def test_sums_that_overflow_give_infinity():
    huge = np.full(3, np.finfo(np.float32).max, np.float32)
    mesh = gr.open_mesh(2, backend="sim")
    for reducer in (gr.NcclAllReduce(), gr.HierarchicalCopyAllReduce()):
        total = reducer.reduce(gr.ReduceOp.SUM, gr.PerReplica([huge] * 2, mesh), mesh)
        assert np.isinf(total.values[0]).all()
    assert np.isinf(gr.add_n([huge, huge])).all()
