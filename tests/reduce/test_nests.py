"""Nested gradients: results have the same structure, and paths name the tensors."""

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import meshes
from support.meshes import refused

import gradreduce as gr
from gradreduce.device import Buffer

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


class Layer(NamedTuple):
    weight: Any
    bias: Any


mesh = meshes.mesh_of((0, 0, 1), strict=True)


@pytest.fixture
def ops(mesh):
    return gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)


def model(value, rows=3):
    """A nest of every kind; its gradients contain ``value`` and larger numbers."""

    def filled(number, *shape):
        return np.full(shape, value + number, np.float32)

    scales = defaultdict(list, b=[filled(5, 1)], a=(filled(6, 2), None))
    return {
        "layers": [Layer(filled(0, rows, 2), filled(1, rows)), Layer(filled(2, rows), None)],
        "head": OrderedDict(weight=filled(3, rows), empty=(), numbers=[value, 2.0]),
        7: {"deep": {"er": (filled(4, rows),)}},
        "scales": scales,
    }


NAMES = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "head.weight", "head.numbers",
         "7.deep.er.0", "scales.b.0", "scales.a.0")  # fmt: skip


def shape_of(nest):
    """A nest with types in place of its arrays."""
    if isinstance(nest, dict):
        return type(nest), {key: shape_of(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest), [shape_of(value) for value in nest]
    return type(nest), getattr(nest, "shape", None)


def same(found, wanted):
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in found)
    if isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found is wanted if found is None else np.array_equal(found, wanted)


@pytest.mark.parametrize("outer", [list, tuple])
def test_results_have_the_nesting_of_the_inputs(mesh, ops, outer):
    found = ops.all_reduce(outer(model(float(replica)) for replica in range(3)), MEAN)
    wanted = model(1.0)
    wanted["head"]["numbers"] = np.array(wanted["head"]["numbers"])  # a list of numbers is an array
    assert type(found) is outer
    for replica in found:
        assert same(replica, wanted)
        assert shape_of(replica) == shape_of(wanted)
    assert found[0]["scales"].default_factory is list
    with mesh.journal() as journal:
        for empty in ([], (), {}):
            assert ops.all_reduce(outer([empty] * 3)) == outer([empty] * 3)
    assert journal.records == []


def test_each_device_keeps_its_own_order_of_keys(ops):
    grads = [{"a": {"x": np.full(2, 1.0), "y": np.full(2, 10.0)}} for _ in range(3)]
    grads[1] = {"a": dict(reversed(grads[1]["a"].items()))}
    found = ops.all_reduce(grads, SUM)
    assert [list(each["a"]) for each in found] == [["x", "y"], ["y", "x"], ["x", "y"]]
    assert all(same(each, {"a": {"x": [3, 3], "y": [30, 30]}}) for each in found)


def test_out_is_nested_too_and_may_be_the_gradients(ops):
    grads = [model(float(replica)) for replica in range(3)]
    for each in grads:
        each["head"]["numbers"] = np.full(2, 7.0)
    assert ops.all_reduce(grads, MEAN, out=grads) is grads
    wanted = model(1.0)
    wanted["head"]["numbers"] = np.full(2, 7.0)
    assert all(same(each, wanted) for each in grads)


def test_names_are_paths_in_every_description(mesh, ops):
    grads = [model(float(replica)) for replica in range(3)]
    for each in grads:
        each["head"]["numbers"] = np.ones(2, np.float32)
    pairs = ops.pairs(grads)
    assert tuple(value.name for value, _ in pairs) == NAMES == ops.plan(SUM, pairs).names
    assert "layers.0.weight to scales.a.0" in str(ops.profile(SUM, pairs))
    ops.all_reduce(grads)
    listed = f"pack 1 of 1 (tensors {', '.join(NAMES[:5])} and 3 more)"
    assert mesh.flight_record()[-1].tensors == listed
    values = [value for value, _ in pairs]
    step = ops.prepare(MEAN, pairs, out=values)
    step()
    assert same(grads[2]["layers"][0].weight, np.full((3, 2), 1.0))
    assert mesh.flight_record()[-1].tensors == listed


def test_a_flat_list_keeps_its_numbers(mesh, ops):
    """Also if a tensor is None on every device."""
    ones = np.ones(2)
    ops.all_reduce([[ones, ones]] * 3)
    assert mesh.flight_record()[-1].tensors == "pack 1 of 1 (tensors 0 to 1)"
    ops.all_reduce([[ones, None, ones]] * 3)
    assert mesh.flight_record()[-1].tensors == "pack 1 of 1 (tensors 0, 2)"


def changed(change):
    """Gradients of three devices, the second one changed."""
    grads = [{"layers": [{"w": np.ones(3), "b": np.ones(2)}], "head": np.ones(2)} for _ in range(3)]
    change(grads[1])
    return grads


