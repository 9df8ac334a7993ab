"""``gr.jax.all_reduce``: values, devices, shardings and errors, on four CPU devices of JAX."""

import importlib
import re
import threading
from collections import namedtuple
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compiled_first import check_compiled_first
from support.exact_data import exact_data, same
from support.exact_sums import adversarial_terms, exact_means, exact_sums
from support.examples import rows_of
from support.hanging_devices import TEST_TIMEOUT, resume, stall
from support.processes import run

import gradreduce as gr
from gradreduce.device import as_dtype

pytestmark = pytest.mark.jax
SUM = gr.ReduceOp.SUM
N = 4  # devices: see tests/conftest.py
DTYPES = ("float16", "bfloat16", "float32", "complex64", "int8", "uint16", "int32")
SHAPES = ((), (1,), (0, 3), (3, 5), (1000,))
Layer = namedtuple("Layer", "kernel bias")
Four = namedtuple("Four", "a b c d")
# Partition specs of arrays, and the shape of the JAX mesh: of pmap, of blocks of rows, of columns,
# over two axes, replicated.
SPECS = {
    "rows": ((4, 3), ("i",), (4,)),
    "scalars": ((4,), ("i",), (4,)),
    "blocks": ((8, 3), ("i",), (4,)),
    "columns": ((3, 8), (None, "i"), (4,)),
    "two axes": ((6, 2, 3), ("i", "j"), (2, 2)),
    "two as one": ((3, 8), (None, ("j", "i")), (2, 2)),
    "replicated": ((2, 3), (), (4,)),
    "replicated scalar": ((), (), (2, 2)),
}


class Ops(gr.AllReduceCrossDeviceOps):
    """Keeps the addresses of what it reduces, and of the results."""

    def reduce_batch(self, reduce_op, requests, *, coalesce):
        reduced = super().reduce_batch(reduce_op, requests, coalesce=coalesce)
        self.read = [[part.address for part in request.value.parts] for request in requests]
        self.made = [[part.address for part in parts] for parts in reduced]
        return reduced


class Results(list):
    """Stands for a ``Mirrored`` of GPU arrays."""

    kind = "jax"


@pytest.fixture(scope="module")
def jax() -> Any:
    import jax

    assert len(jax.local_devices(backend="cpu")) == N
    return jax


@pytest.fixture(scope="module", params=[None, 3], ids=["in order", "random order"])
def mesh(request):
    with gr.open_mesh(N, backend="sim", strict=True, schedule_seed=request.param) as opened:
        yield opened


@pytest.fixture
def sharding(jax):
    """Makes a sharding of the four devices by a partition spec, over a JAX mesh of this shape."""

    def make(spec, shape=(N,)):
        devices = np.array(jax.local_devices(backend="cpu")).reshape(shape)
        named = jax.sharding.Mesh(devices, ("i", "j")[: len(shape)])
        return jax.sharding.NamedSharding(named, jax.sharding.PartitionSpec(*spec))

    return make


@pytest.fixture
def sharded(jax, sharding):
    """Makes an array whose shards differ on each device, also where JAX takes them for replicas."""

    def make(name, dtype="float32"):
        shape, spec, devices = SPECS[name]
        made = sharding(spec, devices)
        shards = [
            jax.device_put(exact_data(made.shard_shape(shape), as_dtype(dtype), seed=r), device)
            for r, device in enumerate(jax.local_devices(backend="cpu"))
        ]
        return jax.make_array_from_single_device_arrays(shape, made, shards)

    return make


def on_each(jax, make):
    """A list with ``make(replica)``, a tree of NumPy arrays, on each of JAX's devices."""
    return [
        jax.device_put(make(r), device) for r, device in enumerate(jax.local_devices(backend="cpu"))
    ]


