"""How one call of a loss becomes gradients of Variables; never updates one.

The loss reads Variables through a ``Reading``, which gives what the loss asks for: values of the
tape, PyTorch's tensors, or JAX's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffer, is_array
from gradreduce.arrays.convert_gpu import Kind, fence_in, on_gpu_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.trace_context import Reader, current_reader, reading_by
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device
from gradreduce.errors import BackendUnavailableError, CollectiveError, InvalidVariableError
from gradreduce.reduce.aggregation import AggregationMethod

from . import rules
from .accumulate_terms import TermAccumulator
from .backward import backward
from .frameworks import JaxLoss, as_jax, is_tensor, tensor_gradients
from .tape import Trace, Traced, resolve
from .unsupported import check_operand

__all__ = ["ENGINES", "Engine", "gradients_of"]

Engine = Literal["jax"]
ENGINES = ("jax",)
_ALLOWED = ("float16", "bfloat16", "float32", "float64")
assert rules, "imported for the tables that it fills"


def gradients_of(
    loss: Callable[[], Any],
    variables: Sequence[Variable] | None,
    method: AggregationMethod,
    grad_loss: Any = None,
    engine: Engine | None = None,
) -> list[tuple[Any, Variable]]:
    """The gradient of ``loss`` with respect to each variable.

    Args:
        loss: takes no argument; returns what it computed from Variables, or an iterator of terms.
        variables: by which to differentiate; None: the trainable ones that the loss reads, in the
            order of first reading.
        method: how the terms of a gradient are combined.
        grad_loss: the gradient of what ``loss`` returns, of its shape; default ones.
        engine: see ``Optimizer.compute_gradients``.

    Returns:
        Pairs. A gradient is an array that is nobody else's, IndexedSlices, or None.

    Raises:
        InvalidVariableError: the loss returned no number and no array of floats.
        ValueError: ``grad_loss`` is not of its shape or no real numbers, or there is no variable.
        NotImplementedError: one call inside another, of which PyTorch or JAX differentiates one.
    """
    grad_loss = _checked_seed(grad_loss)
    outer = current_reader()
    if outer is not None and engine == "jax":
        raise _not_nested()
    reading = _Reading(outer, variables, method)
    with reading_by(reading):
        try:
            if engine == "jax":
                reading.differentiate_jax(loss, grad_loss)
            else:
                for held in _terms_of(loss):
                    reading.differentiate(held, grad_loss)
            return reading.pairs(variables)
        finally:
            reading.close()


def _terms_of(loss: Callable[[], Any]) -> Iterator[list[Any]]:
    """What the loss returns; or, of an iterator, one term after the other.

    Each in a list of its own, from which it is taken: so nobody else keeps what it was made of.
    """
    held = [loss()]
    if not hasattr(held[0], "__next__"):
        yield held
        return
    for term in held.pop():
        held.append(term)
        del term
        yield held


class _Reading:
    """How one call of a loss reads Variables, and what has come of it.

    Attributes:
        home: see ``Reader``.
        trace: of this call.
    """

    def __init__(
        self,
        outer: Reader | None,
        wanted: Sequence[Variable] | None,
        method: AggregationMethod,
    ) -> None:
        self.home: Device | None = outer.home if outer is not None else None
        self.trace: Trace = Trace(outer.trace if isinstance(outer, _Reading) else None)
        self._outer = outer
        self._wanted = None if wanted is None else frozenset(wanted)
        self._method = method
        self._seen: set[Variable] = set()
        self._terms: dict[Variable, TermAccumulator] = {}  # in the order of first reading
        self._leaves: dict[Buffer, Traced] = {}
        self._tensors: dict[Buffer, tuple[Variable, Any]] = {}
        self._jax: JaxLoss | None = None
        self._is_outer = False  # whether an inner call has read a Variable through this one

    def read(self, variable: Variable, copy: Buffer, output_type: str | None) -> Any:
        """See ``Reader.read``; of a variable that nobody asked for, the plain value."""
        self._seen.add(variable)
        if self.home is None:
            self.home = copy.device
        if self._jax is not None or output_type == "jax":
            return self._read_jax(variable, copy)
        if output_type == "torch":
            return self._read_tensor(variable, copy)
        leaf = self._leaves.get(copy)
        if leaf is not None:
            return leaf
        if self._outer is not None:
            if isinstance(self._outer, _Reading):
                self._outer.note_inner()
            value = self._outer.read(variable, copy, output_type)
        else:
            value = _plain(copy)
        if not self._is_wanted(variable):
            return value
        leaf = self.trace.leaf(value, copy.device, self._terms_of(variable))
        self._leaves[copy] = leaf
        return leaf

    def note_inner(self) -> None:
        """An inner call differentiates what it reads through this one, as only the tape can see."""
        if self._jax is not None:
            raise _not_nested()
        self._is_outer = True

    def check_unread(self, variables: Iterable[Variable]) -> None:
        """See ``loss_context.check_unread``."""
        for variable in variables:
            if variable in self._seen:
                raise RuntimeError(
                    f"{variable!r} is written inside a loss that has read it, whose gradients may "
                    "need what it was: write it after the loss, or read it by variable.numpy()"
                )
        if self._outer is not None:
            self._outer.check_unread(variables)

    def differentiate(self, values: list[Any], grad_loss: Any) -> None:
        """Pushes the terms that one value of the loss, taken out of the list, gives."""
        value = resolve(values.pop())
        if is_tensor(value):
            self._differentiate_tensor(value, grad_loss)
            return
        _check_loss(value)
        if not isinstance(value, Traced) or value.node.trace is not self.trace:
            return
        with on_gpu_of(value.node.device):
            seed = _seed(value.value, grad_loss)
        roots = [value.node]
        del value
        backward(roots, seed, lambda: TermAccumulator(self._method))

    def differentiate_jax(self, loss: Callable[[], Any], grad_loss: Any) -> None:
        """As ``differentiate``, by JAX."""
        self._jax = JaxLoss(loss)
        for index, (copy, gradient) in enumerate(self._jax.gradients(grad_loss)):
            variable, _ = self._tensors[copy]
            self._terms_of(variable).push(gradient, (index, 0), copy.device)

    def pairs(self, variables: Sequence[Variable] | None) -> list[tuple[Any, Variable]]:
        """Each variable with its gradient, whose memory is the caller's alone."""
        if variables is None:
            variables = [variable for variable in self._terms if variable.trainable]
        if not variables:
            raise ValueError("No variables to optimize: the loss read none that is trainable")
        seen: set[int] = set()
        found: dict[Variable, Any] = {}
        for variable in variables:
            if variable not in found:
                terms = self._terms_of(variable)
                with on_gpu_of(terms.home):
                    found[variable] = _own(terms.result(), seen)
        return [(found[variable], variable) for variable in variables]

    def close(self) -> None:
        """What the loss made is plain data from here on; updates come behind what it read."""
        self.trace.closed = True
        if self._jax is not None:  # which has been waited for
            return
        _follow(self._leaves, "native")
        _follow(self._tensors, "torch")

    def _is_wanted(self, variable: Variable) -> bool:
        if str(variable.dtype) not in _ALLOWED:
            return False
        return self._wanted is None or variable in self._wanted

    def _terms_of(self, variable: Variable) -> TermAccumulator:
        terms = self._terms.get(variable)
        if terms is None:
            terms = self._terms[variable] = TermAccumulator(self._method, keep_rows=True)
        return terms

    def _read_tensor(self, variable: Variable, copy: Buffer) -> Any:
        """A tensor on the variable's memory, by which PyTorch differentiates."""
        if copy not in self._tensors:
            with StreamScope():
                tensor = from_buffer(copy, "torch")
            if self._is_wanted(variable):
                self._terms_of(variable)
                tensor = tensor.detach().requires_grad_()
            self._tensors[copy] = (variable, tensor)
        return self._tensors[copy][1]

    def _differentiate_tensor(self, value: Any, grad_loss: Any) -> None:
        if self._outer is not None or self._is_outer:
            raise _not_nested()
        copies = [copy for copy, (_, tensor) in self._tensors.items() if tensor.requires_grad]
        leaves = [self._tensors[copy][1] for copy in copies]
        for index, gradient in enumerate(tensor_gradients(value, leaves, grad_loss)):
            variable, _ = self._tensors[copies[index]]
            self._terms_of(variable).push(gradient, (index, 0), copies[index].device)

    def _read_jax(self, variable: Variable, copy: Buffer) -> Any:
        if self._jax is None:
            raise ValueError('a Variable is read as a JAX array: pass engine="jax"')
        if copy not in self._tensors:
            self._tensors[copy] = (variable, as_jax(copy))
            if self._is_wanted(variable):
                self._terms_of(variable)
                self._jax.add(copy, self._tensors[copy][1], variable)
        return self._jax.value(copy, self._tensors[copy][1])


