"""Checkpoints of SyncStep: a training continues in other processes, with other replicas."""

import numpy as np
import pytest
from support.thread_group import run_processes
from train import training

import gradreduce as gr

SHAPES = {"w": (3, 2), "b": (5,)}


def make_step(mesh, dtype="float32", make=gr.AdamOptimizer, **options):
    variables = {name: (shape, dtype) for name, shape in SHAPES.items()}
    return training.make_step(mesh, variables, make(0.1), **options)


def calls_of(num_replicas, number, dtype, exact):
    """The gradients of one call with 4 replicas, for calls with another number of replicas."""
    random = np.random.default_rng(number)
    rows = []
    for _ in range(4):
        arrays = [random.standard_normal(shape) * 4 for shape in SHAPES.values()]
        rows.append([np.asarray(np.rint(each) if exact else each, dtype) for each in arrays])
    if num_replicas == 8:
        return [[row for row in rows for _ in range(2)]]
    return [rows[start : start + num_replicas] for start in range(0, 4, num_replicas)]


def train(counts, calls, state=None, dtype="float32", exact=False, **options):
    """Continues a training with these replicas; returns the values, and the state."""

    def call(step, number, replicas):
        for rows in calls_of(sum(counts), number, dtype, exact):
            step([[[array] for array in rows[replica]] for replica in replicas])

    def make(mesh, _):
        return make_step(mesh, dtype, **options)

    values, _, saved = training.train(counts, make, call, calls, state)
    return values, saved


@pytest.mark.parametrize(
    ("before", "after", "num_required"),  # with 8 half an update is saved
    [([4], [1, 3], None), ([1, 3], [2, 2], None), ([4], [1, 3], 8), ([2, 2], [4], 8)],
)
def test_a_training_continues_in_other_processes_with_the_same_bits(before, after, num_required):
    wanted = train([4], range(5), num_required=num_required)
    _, state = train(before, range(3), num_required=num_required)
    waiting = [each["num_accumulated"] for each in state["accumulators"].values()]
    assert waiting == [0 if num_required is None else 4] * 2
    found = train(after, range(3, 5), state)
    assert found[0] == wanted[0]
    np.testing.assert_equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [([4], [2]), ([2, 2], [1, 1]), ([2, 2], [8]),
                                               ([4], [3, 5])])  # fmt: skip
def test_another_number_of_replicas_takes_the_same_gradients_for_an_update(before, after, dtype):
    options = {
        "dtype": dtype,
        "make": lambda _: gr.MomentumOptimizer(0.5, 0.5, master_dtype="float32"),
        "exact": True,
    }
    wanted, undisturbed = train([4], range(5), **options)
    _, state = train(before, range(3), **options)
    found, continued = train(after, range(3, 5), state, **options)
    assert found == wanted
    assert continued["num_required"] == 4
    np.testing.assert_equal(continued["optimizer"], undisturbed["optimizer"])
    steps = [each["global_step"] for each in continued["accumulators"].values()]
    assert steps == [5, 5]


def test_dropped_gradients_are_counted_over_all_processes():
    def work(group):
        with gr.open_mesh(2, backend="sim", process_group=group) as mesh:
            step = make_step(mesh)
            step([[[np.ones(shape, np.float32)] for shape in SHAPES.values()]] * 2, -1)
            state = step.state_dict()
            step.load_state_dict(state)
            return state["accumulators"]["w"]["num_dropped"], step.accumulators[0].num_dropped

    assert run_processes(2, work) == [(4, 2)] * 2


def test_a_load_of_gradients_that_wait_or_into_a_closed_accumulator_changes_nothing():
    """What is wrong in one entry is tested for every class by tests/test_checkpoint.py."""
    waiting, whole = train([4], range(3), num_required=8)[1], train([4], range(3))[1]
    text = "^the state has 4 gradients of 4 replicas that wait for an update, and 2 replicas"
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh)
        before = step.state_dict()
        with pytest.raises(ValueError, match=text):
            step.load_state_dict(waiting)
        np.testing.assert_equal(step.state_dict(), before)
        step.accumulators[1].close()
        with pytest.raises(gr.errors.CancelledError):
            step.load_state_dict(whole)
        assert step.variables[0].numpy().tolist() == np.ones(SHAPES["w"]).tolist()


def test_processes_with_different_states_all_raise_and_can_continue():
    states = [train([2], range(number))[1] for number in (1, 2)]

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            step = make_step(mesh)
            with pytest.raises(ValueError) as error:
                step.load_state_dict(states[group.rank])
            step.load_state_dict(states[1])
            step.accumulators[0].set_global_step(7 + group.rank)
            with pytest.raises(ValueError, match=r"state_dict: state\['accumulators'\] differs"):
                step.state_dict()
            return str(error.value), step.global_step

    text = "SyncStep.load_state_dict: state['variables'] differs between processes 0 and 1"
    assert run_processes(2, work) == [(text, 7), (text, 8)]


def shut_by_a_loss(mesh, load):
    variable = gr.Variable(np.ones(2), "w", dtype="float32", device=mesh)

    def loss():
        value = np.sum(variable)
        with pytest.raises(RuntimeError, match=r"'w'.* inside a loss that has read it"):
            load()
        return value

    return variable, lambda: gr.GradientDescentOptimizer(1.0).compute_gradients(loss)


def shut_by_a_parameter(mesh, load):
    import torch

    module = torch.nn.Linear(2, 1, bias=False)

    def replace():
        module.weight.data = module.weight.data.clone()
        with pytest.raises(RuntimeError, match="'weight' was replaced"):
            load()

    return gr.torch.variables(module, mesh)[0], replace


@pytest.mark.parametrize(
    "shut", [shut_by_a_loss, pytest.param(shut_by_a_parameter, marks=pytest.mark.torch)]
)
def test_a_load_into_a_variable_that_cannot_be_written_changes_nothing(shut):
    with gr.open_mesh(1, backend="sim") as mesh:
        saved = {}
        variable, load = shut(mesh, lambda: step.load_state_dict(saved))
        first, optimizer = gr.Variable(np.float32([1]), "first", device=mesh), gr.AdamOptimizer(0.1)
        step = gr.SyncStep([first, variable], optimizer, gr.AllReduceCrossDeviceOps(mesh=mesh))
        gradients = [[[np.ones(each.shape, np.float32)] for each in (first, variable)]]
        step(gradients)
        saved |= step.state_dict()
        step(gradients)

        def found():
            return optimizer.state_dict(), step.global_step, first.numpy()

        before = found()
        load()
        np.testing.assert_equal(found(), before)