def values_of(array):
    return np.stack([np.asarray(shard.data) for shard in array.addressable_shards])


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_trees_of_each_device_become_sums_on_the_same_devices(jax, mesh, dtype):
    def make(replica):
        draw = partial(exact_data, dtype=as_dtype(dtype), seed=replica)
        arrays = [draw(shape) for shape in SHAPES]
        return {"a": arrays[:3], "b": Layer(*arrays[3:])}

    given = on_each(jax, make)
    found = gr.jax.all_reduce(given, SUM, mesh=mesh)
    assert type(found) is list
    columns = zip(*[jax.tree_util.tree_leaves(make(r)) for r in range(N)], strict=True)
    sums = [np.sum(column, axis=0, dtype=as_dtype(dtype)) for column in columns]
    for tree, like in zip(found, given, strict=True):
        assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(like)
        leaves = zip(*map(jax.tree_util.tree_leaves, (tree, like)), sums, strict=True)
        for array, other, total in leaves:
            assert (array.sharding, array.dtype) == (other.sharding, other.dtype)
            assert same(np.asarray(array), total)


@pytest.mark.parametrize("op", ["pmean", "psum"])
@pytest.mark.parametrize("name", SPECS)
def test_sharded_arrays_become_what_shard_map_makes_of_them(jax, mesh, sharded, name, op):
    given = sharded(name)
    named, spec = given.sharding.mesh, given.sharding.spec
    combine = getattr(jax.lax, op)
    wanted = jax.shard_map(
        lambda x: combine(x, named.axis_names),
        mesh=named, in_specs=spec, out_specs=spec, check_vma=False,
    )(given)  # fmt: skip
    reduce_op = {"pmean": gr.ReduceOp.MEAN, "psum": SUM}[op]
    found = gr.jax.all_reduce({"w": given, "none": None}, reduce_op, mesh=mesh)
    assert found["none"] is None
    assert (found["w"].shape, found["w"].sharding) == (given.shape, given.sharding)
    assert same(values_of(found["w"]), values_of(wanted))
    assert (values_of(given) != values_of(wanted)).any()


def test_a_tree_may_mix_dtypes_and_shardings(mesh, sharded):
    given = [(sharded(name, dtype),) for name in SPECS for dtype in DTYPES]
    found = gr.jax.all_reduce(given, SUM, mesh=mesh)
    for (array,), (like,) in zip(found, given, strict=True):
        assert (array.dtype, array.sharding) == (like.dtype, like.sharding)
        total = np.sum(values_of(like), axis=0, dtype=like.dtype, keepdims=True)
        assert same(values_of(array), np.repeat(total, N, axis=0))


def test_means_of_integers_are_floats(jax, mesh, sharded):
    given = sharded("rows", "int8")
    found = gr.jax.all_reduce(given, mesh=mesh)
    wrapped = np.sum(values_of(given), axis=0, dtype=np.int8)
    assert same(values_of(found)[0], (wrapped / np.float32(N)).astype(np.float32))
    by_jax = jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i")(sharded("rows", "int32"))
    assert gr.jax.all_reduce(sharded("rows", "int32"), mesh=mesh).dtype == by_jax.dtype


def test_the_structure_stays(jax, mesh):
    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, weight, name):
            self.weight, self.name = weight, name

        def tree_flatten(self):
            return (self.weight,), self.name

        @classmethod
        def tree_unflatten(cls, name, children):
            return cls(*children, name)

    def make(replica, name="w"):
        return Node(np.float32(replica), name), None, {}, ()

    for found in gr.jax.all_reduce(tuple(on_each(jax, make)), mesh=mesh):
        assert (type(found[0]), found[0].name, float(found[0].weight)) == (Node, "w", 1.5)
        assert found[1:] == (None, {}, ())
    for empty in ({}, [], None, [{}, {}], {"a": None}):
        assert gr.jax.all_reduce(empty, mesh=mesh) == empty
    trees = on_each(jax, make)
    trees[2][0].name = "v"
    with pytest.raises(ValueError, match=r"^grads\[2\] has .* structure .*\[v\].*, not .*\[w\]"):
        gr.jax.all_reduce(trees, mesh=mesh)


