"""Every rule against NumPy and HIPS autograd, and with CuPy-like arrays."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.exhaustive import examples
from support.libraries import autograd, hips
from support.loss_operations import OPERATIONS, weighted
from support.strict_array import StrictArray

from gradreduce.autodiff import rules_indexing
from gradreduce.autodiff.accumulate_terms import TermAccumulator
from gradreduce.autodiff.backward import _as_operand as as_operand
from gradreduce.autodiff.backward import backward
from gradreduce.autodiff.tape import Node, Trace, Traced
from gradreduce.sums.methods import AggregationMethod


class Sum(TermAccumulator):
    """Adds terms by NumPy's operators, without a device."""

    def __init__(self) -> None:
        super().__init__(AggregationMethod.ADD_N)
        self.total: Any = None

    def push(self, term, order, device) -> None:
        if term is None:
            return
        self.total = term if self.total is None else self.total + term

    def result(self):
        return self.total


def leaf(trace, value, terms):
    return Traced(value, Node(trace, value, None, terms=terms))


def gradients(do, operands):
    """Gradients of the weighted sum of the result of ``do``, for each operand."""
    trace = Trace()
    sums = [Sum() for _ in operands]
    leaves = [leaf(trace, x, terms) for x, terms in zip(operands, sums, strict=True)]
    loss = do(*leaves)
    one = np.ones_like(loss.value)
    backward([loss.node], one, Sum)
    return [terms.result() for terms in sums]


@pytest.fixture(autouse=True)
def rows_of_numpy(monkeypatch):
    """Adds rows on the host, also of CuPy-like arrays, because other tests cover that module."""

    def added(values, rows, size):
        bare = values.array if isinstance(values, StrictArray) else values
        whole = np.zeros(size, bare.dtype)
        np.add.at(whole, rows, bare)
        return StrictArray(whole) if isinstance(values, StrictArray) else whole

    monkeypatch.setattr(rules_indexing, "_add_by_position", added)
    monkeypatch.setattr(rules_indexing, "IndexedSlices", added)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_an_operation_is_that_of_numpy_and_its_gradient_that_of_hips_autograd(operation):
    known = replace(operation, do=operation.oracle or operation.do)
    for shapes in operation.shapes:
        operands = operation.operands(shapes)
        trace = Trace()
        made = operation.do(np, *[leaf(trace, x, Sum()) for x in operands])
        wanted = operation.do(np, *operands)
        assert (made.shape, made.dtype) == (np.shape(wanted), wanted.dtype)
        np.testing.assert_allclose(made.value, wanted, rtol=1e-14, atol=0)
        mine = gradients(weighted(operation, np), operands)
        theirs = autograd.grad(weighted(known, hips), tuple(range(len(operands))))(*operands)
        for left, right in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-13)
        loss = weighted(operation, np, StrictArray)  # arrays like those of CuPy
        found = gradients(loss, [StrictArray(x) for x in operands])
        for left, right in zip(found, mine, strict=True):
            assert type(left) is (type(None) if right is None else StrictArray)
            if left is not None:
                np.testing.assert_array_equal(left.array, right)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_value_and_every_term_keeps_its_dtype(operation, dtype, monkeypatch):
    if operation.name == "float_power":
        return  # NumPy's own is float64
    in_float32 = dtype == "float16" and operation.name.startswith(("logsumexp", "softmax"))
    terms = []

    def checked(term, node):
        terms.append(term)
        assert in_float32 or term is None or term.dtype == dtype
        return as_operand(term, node)

    monkeypatch.setattr("gradreduce.autodiff.backward._as_operand", checked)
    shapes = operation.shapes[0]
    found = gradients(weighted(operation, np), operation.operands(shapes, dtype))
    assert all(gradient is None or gradient.dtype == dtype for gradient in found)
    assert terms


@given(
    npst.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3),
    st.integers(0, 2**16),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_shapes_are_broadcast_and_reduced_as_hips_does(drawn, seed):
    rng = np.random.default_rng(seed)
    operands = [rng.uniform(0.5, 2.0, shape) for shape in drawn.input_shapes]
    ndim = len(drawn.result_shape)
    axes = tuple(int(each) - ndim * int(rng.integers(2)) for each in np.flatnonzero(
        rng.integers(0, 2, ndim)))  # fmt: skip
    keepdims = bool(rng.integers(2))

    def loss(module):
        def computed(x, y, z):
            whole = x * y / (z + 1) - y**2 + module.logaddexp(x, z)
            parts = module.sum(whole, axis=axes, keepdims=keepdims) * 3
            if whole.size:
                parts = parts + module.mean(whole * y, axis=axes, keepdims=keepdims)
                parts = parts + module.max(module.swapaxes(whole[None], 0, -1) * 2)
            return module.sum(module.square(parts))

        return computed

    mine = gradients(loss(np), operands)
    theirs = autograd.grad(loss(hips), (0, 1, 2))(*operands)
    for left, right in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)


NEITHER = """
negative|positive|add|subtract|sum over None|mean over 0|reshape|transpose|swapaxes|
moveaxis|squeeze|expand_dims|broadcast_to|flip|roll|concatenate|stack|cumsum|an element|slices|
where of a number|clip|fancy rows|take|embedding_lookup|astype|max over None|relu|maximum|
einsum of a sum|tile|repeat|sigmoid
""".replace("\n", "").split("|")
ONLY_RESULT = "exp exp2 expm1 sqrt cbrt reciprocal tan tanh".split()
ONLY_OPERAND = "log log1p sin cos square arctan".split()


def held_by(operation):
    """Whether a node, whose value was freed, keeps its operand and its result."""
    shapes = max(operation.shapes, key=lambda shapes: np.prod(shapes[0]))
    operand = operation.operands(shapes)[0] * 1.0
    trace = Trace()
    others = [StrictArray(x) for x in operation.operands(shapes)[1:]]
    made = operation.do(np, leaf(trace, StrictArray(operand), Sum()), *others)
    refs = [weakref.ref(operand), weakref.ref(made.value.array)]
    node = made.node
    del operand, made, others
    assert node.parents
    return [ref() is not None for ref in refs]


def named(names):
    found = [each for each in OPERATIONS if each.name in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize(
    ("operation", "held"),
    [(each, [False, False]) for each in named(NEITHER)]
    + [(each, [False, True]) for each in named(ONLY_RESULT)]
    + [(each, [True, False]) for each in named(ONLY_OPERAND)],
    ids=str,
)
def test_a_rule_holds_only_the_operands_that_it_needs(operation, held):
    gc.disable()  # freed by reference counting alone
    try:
        assert held_by(operation) == held
    finally:
        gc.enable()
