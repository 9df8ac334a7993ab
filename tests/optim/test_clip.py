"""clip_by_global_norm: TensorFlow's formula, on arrays of every kind, alone and mirrored."""

import numpy as np
import pytest
from support.exact_data import exact_data, random_data, same

import gradreduce as gr


def clipped(arrays, limit, norm=None):
    if norm is None:
        norm = np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays))
    factor = limit * min(1 / norm if norm else np.inf, 1 / limit)
    return [(array.astype(np.float64) * factor) for array in arrays], norm


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_the_norm_of_all_is_what_was_wanted(mesh, dtype, limit):
    shapes = [(3, 7), (), (257,), (0, 2)]
    arrays = [np.asarray(exact_data(shape, dtype, num_terms=64)) for shape in shapes]
    buffers = [mesh.devices[1].put(array) for array in arrays]
    found, norm = gr.clip_by_global_norm([None, *buffers], limit)
    wanted, total = clipped(arrays, limit)
    bound = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    assert found[0] is None
    assert np.allclose(norm.numpy(), total, rtol=max(1e-7, bound * 1e-4), atol=0)
    assert (norm.shape, norm.device) == ((), mesh.devices[1])
    for made, array, value in zip(found[1:], arrays, wanted, strict=True):
        assert (made.shape, made.dtype) == (array.shape, array.dtype)
        assert np.allclose(made.numpy(), value, rtol=bound, atol=0)
    assert all(same(buffer.numpy(), array) for buffer, array in zip(buffers, arrays, strict=True))


def test_arrays_lists_and_rows_keep_their_types(mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.arrays.replica_context.default_mesh", lambda: mesh)
    rows = gr.IndexedSlices(np.full((3, 2), 2, "float32"), [4, 1, 4], (6, 2))
    (array, sparse), norm = gr.clip_by_global_norm((np.full(5, 1, "float32"), rows), 1.0)
    assert np.allclose(norm, np.sqrt(5 + 24))  # rows of one index are not added
    assert isinstance(array, np.ndarray)
    assert np.allclose(array, 1 / np.sqrt(29), rtol=1e-6)
    assert (sparse.indices.tolist(), sparse.dense_shape) == ([4, 1, 4], (6, 2))
    assert np.allclose(sparse.values, 2 / np.sqrt(29), rtol=1e-6)
    made, _ = gr.clip_by_global_norm([np.ones(2, "float32")], 1.0, output_type="buffer")
    assert isinstance(made[0], gr.Buffer)


def test_mirrored_gradients_are_clipped_on_their_devices_to_the_same_bits(mesh):
    arrays = [random_data((40,), "float32"), np.ones((2, 3), "float32")]
    arrays[0] = np.nan_to_num(arrays[0], posinf=1, neginf=1)
    given = [gr.Mirrored([array] * len(mesh), mesh) for array in arrays]
    found, norm = gr.clip_by_global_norm(given, 2.0)
    assert norm.devices == found[0].devices == mesh.devices
    for each in (norm, *found):
        assert all(same(part.numpy(), each.parts[0].numpy()) for part in each.parts)
    alone, _ = gr.clip_by_global_norm([mesh.devices[0].put(array) for array in arrays], 2.0)
    for each, one in zip(found, alone, strict=True):
        assert same(each.parts[0].numpy(), one.numpy())
    optimizer = gr.GradientDescentOptimizer(1.0)
    variables = [gr.Variable(np.zeros_like(array), device=mesh) for array in arrays]
    optimizer.apply_gradients(zip(found, variables, strict=True))
    assert all((var.numpy() == -each.parts[0].numpy()).all()
               for var, each in zip(variables, found, strict=True))  # fmt: skip


def test_launches_do_not_grow_with_the_number_of_tensors(mesh):
    device = mesh.devices[0]
    for number in (1, 60, 260):
        given = [device.put(np.ones(9, "float32")) for _ in range(number)]
        gr.clip_by_global_norm(given, 1.0)
        with mesh.journal() as journal:
            gr.clip_by_global_norm(given, 1.0)
        names = [record.name for record in journal.of("launch")]
        extra = ["square_sum"] if number > 256 else []
        assert names == [*["square_sum"] * 3, *extra, "clip", "pack"]
        assert (journal.syncs, journal.copies) == (0, 0)


def test_use_norm_is_used_and_must_be_a_number(mesh):
    given = [mesh.devices[0].put(np.array([3, 4], "float32"))]
    for own in (10, np.float32(10), mesh.devices[0].put(np.array(10.0))):
        (made,), norm = gr.clip_by_global_norm(given, 5.0, use_norm=own)
        assert (made.numpy().tolist(), float(norm.numpy())) == ([1.5, 2.0], 10.0)
    for wrong in (np.inf, np.nan):
        given = [mesh.devices[0].put(np.array(values, "float32")) for values in ([1], [wrong, 1])]
        found, norm = gr.clip_by_global_norm(given, 5.0)
        assert not np.isfinite(norm.numpy())
        assert all(np.isnan(each.numpy()).all() for each in found)
    zero = [mesh.devices[0].put(np.zeros(3, "float32"))]
    found, norm = gr.clip_by_global_norm(zero, 5.0)
    assert (found[0].numpy().tolist(), float(norm.numpy())) == ([0.0] * 3, 0.0)
    assert gr.clip_by_global_norm([None], 5.0) == ([None], 0.0)


def test_what_is_no_list_of_gradients_is_refused(mesh):
    one = mesh.devices[0].put(np.ones(3, "float32"))
    mirrored = gr.Mirrored([np.ones(3, "float32")] * len(mesh), mesh)
    part = gr.Mirrored([np.ones(3, "float32")], devices=mesh.devices[:1])
    for given, limit, error, match in [
        (one, 1.0, TypeError, "list or tuple"),
        ([one], 0, ValueError, "above 0"),
        ([one], float("nan"), ValueError, "above 0"),
        ([mesh.devices[0].put(np.ones(3, "int32"))], 1.0, ValueError, "float dtype"),
        ([gr.PerReplica([np.ones(3)] * len(mesh), mesh)], 1.0, TypeError, "reduce it first"),
        ([mirrored, one], 1.0, TypeError, "all or none"),
        ([mirrored, part], 1.0, ValueError, "different devices"),
    ]:
        with mesh.journal() as journal, pytest.raises(error, match=match):
            gr.clip_by_global_norm(given, limit)
        assert journal.launches == 0