def test_one_device_takes_a_tree_or_a_list_with_one(jax):
    with gr.open_mesh(1, backend="sim") as mesh:
        tree = {"w": jax.device_put(np.ones(3, np.float32), jax.local_devices(backend="cpu")[2])}
        for given in (tree, [tree], (tree, tree)):
            found = gr.jax.all_reduce(given, mesh=mesh)
            assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(given)
            for array in jax.tree_util.tree_leaves(found):
                assert (array.tolist(), array.devices()) == ([1, 1, 1], tree["w"].devices())


def test_arrays_that_are_not_committed_are_moved_to_the_others(jax, mesh):
    params = on_each(jax, lambda r: {"w": np.float32(r), "b": np.float32(r)})
    grads = [jax.grad(lambda each: each["w"] ** 2)(each) for each in params]
    assert grads[2]["b"].devices() == {jax.local_devices(backend="cpu")[0]}  # not used: zeros
    grads = [{**each, "b": each["b"] + r} for r, each in enumerate(grads)]
    for mean, each in zip(gr.jax.all_reduce(grads, mesh=mesh), params, strict=True):
        assert (float(mean["w"]), float(mean["b"])) == (3, 1.5)
        assert mean["w"].devices() == mean["b"].devices() == each["w"].devices()


def test_devices_of_one_physical_device_may_share_a_device_of_jax(jax):
    trees = [
        jax.device_put(np.float32(r), jax.local_devices(backend="cpu")[r // 2]) for r in range(N)
    ]
    with gr.open_mesh([5, 5, 0, 0], backend="sim") as mesh:
        for found, given in zip(gr.jax.all_reduce(trees, mesh=mesh), trees, strict=True):
            assert (float(found), found.devices()) == (1.5, given.devices())
    with (
        gr.open_mesh([5, 0, 5, 0], backend="sim") as mesh,
        pytest.raises(gr.errors.DeviceMismatchError, match=r"^the trees of grads are on cpu:0, "),
    ):
        gr.jax.all_reduce(trees, mesh=mesh)


# Options and copies -------------------------------------------------------------------------------


def test_inputs_and_results_are_not_copied(jax, sharded, monkeypatch):
    rows = [[np.full(size, r, np.float32) for size in (1000, 9)] for r in range(N)]
    trees = on_each(jax, lambda r: rows[r])
    arrays = [sharded("blocks"), sharded("columns")]
    shards = [[shard.data for shard in array.addressable_shards] for array in arrays]
    given, make = [], jax.make_array_from_callback

    def watched(shape, sharding, callback):
        given.append(callback(None).ctypes.data)  # what JAX takes, and copies if not aligned
        return make(shape, sharding, callback)

    monkeypatch.setattr(jax, "make_array_from_callback", watched)
    with gr.open_mesh(N, backend="sim") as mesh:
        with mesh.journal() as plain:
            gr.HierarchicalCopyAllReduce(mesh=mesh).all_reduce(rows)
        for grads, columns in ((trees, list(zip(*trees, strict=True))), (arrays, shards)):
            ops = Ops("hierarchical_copy", mesh=mesh)
            given.clear()
            with mesh.journal() as journal:
                gr.jax.all_reduce(grads, cross_device_ops=ops)
            assert (journal.launches, journal.copies) == (plain.launches, plain.copies)
            wanted = [[array.unsafe_buffer_pointer() for array in column] for column in columns]
            assert ops.read == wanted
            made = [list(column) for column in zip(*ops.made, strict=True)]
            assert given == (list(chain(*made)) if grads is trees else made[0])


def test_results_keep_their_values(jax, mesh, sharded):
    given = sharded("rows")
    first = gr.jax.all_reduce(given, mesh=mesh)
    wanted = np.asarray(first).copy()
    given.delete()
    for _ in range(3):
        gr.jax.all_reduce(sharded("replicated"), mesh=mesh)
    assert same(np.asarray(first), wanted)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)  # may write into what it is given
    assert same(np.asarray(step(first)), wanted + 1)


def test_the_flight_record_has_the_paths_of_the_arrays(jax, mesh, sharded):
    trees = on_each(jax, lambda r: {"dense": {"kernel": np.ones(3), "bias": np.ones(2)}})
    for grads, names in (
        (trees, "dense.bias, dense.kernel"),
        (Layer(sharded("rows"), [sharded("columns")]), "kernel, bias.0"),
    ):
        gr.jax.all_reduce(grads, mesh=mesh)
        assert mesh.flight_record()[-1].tensors == f"pack 1 of 1 (tensors {names})"


def test_a_deadline_names_the_paths_of_what_is_late(jax, sharded):
    with gr.open_mesh(N, backend="sim", schedule_seed=0) as mesh:
        gr.jax.all_reduce(sharded("rows"), mesh=mesh)
        given = {"a": sharded("rows"), "b": sharded("scalars")}
        stall(mesh.devices[2])
        unless_raised = threading.Timer(TEST_TIMEOUT, resume, [mesh.devices[2]])
        unless_raised.start()
        with pytest.raises(gr.errors.CollectiveError, match=r"\(tensors a, b\)"):
            gr.jax.all_reduce(given, mesh=mesh, deadline=0.1)
        unless_raised.cancel()


def test_a_wire_dtype_rounds_each_term_and_the_sum(jax, mesh):
    given = on_each(jax, lambda replica: {"w": np.full((4, 5), 1 + replica * 2**-9, np.float32)})
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, wire_dtype="bfloat16")
    for options, total in (
        ({"mesh": mesh}, 4 + 6 * 2**-9),
        ({"mesh": mesh, "wire_dtype": "bfloat16"}, 4.0),  # of 8 bits
        ({"cross_device_ops": ops}, 4.0),
        ({"cross_device_ops": gr.ReductionToOneDevice(mesh=mesh)}, 4 + 6 * 2**-9),
    ):
        found = gr.jax.all_reduce(given, SUM, **options)
        assert {float(tree["w"][3, 4]) for tree in found} == {total}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("form", ["trees", "rows", "columns"])
