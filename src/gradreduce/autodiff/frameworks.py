"""How PyTorch and JAX differentiate a loss that is theirs; imports neither.

A loss of PyTorch's has returned a tensor, and JAX's is asked for by name, so that the library is in
``sys.modules``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffer
from gradreduce.device import Buffer, DType
from gradreduce.errors import InvalidVariableError

__all__ = ["JaxLoss", "as_jax", "detached", "is_tensor", "tensor_gradients"]

# After how many calls with a cache of their own all of them are cleared: JAX keeps thousands, and
# one of a loss with one jitted function takes 0.3 MB (JAX 0.10.2, 2026-11).
_MOST_KEPT = 64
_num_kept = itertools.count(1)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of PyTorch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def detached(value: Any) -> Any:
    """A tensor of PyTorch's or an array of JAX's as a constant; anything else as it is."""
    if is_tensor(value):
        return value.detach()
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        return jax.lax.stop_gradient(value)
    return value


def tensor_gradients(loss: Any, leaves: Sequence[Any], grad_loss: Any) -> list[Any]:
    """The gradient of a tensor with respect to each leaf, None where it does not reach one.

    Nobody's ``.grad`` is touched.

    Raises:
        InvalidVariableError: the loss is no tensor of floats.
        ValueError: ``grad_loss`` is not of its shape.
    """
    torch = sys.modules["torch"]
    if not loss.is_floating_point():
        raise InvalidVariableError(f"Invalid type {loss.dtype} of the loss: it must be a float")
    seed = None if grad_loss is None else torch.as_tensor(grad_loss, dtype=loss.dtype)
    if seed is not None and seed.shape != loss.shape:
        raise ValueError(
            f"grad_loss is of shape {tuple(seed.shape)}, the loss of shape {tuple(loss.shape)}"
        )
    if not leaves or not loss.requires_grad:
        return [None] * len(leaves)
    seed = torch.ones_like(loss) if seed is None else seed.to(loss.device)
    found = torch.autograd.grad(loss, leaves, seed, allow_unused=True)
    return [each.to_dense() if each is not None and each.is_sparse else each for each in found]


class JaxLoss:
    """A loss that is differentiated by ``jax.value_and_grad``.

    What JAX traces for itself (of ``jax.jit``, ``jax.lax.scan``, ``jax.checkpoint``) it keeps, with
    the values that were read meanwhile as constants, or as tracers of a call that is over. So a
    loss has a cache of its own, which it shares with other losses, and nothing is kept there that
    has read a Variable: one that does is called again, with a cache for that call alone. Then all
    is compiled anew in each call.

    Args:
        loss: called twice: first on shapes alone, which tells what it reads, then traced. Once or
            twice more if it reads a Variable inside what JAX keeps.

    Raises:
        ValueError: JAX is not imported.
    """

    def __init__(self, loss: Callable[[], Any]) -> None:
        if "jax" not in sys.modules:
            raise ValueError('engine="jax": jax is not imported')
        self._loss = loss
        self._arrays: dict[Buffer, Any] = {}
        self._variables: dict[Buffer, Any] = {}
        self._tracers: dict[Buffer, Any] | None = None  # what copies are while it is traced
        self._unread: set[Buffer] = set()
        self._is_inside = False  # whether one was read inside what JAX keeps
        self._keeps = False  # whether that may be, in this call
        self._top: Any = None  # what traces the loss itself; None: nothing has to

    def add(self, copy: Buffer, array: Any, variable: Any) -> None:
        """A copy of a Variable that the loss has read: one to differentiate by.

        Raises:
            RuntimeError: the loss reads others than when it was called first.
        """
        if self._tracers is not None:
            raise _other_reads(variable)
        self._arrays[copy] = array
        self._variables[copy] = variable

    def value(self, copy: Buffer, array: Any) -> Any:
        """What a copy is at the moment: ``array``, or the tracer of one to differentiate by.

        Of such a one while the shapes are asked for: zeros, which JAX makes where it traces, so
        that nothing which it keeps holds the array.
        """
        if not self._keeps and _tracing_to_keep() not in (None, self._top):
            self._is_inside = True
            raise RuntimeError(
                "a Variable was read inside jax.jit, jax.lax.scan, jax.lax.cond or jax.checkpoint, "
                "which would keep its value: read it outside and pass it in"
            )
        self._unread.discard(copy)
        if self._tracers is not None:
            return self._tracers.get(copy, array)
        return sys.modules["jax"].lax.full_like(array, 0) if copy in self._arrays else array

    def gradients(self, grad_loss: Any) -> list[tuple[Buffer, Any]]:
        """That of each copy which the loss reads.

        A gradient is of the Variable's dtype, also where JAX without x64 has made float32 of it.

        Raises:
            RuntimeError: the loss does not read the same when it is called again; or, with a JAX
                that has no ``make_user_context``, reads a Variable inside what JAX keeps.
        """
        contexts = _contexts()
        try:
            with contexts("a loss of gradreduce's"):
                found = self._gradients(grad_loss)
        except Exception:  # the loss may have made another one of it
            if not self._is_inside or contexts is _no_context:
                raise
        else:
            if not self._is_inside:
                return found
        self._keeps = True
        try:
            with contexts(object()):
                return self._gradients(grad_loss)
        finally:
            if next(_num_kept) % _MOST_KEPT == 0:
                sys.modules["jax"].clear_caches()

    def _gradients(self, grad_loss: Any) -> list[tuple[Buffer, Any]]:
        jax = sys.modules["jax"]
        jax.eval_shape(self._total, grad_loss)
        copies = list(self._arrays)

        def total(arrays: Sequence[Any]) -> Any:
            self._tracers = dict(zip(copies, arrays, strict=True))
            self._unread = set(copies)
            try:
                return self._total(grad_loss)
            finally:
                self._tracers = None

        if not copies:
            return []
        differentiate = jax.value_and_grad(total)
        if self._keeps:  # else what is kept would hold arrays, not only their shapes
            differentiate = jax.jit(differentiate)
        with _contexts()(object()) if self._keeps else nullcontext():
            _, found = differentiate([self._arrays[copy] for copy in copies])
        for copy in self._unread:
            raise _other_reads(self._variables[copy])
        jax.block_until_ready(found)  # JAX still reads the Variables, which may be written next
        return [
            (copy, _in_dtype(gradient, self._variables[copy].dtype))
            for copy, gradient in zip(copies, found, strict=True)
        ]

    def _total(self, grad_loss: Any) -> Any:
        jnp = sys.modules["jax"].numpy
        self._top = _tracing_to_keep()
        made = self._loss()
        terms = list(made) if hasattr(made, "__next__") else [made]
        total: Any = 0.0
        for term in terms:
            value = _as_term(term)
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise InvalidVariableError(f"Invalid type {value.dtype} of the loss")
            if grad_loss is not None:
                seed = jnp.asarray(grad_loss, value.dtype)
                if seed.shape != value.shape:
                    raise ValueError(
                        f"grad_loss is of shape {seed.shape}, the loss of shape {value.shape}"
                    )
                value = value * seed
            total = total + jnp.sum(value)
        return total


def _as_term(term: Any) -> Any:
    """What a loss returned, as an array; a tuple of JAX's (loss, aux) is none."""
    try:
        if not isinstance(term, list | tuple):
            return sys.modules["jax"].numpy.asarray(term)
    except (TypeError, ValueError):
        pass
    raise InvalidVariableError(
        f"the loss returned {type(term).__name__}; it must return a number, an array of JAX's, or "
        "an iterator of them"
    )


