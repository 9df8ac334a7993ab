"""PyTorch's and JAX's own arrays through conversion and every public call, on the CPU."""

import importlib

import numpy as np
import pytest
from support.exact_data import exact_data, same
from support.libraries import jax, torch
from support.meshes import mesh_of

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, kind_of, to_buffer
from gradreduce.device import as_dtype

TORCH = pytest.param("torch", marks=pytest.mark.torch)
JAX = pytest.param("jax", marks=pytest.mark.jax)
SHAPES = [(), (1,), (0,), (3, 5), (2, 0, 3), (1000,)]


mesh = mesh_of(2, scope="module", strict=True)


@pytest.fixture
def device(mesh):
    return mesh.devices[1]


class Library:
    """Conversions between NumPy and a library, by the library's own functions."""

    def __init__(self, name):
        self.name = name
        self.module = importlib.import_module("jax.numpy" if name == "jax" else name)

    def dtypes(self):
        common = ["float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32", "complex64"]
        wide = ["float64", "int64", "complex128"]  # JAX has these only in x64 mode
        return common + (wide if self.name == "torch" else [])

    def array(self, array):
        if self.name == "jax":
            return self.module.asarray(array)
        if array.dtype == as_dtype("bfloat16"):
            return self.module.from_numpy(array.view(np.int16).copy()).view(self.module.bfloat16)
        return self.module.from_numpy(array.copy())

    def numpy(self, array):
        if self.name == "torch" and array.dtype is self.module.bfloat16:
            return array.view(self.module.int16).numpy().view(as_dtype("bfloat16"))
        return np.asarray(array)

    def address(self, array):
        return array.data_ptr() if self.name == "torch" else array.unsafe_buffer_pointer()