def test_exact_sums_are_rounded_once_and_have_no_order(jax, mesh, sharding, form, dtype):
    terms, weights = adversarial_terms(N, 97, dtype, seed=3), [1.0, 0.1, 3.0, 0.0]
    with np.errstate(all="ignore"):
        scaled = [
            (term.astype(np.float64) * weight).astype(np.float32)
            for term, weight in zip(terms[:3], weights, strict=False)
            if dtype != "complex64"
        ]
    axes, spec = (1, (None, "i")) if form == "columns" else (0, ("i",))
    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        rows = [terms[each] for each in order]
        grads = jax.device_put(np.stack(rows, axes), sharding(spec))
        if form == "trees":
            grads = on_each(jax, rows.__getitem__)
        calls = [
            (exact_sums(terms), {"op": SUM}),
            (exact_means(terms, float(N)), {}),
            (exact_means(scaled or terms, 4.1, terms[0].dtype),
             {"weights": [weights[each] for each in order]}),
        ]  # fmt: skip
        for wanted, options in calls[: 3 if scaled else 2]:
            found = gr.jax.all_reduce(grads, mesh=mesh, exact=True, **options)
            found = np.moveaxis(np.stack(found) if form == "trees" else np.asarray(found), axes, 0)
            for row in np.ascontiguousarray(found):
                assert same(row, wanted), (order, options)


def test_an_exact_sum_of_equal_copies_is_the_copy(jax, mesh, sharding):
    value = jax.device_put(np.complex64([complex(-0.0, -0.0), 1j]), sharding(()))
    found = gr.jax.all_reduce(value, SUM, mesh=mesh, replicated="once", exact=True)
    assert same(np.asarray(found), np.asarray(value))


