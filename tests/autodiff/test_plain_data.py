"""A traced value converts to a plain number or array only after its loss."""

import math

import numpy as np
import pytest
from support.gradients import gradients

import gradreduce as gr


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
