"""How PyTorch and JAX differentiate a loss that is theirs; imports neither.

A loss of PyTorch's has returned a tensor, and JAX's is asked for by name, so that the library is in
``sys.modules``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from gradreduce.device import Buffer, DType
from gradreduce.errors import InvalidVariableError
from gradreduce.interop import OneCall, from_buffer

__all__ = ["JaxLoss", "as_jax", "is_tensor", "tensor_gradients"]


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of PyTorch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


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

    Args:
        loss: called twice: first on shapes alone, which tells what it reads, then traced.

    Attributes:
        values: what a copy of a Variable is at the moment: a tracer, inside.

    Raises:
        ValueError: JAX is not imported.
    """

    def __init__(self, loss: Callable[[], Any]) -> None:
        if "jax" not in sys.modules:
            raise ValueError('engine="jax": jax is not imported')
        self._loss = loss
        self._arrays: dict[Buffer, Any] = {}
        self._dtypes: dict[Buffer, DType] = {}
        self.values: dict[Buffer, Any] = {}

    def add(self, copy: Buffer, array: Any, dtype: DType) -> None:
        """A copy of a Variable that the loss has read: one to differentiate by."""
        self._arrays[copy] = array
        self._dtypes[copy] = dtype

    def gradients(self, grad_loss: Any) -> list[tuple[Buffer, Any]]:
        """That of each copy which the loss reads.

        A gradient is of the Variable's dtype, also where JAX without x64 has made float32 of it.
        """
        jax = sys.modules["jax"]
        jax.eval_shape(self._total, grad_loss)
        copies = list(self._arrays)

        def total(arrays: Sequence[Any]) -> Any:
            self.values = dict(zip(copies, arrays, strict=True))
            try:
                return self._total(grad_loss)
            finally:
                self.values = {}

        if not copies:
            return []
        _, found = jax.value_and_grad(total)([self._arrays[copy] for copy in copies])
        jax.block_until_ready(found)  # JAX still reads the Variables, which may be written next
        return [
            (copy, _in_dtype(gradient, self._dtypes[copy]))
            for copy, gradient in zip(copies, found, strict=True)
        ]

    def _total(self, grad_loss: Any) -> Any:
        jnp = sys.modules["jax"].numpy
        made = self._loss()
        terms = list(made) if hasattr(made, "__next__") else [made]
        total: Any = 0.0
        for term in terms:
            try:
                value = jnp.asarray(term)
            except (TypeError, ValueError):
                raise InvalidVariableError(
                    f"the loss returned {type(term).__name__}; it must return a number, an array "
                    "of JAX's, or an iterator of them"
                ) from None
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


def as_jax(copy: Buffer) -> Any:
    """A copy of a Variable as a JAX array on its memory, also while JAX traces."""
    with OneCall(), sys.modules["jax"].ensure_compile_time_eval():
        return from_buffer(copy, "jax")


def _in_dtype(gradient: Any, dtype: DType) -> Any:
    if str(gradient.dtype) == str(dtype):
        return gradient
    return sys.modules["numpy"].asarray(gradient).astype(dtype)
