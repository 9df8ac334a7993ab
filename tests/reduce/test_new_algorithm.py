"""A new all-reduce algorithm is one class: here one that adds everything on the first device."""

import pytest
from support.exact_data import exact_data, same

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import to_local
from gradreduce.reduce.algorithm import Algorithm
from gradreduce.reduce.algorithms import ALGORITHMS


class AddOnFirst(Algorithm):
    """Copies all inputs to the first device, adds them there, and copies the sum out."""

    in_place = False  # it allocates after its first copy

    def all_reduce(self, jobs, queue):
        first = self.devices[0]
        for job in jobs:
            terms = [to_local(first, each) for each in job.inputs]
            ops.all_sum([job.outs[:1]], [terms], divisor=job.divisor, device=first)
        yield
        for job in jobs:
            for out in job.outs[1:]:
                out.device.copy(out, job.outs[0])


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "toy", AddOnFirst)


@pytest.mark.parametrize("num_packs", [0, 1, 3])
@pytest.mark.parametrize("placement", [(0,), (0, 0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("schedule_seed", [None, 0, 7])
def test_the_pipeline_runs_it(num_packs, placement, schedule_seed):
    shapes = [(3, 2), (), (700,)]
    with gr.open_mesh(placement, backend="sim", schedule_seed=schedule_seed, strict=True) as mesh:
        reducer = gr.AllReduceCrossDeviceOps("toy", num_packs, mesh=mesh)
        grads = [
            [exact_data(shape, "float32", seed=10 * replica + index)
             for index, shape in enumerate(shapes)]
            for replica in range(len(mesh))
        ]  # fmt: skip
        expected = [sum(column) for column in zip(*grads, strict=True)]
        for results in reducer.all_reduce(grads, gr.ReduceOp.SUM):
            for result, wanted in zip(results, expected, strict=True):
                assert same(result, wanted)


@pytest.mark.parametrize("peer_access", [False, True])
def test_it_scatters_and_gathers_by_copies(peer_access):
    with gr.open_mesh((0, 0, 1), backend="sim", peer_access=peer_access, strict=True) as mesh:
        reducer = gr.AllReduceCrossDeviceOps("toy", mesh=mesh)
        grads = [[exact_data((6, 50), "float32", seed=replica)] for replica in range(3)]
        shares = reducer.reduce_scatter(grads, gr.ReduceOp.SUM)
        expected = sum(row[0] for row in grads)
        for index, (share,) in enumerate(shares):
            assert same(share, expected[2 * index : 2 * index + 2])
        for (whole,) in reducer.all_gather(shares):
            assert same(whole, expected)


def test_it_has_no_groups_unless_it_says_so():
    with pytest.raises(ValueError, match="'toy' chooses its own"):
        gr.AllReduceCrossDeviceOps("toy", reduction_groups=[[0], [1]])
