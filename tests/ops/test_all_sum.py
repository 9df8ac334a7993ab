"""all_sum in every implementation, against a plain reference, bit by bit."""

from contextlib import contextmanager

import pytest
from support.exact_data import COMPLEX, FLOATS, same
from support.implementations import (
    blank,
    blank_values,
    buffers,
    operands,
    random_terms,
    recorded,
    start_patterns,
)
from support.meshes import MeshCase, hierarchical_sum
from support.row_body import SumBody

from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError
from gradreduce.ops import all_sum
from gradreduce.ops.all_sum import ALL_SUM


def reference(terms, split=0, divisor=1, out=None):
    groups = range(split), range(split, len(terms))
    return hierarchical_sum(terms, divisor, out, groups)


class TestAllSum(SumBody):
    """Rows have two outs."""

    name = "all_sum"

    def row(self, case, size, seed=0, num_inputs=2, num_outs=2):
        outs = [blank_values(size, case) for _ in range(num_outs)]
        return [*outs, *random_terms(num_inputs, size, case, seed=seed)]

    def launch(self, device, rows, *, num_outs=2, split=1, divisor=1):
        outs, inputs = [row[:num_outs] for row in rows], [row[num_outs:] for row in rows]
        all_sum(outs, inputs, split, divisor=divisor)

    def reference(self, case, row, *, num_outs=2, split=1, divisor=1):
        return [reference(row[num_outs:], split, divisor, row[0].dtype)] * num_outs

    def test_every_number_of_inputs(self, device, case):
        """With every split."""
        for num_inputs in range(1, 10):
            for split in range(num_inputs):
                num_outs = 1 + split % 3
                row = self.row(case, 203, num_inputs, num_inputs, num_outs)
                self.check(device, case, [row], num_outs=num_outs, split=split)

    @pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
    @pytest.mark.parametrize("divisor", [1, 2, 3, 7.3, -1, 0, 1e-320, float("inf"), float("nan")])
    def test_the_sum_is_divided_before_it_is_rounded(self, device, dtype, divisor):
        for split in (0, 2):
            row = self.row(dtype, 1003, split, num_inputs=5)
            self.check(device, dtype, [row], split=split, divisor=divisor)

    @pytest.mark.parametrize("template", ALL_SUM.templates, ids=ALL_SUM.expression)
    def test_every_template_and_its_cast(self, device, template):
        to, of = map(as_dtype, template[:2])
        num_inputs = template[2] or 3
        row = [*[blank_values(1003, to)] * 2, *random_terms(num_inputs, 1003, of)]
        for divisor in (1,) if of.kind == "u" else (1, 3):
            for starts in start_patterns(2 + num_inputs):
                self.check(device, of, [row], [starts], split=num_inputs // 2, divisor=divisor)

    def test_in_place(self, device, case):
        """Every out is an input of the same or of another row."""
        for num_inputs in (1, 2, 3, 8):
            terms = random_terms(num_inputs, 17_003, case)
            expected = reference(terms, num_inputs // 2)
            for turn in range(num_inputs):
                inputs = operands(device, terms)
                row = buffers(inputs)
                outs = [out.view(0, out.shape) for out in row[turn:] + row[:turn]]
                all_sum([outs], [row], num_inputs // 2)
                for operand in inputs:
                    assert same(operand.array, expected)
                    assert operand.contained()


@contextmanager
def replicas(implementation, peer_access):
    """Four replicas, two of them on one physical device: Buffers and their arrays."""
    terms = random_terms(4, 1003, "bfloat16")
    with MeshCase((0, 0, 1, 2), peer_access, implementation).open() as mesh:
        yield mesh, terms, [device.upload(one) for device, one in zip(mesh, terms, strict=True)]


@pytest.mark.parametrize("split", range(4))
def test_replicas_beside_and_on_peers_in_one_launch(implementation, split):
    """Each out is on another device than its input, or is the input."""
    with replicas(implementation, True) as (mesh, terms, inputs):
        outs = [device.empty((1003,), "bfloat16") for device in mesh.devices[::-1]]
        for made in (outs, inputs):
            for device in mesh:
                mesh.devices[1].queue_wait(device.queue_mark())
            with mesh.journal() as journal:
                all_sum([made], [inputs], split, device=mesh.devices[1])
            assert [(record.name, record.device) for record in journal.records] == [("all_sum", 1)]
            assert all(same(out.numpy(), reference(terms, split)) for out in made)


def test_replicas_out_of_reach_are_refused_and_unchanged(implementation):
    with replicas(implementation, False) as (mesh, terms, inputs):
        for outs, read in ((inputs[:1], inputs), (inputs, inputs[:2])):
            with mesh.journal() as journal, pytest.raises(DeviceMismatchError, match="peer access"):
                all_sum([outs], [read], 1)
            assert journal.records == []
        assert all(same(one.numpy(), term) for one, term in zip(inputs, terms, strict=True))


def test_each_number_of_outs_is_a_launch_of_its_own(device):
    terms = operands(device, random_terms(2, 100, "float32"))
    outs = [[blank(device, 100, "float32") for _ in range(1 + row % 2)] for row in range(6)]
    with recorded(device) as journal:
        all_sum(list(map(buffers, outs)), [buffers(terms)] * 6)
    assert journal.launches == 2
    expected = reference([term.values for term in terms])
    assert all(same(out.array, expected) for row in outs for out in row)