def _not_nested() -> NotImplementedError:
    return NotImplementedError(
        "a gradient inside a loss would be lost where PyTorch or JAX differentiates either: write "
        "both losses in NumPy's functions, or take the inner one by torch.autograd.grad(..., "
        "create_graph=True) or jax.grad"
    )


def _follow(copies: Iterable[Buffer], kind: Kind) -> None:
    """What writes these copies next comes behind what the library of ``kind`` has queued."""
    for copy in copies:
        if copy.device.mesh_state.backend != "sim":
            # On a device that is lost nothing can be written any more.
            with suppress(BackendUnavailableError, CollectiveError):
                fence_in(copy, kind)


def _plain(copy: Buffer) -> Any:
    """A copy of a Variable as an array on its own memory, which nobody may write."""
    with StreamScope():
        array = from_buffer(copy, "native")
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _check_loss(value: Any) -> None:
    """Raises unless it is a number or an array of floats."""
    if isinstance(value, bool | str) or not (is_array(value) or isinstance(value, int | float)):
        raise InvalidVariableError(
            f"the loss returned {type(value).__name__}; it must return a number or an array that "
            "it computed from Variables, or an iterator of them"
        )
    if is_array(value) and str(value.dtype) not in _ALLOWED:
        raise InvalidVariableError(
            f"Invalid type {value.dtype} of the loss: allowed are {', '.join(_ALLOWED)}"
        )


