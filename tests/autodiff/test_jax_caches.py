"""What JAX keeps of the functions in a loss never holds what a Variable was."""

from __future__ import annotations

import pytest

import gradreduce as gr
from gradreduce.autodiff import frameworks

pytestmark = pytest.mark.jax
DESCENT = gr.GradientDescentOptimizer(1.0)


def gradients(loss, *args):
    return [found for found, _ in DESCENT.compute_gradients(loss, *args, engine="jax")]


@pytest.mark.parametrize("name", ["the loss", "jit", "checkpoint", "scan", "cond", "vmap"])
def test_what_jax_keeps_is_of_no_other_call(mesh, name):
    """Of each kind a function that lives longer than a call; the first one was outside."""
    import jax
    import jax.numpy as jnp

    v = gr.Variable([1.0, 2.0], device=mesh)
    other = gr.Variable(2.0, device=mesh)

    def times(h):
        return jnp.sum(v.read("jax") ** 2 * (h * other.read("jax")))

    def step(carry, h):
        return carry + times(h), None

    def none(h):
        return 0.0 * h

    jitted, kept = jax.jit(times), jax.checkpoint(times)
    loss = {
        "the loss": jax.jit(lambda: times(2.0)),
        "jit": lambda: jitted(2.0),
        "checkpoint": lambda: kept(2.0),
        "scan": lambda: jax.lax.scan(step, 0.0, jnp.array([0.5, 1.5]))[0],
        "cond": lambda: jax.lax.cond(True, times, none, 2.0),
        "vmap": lambda: jnp.sum(jax.vmap(times)(jnp.array([0.5, 1.5]))),
    }[name]
    loss()
    for first, variables in ((1.0, None), (5.0, [other, v, v])):
        v.assign([first, 2.0])
        pairs = DESCENT.compute_gradients(loss, variables, engine="jax")
        found = {variable: gradient for gradient, variable in pairs}
        assert found[v].tolist() == [8 * first, 16.0]
        assert float(found[other]) == 2 * (first**2 + 4)
    (found,) = gradients(loss, [v])
    assert found.tolist() == [40.0, 16.0]
    DESCENT.minimize(loss, var_list=v, engine="jax")
    assert v.numpy().tolist() == [-35.0, -14.0]


def test_what_is_passed_in_is_compiled_once(v, monkeypatch):
    """In all losses; and where JAX cannot tell caches apart the other way is refused."""
    import jax
    import jax.numpy as jnp

    traced = []

    @jax.jit
    def square(x):
        traced.append(x)
        return jnp.sum(x * x)

    for number in range(4):
        v.assign([number, 1.0, 2.0])
        found = gradients(lambda: square(v.read("jax")))
        assert found[0].tolist() == [2.0 * number, 2.0, 4.0]
    assert len(traced) == 1

    def caught():
        try:
            return jax.jit(lambda: jnp.sum(v.read("jax")))()
        except Exception:
            return jnp.sum(v.read("jax")) * 0

    assert gradients(caught)[0].tolist() == [1.0] * 3
    monkeypatch.setattr(frameworks, "_contexts", lambda: frameworks.nullcontext)
    assert gradients(lambda: square(v.read("jax")))[0].tolist() == [6.0, 2.0, 4.0]
    with pytest.raises(RuntimeError, match=r"read inside jax\.jit.*pass it as"):
        gradients(jax.jit(lambda: jnp.sum(v.read("jax"))))


def test_caches_of_a_call_alone_are_cleared(v, monkeypatch):
    import jax
    import jax.numpy as jnp

    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    monkeypatch.setattr(frameworks, "_MOST_KEPT", 2)
    loss = jax.jit(lambda: jnp.sum(v.read("jax")))
    for _ in range(4):
        assert gradients(loss)[0].tolist() == [1.0] * 3
        assert gradients(lambda: jnp.sum(v.read("jax")))[0].tolist() == [1.0] * 3
    assert len(cleared) == 2


def test_a_loss_that_reads_otherwise_the_second_time_is_refused(v, w):
    import jax.numpy as jnp

    def total(*variables):
        return sum(jnp.sum(each.read("jax")) for each in variables)

    for reads in ([[v, w], [w]], [[w], [v, w]], [[v], [w]]):
        calls = iter(reads)
        with pytest.raises(RuntimeError, match=r"it read <Variable '[vw]'"):
            gradients(lambda calls=calls: total(*next(calls)))
    kept = []

    def loss():
        kept.append(v.read("jax"))
        return jnp.sum(kept[0]) + total(w)

    with pytest.raises(Exception, match="tracer"):
        gradients(loss)
    v.assign([1.0, 1.0, 1.0])  # nothing is left behind
