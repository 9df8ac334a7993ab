"""Every wrong argument of a reduction raises, with its name, before any device is used."""

import sys
from functools import partial
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
from support import meshes
from support.meshes import MeshCase, owned, per_replica, refused

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.errors import BackendUnavailableError, DeviceMismatchError, about
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN

mesh = meshes.mesh_of((0, 0, 1), strict=True)


@pytest.fixture(params=ALGORITHMS)
def ops(request, mesh):
    return gr.AllReduceCrossDeviceOps(request.param, mesh=mesh)


@pytest.fixture
def value(mesh):
    return per_replica(mesh, lambda replica: np.full(4, replica, np.float32))


def test_wrong_options_are_refused_at_construction():
    for name in ("NCCL", "", "ring", False, 0):
        text = r"all_reduce_alg=.* is not one of \['nccl', 'hierarch"
        with pytest.raises(ValueError, match=text):
            gr.AllReduceCrossDeviceOps(name)
    for name in ("num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"):
        for number in (-1, True, np.True_, False, 1.0, "1", None):
            text = f"{name}={number!r} must be a non-negative integer"
            with pytest.raises(ValueError, match=text):
                gr.AllReduceCrossDeviceOps(**{name: number})


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1, 64), "agg_small_grads_max_bytes=64 has no effect with num_packs=1"),
        ((3, 0, 2), "agg_small_grads_max_group=2 has no effect with num_packs=3"),
        ((2, 64, 2), "agg_small_grads_max_bytes=64 and agg_small_grads_max_group=2 have no effect "
         "with num_packs=2"),
    ],
)  # fmt: skip
def test_what_packs_overrule_is_warned_of_where_it_is_passed(numbers, text):
    with pytest.warns(UserWarning) as warned:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", *numbers)
        with gr.open_mesh(2, backend="sim") as mesh:  # a reduction does not warn again
            value = gr.PerReplica([np.ones(2)] * 2, mesh)
            assert ops.reduce(SUM, value, value).primary.tolist() == [2, 2]
    (warning,) = warned
    assert str(warning.message) == f"{text}: pass num_packs=0 to reduce small gradients in groups"
    assert warning.filename == __file__
    for silent in ((), (0, 64, 2), (0, 0, 2), (2, 0, 10)):
        gr.AllReduceCrossDeviceOps("hierarchical_copy", *silent)  # a warning would be an error


def test_presets_choose_the_algorithm_and_check_their_number(value):
    for preset, name in (
        (gr.NcclAllReduce, "nccl"),
        (gr.HierarchicalCopyAllReduce, "hierarchical_copy"),
    ):
        with pytest.raises(ValueError, match="num_packs=-2"):
            preset(-2)
        assert (preset().all_reduce_alg, preset().num_packs, preset(0).num_packs) == (name, 1, 0)
        assert preset(3).reduce(SUM, value, value).values[1][0] == 3
    assert gr.AllReduceCrossDeviceOps().all_reduce_alg == "nccl"
    assert isinstance(preset(), gr.CrossDeviceOps)
    assert get_args(AllReduceAlg) == tuple(ALGORITHMS)
    with pytest.raises(TypeError, match="abstract"):
        gr.CrossDeviceOps()


def test_an_invalid_mesh(mesh):
    for wrong in (3, "sim:0", [0, 1], mesh.devices[0]):
        for make in (
            gr.AllReduceCrossDeviceOps,
            gr.NcclAllReduce,
            gr.HierarchicalCopyAllReduce,
            gr.ReductionToOneDevice,
            partial(gr.all_reduce, [[1.0]] * 3),
        ):
            with refused(mesh, ValueError, "^mesh=.* must be a Mesh; gr.open_mesh"):
                make(mesh=wrong)


ONES, THREE = np.ones(2), [[np.ones(2)]] * 3
NO_DEVICE = "destination 0 is .* non-empty list"
NO_NAME = r"destination 0: '.*' is not (the name of )?a device"
NO_VALUE = r" is \w+; pass a PerReplica, an array or IndexedSlices"