def _checked_seed(grad_loss: Any) -> Any:
    """``grad_loss`` with its Variables read, which is done as around the loss, not inside."""
    if grad_loss is None:
        return None
    given = resolve(grad_loss)
    if isinstance(given, np.ndarray):
        check_operand(given)
    name = str(given.dtype if is_array(given) else np.asarray(given).dtype)
    if not any(kind in name for kind in ("float", "int", "bool")):
        raise ValueError(f"grad_loss is of dtype {name}: it must be real numbers")
    return given


def _seed(value: Any, grad_loss: Any) -> Any:
    """The gradient of the loss, of its shape, dtype and library."""
    if grad_loss is None:
        return np.ones_like(value)
    given = grad_loss
    if not isinstance(given, Traced):
        base = value
        while isinstance(base, Traced):
            base = base.value
        if not is_array(given):
            host = isinstance(base, np.generic)
            given = np.asarray(given) if host else np.asarray(given, like=base)
    if given.shape != value.shape:
        raise ValueError(f"grad_loss is of shape {given.shape}, the loss of shape {value.shape}")
    return given.astype(value.dtype)  # a copy: a gradient may be this very array


def _own(gradient: Any, seen: set[int]) -> Any:
    """A gradient in memory that no other gradient and no operand has.

    A rule may hand on an array as it is, to several operands, or a view of it.
    """
    if isinstance(gradient, IndexedSlices):
        rows = _own(gradient.values, seen)
        return IndexedSlices.of(rows, gradient.indices, gradient.dense_shape)
    if isinstance(gradient, np.generic):
        return np.asarray(gradient)
    if gradient is None or isinstance(gradient, Traced):
        return gradient
    base = getattr(gradient, "base", None)
    if base is not None or id(gradient) in seen:
        gradient = gradient.copy()
    seen.add(id(gradient))
    return gradient
