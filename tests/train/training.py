"""Trainings by ``SyncStep``, in one process or several, that must end alike in all of them."""

import pickle

import numpy as np
from support.thread_group import run_replicas

import gradreduce as gr


def make_step(mesh, variables, optimizer, *, start=1.0, **options):
    """A step of variables that are given as ``{name: (shape, dtype)}``."""
    made = [
        gr.Variable(np.full(shape, start), name, dtype=dtype, device=mesh)
        for name, (shape, dtype) in variables.items()
    ]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    return gr.SyncStep(made, optimizer, ops, **options)


def train(counts, make, call, calls, state=None, placement=None, seed=None):
    """Returns the values, what each call returned, and the state.

    Args:
        counts: the number of replicas of each process.
        make: makes the step, from a mesh and the numbers of its replicas.
        call: makes a call; it gets the step, the number of the call, and those of the replicas.
        calls: the numbers of the calls.
        state: is loaded first.
        placement: ``devices`` of the mesh of a single process.
        seed: its ``schedule_seed``.
    """

    def work(mesh, replicas):
        step = make(mesh, replicas)
        if state is not None:
            step.load_state_dict(pickle.loads(pickle.dumps(state)))
        seen = [call(step, number, replicas) for number in calls]
        values = [[buffer.numpy().tobytes() for buffer in v.buffers] for v in step.variables]
        assert all(len(set(copies)) == 1 for copies in values)
        return [copies[0] for copies in values], seen, step.state_dict()

    found = run_replicas(counts, work, placement, schedule_seed=seed)
    for each in found[1:]:
        np.testing.assert_equal(each, found[0])
    return found[0]
