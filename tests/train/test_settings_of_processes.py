"""Settings that must be equal in all processes: hyperparameters, and options of ``SyncStep``."""

import re

import numpy as np
import pytest
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.errors import CollectiveError, InvalidArgumentError

GRADS = np.ones(3, np.float32)
# What process 1 has instead of Adam(0.1), and the error.
OPTIMIZERS = {
    "number": (lambda: gr.AdamOptimizer(0.2), "learning_rate is 0.1 in process 0, 0.2 in"),
    "beta": (lambda: gr.AdamOptimizer(0.1, 0.5), "beta1 is 0.9 in process 0, 0.5 in"),
    "schedule": (lambda: gr.AdamOptimizer(lambda: 0.1), "learning_rate is 0.1 in process 0, a sch"),
    "rule": (lambda: gr.GradientDescentOptimizer(0.1), "optimizer is AdamOptimizer in process 0"),
    "masters": (lambda: gr.AdamOptimizer(0.1, master_dtype="float32"), "masters is False in proc"),
    "lazy": (lambda: gr.AdamOptimizer(0.1, lazy=True), "lazy is False in process 0, True in"),
    "eps_mode": (
        lambda: gr.AdamOptimizer(0.1, eps_mode="torch"),
        "eps_mode is tensorflow in process 0",
    ),
}
# What process 1 has instead of the default of ``SyncStep``.
OPTIONS = {
    "num_required": (4, "num_required is 2 in process 0, 4 in process 1"),
    "aggregation_method": (1, "aggregation_method is ADD_N in process 0, EXPERIMENTAL_TREE"),
    "shard_optimizer": (True, "shard_optimizer is False in process 0, True in process 1"),
    "clip_norm": (2.0, "clip_norm is None in process 0, 2.0 in process 1"),
}


def adam():
    return gr.AdamOptimizer(0.1)


def stepped(group, optimizer, **options):
    """A mesh, a variable, and a function that makes a step."""
    mesh = gr.open_mesh(1, backend="sim", process_group=group)
    variable = gr.Variable(GRADS, "w", device=mesh)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    step = gr.SyncStep([variable], optimizer, ops, **options)
    return mesh, variable, lambda: step([[[GRADS]]])


def averaged(group, optimizer):
    """A mesh, a variable, and a function that applies the mean gradient of all replicas."""
    mesh = gr.open_mesh(1, backend="sim", process_group=group)
    variable = gr.Variable(GRADS, "w", device=mesh)
    value = gr.PerReplica([GRADS], mesh)
    return mesh, variable, lambda: optimizer.apply_gradients([(value, variable)])


def refused(mesh, variable, call):
    """The error of a call that must change nothing."""
    memory = variable.buffers[0].block.raw.as_dtype(GRADS.dtype)  # a failed mesh returns no values
    before = memory.tobytes()
    with pytest.raises((InvalidArgumentError, CollectiveError)) as caught:
        call()
    assert memory.tobytes() == before
    mesh.close()
    return str(caught.value)


@pytest.mark.parametrize("make", [stepped, averaged])
@pytest.mark.parametrize("differs", OPTIMIZERS)
def test_different_optimizers_are_named_at_the_first_call(differs, make):
    other, message = OPTIMIZERS[differs]
    said = run_processes(2, lambda group: refused(*make(group, (adam, other)[group.rank]())))
    assert message in said[0]
    assert all("in process 1" in each and "in process 0" in each for each in said)


@pytest.mark.parametrize("name", OPTIONS)
def test_different_options_of_steps_are_named_at_the_first_call(name):
    value, message = OPTIONS[name]

    def work(group):
        return refused(*stepped(group, adam(), **({name: value} if group.rank == 1 else {})))

    first, second = run_processes(2, work)
    assert message in first
    assert f"{name} is " in second


