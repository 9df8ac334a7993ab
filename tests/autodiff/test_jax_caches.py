"""JAX's caches of functions in a loss never contain old values of a Variable."""

import pytest
from support.libraries import jax, jnp

import gradreduce as gr

pytestmark = pytest.mark.jax
DESCENT = gr.GradientDescentOptimizer(1.0)


def gradients(loss, *args):
    return [found for found, _ in DESCENT.compute_gradients(loss, *args, engine="jax")]


@pytest.mark.parametrize("name", ["the loss", "jit", "checkpoint", "scan", "cond"])
def test_a_read_in_a_function_that_jax_caches_is_refused(v, name):
    """Also in a function that was called outside of losses, and cached what it read."""

    def times(h):
        return jnp.sum(v.read("jax") ** 2 * h)

    def step(carry, h):
        return carry + times(h), None

    jitted, kept = jax.jit(times), jax.checkpoint(times)
    loss = {
        "the loss": jax.jit(lambda: times(2.0)),
        "jit": lambda: jitted(2.0),
        "checkpoint": lambda: kept(2.0),
        "scan": lambda: jax.lax.scan(step, 0.0, jnp.array([0.5, 1.5]))[0],
        "cond": lambda: jax.lax.cond(True, times, lambda h: 0.0 * h, 2.0),
    }[name]
    loss()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"read inside jax\.jit.*pass it as"):
            gradients(loss)
    assert gradients(lambda: jnp.sum(v.read("jax")))[0].tolist() == [1.0] * 3


def test_a_read_under_vmap_has_its_gradient(v):
    def times(h):
        return jnp.sum(v.read("jax") ** 2 * h)

    for _ in range(2):
        found = gradients(lambda: jnp.sum(jax.vmap(times)(jnp.array([0.5, 1.5]))))
        assert found[0].tolist() == [4.0, 8.0, 12.0]


def test_what_is_passed_in_is_compiled_once(v):
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


def test_a_loss_that_reads_other_variables_in_its_second_call(v, w):
    """A Variable read only in the first call gets zeros; only in the second call, an error."""

    def total(*variables):
        return sum((jnp.sum(each.read("jax")) for each in variables), 0.0)

    calls = iter([[v, w], [w]])
    of_v, of_w = gradients(lambda: total(*next(calls)))
    assert (of_v.tolist(), of_w.tolist()) == ([0.0] * 3, [[1.0, 1.0]] * 3)
    for reads in ([[w], [v, w]], [[v], [w]], [[], [v]]):
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