@pytest.fixture(params=[TORCH, JAX])
def library(request):
    return Library(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_round_trip_keeps_shape_dtype_values_and_memory(library, device, shape):
    for dtype in library.dtypes():
        values = np.asarray(exact_data(shape, as_dtype(dtype)))
        theirs = library.array(values)
        assert kind_of(theirs) == library.name
        buffer = to_buffer(theirs, device)
        assert (buffer.shape, buffer.dtype, buffer.device) == (shape, as_dtype(dtype), device)
        assert same(buffer.numpy(), values)
        own = device.upload(values)
        back = from_buffer(own, library.name)
        assert (kind_of(back), tuple(back.shape)) == (library.name, shape)
        assert same(library.numpy(back), values)
        if values.size:
            assert buffer.address == library.address(theirs), dtype
            shared = library.address(back) == own.address
            assert shared == (library.name == "torch" or dtype != "bfloat16"), dtype


def test_a_returned_array_keeps_its_memory(library, device):
    own = device.upload(np.full(5000, 3, np.float32))
    theirs = from_buffer(own, library.name)
    del own
    for _ in range(3):
        device.upload(np.full(5000, 9, np.float32))
    assert (library.numpy(theirs) == 3).all()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_that_are_no_plain_arrays(device):
    needing = torch.zeros(3, requires_grad=True)
    for tensor, error, text in [
        (needing, ValueError, r"pass tensor\.detach\(\)"),
        (torch.nn.Parameter(torch.zeros(3)), ValueError, r"pass tensor\.detach\(\)"),
        (torch.eye(3).to_sparse_csr(), TypeError, r"layout torch\.sparse_csr is not an array: p"),
        (torch.zeros(3, dtype=torch.bool), TypeError, "cannot be added"),
        (torch.zeros(3, device="meta"), gr.errors.DeviceMismatchError, "the tensor is on meta"),
    ]:
        with pytest.raises(error, match=text):
            to_buffer(tensor, device)
    assert to_buffer(needing.detach(), device).address == needing.data_ptr()
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert same(to_buffer(conjugate, device).numpy(), np.array([1 - 2j, 3 + 1j], np.complex64))
    tensor = torch.arange(12.0).reshape(3, 4).T
    buffer = to_buffer(tensor, device)
    assert buffer.block.owned
    assert same(buffer.numpy(), np.arange(12, dtype=np.float32).reshape(3, 4).T)
    assert tensor.stride() == (1, 4)
    with pytest.raises(TypeError, match="bool cannot be added"):
        gr.IndexedSlices(torch.zeros(3, dtype=torch.bool), [0, 1, 2])
    with pytest.raises(TypeError, match="indices must be integers, got bool"):
        gr.IndexedSlices(torch.zeros(3), torch.tensor([True, False, True]))
    rows = gr.IndexedSlices(needing, [0, 1, 2], torch.Size([3]))
    with pytest.raises(ValueError, match=r"pass tensor\.detach\(\)"):
        rows.to_dense()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values_in_memory_are_refused_with_our_message(mesh):
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    parts, plain = [torch.ones(2), torch.ones(3)], torch.ones(3)
    with fake.FakeTensorMode():
        faked = torch.ones(3)
    other = type("Scaled", (torch.Tensor,), {})
    accumulator = gr.ConditionalAccumulator("float32", device=mesh)
    for given, told in (
        (plain.as_subclass(type("DTensor", (torch.Tensor,), {})), r"pass .to_local\(\)$"),
        (plain.as_subclass(other), r"Scaled is a subclass .* pass a plain tensor"),
        (faked, "FakeTensor has no values: call this outside FakeTensorMode"),
        (torch.nested.nested_tensor(parts), "nested tensors are not arrays: pass"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "nested tensors"),
    ):
        with pytest.raises(TypeError, match=rf"^grads\[1\]\['w'\]: .*{told}"):
            gr.all_reduce([{"w": plain}, {"w": given}], mesh=mesh)
        with pytest.raises(TypeError, match=rf"^out\[0\]\[0\]: .*{told}"):
            gr.all_reduce([[plain], [plain]], mesh=mesh, out=[[given], [plain]])
        for call in (
            lambda given=given: gr.IndexedSlices(given, [0, 1, 2]),
            lambda given=given: gr.IndexedSlices(plain, given),
            lambda given=given: accumulator.apply_grad(given),
        ):
            with pytest.raises(TypeError, match=told):
                call()

    def mapped(x):
        with pytest.raises(TypeError, match="cannot be read as an array: PyTorch says"):
            gr.all_reduce([[x], [x]], mesh=mesh)
        return x

    torch.func.vmap(mapped)(torch.ones(2, 3))
    for kept in (torch.nn.Parameter(plain, requires_grad=False), torch.nn.Buffer(plain)):
        assert to_buffer(kept, mesh.devices[0]).address == plain.data_ptr()


def test_booleans_are_broadcast(mesh, library):
    mask = np.array([[True, False, True], [False, False, True]])
    (found,) = gr.AllReduceCrossDeviceOps(mesh=mesh).broadcast(library.array(mask), mesh[1]).values
    assert kind_of(found) == library.name
    assert same(np.asarray(found), mask)


@pytest.mark.jax
def test_what_jax_copies_of_host_memory_stays_on_the_cpu(device, monkeypatch):
    seen, make = [], jax.numpy.asarray

    def watched(array):
        seen.append(jax.config.jax_default_device.platform)
        return make(array)

    monkeypatch.setattr(jax.numpy, "asarray", watched)
    with jax.default_device(None):
        from_buffer(device.upload(np.zeros(3, as_dtype("bfloat16"))), "jax")
    assert seen == ["cpu"]


@pytest.mark.jax
def test_jax_arrays_are_read_only_and_refused_without_values(device):
    def traced(x):
        for call in (
            lambda: to_buffer(x, device),
            lambda: gr.IndexedSlices(np.ones(3), x),
            lambda: gr.all_reduce([[x], [x]], mesh=device.mesh),
        ):
            with pytest.raises(TypeError, match="traced by JAX and has no values yet: call this o"):
                call()
        return x

    theirs = Library("jax").array(np.zeros(3, np.float32))
    jax.jit(traced)(theirs)
    buffer = to_buffer(theirs, device)
    assert not buffer.block.writable
    with pytest.raises(ValueError, match="read-only"):
        device.upload(np.ones(3, np.float32), out=buffer)
    assert same(np.asarray(from_buffer(buffer, "jax")), np.zeros(3, np.float32))
    good, donated = terms(Library("jax"), (1, 2))
    donated.delete()
    told = r"^grads\[1\]\['w'\]: the JAX array was deleted or donated: 'Array has been deleted"
    with pytest.raises(ValueError, match=told):
        gr.all_reduce([{"w": good}, {"w": donated}], mesh=device.mesh)


def test_other_objects_of_a_library_are_refused_with_our_message(library, mesh):
    module, good = library.module, library.array(np.zeros(3, np.float32))
    if library.name == "jax":
        odd = [jax.ShapeDtypeStruct((3,), np.float32), jax.jit(lambda x: x), module.float32]
    else:
        odd = [module.float32, good.untyped_storage(), module.nn.ReLU()]
    for each in odd:
        named = rf"{type(each).__name__} is not an array, a list of numbers or a Buffer"
        for call in (
            lambda each=each: to_buffer(each, mesh.devices[0]),
            lambda each=each: gr.IndexedSlices(each, [0, 1, 2]),
            lambda each=each: gr.Variable(each, device=mesh),
        ):
            with pytest.raises(TypeError, match=f"^{named}$"):
                call()
        if library.name == "torch" and isinstance(each, module.nn.Module):
            continue  # a dict of the gradients of its parameters
        with pytest.raises(TypeError, match=rf"^grads\[1\]\['w'\]: {named}$"):
            gr.all_reduce([{"w": good}, {"w": each}], mesh=mesh)


def terms(library, seeds=(1, 2, 3)):
    return [library.array(np.full((2, 3), seed, np.float32)) for seed in seeds]


def test_results_have_the_type_of_the_first_array(library, mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.backends._default", [mesh])
    inputs, two = terms(library), np.full((2, 3), 2, np.float32)
    for result in (
        gr.add_n(inputs),
        gr.accumulate_n(inputs),
        gr.aggregate(inputs, 1),
        gr.add_n([inputs[0], two, inputs[2]]),
        gr.add_n([two, two, two], output_type=library.name),
    ):
        assert kind_of(result) == library.name
        assert same(library.numpy(result), 3 * two)
    assert isinstance(gr.add_n(inputs, output_type="numpy"), np.ndarray)
    assert isinstance(gr.add_n(inputs, output_type="buffer"), gr.Buffer)
    accumulator = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
    accumulator.apply_grad(inputs[0])
    accumulator.apply_grad(3 * np.ones((2, 3), np.float32))
    mean = accumulator.take_grad(2)
    assert kind_of(mean) == library.name
    assert same(library.numpy(mean), two)
    accumulator.apply_grad(two, local_step=1)
    assert isinstance(accumulator.take_grad(1), np.ndarray)  # the next sum has a new type
    accumulator.apply_grad(inputs[0], local_step=2)
    assert isinstance(accumulator.take_grad(1, output_type="numpy"), np.ndarray)


def test_an_all_reduce_returns_the_same_nesting(library, mesh):
    grads = [{"w": term, "b": term[0]} for term in terms(library, (1, 3))]
    for ops in (gr.HierarchicalCopyAllReduce(mesh=mesh), gr.NcclAllReduce(mesh=mesh)):
        for entry in ops.all_reduce(grads):
            assert list(entry) == ["w", "b"]
            assert kind_of(entry["w"]) == library.name
            assert same(library.numpy(entry["w"]), np.full((2, 3), 2, np.float32))
        assert isinstance(ops.all_reduce(grads, output_type="numpy")[0]["b"], np.ndarray)
    value = gr.PerReplica(terms(library, (1, 3)), mesh)
    reduced = gr.NcclAllReduce().reduce(gr.ReduceOp.SUM, value, value)
    assert kind_of(reduced.primary) == library.name
    as_numpy = gr.NcclAllReduce().reduce(gr.ReduceOp.SUM, value, value, output_type="numpy")
    assert isinstance(as_numpy.primary, np.ndarray)
    variable = gr.Variable(terms(library)[0], device=mesh)
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    step = gr.SyncStep([variable], gr.GradientDescentOptimizer(0.5), ops)
    assert step([[terms(library)], [terms(library, (2, 2, 6))]])
    assert same(variable.numpy(), np.full((2, 3), 1 - 0.5 * 8, np.float32))


def test_sparse_rows_keep_their_array_type(library, mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.backends._default", [mesh])
    indices = library.array(np.array([2, 0, 2], np.int32))
    for dtype in library.dtypes():
        values = np.arange(6).reshape(3, 2).astype(as_dtype(dtype))
        slices = gr.IndexedSlices(library.array(values), indices, (4, 2))
        assert (slices.dtype, slices.kind) == (as_dtype(dtype), library.name)
        assert slices.indices.tolist() == [2, 0, 2]
        merged, dense = slices.coalesce(), slices.to_dense()
        assert kind_of(merged.values) == kind_of(dense) == library.name
        assert same(library.numpy(merged.values), np.array([[2, 3], [4, 6]], values.dtype))
        expected = np.array([[2, 3], [0, 0], [4, 6], [0, 0]], values.dtype)
        assert same(library.numpy(dense), expected)
        assert isinstance(slices.to_dense(output_type="numpy"), np.ndarray)
        joined = gr.aggregate([slices, slices.coalesce()])
        assert joined.kind == library.name
        assert joined.indices.tolist() == [2, 0, 2, 0, 2]
        assert kind_of(gr.aggregate([slices, dense])) == kind_of(gr.add_n([slices])) == library.name
    shape = library.array(np.array([4, 2], np.int32))
    assert gr.IndexedSlices(library.array(values), indices, shape).dense_shape == (4, 2)
    for wrong in ("float32", "bfloat16"):
        with pytest.raises(TypeError, match="indices must be integers"):
            gr.IndexedSlices(values, library.array(np.zeros(3, as_dtype(wrong))))


@pytest.mark.torch
def test_sparse_coo_tensors_of_one_dimension_or_that_have_no_rows(mesh):
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    vector = coo_tensor([[3, 1]], torch.tensor([1.0, 2]), (5,))
    (total,) = ops.all_reduce([[vector], [vector]], gr.ReduceOp.SUM)[0]
    assert total.to_dense().tolist() == [0, 4, 0, 2, 0]
    whole = torch.eye(3).to_sparse()
    text = r"^grads\[0\]\['w'\]: .*sparse_dim 2 has no rows; pass one"
    with pytest.raises(ValueError, match=text):
        ops.all_reduce([{"w": whole}, {"w": whole}])
    with pytest.raises(ValueError, match=r"the tensor requires grad: pass tensor.detach"):
        ops.all_reduce([[vector.requires_grad_()], [vector]])
    fixed = np.ones(3, np.float32)
    fixed.flags.writeable = False
    gr.PerReplica([torch.ones(3), fixed], mesh).values[1].add_(1)
    assert fixed.tolist() == [1, 1, 1]  # a tensor never shares read-only memory


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_last_tensors_stay_so(mesh, dtype):
    tensors = [
        torch.arange(120).reshape(2, 3, 4, 5).to(getattr(torch, dtype)).add(replica)
        for replica in range(2)
    ]
    last = [each.contiguous(memory_format=torch.channels_last) for each in tensors]
    wanted = (tensors[0] + tensors[1]) / 2
    for given in (last, [last[0], tensors[1]], [tensors[0], last[1]]):
        out = [[torch.empty_like(each)] for each in given]
        in_place = [[each.clone()] for each in given]
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        ops.all_reduce([[each] for each in given], out=out)
        ops.all_reduce(in_place, out=in_place)
        found = ops.all_reduce([[each] for each in given])
        for row in (out, in_place, found):
            assert all(torch.equal(each, wanted) for (each,) in row)
        for row in (out, in_place):
            assert [each.stride() for (each,) in row] == [each.stride() for each in given]
        kept = found[0][0].is_contiguous(memory_format=torch.channels_last)
        assert kept == (given is last)


def coo_tensor(indices, rows, shape):
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, rows, shape)


def coo_rows():
    return coo_tensor([[2, 0, 2]], torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (4, 2))


@pytest.mark.torch
def test_sparse_coo_tensors_are_returned_as_sparse_coo_tensors(mesh, monkeypatch):
    coo = [coo_rows(), coo_tensor([[0]], torch.tensor([[10.0, 20]]), (4, 2)).coalesce()]
    monkeypatch.delattr(torch, "sparse_coo_tensor")  # it always warns in PyTorch 2.11
    wanted = coo[0].to_dense() + coo[1].to_dense()
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    for coalesce in (False, True):
        found = ops.all_reduce([{"w": each} for each in coo], gr.ReduceOp.SUM, coalesce=coalesce)
        for entry in found:
            assert entry["w"].layout is torch.sparse_coo
            assert entry["w"].is_coalesced() == coalesce
            assert entry["w"].shape == (4, 2)
            assert torch.equal(entry["w"].to_dense(), wanted)
    mean = ops.all_reduce([[each] for each in coo], output_type="torch")[1][0]
    assert torch.equal(mean.to_dense(), wanted / 2)
    slices = ops.all_reduce([[each] for each in coo], output_type="numpy")[0][0]
    assert isinstance(slices, gr.IndexedSlices)
    assert isinstance(slices.values, np.ndarray)
    assert torch.equal(gr.PerReplica(coo, mesh)[0].to_dense(), coo[0].to_dense())
    dense = ops.all_reduce([[coo[0]], [coo[1].to_dense()]], gr.ReduceOp.SUM)[0][0]
    assert torch.equal(dense, wanted)
    copied = ops.broadcast(coo[0], mesh)[1]
    assert copied.layout is torch.sparse_coo
    assert torch.equal(copied.to_dense(), coo[0].to_dense())
    (alone,) = ops.batch_reduce(gr.ReduceOp.SUM, [(coo[0], mesh)], coalesce=True)
    assert torch.equal(alone[1].to_dense(), coo[0].to_dense())


@pytest.mark.torch
def test_optimizers_and_sums_take_sparse_coo_tensors(mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.backends._default", [mesh])
    rows, whole = coo_rows(), coo_rows().to_dense()
    variable = gr.Variable(np.zeros((4, 2)), dtype="float32", device=mesh, name="table")
    gr.GradientDescentOptimizer(1.0).apply_gradients([(rows, variable)])
    assert (variable.numpy() == -whole.numpy()).all()
    with pytest.raises(ValueError, match=r"the gradient of <Variable 'table' .*sparse_dim 2 has"):
        gr.GradientDescentOptimizer(1.0).apply_gradients([(torch.eye(4).to_sparse(), variable)])
    for terms, factor in (([rows], 1), ([rows, rows.coalesce(), None], 2), (iter([rows] * 3), 3)):
        total = gr.aggregate(terms)
        assert total.layout is torch.sparse_coo
        assert torch.equal(total.to_dense(), factor * whole)
    assert torch.equal(gr.aggregate([rows, whole]), 2 * whole)
    assert torch.equal(gr.add_n([rows, rows]), 2 * whole)


@pytest.mark.torch
@pytest.mark.parametrize("over_mesh", [False, True])
def test_a_sparse_accumulator_returns_sparse_coo_tensors(mesh, over_mesh):
    rows, whole = coo_rows(), coo_rows().to_dense()
    place = {"device": mesh if over_mesh else mesh.devices[1]}

    def first(value):
        return value.primary if over_mesh else value

    accumulator, again, parts = (
        gr.SparseConditionalAccumulator("float32", (4, 2), reduction_type="SUM", **place)
        for _ in range(3)
    )
    dense = gr.ConditionalAccumulator("float32", (4, 2), **place)
    assert gr.apply_grads([accumulator, dense, parts], [rows] * 3)
    given = gr.PerReplica([rows, rows], mesh) if over_mesh else rows
    accumulator.apply_indexed_slices_grad(given)
    again.load_state_dict(accumulator.state_dict())
    for each in (accumulator, again):
        taken = first(each.take_indexed_slices_grad(2))
        assert taken.is_coalesced()
        assert torch.equal(taken.to_dense(), (3 if over_mesh else 2) * whole)
    assert torch.equal(first(dense.take_grad(1)), whole)
    indices, values, shape = parts.take_grad(1)
    assert (indices.tolist(), shape) == ([0, 2], (4, 2))
    assert first(values).tolist() == [[3, 4], [6, 8]]
    assert not accumulator.apply_indexed_slices_grad(rows, local_step=0)  # dropped
    why = r"^grads\[1\], for accumulator 'conditional_accumulator': .* with sparse_dim 2 has no ro"
    with pytest.raises(ValueError, match=why):
        gr.apply_grads([accumulator, dense], [rows, torch.eye(4).to_sparse()], 3)