@pytest.mark.parametrize("op", gr.ReduceOp)
def test_equal_copies_of_a_replicated_array_count_once(jax, mesh, sharding, sharded, op):
    tree = {
        "equal": jax.device_put(np.float32([1, 2, 3]), sharding(())),
        "rows": sharded("rows"),
        "numbers": jax.device_put(np.int32(5), sharding((), (2, 2))),
    }
    found = gr.jax.all_reduce(tree, op, mesh=mesh, replicated="once")
    assert values_of(found["equal"]).tolist() == [[1, 2, 3]] * N
    assert values_of(found["numbers"]).tolist() == [5] * N
    each = gr.jax.all_reduce(tree, op, mesh=mesh)
    assert same(np.asarray(found["rows"]), np.asarray(each["rows"]))
    times = N if op is SUM else 1
    assert values_of(each["equal"]).tolist() == [[times, 2 * times, 3 * times]] * N
    for name, array in tree.items():
        assert found[name].sharding == array.sharding
    trees = on_each(jax, lambda replica: np.float32(replica))
    totals = gr.jax.all_reduce(trees, SUM, mesh=mesh, replicated="once")
    assert [float(total) for total in totals] == [6] * N


def test_without_a_mesh_the_default_one_is_used(mesh, sharded, monkeypatch):
    monkeypatch.setattr("gradreduce.backends._default", [mesh])
    found, wanted = (
        gr.jax.all_reduce(sharded("rows")),
        gr.jax.all_reduce(sharded("rows"), mesh=mesh),
    )
    assert same(values_of(found), values_of(wanted))


def test_results_on_gpus_are_put_together(jax, sharded):
    like = sharded("columns")
    parts = on_each(jax, lambda replica: np.full((3, 2), replica, np.float32))
    made = gr.jax._like(like, (Results(parts), range(N)))
    assert (made.shape, made.sharding) == (like.shape, like.sharding)
    assert np.asarray(made).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert gr.jax._like(parts[2], (Results(parts), [2])).devices() == parts[2].devices()


# Errors -------------------------------------------------------------------------------------------


def test_a_traced_array_is_refused_in_one_line(jax, mesh):
    told = r"^grads\['w'\]: \w+ is traced by JAX and has no values yet: call this outside jax.jit"

    def traced(x):
        with pytest.raises(TypeError, match=told) as caught:
            gr.jax.all_reduce({"w": x}, mesh=mesh)
        assert "\n" not in str(caught.value)
        return x.sum()

    for transform in (jax.jit, jax.grad, jax.vmap, jax.pmap, jax.eval_shape):
        x = jax.numpy.ones((4, 3))
        (jax.eval_shape(traced, x) if transform is jax.eval_shape else transform(traced)(x))


def test_a_leaf_that_cannot_be_reduced_is_named(jax, mesh, sharded, sharding):
    deleted = sharded("rows")
    deleted.delete()
    wrong = {
        r"ndarray is not a jax.Array: pass jax.numpy.asarray": (np.ones(3), TypeError),
        r"float is not a jax.Array": (1.0, TypeError),
        r"the JAX array was deleted or donated": (deleted, ValueError),
        r"dtype bool cannot be added": (sharded("rows").astype(bool), TypeError),
        r"the array has 1 shard\(s\) in this process, but <Mesh .*> has 4 device\(s\): pass "
        r"mesh=gr.open_mesh\(1, backend='sim'\)": (jax.numpy.ones(3), ValueError),
        r"the array is replicated over some of its devices, .*'j'": (
            jax.device_put(np.ones((4, 3)), sharding(("j",), (2, 2))), ValueError,
        ),
        r"JAX array with PRNGKey dtype cannot be converted": (
            jax.device_put(jax.random.key(0), sharding(())), TypeError,
        ),
    }  # fmt: skip
    for told, (leaf, error) in wrong.items():
        with mesh.journal() as journal, pytest.raises(error, match=rf"^grads\['a\.1'\]: {told}"):
            gr.jax.all_reduce({"a": [sharded("rows"), leaf]}, mesh=mesh)
        assert journal.launches == 0


