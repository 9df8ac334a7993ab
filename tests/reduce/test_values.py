"""One law for dense all-reduces: the bits are those that NumPy adds in the documented order.

The law is checked for plain calls, prepared steps and captured steps. Everything else is drawn:
the mesh, the order in which queues run, the tensors, where they are, and all options.
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import DTYPES, random_data, same
from support.exhaustive import examples
from support.meshes import PLACEMENTS, adopted, collective_sum, hierarchical_sum, owned

import gradreduce as gr
from gradreduce.device import accumulate_dtype, as_dtype, mean_dtype
from gradreduce.reduce import hierarchical_copy, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:agg_small_grads")  # with packs
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
WAYS = [
    ("nccl", "batch_reduce"),
    ("nccl", "prepare"),
    ("hierarchical_copy", "batch_reduce"),
    ("hierarchical_copy", "prepare"),
    ("hierarchical_copy", "capture"),
]
SHAPES = st.one_of(
    st.just(()), st.just((0, 4)), st.tuples(st.integers(0, 40)), st.just((70, 9)),
    st.tuples(st.integers(0, 5), st.integers(1, 7)),
)  # fmt: skip
PACKINGS = st.sampled_from(
    [(0,), (0,), (1,), (2,), (7,), (1000,), (0, 64, 2), (0, 10**6, 10), (1, 64, 2)]
)
ISLANDS = frozenset({(0, 1), (1, 0), (0, 2)})  # two with access to each other, one without


def array_on(_device, array: np.ndarray) -> np.ndarray:
    return array


PLACES = {
    "an array": array_on,
    "an adopted array": adopted,
    "a Buffer": owned,
    "an array of Fortran's order": lambda _device, array: np.array(array, order="F"),
    "an array of either order": lambda device, array: np.array(array, order="CF"[device.index % 2]),
}


@dataclass(frozen=True)
class Case:
    """A reduction, without its algorithm."""

    placement: tuple[int, ...]  # the physical device of each replica
    peers: bool | frozenset
    schedule: int | None
    tensors: list[tuple[tuple[int, ...], np.dtype]]
    place: str  # where the gradients are, of PLACES
    seed: int  # of the data
    op: gr.ReduceOp
    wire: str | None  # wire_dtype
    packing: tuple[int, ...]  # num_packs, and the limits of small gradients
    groups: list[list[int]] | None  # reduction_groups, for hierarchical_copy
    out: str  # where results are written
    small_slices: bool  # whether a few bytes are enough for a slice on each device
    stage_bytes: int

    def arrays(self, seed: int) -> list[list[np.ndarray]]:
        """``[tensor][replica]``."""
        return [
            [random_data(shape, dtype, seed=self.seed + seed + 100 * place + replica)
             for replica in range(len(self.placement))]
            for place, (shape, dtype) in enumerate(self.tensors)
        ]  # fmt: skip

    def out_dtype(self, dtype: np.dtype) -> np.dtype:
        return mean_dtype(dtype) if self.op is MEAN else dtype

    def total(self, algorithm: str, replicas: list[np.ndarray]) -> np.ndarray:
        """What NumPy computes."""
        dtype, count = replicas[0].dtype, len(replicas)
        divisor = count if self.op is MEAN else 1
        if dtype.kind in "iu":  # sums wrap, before the division too
            wide = self.out_dtype(dtype)
            total = np.asarray(np.sum(replicas, axis=0, dtype=dtype))
            return total if self.op is SUM else np.asarray(total.astype(wide) / wide.type(divisor))
        if self.wire is None or dtype.kind == "c":
            return self.summed(algorithm, replicas, divisor)
        wire = as_dtype(self.wire)
        early = divisor if wire.itemsize == 2 else 1  # before the cast, so that it cannot overflow
        terms = [cast(each, wire, early) for each in replicas]
        return cast(self.summed(algorithm, terms, divisor // early), dtype)

    def summed(self, algorithm: str, replicas: list[np.ndarray], divisor: int) -> np.ndarray:
        if algorithm == "nccl":
            return collective_sum(replicas, self.placement, divisor)
        return hierarchical_sum(replicas, divisor, reduction_groups=self.groups)


def cast(array: np.ndarray, dtype: np.dtype, divisor: int = 1) -> np.ndarray:
    """Casts like the pack kernel: divides in the accumulate type; double goes through float32."""
    with np.errstate(all="ignore"):
        if divisor != 1:
            wide = accumulate_dtype(array.dtype)
            array = array.astype(wide) / wide.type(divisor)
        if (array.itemsize, dtype.itemsize) == (8, 2):
            array = array.astype(np.float32)
        return array.astype(dtype)


@st.composite
def cases(draw) -> Case:
    placement = draw(
        st.one_of(
            st.sampled_from([*PLACEMENTS, (0, 1), (1, 0, 1), (0, 1, 2, 3)]),
            st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
        )
    )
    groups = None
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(placement))))
        cut = draw(st.integers(0, len(placement)))
        groups = draw(st.sampled_from([[order[:cut], order[cut:]], [[each] for each in order]]))
    few = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    dtypes = st.sampled_from(few)  # so that tensors are packed together
    return Case(
        placement=placement,
        peers=draw(st.sampled_from([True, True, False, ISLANDS])),
        schedule=draw(st.one_of(st.none(), st.integers(0, 99))),
        tensors=draw(st.lists(st.tuples(SHAPES, dtypes), min_size=1, max_size=7)),
        place=draw(st.sampled_from(sorted(PLACES))),
        seed=draw(st.integers(0, 9)) * 10_000,
        op=draw(st.sampled_from([SUM, MEAN])),
        wire=draw(st.sampled_from([None, None, "float16", "bfloat16", "float32"])),
        packing=draw(PACKINGS),
        groups=groups,
        out=draw(st.sampled_from(["new", "new", "apart", "in place", "in a flat buffer"])),
        small_slices=draw(st.booleans()),
        stage_bytes=draw(st.sampled_from([100, 1 << 23])),
    )


def numbers(each) -> np.ndarray:
    return each.numpy() if isinstance(each, gr.Buffer) else each


def outs_of(mesh, case, place, inputs):
    """``out=`` of a call; None: the results are new arrays."""
    dtypes = [case.out_dtype(dtype) for _, dtype in case.tensors]
    if case.out == "new":
        return None
    if case.out == "in place" and dtypes == [dtype for _, dtype in case.tensors]:
        return inputs
    shapes = [shape for shape, _ in case.tensors]
    if case.out == "in a flat buffer" and len(set(dtypes)) == 1:
        return [list(row) for row in zip(*mesh.flat_buffer(shapes, dtypes[0]).views, strict=True)]
    return [
        [place(device, np.empty(shape, dtype)) for device in mesh]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


NAMES = ("num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group")


def check(case: Case, algorithm: str, form: str) -> None:
    with gr.open_mesh(
        case.placement, backend="sim", strict=True, peer_access=case.peers,
        schedule_seed=case.schedule,
    ) as mesh:  # fmt: skip
        ops = gr.AllReduceCrossDeviceOps(
            algorithm,
            mesh=mesh,
            wire_dtype=case.wire,
            reduction_groups=case.groups if algorithm == "hierarchical_copy" else None,
            **dict(zip(NAMES, case.packing, strict=False)),
        )
        place = PLACES[case.place]
        if form != "batch_reduce" and place not in (array_on, adopted):
            place = owned  # a step reads no copies
        if case.schedule is not None and (place is adopted or form != "batch_reduce"):
            place = owned  # host arrays are copied where work is queued
        inputs = [
            [place(device, array.copy()) for device, array in zip(mesh, row, strict=True)]
            for row in case.arrays(0)
        ]
        outs = outs_of(mesh, case, place, inputs)
        options = {} if outs is None else {"out": outs}
        step = None
        if form != "batch_reduce":
            step = getattr(ops, form)(case.op, pairs_of(mesh, inputs), **options)

        def call(pairs):
            return step() if step else ops.batch_reduce(case.op, pairs, **options)

        kept = [checked(case, ops, inputs, outs, turn, call) for turn in range(2)]
        if step is None and outs is None:  # the second call has not changed the first results
            for found, wanted in kept:
                check_results(mesh, found, wanted, None)


def checked(case, ops, inputs, outs, turn, call) -> tuple:
    """Checks one call on new data; returns the results, and those of NumPy."""
    data = case.arrays(5000 * turn)
    refill(inputs, data)
    pairs = pairs_of(ops.mesh, inputs)
    with ops.mesh.journal() as journal:
        found = call(pairs)
    wanted = [case.total(ops.all_reduce_alg, row) for row in data]
    if outs is None and any(total.size for total in wanted):
        check_plan(ops, ops.plan(case.op, pairs), journal, wanted)
    check_results(ops.mesh, found, wanted, outs)
    if outs is not inputs:
        assert all(map(same, map(numbers, chain(*inputs)), chain(*data)))
    return found, wanted


def pairs_of(mesh, inputs) -> list:
    """Values that read what the arrays contain now."""
    return [(value, value) for value in (gr.PerReplica(row, mesh) for row in inputs)]


def refill(inputs, data) -> None:
    for row, arrays in zip(inputs, data, strict=True):
        for each, array in zip(row, arrays, strict=True):
            if isinstance(each, gr.Buffer):
                each.device.upload(array, out=each)
            else:
                each[...] = array


def check_plan(ops, plan, journal, wanted) -> None:
    done = (journal.launches, journal.copies, len(journal.of("collective")), journal.bytes)
    assert done == (plan.launches, plan.copies, plan.collectives, plan.bytes)
    assert {pack.way for pack in plan.packs} == {ops.all_reduce_alg}
    carried = {tensor for pack in plan.packs for tensor in pack.tensors}
    assert carried == {place for place, total in enumerate(wanted) if total.size}


def check_results(mesh, found, wanted, outs) -> None:
    for place, (result, total) in enumerate(zip(found, wanted, strict=True)):
        assert type(result) is gr.Mirrored
        assert result.devices == mesh.devices
        for replica, each in reversed(list(enumerate(result.values))):
            assert same(numbers(each), total), (place, replica)
            assert outs is None or each is outs[place][replica]


def can_be_captured(case: Case) -> bool:
    return case.peers is True or len(set(case.placement)) == 1


@pytest.mark.parametrize(("algorithm", "form"), WAYS)
@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_the_bits_are_those_of_numpy(algorithm, form, data):
    case = data.draw(cases().filter(can_be_captured) if form == "capture" else cases())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "STAGE_BYTES", case.stage_bytes)
        if case.small_slices:
            slices = partial(hierarchical_copy.plan_slices, slice_bytes=64)
            patch.setattr(hierarchical_copy, "plan_slices", slices)
        check(case, algorithm, form)
