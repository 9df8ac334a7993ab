"""Gradients of PyTorch and JAX losses, computed by these libraries.

This module imports neither library. A loss that returned a PyTorch tensor has imported PyTorch, and
for ``engine="jax"`` the caller must have imported JAX, so both are found in ``sys.modules``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from gradreduce.arrays.array_methods import traceable
from gradreduce.arrays.convert import from_buffer
from gradreduce.device import Buffer, DType
from gradreduce.errors import InvalidVariableError


def is_tensor(value: Any) -> bool:
    """Whether a value is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jax(value: Any) -> bool:
    """Whether a value is a JAX array."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


@traceable
def stop_gradient(x: Any) -> Any:
    """Returns the plain value of ``x``, as a constant (tf.stop_gradient).

    Args:
        x: a traced value, a Variable, an array, a PyTorch tensor or a JAX array, or a list or tuple
            of these. In a PyTorch loss, pass ``variable.read("torch")`` for a Variable.

    Returns:
        The array itself, which may share memory with a Variable: do not write to it. For a list or
        tuple, a list or tuple.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([2, 3]), "w", device=mesh.devices[0])
        >>> def loss():
        ...     scale = gr.autodiff.stop_gradient(w)  # a constant
        ...     return np.sum(scale * w)
        >>> [(grad, _)] = gr.GradientDescentOptimizer(0.1).compute_gradients(loss)
        >>> grad
        array([2., 3.], dtype=float32)
    """
    if isinstance(x, list | tuple):
        within = [stop_gradient(each) for each in x]
        return tuple(within) if isinstance(x, tuple) else within
    if is_tensor(x):
        return x.detach()
    if is_jax(x):
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def check_seed_shape(seed: Any, loss: Any) -> None:
    """Raises ``ValueError`` unless ``seed`` has the shape of the loss."""
    if seed.shape != loss.shape:
        raise ValueError(
            f"grad_loss has shape {tuple(seed.shape)}; expected that of the loss, "
            f"{tuple(loss.shape)}"
        )


def tensor_gradients(loss: Any, leaves: Sequence[Any], grad_loss: Any) -> list[Any]:
    """Returns the gradient of a PyTorch loss for each leaf; None without a dependency.

    The ``.grad`` of tensors is not changed.

    Raises:
        InvalidVariableError: the loss is not a tensor of floats.
        ValueError: ``grad_loss`` has another shape than the loss.
    """
    torch = sys.modules["torch"]
    if not loss.is_floating_point():
        raise InvalidVariableError(f"Invalid type {loss.dtype} of the loss: it must be a float")
    seed = torch.ones_like(loss)
    if grad_loss is not None:
        seed = torch.as_tensor(grad_loss, dtype=loss.dtype, device=loss.device)
        check_seed_shape(seed, loss)
    if not leaves or not loss.requires_grad:
        return [None] * len(leaves)
    found = torch.autograd.grad(loss, leaves, seed, allow_unused=True)
    return [each.to_dense() if each is not None and each.is_sparse else each for each in found]


class JaxLoss:
    """Differentiates a loss by ``jax.value_and_grad``.

    JAX caches functions that it traces in ``jax.jit``, ``jax.lax.scan`` and ``jax.checkpoint``. A
    value that such a function reads from outside is cached as a constant, or as a tracer of a call
    that has ended. So a loss must not read a Variable inside such a function. Losses use a separate
    cache, so that they do not get functions that were traced outside of losses.

    Args:
        loss: called twice: first with shapes only, to find which Variables it reads, then traced.

    Attributes:
        values: the value of the loss, or those of an iterator, after ``gradients``.
        has_terms: whether the loss returned an iterator.

    Raises:
        ValueError: JAX is not imported.
    """

    def __init__(self, loss: Callable[[], Any]) -> None:
        if "jax" not in sys.modules:
            raise ValueError('engine="jax" needs JAX: import jax before this call')
        self._loss = loss
        self.values: list[Any] = []
        self.has_terms = False
        self._arrays: dict[Buffer, Any] = {}  # the array of each copy that the loss reads
        self._variables: dict[Buffer, Any] = {}  # the Variable of each copy that gets a gradient
        self._tracers: dict[Buffer, Any] | None = None  # in the second call, the tracer of each
        self._top: Any = None  # the JAX trace in which the loss is called; None without one

    def read(self, variable: Any, copy: Buffer, *, is_wanted: bool) -> Any:
        """Returns the array of a copy, or its tracer if it gets a gradient.

        In the first call of the loss, a copy with a gradient is replaced by zeros that JAX creates
        while it traces, so that JAX's caches do not keep the array.

        Raises:
            RuntimeError: the Variable is read in a function that JAX caches, or only in the second
                call of the loss.
        """
        if _tracing_to_keep() not in (None, self._top):
            raise RuntimeError(
                "a Variable was read inside jax.jit, jax.lax.scan, jax.lax.cond or jax.checkpoint, "
                "which would cache its value: read it outside and pass it as an argument"
            )
        if copy not in self._arrays:
            with sys.modules["jax"].ensure_compile_time_eval():
                self._arrays[copy] = from_buffer(copy, "jax")
        if not is_wanted:
            return self._arrays[copy]
        if self._tracers is None:
            self._variables[copy] = variable
            return sys.modules["jax"].lax.full_like(self._arrays[copy], 0)
        if copy not in self._tracers:
            raise RuntimeError(
                f'engine="jax" calls a loss twice, and it read {variable!r} only once: read the '
                "same Variables with variable.read in every call"
            )
        return self._tracers[copy]

    def gradients(self, grad_loss: Any) -> list[tuple[Any, Buffer, Any]]:
        """Returns (Variable, copy, gradient) for each copy that gets a gradient.

        A gradient has the Variable's dtype, also if JAX computed in float32 because x64 is off.
        """
        jax = sys.modules["jax"]

        def total(arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
            self._tracers = dict(zip(self._variables, arrays, strict=True))
            return self._total(grad_loss)

        with _own_caches()("a loss of gradreduce's"):
            jax.eval_shape(self._total, grad_loss)
            arrays = [self._arrays[copy] for copy in self._variables]
            if not arrays:
                self._tracers = {}
                _, self.values = self._total(grad_loss)
                return []
            (_, self.values), results = jax.value_and_grad(total, has_aux=True)(arrays)
        jax.block_until_ready(results)  # the Variables may be overwritten after this call
        return [
            (variable, copy, _in_dtype(gradient, variable.dtype))
            for (copy, variable), gradient in zip(self._variables.items(), results, strict=True)
        ]

    def _total(self, grad_loss: Any) -> tuple[Any, list[Any]]:
        jnp = sys.modules["jax"].numpy
        self._top = _tracing_to_keep()
        made = self._loss()
        self.has_terms = isinstance(made, Iterator)
        terms = [_as_term(term) for term in (made if self.has_terms else [made])]
        total: Any = 0.0
        for value in terms:
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise InvalidVariableError(f"Invalid type {value.dtype} of the loss")
            if grad_loss is not None:
                seed = jnp.asarray(grad_loss, value.dtype)
                check_seed_shape(seed, value)
                value = value * seed
            total = total + jnp.sum(value)
        return total, terms


def _as_term(term: Any) -> Any:
    """Converts a value that a loss returned to an array; a tuple is an error."""
    try:
        if not isinstance(term, list | tuple):
            return sys.modules["jax"].numpy.asarray(term)
    except (TypeError, ValueError):
        pass
    raise InvalidVariableError(
        f"the loss returned {type(term).__name__}; it must return a number, a JAX array, or an "
        "iterator of them"
    )


def _tracing_to_keep() -> Any:
    """Returns the current JAX trace, or None if JAX computes operations directly."""
    jax = sys.modules["jax"]
    number = jax.lax.neg(sys.modules["numpy"].float32(0))
    if not isinstance(number, jax.core.Tracer):
        return None
    trace = number._trace
    return getattr(trace, "main", None) or trace  # JAX before 0.4.36 creates one for each operation


@lru_cache(maxsize=1)
def _own_caches() -> Callable[[Any], Any]:
    """Returns JAX's factory of context managers that have their own caches, if JAX has it."""
    make: Any = getattr(sys.modules["jax"], "make_user_context", None)
    return nullcontext if make is None else make()


def _in_dtype(gradient: Any, dtype: DType) -> Any:
    if str(gradient.dtype) == str(dtype):
        return gradient
    return sys.modules["numpy"].asarray(gradient).astype(dtype)
