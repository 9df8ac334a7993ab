"""Writes of or into traced values raise or create a new value; no gradient is lost."""

import operator

import numpy as np
import pytest
from support.gradients import gradients

from gradreduce.arrays.trace_context import bind_arguments

PLAIN = np.zeros(3, "float32")


def test_a_loss_has_no_out(v):
    kernel = type("Kernel", (), {"name": "cupy_multiply"})
    for write in (
        lambda h, buffer: np.maximum(h, 0, out=buffer),
        lambda h, buffer: np.negative(h, out=buffer),
        lambda h, buffer: np.multiply(h, 5, buffer),
        lambda h, buffer: np.matmul(np.eye(3, dtype="f"), h, buffer),
        lambda h, buffer: np.add.reduce(np.stack([h, h]), out=buffer),
        lambda h, buffer: np.concatenate([h[:1], h[1:]], 0, buffer),
        lambda h, buffer: np.stack([h[0], h[1], h[2]], 0, buffer),
        lambda h, buffer: np.take(h, [0, 1, 2], 0, buffer),
        lambda h, buffer: np.clip(h, 0, 1, buffer),
        lambda h, buffer: np.dot(np.eye(3, dtype="f"), h, buffer),
        lambda h, buffer: np.round(h, 0, buffer),
        lambda h, buffer: np.stack([h, h]).sum(0, None, buffer),
        lambda h, buffer: h.__cupy_override_elementwise_kernel__(kernel, 2, h, buffer),
    ):
        for into_itself in (True, False):

            def loss(write=write, into_itself=into_itself):
                h = v * 1
                write(h, h if into_itself else PLAIN)
                return np.sum(h)

            with pytest.raises(NotImplementedError, match="a loss does not support out="):
                gradients(loss)
    assert not PLAIN.any()


def test_an_out_by_position_is_found():
    places = {np.sum: 3, np.concatenate: 2, np.dot: 2, np.fix: 1, np.trace: 5, np.clip: 3}
    for function, index in places.items():
        assert bind_arguments(function, range(index + 1), {})["out"] == index
    assert "out" not in bind_arguments(np.einsum, ("i,i", PLAIN, PLAIN), {})


def test_an_operator_in_place_makes_a_new_value(v):
    def loss():
        before = h = v * 1
        h += v
        h *= 3.0
        h -= 1
        h /= 2
        h **= 2
        h @= np.float32([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
        h += np.float64([0.5, 0.5, 0.5])
        assert (h.dtype, before.tolist()) == (np.float32, [1.0, 2.0, 3.0])
        return np.sum(h)

    assert gradients(loss)[0].tolist() == [2 * (3 * x - 0.5) * 3 for x in (1.0, 2.0, 3.0)]

    def wider():
        h = v * 1
        h += np.ones((2, 3), "float32")
        return h

    with pytest.raises(ValueError, match="non-broadcastable"):
        gradients(wider)

    def number():
        total = v[0]
        total += v[1]
        total *= v
        return total

    assert gradients(number)[0].tolist() == [9.0, 9.0, 3.0], "NumPy's numbers are not written"


def test_a_view_of_another_value_cannot_be_written(w):
    for part in (
        lambda h: next(iter(h)), lambda h: h[:, 1:], lambda h: h.reshape(-1), lambda h: h.ravel(),
        lambda h: h.T, lambda h: np.split(h, 3)[0], lambda h: h[None], lambda h: np.squeeze(h[:1]),
        lambda h: np.flip(h), lambda h: h.T[0].copy()[...],
    ):  # fmt: skip
        for do in (operator.iadd, operator.imul, operator.itruediv):
            with pytest.raises(NotImplementedError, match=r"write a = a \+ b"):
                gradients(lambda do=do, part=part: np.sum(do(part(w * 2), 2.0)))
        kept = []
        gradients(lambda part=part, kept=kept: kept.append(part(w * 2)) or np.sum(w))
        operator.iadd(kept[0], 1.0)  # plain data by now
    for copy in (
        lambda h: h[[0, 1]], lambda h: h[0].copy(), lambda h: h.flatten(), lambda h: h.T @ h,
        lambda h: h.T.reshape(-1), lambda h: h.T.astype("float32"), lambda h: np.stack([h[0]]),
    ):  # fmt: skip
        found = gradients(lambda copy=copy: np.sum(operator.imul(copy(w * 1), 2.0)))
        assert found[0].any()


def test_what_changes_the_meaning_of_a_ufunc_has_no_rule(v, w):
    for ufunc, name, given in [
        (np.matmul, "axes", [(0, 1), (0, 1), (0, 1)]),
        (np.add, "signature", "ff->f"),
        (np.matmul, "keepdims", True),
        (np.matmul, "axis", 0),
        (np.add, "where", [True, False, True]),
    ]:
        with pytest.raises(NotImplementedError, match=rf"np\.\w+\(\.\.\., {name}=\)"):
            gradients(lambda u=ufunc, option={name: given}: u(w * 1, v * 1, **option))
    (found,) = gradients(lambda: np.exp(v * 1, dtype="float64", casting="same_kind"), [v])
    np.testing.assert_allclose(found, np.exp([1.0, 2.0, 3.0]), rtol=1e-6)
