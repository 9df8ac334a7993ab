"""accumulate_n in every implementation, against a plain reference, bit by bit."""

import pytest
from support.exact_data import random_data
from support.implementations import random_terms, start_patterns
from support.meshes import one_device_sum
from support.row_body import SumBody

from gradreduce.ops import accumulate_n
from gradreduce.ops.accumulate_n import ACCUMULATE_N


class TestAccumulateN(SumBody):
    name = "accumulate_n"

    def row(self, case, size, seed=0, num_inputs=2):
        return random_terms(1 + num_inputs, size, case, seed=seed)

    def launch(self, device, rows):
        accumulate_n([row[0] for row in rows], [row[1:] for row in rows])

    def reference(self, case, row):
        """Adds in the accumulate type of the total, to which every term is cast, total first."""
        return [one_device_sum(row)]

    @pytest.mark.parametrize("template", ACCUMULATE_N.templates, ids=ACCUMULATE_N.expression)
    def test_every_template_and_its_cast(self, device, template):
        to, of = template
        for num_inputs in (1, 2, 9):
            terms = random_terms(num_inputs, 1003, of, seed=num_inputs)
            row = [random_data((1003,), to, seed=99), *terms]
            for starts in start_patterns(1 + num_inputs):
                self.check(device, of, [row], [starts])

    def test_complex_terms_of_a_wider_total(self, device):
        total = random_data((1003,), "complex128", seed=99)
        self.check(device, "complex64", [[total, *random_terms(2, 1003, "complex64")]])
