"""NumPy gradients: a step uploads many of them together."""

import threading

import numpy as np
import pytest
from support.exact_data import FLOATS, exact_data, same

import gradreduce as gr
from gradreduce.arrays.staging import SMALL_BYTES, HostStaging

SHAPES = [(3, 7), (), (0, 2), (257,), (SMALL_BYTES // 2 + 1,), (SMALL_BYTES // 8, 2)]
TURNS = 4


def trained(device, as_given, make=lambda: gr.AdamOptimizer(0.5)):
    """The values of all variables and slots after some steps; the last gradients vary."""
    variables = [gr.Variable(exact_data(shape, dtype), f"{dtype} {place}", device=device)
                 for dtype in FLOATS for place, shape in enumerate(SHAPES)]  # fmt: skip
    optimizer = make()
    for turn in range(TURNS):
        grads = [as_given(place, np.array(exact_data(var.shape, var.dtype, seed=turn)))
                 for place, var in enumerate(variables)]  # fmt: skip
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        for grad in grads:
            if isinstance(grad, np.ndarray) and grad.flags.writeable:
                grad[...] = np.nan
    kept = [*variables, *optimizer.variables()]
    return [buffer.numpy() for each in kept for buffer in each.buffers]


def in_many_ways(place, array):
    """An array as it is, read-only, as a view, not contiguous, and of other kinds."""
    way = place % 4
    if way == 1:
        array.flags.writeable = False
    elif way == 2:
        array = np.stack([array, array])[1]
    elif way == 3:
        array = np.stack([array, array], axis=-1)[..., 0]
    return np.asarray(array)


@pytest.mark.parametrize("place", [0, 3])
def test_arrays_give_what_buffers_give(mesh, place):
    device = mesh.devices[min(place, len(mesh) - 1)]
    wanted = trained(device, lambda _, array: device.upload(array))
    assert all(map(same, trained(device, in_many_ways), wanted))
    # A gradient that is not such a NumPy array, or is on a device, disables the joint upload.
    mixed = trained(device, lambda place, array: device.upload(array) if place == 8 else array)
    assert all(map(same, mixed, wanted))


@pytest.mark.parametrize("seed", range(8))
def test_host_gradients_may_be_overwritten_at_once(seed):
    def once(**options):
        with gr.open_mesh([0, 0, 1], backend="sim", strict=True, **options) as mesh:
            return [part for device in mesh for part in trained(device, in_many_ways)]

    assert all(map(same, once(schedule_seed=seed), once()))


def test_a_step_uploads_the_small_ones_together(mesh):
    device = mesh.devices[-1]
    variables = [gr.Variable(np.zeros(5, dtype), device=device)
                 for dtype in ("float32", "float16") * 30]  # fmt: skip
    beside = gr.Variable(np.zeros(5, "float32"), device=mesh.devices[0])
    large = gr.Variable(np.zeros(SMALL_BYTES, "float32"), device=device)  # is shared as it is
    optimizer = gr.GradientDescentOptimizer(1.0)
    pairs = [(np.ones(var.shape, var.dtype), var) for var in (*variables, beside, large)]
    optimizer.apply_gradients(pairs)
    for _ in range(2):
        with mesh.journal() as journal:
            optimizer.apply_gradients(pairs)
        assert journal.uploads == 3, "for each device and dtype"
        assert journal.copies == journal.syncs == 0
    assert [buffer.numpy().tolist() for var in variables for buffer in var.buffers] == [
        [-3.0] * 5
    ] * 60


@pytest.mark.parametrize("size", [3, SMALL_BYTES])
@pytest.mark.parametrize("given", ["array", "buffer"])
def test_an_invalid_gradient_at_a_later_step_changes_nothing(mesh, size, given):
    device = mesh.devices[1]
    variables = [gr.Variable(np.ones(size, "float32"), device=device) for _ in range(2)]
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    good = as_given(np.ones(size, "float32"), given, device)
    for _ in range(2):
        optimizer.apply_gradients([(good, var) for var in variables])
    slot = optimizer.get_slot(variables[0], "momentum")
    before = [each.numpy() for each in (*variables, slot)]
    wrong = [(np.ones(size + 1, "float32"), "is float32"), (np.ones((size, 1), "float32"), "is"),
             (np.ones(size), "is float64"), (np.ones(size, "int32"), "is int32")]  # fmt: skip
    wrong = [(as_given(array, given, device), match) for array, match in wrong]
    own = [variables[0].array(), variables[0].array()[:], slot.array().reshape(-1)]
    own += [each.buffers[0] for each in (*variables, slot)]
    for grad, match in [
        *wrong,
        *((array, "shares memory with a variable or slot") for array in own),
    ]:
        for pairs in ([(good, variables[0]), (grad, variables[1])],
                      [(grad, variables[0]), (good, variables[1])]):  # fmt: skip
            with pytest.raises(ValueError, match=match):
                optimizer.apply_gradients(pairs)
    masked = np.ma.ones(size, "float32")
    with pytest.raises(TypeError, match="mask"):
        optimizer.apply_gradients([(good, variables[0]), (masked, variables[1])])
    assert all(map(same, before, [each.numpy() for each in (*variables, slot)]))
    optimizer.apply_gradients([(good, var) for var in variables])
    assert variables[1].numpy()[0] == 1 - 1 - 1.5 - 1.75


def as_given(array, given, device):
    return device.upload(array) if given == "buffer" else array


def test_a_gradient_may_be_elsewhere_at_a_later_step(mesh):
    home = mesh.devices[1]
    variable = gr.Variable(np.zeros(3, "float32"), device=home)
    optimizer = gr.GradientDescentOptimizer(1.0)
    for count, device in enumerate((home, home, *mesh.devices, home)):
        optimizer.apply_gradients([(device.upload(np.ones(3, "float32")), variable)])
        assert variable.numpy().tolist() == [-1.0 - count] * 3


def test_external_memory_is_read_in_order_later_too(mesh, monkeypatch):
    """A Buffer of a PerReplica is memory of a library, whose stream has more work by then."""
    read = []
    monkeypatch.setattr("gradreduce.optim.update_plan.wait_for_inputs", read.extend)
    external = gr.PerReplica([np.ones(3, "float32")] * len(mesh), mesh).buffers[0]
    variable = gr.Variable(np.zeros(3, "float32"), device=mesh.devices[0])
    optimizer = gr.GradientDescentOptimizer(1.0)
    for _ in range(2):
        optimizer.apply_gradients([(external, variable)])
    assert read == [external]


def test_a_rule_on_arrays_is_shown_the_array_that_was_given(mesh):
    """The rule may keep the array, so it must not be memory that the next step overwrites."""

    class KeepsGradient(gr.Optimizer):
        def _apply(self, variable, slots, gradient):
            kept.append(gradient)
            variable -= gradient

    kept, optimizer = [], KeepsGradient("keeps")
    variable = gr.Variable(np.zeros(3, "float32"), device=mesh.devices[0])
    for turn in range(3):
        optimizer.apply_gradients([(np.full(3, turn, "float32"), variable)])
    assert [array[0] for array in kept] == [0, 1, 2]


def test_each_thread_has_memory_of_its_own(mesh):
    device = mesh.devices[0]
    staging = HostStaging([(device, np.dtype("float32"), (3,))])
    (mine,) = staging.upload([np.full(3, 1, "float32")])
    theirs = []
    other = threading.Thread(
        target=lambda: theirs.extend(staging.upload([np.full(3, 2, "float32")]))
    )
    other.start()
    other.join(timeout=30)
    assert [mine.numpy().tolist(), theirs[0].numpy().tolist()] == [[1.0] * 3, [2.0] * 3]
    (again,) = staging.upload([np.full(3, 3, "float32")])
    assert again is mine
    assert theirs[0].numpy().tolist() == [2.0] * 3
