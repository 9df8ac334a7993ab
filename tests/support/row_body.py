"""One test body for all launchers that take many rows and launch once per group of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exact_data import DTYPES, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPLIT_SIZE,
    Operand,
    buffers,
    counted_threads,
    operands,
    random_terms,
    recorded,
    start_patterns,
)

from gradreduce.device import as_dtype

DRAWN = 40_003


class RowBody:
    """Compares a launcher with a plain reference, bit by bit, in every implementation.

    Attributes:
        name: the name of the kernel.
        cases: the dtypes, or what else a row is made for.
        few: cases for rows that need much time.
        sized: cases for rows of every size.
        groups: arguments of ``row``; each group of rows needs a launch of its own.
    """

    name: str
    cases: Sequence[Any]
    few: Sequence[Any]
    sized: Sequence[Any] = ()  # all
    groups: Sequence[dict[str, Any]]

    def name_of(self, case):
        """The name of the kernel."""
        return self.name

    def row(self, case, size, seed=0):
        """The values of all operands. Those that are written come first."""
        raise NotImplementedError

    def launch(self, device, rows):
        """Calls the launcher with rows of Buffers."""
        raise NotImplementedError

    def reference(self, case, row):
        """The expected values of the operands that are written."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc):
        """Makes the parameters ``case``, ``few_case`` and ``sized_case``."""
        sized = self.sized or self.cases
        for argument, values in (
            ("case", self.cases), ("few_case", self.few), ("sized_case", sized),
        ):  # fmt: skip
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, ids=case_id)

    def check(self, device, case, rows, starts=None, **options):
        """Launches all rows in one call, and checks every byte. Inputs are read-only."""
        expected = [self.reference(case, row, **options) for row in rows]
        starts = starts or [[0] * len(row) for row in rows]
        made = [
            [
                Operand(device, values, start, writable=place < len(written))
                for place, (values, start) in enumerate(zip(row, places, strict=True))
            ]
            for row, written, places in zip(rows, expected, starts, strict=True)
        ]
        self.launch(device, [buffers(row) for row in made], **options)
        for row, written, places in zip(made, expected, starts, strict=True):
            for operand, values in zip(row, written, strict=False):
                assert same(operand.array, values), (operand.buffer, places, options)
                assert operand.contained()
            assert all(operand.unchanged() for operand in row[len(written) :])

    def check_one_launch(self, device, case, rows, starts):
        with recorded(device) as journal:
            self.check(device, case, rows, starts)
        num_rows = sum(row[0].size > 0 for row in rows)
        found = [(record.name, record.num_rows) for record in journal.records]
        assert found == [(self.name_of(case), num_rows)]

    def test_rows_of_every_size_and_start_are_one_launch(self, device, sized_case):
        rows = [self.row(sized_case, size, seed=size) for size in (*SIZES, 40_003)]
        for starts in start_patterns(len(rows[0])):
            self.check_one_launch(device, sized_case, rows, [starts] * len(rows))

    def test_rows_of_a_table_that_is_not_inline_are_one_launch(self, device, few_case):
        sizes = [1, 40_001, 0, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
        rows = [self.row(few_case, size, seed=size) for size in sizes]
        starts = [
            [(number + place) % 3 for place in range(len(row))] for number, row in enumerate(rows)
        ]
        self.check_one_launch(device, few_case, rows, starts)

    def test_any_geometry(self, geometric_device, case):
        rows = [self.row(case, size, seed=size) for size in (1, 17, 255, 16_385, 40_003)]
        for starts in start_patterns(len(rows[0]))[:2]:
            self.check(geometric_device, case, rows, [starts] * len(rows))

    def test_large_rows_are_spread_over_threads(self, device, few_case):
        drawn = self.row(few_case, DRAWN)  # repeated: drawing as many would take most of the time
        rows = [
            [
                values if values.size == 1 else np.resize(values, values.size + size - DRAWN)
                for values in drawn
            ]
            for size in (SPLIT_SIZE, SPLIT_SIZE // 2, 5)
        ]
        with counted_threads(device) as num_jobs:
            self.check(device, few_case, rows[:1], [range(len(rows[0]))])
            self.check(device, few_case, rows)
        assert num_jobs == [NUM_THREADS] * 2

    def test_each_group_is_a_launch_of_its_own(self, device):
        rows = [self.row(size=100, **group) for _ in range(3) for group in self.groups]
        with recorded(device) as journal:
            self.launch(device, [[device.adopt(values) for values in row] for row in rows])
        assert [record.num_rows for record in journal.records] == [3] * len(self.groups)

    def test_nothing_is_launched_for_nothing(self, device):
        case = self.few[0]
        with recorded(device) as journal:
            self.launch(device, [])
            self.check(device, case, [self.row(case, 0)] * 3)
        assert journal.records == []

    @settings(
        max_examples=examples(30),
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(
        data=st.data(),
        sizes=st.lists(
            st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8
        ),
        starts=st.lists(st.integers(0, 5), min_size=13, max_size=13),
    )
    def test_any_rows(self, device, data, sizes, starts):
        case = data.draw(st.sampled_from(self.cases), "case")
        rows = [self.row(case, size, seed=size) for size in sizes]
        places = [
            (starts[number:] + starts[:number])[: len(row)] for number, row in enumerate(rows)
        ]
        self.check(device, case, rows, places)


class SumBody(RowBody):
    """Launchers that add terms of one dtype."""

    cases = DTYPES
    few = tuple(map(as_dtype, ("float16", "complex64", "uint8")))
    groups = ({"case": "float32"}, {"case": "float32", "num_inputs": 3}, {"case": "float16"},
              {"case": "int32"})  # fmt: skip

    def test_every_number_of_inputs(self, device, case):
        for num_inputs in range(1, 21):
            self.check(device, case, [self.row(case, 1003, num_inputs, num_inputs)])

    def test_in_place(self, device, case):
        """Any input may be written; some terms are added twice."""
        for num_inputs in (1, 2, 3, 9):
            terms = random_terms(num_inputs, 17_003, case)
            for place in range(num_inputs):
                inputs = operands(device, terms)
                written = inputs[place].buffer
                row = [written.view(0, written.shape), *buffers([*inputs, *inputs[:2]])]
                self.launch(device, [row])
                (expected,) = self.reference(case, [terms[place], *terms, *terms[:2]])
                assert same(inputs[place].array, expected)
                assert inputs[place].contained()
                assert all(inputs[k].unchanged() for k in range(num_inputs) if k != place)


def case_id(case) -> str:
    """``adam-float16-master`` of ("adam", float16, True)."""
    if not isinstance(case, tuple):
        return str(case)
    *names, flag = map(str, case)
    return "-".join([*names, *["master"] * (flag == "True")])
