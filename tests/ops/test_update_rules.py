"""The NumPy formulas of the update rules write each array once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from gradreduce.ops.update_rules import RULES

COUNTS: Counter[int] = Counter()  # id of an array -> how often it was written


class Written(np.ndarray):
    """An array that counts how often a ufunc writes it."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outs = options.pop("out", ())
        COUNTS.update(id(out) for out in outs)
        plain = [each.view(np.ndarray) if type(each) is Written else each for each in inputs]
        targets = tuple(out.view(np.ndarray) for out in outs)
        return getattr(ufunc, method)(*plain, out=targets, **options)


@pytest.mark.parametrize("name", RULES)
def test_a_step_writes_the_variable_and_each_slot_once(name):
    """So a signal handler or another thread sees old or new values, nothing in between."""
    rule = RULES[name]
    arrays = [np.ones(4).view(Written) for _ in range(2 + len(rule.slots) + rule.num_scratch)]
    COUNTS.clear()
    rule.step(*arrays, *[0.5] * len(rule.scalars))
    grad = 1 + len(rule.slots)
    assert [COUNTS[id(array)] for array in arrays[:grad]] == [1] * grad
    assert COUNTS[id(arrays[grad])] == 0
