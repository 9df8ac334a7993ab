"""Flat buffers: filled through arrays of any library, recognized as arguments, not packed."""

import gc
import sys
import weakref
from collections import deque
from types import ModuleType

import numpy as np
import pytest
from support.exact_data import same
from support.libraries import torch
from support.meshes import MeshCase, num_grown, refused

import gradreduce as gr
from gradreduce.arrays.convert import kind_of, to_buffer
from gradreduce.device import Block
from gradreduce.device.memory.external import ExternalBuffers
from gradreduce.device.memory.freed import DeferredFree
from gradreduce.errors import BackendUnavailableError

SHAPES = [(100, 180), (7,), (), (0, 3), (5, 900)]  # more than 64 KiB: a slice on each device
KINDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]
SUM = gr.ReduceOp.SUM


@pytest.fixture(scope="module", params=[(0, 0, 1, 1), (0,)], ids=str)
def mesh(request):
    with MeshCase(request.param).open() as opened:
        yield opened


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def address(array) -> int:
    if kind_of(array) == "torch":
        return array.data_ptr()
    return array.__array_interface__["data"][0]


def fill(arrays, seed: int = 0) -> None:
    for replica, row in enumerate(arrays):
        for tensor, array in enumerate(row):
            array[...] = seed + 10 * replica + tensor