# The same error for each of many arguments: the call, its arguments, the start of its text.
ALIKE = {
    "an operation": (
        lambda ops, value, op: ops.reduce(op, value, value),
        ["sum", "SUM", "MEAN", None, 0, gr.ReduceOp],
        r"reduce_op=.* must be ReduceOp\.SUM or ReduceOp\.MEAN",
    ),
    "an operation of no pairs": (lambda ops, value, op: ops.batch_reduce(op, []), ["sum"], "redu"),
    "an op of all_reduce": (lambda ops, value, op: ops.all_reduce(THREE, op), ["sum", 0], "op="),
    "a pair": (
        lambda ops, value, pair: ops.batch_reduce(SUM, [(value, value), pair]),
        [[ONES, ONES], (ONES,) * 3, (ONES,), ONES, None],
        r"value_destination_pairs\[1\] must be a tuple of size 2",
    ),
    "pairs": (
        lambda ops, value, pairs: ops.batch_reduce(SUM, pairs),
        [None, ONES, {1: 2}, iter([])],
        ".* must be a list or a tuple of pairs, not",
    ),
    "a destination": (
        lambda ops, value, destination: ops.reduce(SUM, value, destination),
        [None, "", [], (), 0, np.zeros(3), [None], ["sim:0", ""], [["sim:0"]]],
        NO_DEVICE,
    ),
    "a destination of the second pair": (
        lambda ops, value, name: ops.batch_reduce(SUM, [(value, value), (value, name)]),
        [None, "sim:3", ["sim:0", "sim:3"]],
        "destination 1",
    ),
    "a name": (
        lambda ops, value, name: ops.reduce(SUM, value, name),
        ["sim:3", "gpu:3", "/device:GPU:99", "cpu:0", "gpu", "gpu:-1", "sim:0 ", "sim:x",
         "/task:0gpu:1", "/job:workergpu:1", "//gpu:1", "/device:/gpu:1", ["sim:0", "gpu:3"]],
        NO_NAME,
    ),
    "a name to broadcast to": (
        lambda ops, value, name: ops.broadcast(value.parts[0], name),
        ["sim:3", ["sim:0", "gpu"]],
        "destination 0: ",
    ),
    "a name twice": (
        lambda ops, value, twice: ops.reduce(SUM, value, twice),
        [["sim:1", "/gpu:1"], ["sim:1"] * 2],
        "destination 0 names a device twice",
    ),
    "a value": (
        lambda ops, value, wrong: ops.batch_reduce(SUM, [(value, value), (wrong, value)]),
        [None, 1.0, "sim:0", [np.ones(4)] * 3, object()],
        "value 1" + NO_VALUE,
    ),
    "a tensor": (
        lambda ops, value, wrong: ops.broadcast(wrong, value),
        [None, "sim:0", object()],
        "tensor" + NO_VALUE,
    ),
    "a tensor of several": (
        lambda ops, value, wrong: ops.broadcast([ONES, wrong], value),
        [None, object()],
        r"tensor\[1\]" + NO_VALUE,
    ),
    "entries of grads": (
        lambda ops, value, grads: ops.all_reduce(grads),
        [None, {0: [1.0]}, 3, np.ones((3, 2)), "abc"],
        "grads must be a list or tuple",
    ),
    "a number of entries": (
        lambda ops, value, count: ops.all_reduce([[ONES]] * count),
        [0, 1, 2, 4],
        r"grads has \d entries; .* one entry for each of 3 dev",
    ),
    "an entry": (
        lambda ops, value, entry: ops.all_reduce([[ONES], entry, [ONES]]),
        [1.0, ONES, {1.0}],
        r"grads\[1\] must be a list, tuple or dict of arrays, or .*, not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ALIKE)
def test_arguments_of_another_kind_are_refused(mesh, ops, value, what):
    call, arguments, text = ALIKE[what]
    for wrong in arguments:
        with refused(mesh, ValueError, f"^{text}"):
            call(ops, value, wrong)


def test_a_mesh_in_the_place_of_the_operation(mesh, ops):
    for call in (ops.all_reduce, gr.all_reduce):
        with refused(mesh, ValueError, r"^op=<Mesh .* must be ReduceOp\..*by name: mesh="):
            call(THREE, mesh)


def test_arguments_that_do_not_fit_each_other_are_refused(mesh, ops, value):
    """Entries whose tensors differ are in test_nests.py."""
    buffers = [owned(device, ONES) for device in mesh]
    many = {name: ONES for name in "abcdefghijkl"}
    zeros = [[np.zeros(2), np.zeros(3)] for _ in mesh]
    shared = [[np.zeros(2), np.zeros(2)] for _ in mesh]
    odd = gr.PerReplica([np.ones(3), np.ones(4), np.ones(4)], mesh)
    with MeshCase((0, 1)).open() as other:
        for error, text, call in (
            (DeviceMismatchError, "destination 0: .* belongs to another mesh",
             lambda: ops.reduce(SUM, value, other)),
            (ValueError, "tensor is a PerReplica of 3 replicas, which may differ: pass one",
             lambda: ops.broadcast(value, mesh)),
            (ValueError, r"replica 1 is float64\[4\], replica 0 is float64\[3\]",
             lambda: ops.reduce(SUM, odd, odd)),
            (ValueError, "destination 0 names a device twice",
             lambda: ops.reduce(SUM, value, [mesh.devices[1], "sim:1"])),
            (DeviceMismatchError, r"^grads\[0\]\[0\]: .* was passed as the value for sim:0",
             lambda: ops.all_reduce([[buffer] for buffer in buffers[::-1]])),
            (ValueError, r"grads\[1\] has other .*: it lacks 'a' and it has also 'b'$",
             lambda: ops.all_reduce([{"a": ONES}, {"b": ONES}, {"a": ONES}])),
            (ValueError, "it lacks 'a', 'd', 'e', 'f', 'g' and 5 more$",
             lambda: ops.all_reduce([many, {"b": ONES, "c": ONES}, many])),
            (ValueError, r"out\[1\] has other tensors than grads\[0\]: it has 1, grads",
             lambda: ops.all_reduce(zeros, out=[zeros[0], zeros[1][:1], zeros[2]])),
            (ValueError, "out has 2 entries; .* each of 3 devices, as grads has",
             lambda: ops.all_reduce(zeros, out=zeros[:2])),
            (ValueError, r"^out\[2\]\[1\]: out is float64\[2\]",
             lambda: ops.all_reduce(zeros, out=[*zeros[:2], [np.zeros(2), np.zeros(2)]])),
            (ValueError, r"out\[1\]\[1\] overlaps grads\[1\]\[0\]; an out may be",
             lambda: ops.all_reduce(shared, out=[shared[0], shared[1][::-1], shared[2]])),
        ):  # fmt: skip
            with refused(mesh, error, text):
                call()


def test_replicas_that_differ(mesh, ops, value):
    for shape, dtype, text in (
        ((4, 1), "float32", r"float32\[4, 1\]"),
        ((), "float32", r"float32\[\]"),
        ((4,), "float16", r"float16\[4\]"),
    ):
        arrays = [np.ones(4, np.float32), np.ones(4, np.float32), np.ones(shape, dtype)]
        odd = gr.PerReplica(arrays, mesh)
        with refused(mesh, ValueError, rf"value 1: replica 2 is {text}, replica 0 is float32\[4\]"):
            ops.batch_reduce(SUM, [(value, value), (odd, value)])
        with refused(mesh, ValueError, rf"grads\[2\]\[0\] is {text}, grads\[0\]\[0\] is float32"):
            ops.all_reduce([[array] for array in arrays])


UNFIT = {
    "truth values": (np.ones(4, bool), TypeError, "dtype bool cannot be added"),
    "objects": (np.array([None]), TypeError, "dtype object cannot be added"),
    "another byte order": (np.ones(4, ">f4"), TypeError, "dtype >f4 cannot be added"),
    "text": ("1", TypeError, "str is not an array"),
    "a masked array": (np.ma.masked_array(np.ones(4)), TypeError, "would lose its mask"),
    "a ragged list": ([1.0, [2.0]], ValueError, "inhomogeneous"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_reduced_is_named_by_replica_and_position(mesh, ops, value, name):
    odd, error, text = UNFIT[name]
    for replica in range(3):
        grads = [{"a": ONES, "b": ONES} for _ in mesh]
        grads[replica]["b"] = odd
        with refused(mesh, error, rf"^grads\[{replica}\]\['b'\]: .*{text}"):
            ops.all_reduce(grads)
        with refused(mesh, error, f"^replica {replica}: .*{text}"):
            gr.PerReplica([entry["b"] for entry in grads], mesh)
    if not isinstance(odd, np.ndarray) or isinstance(odd, np.ma.MaskedArray):
        return
    with refused(mesh, error, f"^value 1: {text}"):
        ops.batch_reduce(SUM, [(value, value), (odd, value)])
    if name != "truth values":  # which are copied, but not added
        with refused(mesh, error, f"^tensor: {text}"):
            ops.broadcast(odd, mesh)


def test_an_error_of_a_class_that_is_not_ours_keeps_its_text():
    """The exception class of another library may need other arguments than a text."""

    class ForeignError(TypeError):
        def __init__(self, tracer, context):
            super().__init__(f"{tracer} {context}")

    foreign = ForeignError("a", "b")
    assert about("value 1", foreign) is foreign
    named = about("value 1", DeviceMismatchError("elsewhere"))
    assert (type(named), str(named)) == (DeviceMismatchError, "value 1: elsewhere")


def test_a_closed_mesh(mesh, ops, value):
    with MeshCase((0, 1)).open() as closed:
        late = per_replica(closed, lambda replica: np.ones(2, np.float32))
    of_closed = gr.AllReduceCrossDeviceOps(ops.all_reduce_alg, mesh=closed)
    for call in (
        lambda: of_closed.reduce(SUM, late, late),
        lambda: of_closed.reduce(SUM, late, "sim:1"),
        lambda: of_closed.all_reduce([[np.ones(2)]] * 2),
        lambda: of_closed.plan(SUM, [(late, late)]),
        lambda: of_closed.broadcast(late.parts[0], closed),
        lambda: of_closed.broadcast(np.ones(2), "sim:1"),
        lambda: gr.ReductionToOneDevice().reduce(SUM, late, late),
        lambda: ops.batch_reduce(SUM, [(value, value), (late, late)]),
    ):
        with refused(mesh, BackendUnavailableError, "was closed"):
            call()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_failed_device_stops_a_batch_before_the_others_are_asked(mesh, ops, lost):
    """Whether the failed device has a replica or should get a result."""
    value = per_replica(mesh, lambda replica: np.ones(4, np.float32), owned)
    near = gr.PerReplica([value.buffers[2 - lost]])
    mesh.synchronize()
    mesh.devices[lost].mark_failed("tested")
    one = gr.ReductionToOneDevice()
    for call in (
        lambda: ops.batch_reduce(SUM, [(near, near), (value, near)]),
        lambda: ops.batch_reduce(SUM, [(near, near), (near, mesh)]),
        lambda: ops.batch_reduce(SUM, [(near, near), (value, value)]),
        lambda: one.batch_reduce(SUM, [(near, near), (value, near)]),
        lambda: one.batch_reduce(SUM, [(near, near), (near, mesh.devices[lost])]),
        lambda: ops.broadcast(near.parts[0], mesh),
        lambda: ops.broadcast(value.parts[lost], near),
        lambda: ops.plan(SUM, [(near, near), (value, near)]),
    ):
        with refused(mesh, BackendUnavailableError, f"sim:{lost} failed: tested"):
            call()
    assert (ops.reduce(SUM, near, near).buffers[0].numpy() == 1).all()


@pytest.mark.parametrize("name", ["tensor", "", 3, "cupy"])
def test_an_unavailable_output_type(mesh, ops, value, name, monkeypatch):
    if name == "cupy":  # also if it is installed: simulated devices are host memory
        monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    for call in (
        lambda: ops.reduce(SUM, value, value, output_type=name),
        lambda: ops.batch_reduce(SUM, [(value, value), (value, "sim:1")], output_type=name),
        lambda: ops.all_reduce([[np.ones(2)]] * 3, output_type=name),
        lambda: ops.broadcast(value.parts[0], mesh, output_type=name),
        lambda: gr.ReductionToOneDevice().reduce(SUM, value, value, output_type=name),
    ):
        with refused(mesh, ValueError, f"output_type={name!r}"):
            call()