def test_trees_that_do_not_fit_are_named(jax, mesh):
    first, _, third, _ = jax.local_devices(backend="cpu")

    def trees(**changed):
        made = on_each(jax, lambda r: {"w": [np.ones(3, np.float32)], "b": np.float32(r)})
        made[2] |= changed
        return made

    same_place = trees()
    same_place[2] = jax.device_put(same_place[2], first)
    other_key = trees()
    other_key[2]["c"] = other_key[2].pop("b")
    of_each = "that are each on one JAX device"
    cases = {
        r"grads\[2\] has another structure than grads\[0\]: it lacks 'b' and it has also 'c'$":
            other_key,
        r"grads\[2\] has another structure .*: it lacks 'b'$": trees(b=None),
        r"grads\[2\] has another structure .*: it is PyTreeDef.*, not PyTree":
            trees(w=(trees()[2]["w"][0],)),
        r"grads\[2\]\['w\.0'\] is float32\[4\], grads\[0\]\['w\.0'\] is float32\[3\]; replicas":
            trees(w=[jax.device_put(np.ones(4, np.float32), third)]),
        r"grads\[2\]\['b'\] is int32\[\], grads\[0\]\['b'\] is float32\[\]; replicas must":
            trees(b=jax.device_put(np.int32(1), third)),
        r"grads\[2\] is on several JAX devices \('b' on cpu:0, 'w\.0' on cpu:2\): put":
            trees(b=jax.device_put(np.float32(1), first)),
        r"the trees of grads are on cpu:0, cpu:1, cpu:0, cpu:3, but <Mesh sim \[0, 1, 2, 3\]> has":
            same_place,
        rf"grads is a list of 3 entries {of_each}": trees()[:3],
        rf"grads is a dict of arrays {of_each}": trees()[0],
        rf"grads is a Four of 4 entries {of_each}": Four(*trees()),
    }  # fmt: skip
    for told, grads in cases.items():
        with mesh.journal() as journal, pytest.raises(ValueError, match=f"^{told}"):
            gr.jax.all_reduce(grads, mesh=mesh)
        assert journal.launches == 0


def test_wrong_arguments_are_named(jax, mesh, sharded, monkeypatch):
    with gr.open_mesh(N, backend="sim") as other:
        cases = {
            r"op='mean' must be ReduceOp": {"op": "mean"},
            r"mesh='sim' must be a Mesh": {"mesh": "sim"},
            r"cross_device_ops='nccl' must be a CrossDeviceOps": {"cross_device_ops": "nccl"},
            r"mesh=<Mesh .*> is not the mesh of cross_device_ops, <Mesh .*: pass one of the two": {
                "mesh": mesh, "cross_device_ops": gr.AllReduceCrossDeviceOps(mesh=other),
            },
            r"wire_dtype='float16' cannot be combined with cross_device_ops: pass it to that object"
            "$": {"wire_dtype": "float16", "cross_device_ops": gr.AllReduceCrossDeviceOps()},
            r"wire_dtype='int8' is not 'float16', 'bfloat16' or 'float32'$": {"wire_dtype": "int8"},
            r"exact=True cannot be combined with cross_device_ops: pass it to that object$": {
                "exact": True, "cross_device_ops": gr.AllReduceCrossDeviceOps(),
            },
            r"words=4 cannot be combined with cross_device_ops: pass it to that object$": {
                "words": 4, "cross_device_ops": gr.AllReduceCrossDeviceOps(exact=True),
            },
            r"words=4 is only for exact=True": {"words": 4},
            r"wire_dtype='float16' cannot be combined with exact=True": {
                "wire_dtype": "float16", "exact": True,
            },
            r"replicated=True is not one of \('each', 'once'\)$": {"replicated": True},
            r"replicated='all' is not one of \('each', 'once'\)$": {"replicated": "all"},
        }  # fmt: skip
        for told, options in cases.items():
            with pytest.raises(ValueError, match=f"^{told}"):
                gr.jax.all_reduce({"w": sharded("rows")}, **options)
    monkeypatch.setattr(mesh.mesh_state, "shares_host_memory", False)
    told = r"^grads\['w'\]: the array is on cpu:., but <Mesh .*open one with backend='sim'"
    with pytest.raises(gr.errors.DeviceMismatchError, match=told):
        gr.jax.all_reduce({"w": sharded("rows")}, mesh=mesh)