def sums(num_replicas: int, seed: int = 0) -> list[np.ndarray]:
    """The sums of the values that ``fill`` writes."""
    return [
        np.full(shape, sum(seed + 10 * replica + tensor for replica in range(num_replicas)), "f4")
        for tensor, shape in enumerate(SHAPES)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_arrays_share_the_memory_of_the_views(mesh, kind, dtype):
    flat = mesh.flat_buffer(SHAPES, dtype)
    for row, views in zip(flat.arrays(kind), flat.views, strict=True):
        for array, view in zip(row, views, strict=True):
            assert kind_of(array) == ("native" if kind == "numpy" else kind)
            assert tuple(array.shape) == view.shape
            assert address(array) == view.address or not view.size
            back = to_buffer(array, view.device)
            assert (back.shape, back.dtype) == (view.shape, view.dtype)
            assert back.block is view.block or not view.size
            assert back.address == view.address or not view.size
    assert flat.arrays("buffer") == [list(views) for views in flat.views]
    assert isinstance(flat.arrays()[0][0], np.ndarray)


@pytest.mark.parametrize("form", ["all_reduce", "prepare"])
def test_arrays_filled_by_other_libraries_are_reduced_in_place(mesh, kind, form):
    flat = mesh.flat_buffer(SHAPES, "float32")
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    arrays = flat.arrays(kind)
    values = [gr.PerReplica(column, mesh) for column in zip(*arrays, strict=True)]
    step = ops.prepare(SUM, [(value, value) for value in values])
    grown = []
    for seed in (1, 2, 3):
        fill(arrays, seed)
        with mesh.journal() as journal:
            if form == "prepare":
                reduced = [list(row) for row in zip(*[each.values for each in step()], strict=True)]
            else:
                reduced = ops.all_reduce(arrays, SUM)
        assert [record.name for record in journal.records] == ["all_sum"] * len(mesh.by_physical)
        for row in reduced:
            assert [kind_of(array) for array in row] == [kind_of(each) for each in arrays[0]]
            for array, expected in zip(row, sums(len(mesh), seed), strict=True):
                assert same(np.asarray(array), expected)
        del row, reduced, array
        grown.append(num_grown(mesh))
    assert grown[0] == grown[2]


def test_any_view_of_an_array_is_recognized(mesh, kind):
    flat = mesh.flat_buffer(SHAPES, "float32")
    device, view = mesh.devices[0], flat.views[0][0]
    array = flat.arrays(kind)[0][0]
    del flat
    for seen in (array, array.reshape(180, 100), array[3:5], array.reshape(-1)[5:6], array[7:]):
        back = to_buffer(seen, device)
        assert (back.block, back.address) == (view.block, address(seen))
        assert back.shape == tuple(seen.shape)
    other = array.view((torch if kind == "torch" else np).int16)
    back = to_buffer(other, device)
    assert (back.block, back.dtype, back.shape) == (view.block, np.dtype("int16"), (100, 360))
    for copied in (array.T, array[:, ::2]):
        back = to_buffer(copied, device)
        assert back.block is not view.block
        assert back.block.owned  # a copy, like that of any array


def test_other_arrays_are_converted_as_usual(mesh):
    flat = mesh.flat_buffer(SHAPES, "float32")
    array = flat.arrays()[-1][0]
    device = mesh.devices[-1]
    assert to_buffer(array, device).block.owned
    array.flags.writeable = False
    fixed = to_buffer(array, device)
    assert not fixed.block.owned
    assert not fixed.block.writable
    assert flat.buffers[-1].block.writable
    others = [np.zeros(3), np.zeros((2, 3))[1], np.frombuffer(bytearray(24)), np.zeros(0)]
    result = gr.HierarchicalCopyAllReduce(mesh=mesh).all_reduce([[np.zeros(3)] for _ in mesh])
    for other in (*others, result[-1][0]):  # what a plain call returned is the caller's
        assert not to_buffer(other, device).block.owned
    if len(mesh) > 1:  # an array passed for another device is copied there
        back = to_buffer(flat.arrays()[0][0], device)
        assert back.device is device
        assert not back.block.owned


def test_memory_lives_as_long_as_an_array_and_is_not_taken_for_the_old_one_after(mesh, kind):
    device = mesh.devices[0]
    flat = mesh.flat_buffer([(1000,)], "float32")
    block, start = weakref.ref(flat.buffers[0].block), flat.buffers[0].address
    array = flat.arrays(kind)[0][0]
    array[...] = 5
    del flat
    gc.collect()
    kept = device.empty((1000,), "float32")  # strict fills it with NaN
    assert kept.address != start
    assert (np.asarray(array) == 5).all()
    assert to_buffer(array, device).block is block()
    del array
    gc.collect()
    assert block() is None
    again = device.empty((1000,), "float32")
    assert again.address == start  # from the pool
    seen = to_buffer(device.release(again), device)
    assert seen.block is not again.block
    assert not seen.block.owned


def block_at(device, start: int, nbytes: int) -> Block:
    return Block(device, object(), start, nbytes, owned=True, writable=True)


def test_external_memory_is_found_by_all_of_its_bytes(mesh):
    external = ExternalBuffers()
    assert external.find(100, 1) is None
    low, high = block_at(mesh.devices[0], 100, 50), block_at(mesh.devices[0], 200, 8)
    external.add(high)
    external.add(low)
    for block, places in ((low, (100, 142)), (high, (200,)), (None, (99, 143, 199, 201))):
        assert all(external.find(at, 8) is block for at in places)
    assert external.find(150, 0) is external.find(120, 0) is None
    del low, block
    assert external.find(100, 8) is None
    other = block_at(mesh.devices[0], 90, 60)
    external.add(other)
    assert external.find(100, 50) is other


def test_a_block_that_is_being_freed_is_not_found(mesh):
    """Also in another thread, when its memory may have a new owner."""
    external, found, deferred = ExternalBuffers(), [], DeferredFree()

    class FindingDeque(deque):
        def append(self, end):
            found.append(external.find(100, 8))
            assert end.raw is memory

    deferred.freed = FindingDeque()
    memory = object()
    block = Block(mesh.devices[0], memory, 100, 50, owned=True, writable=True)
    external.add(deferred.track(block))
    assert external.find(100, 8) is block
    del block
    assert found == [None]


def test_zero_is_one_fill_on_each_device(mesh, kind):
    flat = mesh.flat_buffer(SHAPES, "float32")
    arrays = flat.arrays(kind)
    fill(arrays, 1)
    with mesh.journal() as journal:
        flat.zero()
    filled = [(record.kind, record.device, record.nbytes) for record in journal.records]
    assert filled == [("fill", buffer.device.index, buffer.nbytes) for buffer in flat.buffers]
    for row in arrays:
        for array in row:
            assert not np.asarray(array).any()
    mesh.flat_buffer([], "float32").zero()


@pytest.mark.parametrize("seed", range(4))
def test_deferred_work_sees_what_was_filled_before_the_call(seed):
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        flat = mesh.flat_buffer(SHAPES, "float32")
        arrays = flat.arrays()
        fill(arrays, 4)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        reduced = ops.all_reduce(arrays, SUM, output_type="buffer")
        fill(arrays, 9)  # allowed: the call has read them
        for array, expected in zip(reduced[2], sums(3, 4), strict=True):
            assert same(array.numpy(), expected)
        read = mesh.devices[2].empty(SHAPES[0], "float32")
        mesh.devices[2].copy(read, flat.views[0][0])
        flat.zero()  # waits for the copy
        assert (read.numpy() == 9).all()
        assert not any(array.any() for row in arrays for array in row)
        values = [gr.PerReplica(views, mesh) for views in zip(*flat.views, strict=True)]
        step = ops.prepare(SUM, [(value, value) for value in values])
        for turn in (3, 8):
            flat.release()
            fill(arrays, turn)
            flat.adopt()
            results = step()
        flat.release()
        fill(arrays, 99)
        for result, expected in zip(results, sums(3, 8), strict=True):
            assert same(result.buffers[2].numpy(), expected)


def test_arrays_that_nobody_can_fill_are_refused(mesh, monkeypatch):
    flat = mesh.flat_buffer(SHAPES, "float32")
    with refused(mesh, ValueError, "output_type='tensor' is not one of"):
        flat.arrays("tensor")
    for name, why in (("jax", "JAX arrays are immutable"), ("cupy", "is simulated")):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with refused(mesh, ValueError, f"output_type='{name}': {name} is not imported"):
            flat.arrays(name)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        with refused(mesh, ValueError, why):
            flat.arrays(name)
    with gr.open_mesh(1, backend="sim") as closed:
        flat = closed.flat_buffer(SHAPES, "float32")
        flat.arrays()
    for call in (flat.zero, flat.arrays, flat.adopt, flat.release):
        with pytest.raises(BackendUnavailableError, match="was closed"):
            call()


def a_model(mesh, seed: int = 0):
    """Equal layers on each device, and an attached flat buffer of their gradients."""
    torch.manual_seed(seed)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)) for _ in mesh]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    parameters = [list(model.parameters()) for model in models]
    flat = mesh.flat_buffer([parameter.shape for parameter in parameters[0]], "float32")
    flat.attach(model.parameters() for model in models)
    return models, parameters, flat


