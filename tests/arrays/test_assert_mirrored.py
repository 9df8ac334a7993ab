"""assert_mirrored: names the first tensor whose copies differ, on devices and in processes."""

import numpy as np
import pytest
from support.thread_group import run_replicas

import gradreduce as gr

SHAPES = {"w": (50, 41), "b": (7,), "s": (), "e": (0, 3)}
DTYPES = ("float16", "bfloat16", "float32", "float64")
# of one copy each: the tensor, the replica, and the place in it; and how the error says where
CHANGES = [(2, 1, 0), (1, 2, 3), (0, 2, 2049), (0, 1, 1030)]
PLACES = ["'s'", "'b'[3]", "'w'[49, 40]", "'w'[25, 5]"]


def make(mesh, dtype="float32"):
    return [
        gr.Variable(np.full(shape, 0.5), name, dtype=dtype, device=mesh)
        for name, shape in SHAPES.items()
    ]


def error_of(values, *mesh):
    """The text of the error that ``assert_mirrored`` raises."""
    with pytest.raises(AssertionError) as error:
        gr.assert_mirrored(values, *mesh)
    return str(error.value)


def change(variable, replica, place, value):
    """Writes to one copy only."""
    array = variable.buffers[replica].numpy()
    array.reshape(-1)[place] = value
    device = variable.buffers[replica].device
    device.copy(variable.buffers[replica], device.upload(array))


def test_bits_are_compared_but_those_of_nan():
    with gr.open_mesh(2, backend="sim") as mesh:
        arrays = np.array([[0x7FC00000, 0], [0x7FC00001, 0]], np.uint32).view(np.float32)
        gr.assert_mirrored(gr.PerReplica(list(arrays), mesh))
        arrays[1, 1] = -0.0
        values = [gr.Mirrored([arrays[0]] * 2, mesh), gr.PerReplica(list(arrays), mesh)]
        text = "'values[1]'[1] differs: 0.0 in replica 0, -0.0 in replica 1"
        assert error_of(values) == text
        for values in ([2**40, 2**40 + 1], [1 + 2j, 1 + 3j]):
            pair = [np.array([value]) for value in values]
            text = f"[0] differs: {pair[0][0]} in replica 0, {pair[1][0]} in replica 1"
            assert error_of(gr.PerReplica(pair, mesh)) == "'values[0]'" + text


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(3,), (1, 1, 1), (1, 3)], ids=str)
def test_the_first_difference_is_named_in_all_processes(counts, dtype):
    def work(mesh, replicas):
        variables, texts = make(mesh, dtype), []
        gr.assert_mirrored(variables)
        gr.assert_mirrored(variables[0])
        for index, replica, place in CHANGES:
            if replica in replicas:
                change(variables[index], replica - replicas.start, place, 0.25)
            texts.append(error_of(variables))
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)  # the mesh is still usable
        assert ops.all_reduce([[np.ones(2)] for _ in mesh])[0][0].tolist() == [1.0, 1.0]
        return texts

    several = len(counts) > 1

    def named(replica):
        return f"replica {replica}" + f" (process {min(replica, len(counts) - 1)})" * several

    wanted = [
        f"{at} differs: 0.5 in {named(0)}, 0.25 in {named(replica)}"
        for (_, replica, _), at in zip(CHANGES, PLACES, strict=True)
    ]
    found = run_replicas(counts, work, placement=None if several else (0, 1, 1))
    assert found == [wanted] * len(counts)


def test_different_tensors_of_processes_are_reported():
    def work(mesh, replicas):
        rank, variables = mesh.process_index, make(mesh)
        fewer = error_of(variables[: 4 - rank])
        rows = gr.Variable(np.zeros((2 + rank, 3)), "rows", dtype="float32", device=mesh)
        # process 2 has fewer than both
        other = error_of([*variables[:1], rows, *variables[1:]][: 3 - rank])
        gr.assert_mirrored(variables)
        return fewer, other

    where = ["replica 0 (process 0)", "replica 1 (process 1)"]
    fewer = f"{where[0]} has 4 tensors, {where[1]} 3"
    other = f"'rows' (float32[2, 3]) in {where[0]} is 'rows' (float32[3, 3]) in {where[1]}"
    assert run_replicas((1, 1, 1), work) == [(fewer, other)] * 3


def test_what_cannot_be_compared():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable(np.ones(2), device=mesh)
        rows = gr.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
        for values, error, text in [
            ([], ValueError, "^values is empty; pass at least one$"),
            (3, TypeError, "^values=3 must be Variables, Mirrored values or PyTorch modules$"),
            ([variable, 3], TypeError, r"^values\[1\]=3 is not a Variable or Mirrored value$"),
            (gr.Mirrored([rows] * 2, mesh), TypeError, r"has IndexedSlices; pass \.to_dense\(\)$"),
            ([variable, gr.Variable(1.0, device=mesh[0])], ValueError, "numbers of copies"),
        ]:
            with pytest.raises(error, match=text):
                gr.assert_mirrored(values)
        with pytest.raises(TypeError, match=r"^mesh=3 must be a Mesh"):
            gr.assert_mirrored(variable, 3)