# Optax --------------------------------------------------------------------------------------------


@pytest.mark.repo
def test_both_scripts_of_the_docs_train_alike():
    text = (Path(__file__).parents[1] / "docs" / "jax.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "def train(" in block:
            names = {"__name__": "block"}
            exec(compile(block, "block", "exec"), names)
            found.append(names["train"](steps=30))
    before, after = found
    assert np.allclose(before["w"], after["w"], atol=1e-5)
    assert np.allclose(after["w"], 1, atol=0.1)


@pytest.fixture
def example(jax, tmp_path, monkeypatch, capsys):
    """Runs examples/train_jax.py in this process; returns exit status and the printed table."""
    # JAX has been used: the example changes what the environment says, but not the devices.
    for name, value in {"NO_COLOR": "1", "COLUMNS": "100", "XLA_FLAGS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("train_jax")

    def train(*flags):
        status = script.main(list(flags))
        text = capsys.readouterr().out
        assert "100%" in text
        return status, rows_of(text)

    return train


@pytest.mark.repo
def test_the_example_learns_and_says_whether_it_has_reached_the_goal(example, capsys):
    status, rows = example("--devices", "2", "--steps", "80")
    assert float(rows["test accuracy"]) > 0.85
    assert status == (float(rows["test accuracy"]) < 0.95)
    assert Path("train_jax.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        example("--devices", "5")
    assert "--devices: got 5, but JAX has 4; allowed: 1 to 64" in capsys.readouterr().err


@pytest.mark.repo
@pytest.mark.mpi
@pytest.mark.exhaustive
def test_the_example_reaches_the_goal_and_computes_the_same_in_two_processes(example):
    script = str(Path(__file__).parents[1] / "examples" / "train_jax.py")
    status, rows = example()
    assert (status, float(rows["test accuracy"]) >= 0.95) == (0, True)
    done = run("mpi", 2, script, "--devices", "2")
    assert done.returncode == 0, done.text
    assert rows_of(done.text)["digest of the weights"] == rows["digest of the weights"]


def test_no_call_compiles_after_its_first_launch(jax, sharded):
    def calls(mesh):
        for dtype in ("bfloat16", "float32", "int8"):
            for op in (SUM, gr.ReduceOp.MEAN):
                gr.jax.all_reduce({"w": sharded("rows", dtype)}, op, mesh=mesh)
                yield

    with gr.open_mesh(N, backend="sim") as mesh:
        check_compiled_first(mesh, calls)


def test_weights_are_those_of_the_devices(jax, mesh):
    grads = [
        {"w": jax.device_put(np.full(3, index + 1, "float32"), device)}
        for index, device in enumerate(jax.local_devices(backend="cpu"))
    ]
    found = gr.jax.all_reduce(grads, mesh=mesh, weights=[4, 2, 1, 1])
    assert all(each["w"].tolist() == [15 / 8] * 3 for each in found)
    rows = jax.pmap(lambda x: x)(np.arange(4, dtype="float32")[:, None])
    assert gr.jax.all_reduce(rows, SUM, mesh=mesh, weights=[4, 2, 1, 0]).tolist() == [[4]] * 4
    with pytest.raises(ValueError) as caught:
        gr.jax.all_reduce(rows, SUM, mesh=mesh, replicated="once", weights=[1, 1, 1, 1])
    assert str(caught.value) == "weights cannot be combined with a SUM of replicated='once'"