def are_views(parameters, flat) -> bool:
    found = [[parameter.grad.data_ptr() for parameter in row] for row in parameters]
    return found == [[view.address for view in views] for views in flat.views]


def steps_of(mesh, flat):
    """Makes a step of the same reduction in place in each possible way."""
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    columns = list(zip(*flat.arrays("torch"), strict=True))
    pairs = [(value, value) for value in (gr.PerReplica(column, mesh) for column in columns)]
    return [
        flat.prepare_all_reduce(gr.ReduceOp.MEAN, cross_device_ops=ops),
        ops.prepare(gr.ReduceOp.MEAN, pairs, out=columns),
        ops.capture(gr.ReduceOp.MEAN, pairs, out=columns),
    ]


@pytest.mark.torch
@pytest.mark.parametrize("way", [0, 1, 2], ids=["flat", "prepare", "capture"])
def test_replicas_stay_equal_whatever_zero_grad_does_to_attached_gradients(mesh, way):
    models, parameters, flat = a_model(mesh)
    step = steps_of(mesh, flat)[way]
    flat = weakref.ref(flat) if way else flat  # the step of other arrays needs no flat buffer
    optimizers = [torch.optim.SGD(row, 0.1) for row in parameters]
    plain = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
    plain.load_state_dict(models[0].state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    images = torch.randn(6, len(mesh), 16, 8)
    for turn, to_none in enumerate([True, True, False, None, True, False]):
        for each in (*optimizers, optimizer) if to_none is not None else ():
            each.zero_grad(set_to_none=to_none)
        for replica, model in enumerate(models):
            for _ in range(2):
                model(images[turn, replica]).square().mean().backward()
        for image in images[turn]:
            (2 * plain(image).square().mean() / len(mesh)).backward()
        step()
        for each in (*optimizers, optimizer):
            each.step()
    flatten = torch.nn.utils.parameters_to_vector
    for row in parameters:
        assert torch.equal(flatten(row), flatten(parameters[0]))
        assert torch.allclose(flatten(row), flatten(plain.parameters()), atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("made", ["prepare", "capture"])
def test_steps_of_buffers_wait_for_the_owners_of_attached_gradients(made):
    """Buffers have no owner's stream, but PyTorch fills these and must see the sums."""
    with gr.open_mesh([0, 0, 1, 1], backend="sim", schedule_seed=3) as mesh:
        models, parameters, flat = a_model(mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        pairs = [(gr.PerReplica(each, mesh), mesh) for each in zip(*flat.views, strict=True)]
        step = getattr(ops, made)(SUM, pairs, out=list(zip(*flat.views, strict=True)))
        for turn in range(4):
            for replica, model in enumerate(models):
                model.zero_grad(set_to_none=False)
                model[1](torch.full((1, 4), float(replica + turn))).sum().backward()
            step()
            for row in parameters:
                assert (row[2].grad == 6 + 4 * turn).all()
                assert (row[3].grad == 4).all()


@pytest.mark.torch
def test_a_parameter_without_a_gradient_contributes_zero(mesh):
    models, parameters, flat = a_model(mesh)
    step = flat.prepare_all_reduce(SUM)
    for view in flat.arrays("torch")[0]:
        view.fill_(7)
    for row in parameters:
        for parameter in row:
            parameter.grad = None
    for model in models:
        model[1](torch.ones(1, 4)).sum().backward()  # the first layer is not used
    parameters[0][2].grad = None
    results = step()
    assert are_views(parameters, flat)
    for row in parameters:
        assert not row[0].grad.any()
        assert not row[1].grad.any()
        assert (row[2].grad == len(mesh) - 1).all()
        assert (row[3].grad == len(mesh)).all()
    assert [result.parts for result in results] == list(zip(*flat.views, strict=True))
    parameters[-1][0].grad = torch.ones_like(parameters[-1][0])
    flat.zero()
    assert are_views(parameters, flat)
    assert not any(parameter.grad.any() for row in parameters for parameter in row)


@pytest.mark.torch
def test_an_optimizer_leaves_a_frozen_parameter_alone(mesh):
    models, parameters, flat = a_model(mesh)
    step = flat.prepare_all_reduce(SUM)
    optimizers = [torch.optim.AdamW(row, 0.1, weight_decay=0.1) for row in parameters]
    start = parameters[0][0].detach().clone()

    def train():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
        step()
        for optimizer in optimizers:
            optimizer.step()

    for row in parameters:
        row[0].requires_grad_(False)
    train()
    train()
    for row, views in zip(parameters, flat.arrays("torch"), strict=True):
        assert row[0].grad is None
        assert torch.equal(row[0], start)
        assert not views[0].any()
        row[0].requires_grad_(True)
    train()
    assert are_views(parameters, flat)
    for row in parameters:
        assert row[0].grad.any()
        assert torch.equal(row[0], parameters[0][0])
        assert not torch.equal(row[0], start)


@pytest.mark.torch
def test_a_gradient_that_does_not_fit_its_view_is_refused_and_nothing_is_changed(mesh):
    models, parameters, flat = a_model(mesh)
    steps = [*steps_of(mesh, flat), flat.zero]
    replaced = parameters[0][0].grad = torch.ones_like(parameters[0][0])

    def swap(parameter):  # as model.double() does: the same tensors, of other memory
        models[-1].double()

    def grow(parameter):
        parameter.grad, parameter.data = None, torch.zeros(3)

    def make_sparse(parameter):
        parameter.data = torch.zeros(4)
        parameter.grad = torch.zeros(4).to_sparse()

    at = len(mesh) - 1
    for change, why in (
        (grow, rf"parameters\[{at}\]\[3\] is float32\[3\], but its view in the flat buffer is fl"),
        (make_sparse, rf"parameters\[{at}\]\[3\]\.grad has layout torch.sparse_coo"),
        (swap, rf"parameters\[{at}\]\[.\] is float64.*make a new flat buffer or DataParallel"),
    ):
        change(parameters[-1][3])
        for step in steps:
            with refused(mesh, ValueError, why):
                step()
        assert parameters[0][0].grad is replaced
    with refused(mesh, ValueError, r"parameters\[.\]\[.\] is float64"):
        flat.attach(parameters)


@pytest.mark.torch
def test_a_refused_attach_keeps_the_existing_gradients(mesh):
    models, parameters, flat = a_model(mesh)
    others = [[torch.nn.Parameter(each.detach().clone()) for each in row] for row in parameters]
    for row in others:
        row[1].grad = torch.full((4,), 3.0)
    shared = [*others[0][:3], others[0][1]]
    scaled = [*others[0][:3], others[0][3] * 2]
    double = [*others[0][:3], others[0][3].detach().double()]
    for given, kind, why in (
        (others[:-1], ValueError, r"parameters must have 4 for each of .* it has \["),
        ([row[:3] for row in others], ValueError, r"must have 4 for each of .* it has \[3"),
        ([shared, *others[1:]], ValueError, r"0\]\[3\] is the same tensor as .*0\]\[1\], which"),
        ([scaled, *others[1:]], ValueError, r"parameters\[0\]\[3\] is computed from other tens"),
        ([double, *others[1:]], ValueError, r"parameters\[0\]\[3\] is float64\[4\], but its view"),
        (["wxyz", *others[1:]], TypeError, r"parameters\[0\]\[0\] is str; pass a PyTorch"),
        ([3], TypeError, r"parameters\[0\] is int; pass the module, the parameters or the named_p"),
        ([torch.nn.ReLU()], ValueError, r"parameters must have 4 for each of .* it has \[0\]"),
    ):
        with refused(mesh, kind, why):
            flat.attach(given)
        assert others[0][0].grad is None
    assert are_views(parameters, flat)
    flat.attach(others)
    assert are_views(others, flat)
    assert all((row[1].grad == 3).all() and not row[0].grad.any() for row in others)
    with pytest.raises(ValueError, match="cross_device_ops=3 cannot prepare a step"):
        flat.prepare_all_reduce(SUM, cross_device_ops=3)
    block = weakref.ref(flat.buffers[0].block)
    del flat, others, row, shared, scaled, double, given, models, parameters
    gc.collect()
    assert block() is None  # no reference cycle keeps it