CHANGES = {
    "a shape": (
        lambda nest: nest["layers"][0].update(w=np.ones(4)),
        r"grads\[1\]\['layers.0.w'\] is float64\[4\], grads\[0\]\['layers.0.w'\] is float64\[3\]",
    ),
    "a type": (
        lambda nest: nest["layers"][0].update(w=np.ones(3, bool)),
        r"grads\[1\]\['layers.0.w'\]: dtype bool cannot be added",
    ),
    "None": (
        lambda nest: nest["layers"][0].update(b=None),
        r"grads\[1\]\['layers.0.b'\] is None, but grads\[0\]\['layers.0.b'\] is not: pass zeros",
    ),
    "None for a nest": (
        lambda nest: nest.update(layers=None),
        r"grads\[1\]\['layers'\] must be a list, tuple or dict of arrays.*, not NoneType",
    ),
    "a nest for an array": (
        lambda nest: nest.update(head=[np.ones(2)]),
        r"grads\[0\]\['head'\] must be a list, tuple or dict of arrays.*, not ndarray",
    ),
    "a key less": (
        lambda nest: nest["layers"][0].pop("b"),
        r"grads\[1\]\['layers.0'\] has other tensors than grads\[0\]\['layers.0'\]: it lacks 'b'",
    ),
    "a tuple": (
        lambda nest: nest.update(layers=tuple(nest["layers"])),
        r"grads\[1\]\['layers'\] has other .*: it is a tuple, not a list",
    ),
    "an item more": (
        lambda nest: nest["layers"].append({}),
        r"grads\[1\]\['layers'\] has other .*: it has 2, grads\[0\]\['layers'\] has 1",
    ),
    "an iterator": (
        lambda nest: nest.update(layers=iter([1.0])),
        r"grads\[1\]\['layers'\] is an iterator or list of 1.0: pass a PyTorch module or its named",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_errors_name_the_tensor_by_its_path(mesh, ops, change):
    make, text = CHANGES[change]
    error = TypeError if change in ("a type", "an iterator") else ValueError
    with refused(mesh, error, f"^{text}"):
        ops.all_reduce(changed(make))


def test_an_out_that_differs_is_named_by_its_path(mesh, ops):
    grads = changed(lambda nest: None)
    out = changed(lambda nest: nest["layers"][0].update(w=np.ones(5)))
    with refused(mesh, ValueError, r"^out\[1\]\['layers.0.w'\]: out is float64\[5\]; expected"):
        ops.all_reduce(grads, out=out)
    with refused(mesh, ValueError, r"^out\[1\]\['layers.0'\] has other .* it lacks 'b'"):
        ops.all_reduce(grads, out=changed(lambda nest: nest["layers"][0].pop("b")))


def test_a_step_takes_terms_by_the_names_of_its_variables(mesh, ops):
    variables = [gr.Variable(np.zeros(2), name, device=mesh) for name in ("w", "bias", "unused")]
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), ops)
    terms = [
        {"bias": [np.full(2, 6.0), None], "unused": None,
         "w": [np.ones(2), np.full(2, float(replica))]}
        for replica in range(3)
    ]  # fmt: skip
    assert step([*terms[:2], OrderedDict(terms[2])])
    assert [each.numpy().tolist() for each in variables] == [[-2, -2], [-6, -6], [0, 0]]
    for change, text in (
        (lambda entry: entry.pop("w"), "it lacks 'w'"),
        (lambda entry: entry.update(x=[np.ones(2)]), "it has also 'x'"),
    ):
        odd = dict(terms[1])
        change(odd)
        with pytest.raises(ValueError, match=rf"^terms\[1\] has other .* the variables: {text}$"):
            step([terms[0], odd, terms[2]])
    with pytest.raises(ValueError, match=r"^terms of replica 2 for 'w': got float64\[3\]"):
        step([*terms[:2], {**terms[2], "w": [np.ones(3)]}])
    assert step.global_step == 1


def test_each_tensor_has_results_of_its_own_kind(mesh, ops):
    grads = [[np.ones(2), device.put(np.ones(3))] for device in mesh]
    for array, buffer in ops.all_reduce(grads, SUM):
        assert (type(array), type(buffer)) == (np.ndarray, Buffer)
        assert (array.tolist(), buffer.numpy().tolist()) == ([3, 3], [3, 3, 3])
    assert ops.all_reduce([[] for _ in mesh]) == [[] for _ in mesh]


def test_arrays_beside_rows_are_uploaded_once():
    deferring = gr.open_mesh(2, backend="sim", schedule_seed=0)
    rows = gr.IndexedSlices(np.ones((1, 5)), [0], (3, 5))
    with deferring.journal() as journal:
        gr.all_reduce([[np.ones(7), rows] for _ in deferring], SUM, mesh=deferring)
    assert [each.nbytes for each in journal.of("upload")].count(7 * 8) == 2