def _other_reads(variable: Any) -> RuntimeError:
    return RuntimeError(
        f'engine="jax" calls a loss again, and it did not read {variable!r} both times: its '
        "gradient would be lost. Read the same Variables by variable.read in every call"
    )


def _tracing_to_keep() -> Any:
    """What makes a program of all that is computed now; None where it is just computed."""
    jax = sys.modules["jax"]
    number = jax.lax.neg(sys.modules["numpy"].float32(0))
    if not isinstance(number, jax.core.Tracer):
        return None
    trace = number._trace
    return getattr(trace, "main", None) or trace  # JAX before 0.4.36 makes one for each operation


def _no_context(value: Any) -> Any:
    return nullcontext()


@lru_cache(maxsize=1)
def _contexts() -> Callable[[Any], Any]:
    """Context managers inside which JAX keeps apart what it keeps, by their argument."""
    make: Any = getattr(sys.modules["jax"], "make_user_context", None)
    return _no_context if make is None else make()


def as_jax(copy: Buffer) -> Any:
    """A copy of a Variable as a JAX array on its memory, also while JAX traces."""
    with StreamScope(), sys.modules["jax"].ensure_compile_time_eval():
        return from_buffer(copy, "jax")


def _in_dtype(gradient: Any, dtype: DType) -> Any:
    if str(gradient.dtype) == str(dtype):
        return gradient
    return sys.modules["numpy"].asarray(gradient).astype(dtype)
