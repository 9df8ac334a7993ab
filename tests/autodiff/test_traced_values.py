"""What is not done with traced values: writes, plain numbers, and operands of other kinds."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest
from support.gradients import gradients

import gradreduce as gr
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


def test_inside_its_loss_a_value_is_neither_a_number_nor_stored(v):
    for number in (float, int, complex, math.exp):
        with pytest.raises(TypeError, match="stop_gradient"):
            gradients(lambda number=number: number(v[0] * 2))
    scalar = gr.Variable(2.0, device=v.devices[0])
    with pytest.raises(TypeError, match=r"variable\.numpy"):
        gradients(lambda: scalar * float(scalar))
    assert gradients(lambda: np.sum(v) * int(v[2] > 1))[0].tolist() == [1.0] * 3
    plain = np.zeros(3, "float32")
    for store in (plain.fill, lambda x: plain.__setitem__(0, x), lambda x: plain.put(0, x)):
        with pytest.raises((TypeError, ValueError)) as caught:  # NumPy raises its own from ours
            gradients(lambda store=store: store(v[0] * 2))
        assert "stop_gradient" in str(caught.value.__cause__ or caught.value)
    assert not plain.any()


def test_full_like_with_a_traced_value_has_its_gradient(v):
    found = gradients(lambda: np.sum(np.full_like(v, v[0] * v[0]) * v))
    assert found[0].tolist() == [13.0, 1.0, 1.0]
    assert gradients(lambda: np.sum(np.full_like(v * 1, 2) * v))[0].tolist() == [2.0] * 3
    assert gradients(lambda: np.sum(np.full_like(v, v[0], shape=(2,))))[0].tolist() == [2.0, 0, 0]


def test_after_its_loss_a_value_is_plain_data(v):
    kept = []
    for _ in range(2):
        gradients(lambda: kept.append(np.sum(v * v)) or kept[-1])
    assert [float(x) for x in kept] == [14.0, 14.0]
    assert (int(kept[0]), complex(kept[0]), math.sqrt(kept[0])) == (14, 14, math.sqrt(14))
    assert np.mean(kept) == 14
    assert np.array(kept, "float64").tolist() == [14.0, 14.0]
    plain = np.ones(2)
    plain += kept[0]
    assert np.add(plain, kept[0], out=plain) is plain
    np.sum(kept[0], out=plain[0, ...])
    plain[1] = kept[1]
    assert plain.tolist() == [14.0, 14.0]
    total = kept[0]
    total += 1
    assert (float(total), float(kept[0])) == (15.0, 14.0)
    with pytest.raises(TypeError, match="would write"):
        np.add(plain, 1, out=kept[0])


def test_a_variable_has_the_methods_of_a_value(v, w):
    x = w.numpy()
    for name in ("max", "std", "prod", "ravel", "squeeze", "argmax", "tolist", "cumsum", "mT"):
        ours, theirs = getattr(w, name), getattr(x, name, x.T)
        if name != "mT":
            ours, theirs = ours(), theirs()
        assert np.asarray(ours).tolist() == np.asarray(theirs).tolist(), name
    assert (len(v), bool(v), v[:1].item(), w.clip(2, 3).max()) == (3, True, 1.0, 3.0)
    assert gradients(lambda: v.max() * 2 + v.min() * len(v))[0].tolist() == [3.0, 0.0, 2.0]
    assert gradients(lambda: sum(v) + max(v))[0].tolist() == [1.0, 1.0, 2.0]
    scalar = gr.Variable(0.0, device=v.devices[0])
    assert bool(scalar)
    with pytest.raises(TypeError, match="unsized"):
        len(scalar)


MASKED = np.ma.masked_array(np.float32([1, 2, 3]), mask=[0, 1, 0])


def test_results_that_lose_a_gradient_are_refused(v, w):
    for loss, match in [
        (lambda: (v * 1) * Fraction(1, 2), r"as the dtype of its result.*PyTorch"),
        (lambda: (v * 1) * np.array([1, 2, 3], object), r"as the dtype of its result.*PyTorch"),
        (lambda: (v * 1).astype(object), r"as the dtype of its result.*PyTorch"),
        (lambda: np.where([True, False, True], v * 1, Fraction(1, 2)), "dtype of its result.*PyT"),
        (lambda: (v * 1).astype("m8[s]"), r"as the dtype of its result.*PyTorch"),
        (lambda: (w * 1).flatten("F"), r"order=.*PyTorch"),
        (lambda: (w * 1).ravel("K"), r"order=.*PyTorch"),
        (lambda: (w * 1).reshape(-1, order="A"), r"order=.*PyTorch"),
        (lambda: gr.add_n([v * 1, v * 2], output_type="buffer"), "output_type='buffer'"),
    ]:
        with pytest.raises(NotImplementedError, match=match):
            gradients(lambda loss=loss: np.sum(loss()))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
def test_masked_arrays_and_matrices_are_refused_as_operands(v):
    for loss in (
        lambda x: np.einsum("ij,j->i", np.eye(3, dtype="f"), x) - MASKED,
        lambda x: MASKED @ x,
        lambda x: np.maximum(MASKED, x),
        lambda x: np.where(x > MASKED, x, 0.0),
        lambda x: np.where(MASKED > 1, x, 0.0),
        lambda x: np.stack([x, MASKED]),
        lambda x: x * [MASKED[0], MASKED[1], 2.0],
        lambda x: np.clip(x, a_min=MASKED, a_max=3),
        lambda x: np.dot(MASKED, x),
        lambda x: x[MASKED > 1],
        lambda x: gr.autodiff.softmax_cross_entropy(x, MASKED),
        lambda x: np.matrix([[1.0, 2.0, 3.0]]) * x,
        lambda x: x + np.matrix([[1.0, 2.0, 3.0]]),
    ):
        with pytest.raises(TypeError, match=r"np\.(MaskedArray|MaskedConstant|matrix) is not"):
            gradients(lambda loss=loss: np.sum(loss(v * 1)))
    for loss in (lambda x: MASKED * x, lambda x: MASKED - x, lambda x: np.ma.sum(x)):
        with pytest.raises(TypeError, match="plain array"):
            gradients(lambda loss=loss: np.sum(loss(v * 1)))
    with pytest.raises(TypeError, match="Masked"):
        gradients(lambda: v * 1, grad_loss=MASKED)


def test_a_list_of_traced_values_is_an_operand_of_what_joins_alone(v):
    assert gradients(lambda: np.sum(np.stack([v[0], v[1]]) * v[2]))[0].tolist() == [3.0, 3.0, 3.0]
    for loss in (
        lambda: v * [v[0], v[1], 1.0],
        lambda: np.where([True, False], v[:2], (v[0], v[1])),
    ):
        with pytest.raises(NotImplementedError, match=r"np\.stack joins it"):
            gradients(loss)
    with pytest.raises(NotImplementedError, match="traced argument 2"):
        gradients(lambda: np.sum(v * 1, None, v[0]))


def test_numbers_of_numpy_and_lists_are_arguments(v):
    for loss, wanted in [
        (lambda x: np.power(x, [1, 2, 3]), [1, 4, 27]),
        (lambda x: np.power((1, 1, 2), x)[:2], [0, 0, 0]),
        (lambda x: np.tile(x, np.array([2, 2])), [4, 4, 4]),
        (lambda x: np.split(x, np.int64(3))[1], [0, 1, 0]),
        (lambda x: x[range(2)], [1, 1, 0]),
        (lambda x: x.reshape(1, 3, order="C").flatten("C"), [1, 1, 1]),
        (lambda x: x.astype("float64", copy=False) * x.item(1), [2, 2, 2]),
        (lambda x: np.linalg.norm(x[None, :1], 2, axis=np.int64(1)), [1, 0, 0]),
        (lambda x: np.linalg.norm(x[None, 2:], 2, axis=(1,)), [0, 0, 1]),
    ]:
        assert gradients(lambda loss=loss: np.sum(loss(v * 1)))[0].tolist() == wanted


def test_a_single_row_is_looked_up_by_an_integer(v, w):
    assert gr.embedding_lookup(w, 1).tolist() == [3.0, 4.0]
    (rows,) = gradients(lambda: gr.embedding_lookup(w, 1))
    assert (rows.indices.tolist(), rows.values.tolist()) == ([1], [[1.0, 1.0]])
    assert gradients(lambda: gr.embedding_lookup(v * 1, (2, 0)))[0].tolist() == [1.0, 0.0, 1.0]