@pytest.mark.parametrize("make", [stepped, averaged])
@pytest.mark.parametrize(
    ("earlier", "last"),
    [([0.1, 0.1], [0.1, 0.01, 0.1]), ([0.1, 0.2, 0.1], [0.1, 0.2])],
    ids=["one of three changes", "all were used before"],
)
def test_learning_rates_that_differ_are_named_by_all(make, earlier, last):
    def work(group):
        optimizer = adam()
        mesh, variable, call = make(group, optimizer)
        for rate in earlier:
            if rate != optimizer.learning_rate:
                optimizer.learning_rate = rate
            call()
        if last[group.rank] != optimizer.learning_rate:
            optimizer.learning_rate = last[group.rank]
        return refused(mesh, variable, call)

    for said in run_processes(len(last), work, timeout=150.0):  # longer than run_processes waits
        assert re.search(r"learning_rate is 0\.\d+ in process \d, 0\.\d+ in process \d", said)


@pytest.mark.parametrize(
    ("make", "differs_at", "refused_at", "named"),
    [
        (stepped, [2], 3, "learning_rate of the last update"),
        (averaged, [1], 2, "learning_rate of the last update"),  # after 1, 2, 4, 8, … updates
        (averaged, [5, 6, 7], 8, "learning_rate of the last update"),
        (averaged, [4], 8, "the checksum of the hyperparameters of all updates"),
        (averaged, [70], 100, "the checksum of the hyperparameters of all updates"),
    ],
)
def test_values_of_a_schedule_are_compared_later(make, differs_at, refused_at, named):
    def work(group):
        reads = []

        def rate():
            reads.append(0.3 if group.rank == 1 and len(reads) in differs_at else 0.1)
            return reads[-1]

        mesh, variable, call = make(group, gr.AdamOptimizer(rate))
        for _ in range(refused_at):
            call()
        said = refused(mesh, variable, call)
        assert len(reads) == refused_at  # once for each update
        return said

    first, second = run_processes(2, work)
    value = "0.1 in process 0, 0.3 in process 1" if named.startswith("learning") else ""
    assert f"{named} is {value}" in first
    assert f"{named} is " in second


def test_settings_are_compared_if_only_the_second_variable_spans_processes():
    def work(group):
        alone = gr.open_mesh(1, backend="sim", processes="none")
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        variables = [gr.Variable(GRADS, "w", device=each) for each in (alone, mesh)]
        optimizer = gr.AdamOptimizer([0.1, 0.2][group.rank])
        pairs = [(GRADS, each) for each in variables]
        said = refused(mesh, variables[1], lambda: optimizer.apply_gradients(pairs))
        assert variables[0].numpy().tolist() == GRADS.tolist()
        alone.close()
        return said

    assert "learning_rate is 0.1 in process 0, 0.2" in run_processes(2, work)[0]


@pytest.mark.parametrize(
    ("make", "rate", "new"),
    [
        (stepped, "number", [0, 1, 1, 1]),
        (averaged, "number", [0, 1, 1, 1]),
        (stepped, "schedule", [0, 0, 0, 0]),
        (averaged, "schedule", [1, 2, 2, 3]),  # after 1, 2 and 4 updates
    ],
)
def test_only_a_call_after_a_change_compares(make, rate, new):
    """Others wait for no process: a process posts a description only to compare it."""

    def work(group):
        rates = iter([0.5, 0.5, 0.25, 0.25, 0.25])
        optimizer = gr.AdamOptimizer((lambda: next(rates)) if rate == "schedule" else 0.5)
        mesh, _, call = make(group, optimizer)
        call()
        posted, post = [], group.post
        group.post = lambda key, text: (posted.append(key), post(key, text))
        counts = []
        for number in range(1, 5):
            if number == 2 and rate == "number":
                optimizer.learning_rate = 0.25
            call()
            counts.append(len([key for key in posted if key.startswith("description/")]))
        del group.post
        mesh.close()
        return counts

    assert run_processes(2, work) == [new] * 2
