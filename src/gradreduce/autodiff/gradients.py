"""Computes the gradients of one call of a loss with respect to Variables.

During the call, reads of Variables go through a ``_Reading``, which returns traced values, PyTorch
tensors or JAX arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np

from gradreduce.arrays.convert import from_buffer, is_array
from gradreduce.arrays.convert_gpu import Kind, on_gpu_of, wait_for_current_stream
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.trace_context import current_reader, reading_by
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, as_dtype
from gradreduce.errors import BackendUnavailableError, CollectiveError, InvalidVariableError
from gradreduce.sums.methods import AggregationMethod

from .accumulate_terms import TermAccumulator
from .backward import backward
from .frameworks import JaxLoss, check_seed_shape, is_tensor, tensor_gradients
from .tape import Node, Trace, Traced, resolve
from .unsupported import check_operands

Pairs = list[tuple[Any, Variable]]
Engine = Literal["jax"]
ENGINES = ("jax",)
_ALLOWED = {as_dtype(name): name for name in ("float16", "bfloat16", "float32", "float64")}


def gradients_of(
    loss: Callable[[], Any],
    variables: Sequence[Variable] | None,
    method: AggregationMethod,
    grad_loss: Any = None,
    engine: Engine | None = None,
) -> tuple[Any, Pairs]:
    """Computes the gradient of ``loss`` with respect to each variable.

    Args:
        loss: a function without arguments that returns a value computed from Variables, or an
            iterator of such values.
        variables: the Variables to differentiate with respect to. None: the trainable Variables
            that the loss reads, in the order in which it reads them first.
        method: how the terms of a gradient are combined.
        grad_loss: the gradient with respect to the value of ``loss``, of its shape. Default: ones.
        engine: see ``Optimizer.compute_gradients``.

    Returns:
        A copy of the value of the loss, or for an iterator the list of its values; and pairs of
        gradient and variable. A gradient is a new array, IndexedSlices, or None.

    Raises:
        InvalidVariableError: the loss did not return a number or an array of floats.
        ValueError: ``grad_loss`` has another shape or is not real, or there is no variable.
        NotImplementedError: the call is made inside a loss.
    """
    if current_reader() is not None:
        raise NotImplementedError(
            "compute_gradients cannot be called inside a loss: compute the inner gradients with "
            "torch.autograd.grad(..., create_graph=True) or jax.grad"
        )
    grad_loss = _validate_seed(grad_loss)
    reading = _Reading(variables, method)
    with reading_by(reading):
        try:
            if engine == "jax":
                has_terms = reading.differentiate_jax(loss, grad_loss)
            else:
                held = [loss()]
                has_terms = isinstance(held[0], Iterator)
                for term in _terms_of(held) if has_terms else [held]:
                    reading.differentiate(term, grad_loss)
            pairs = reading.pairs(variables)
            return (reading.values if has_terms else reading.values[0]), pairs
        finally:
            reading.close()


def _terms_of(held: list[Any]) -> Iterator[list[Any]]:
    """Yields ``held`` with one value of an iterator at a time.

    At the start, ``held`` contains the iterator. Later it contains one value, which the caller
    removes. So no other reference keeps a value alive while the next one is computed.
    """
    for term in held.pop():
        held.append(term)
        del term
        yield held


class _Reading:
    """Records which Variables one call of a loss reads, and collects their gradients.

    Attributes:
        home: see ``Reader``.
        trace: the trace of this call.
        values: the value of the loss, or those of an iterator.
    """

    def __init__(self, variables: Sequence[Variable] | None, method: AggregationMethod) -> None:
        self.home: Device | None = None
        self.trace = Trace()
        self.values: list[Any] = []
        self._wanted = None if variables is None else frozenset(variables)
        self._method = method
        self._seen: set[Variable] = set()
        self._terms: dict[Variable, TermAccumulator] = {}  # in the order of the first read
        self._leaves: dict[Buffer, Traced] = {}
        self._tensors: dict[Buffer, tuple[Variable, Any]] = {}
        self._jax: JaxLoss | None = None

    def read(self, variable: Variable, copy: Buffer, output_type: str | None) -> Any:
        """See ``Reader.read``. For a variable without a gradient, returns the plain array."""
        self._seen.add(variable)
        if self.home is None:
            self.home = copy.device
        if self._jax is not None or output_type == "jax":
            return self._read_jax(variable, copy)
        if output_type == "torch":
            return self._read_tensor(variable, copy)
        if copy not in self._leaves:
            value = _plain(copy)
            if not self._is_wanted(variable):
                return value
            terms = self._terms_of(variable)
            self._leaves[copy] = Traced(value, Node(self.trace, value, copy.device, terms=terms))
        return self._leaves[copy]

    def check_unread(self, variables: Iterable[Variable]) -> None:
        """See ``trace_context.check_unread``."""
        for variable in variables:
            if variable in self._seen:
                raise RuntimeError(
                    f"{variable!r} is written inside a loss that has read it, and its gradients "
                    "may need the old value: write it after the loss, or read it with "
                    "variable.numpy()"
                )

    def differentiate(self, values: list[Any], grad_loss: Any) -> None:
        """Removes one value of the loss from the list, and differentiates it."""
        value = resolve(values.pop())
        if is_tensor(value):
            self._differentiate_tensor(value, grad_loss)
            self.values.append(value.detach().clone())
            return
        _check_loss(value)
        if not isinstance(value, Traced):
            self.values.append(value.copy() if is_array(value) else value)
            return
        with on_gpu_of(value.node.device):
            seed = _seed(value.value, grad_loss)
            self.values.append(value.value.copy())
        roots = [value.node]
        del value
        backward(roots, seed, partial(TermAccumulator, self._method))

    def differentiate_jax(self, loss: Callable[[], Any], grad_loss: Any) -> bool:
        """Differentiates the loss by JAX; returns whether it returned an iterator."""
        self._jax = JaxLoss(loss)
        for variable, copy, gradient in self._jax.gradients(grad_loss):
            self._terms_of(variable).push(gradient, (0, 0), copy.device)
        self.values = self._jax.values
        return self._jax.has_terms

    def pairs(self, variables: Sequence[Variable] | None) -> Pairs:
        """Returns a pair (gradient, variable) for each variable; the caller owns the gradients."""
        if variables is None:
            variables = [variable for variable in self._terms if variable.trainable]
        if not variables:
            raise ValueError("No variables to optimize: the loss read no trainable Variable")
        seen: set[int] = set()
        gradient_of: dict[Variable, Any] = {}
        for variable in variables:
            if variable not in gradient_of:
                terms = self._terms_of(variable)
                with on_gpu_of(terms.home):
                    gradient_of[variable] = _own(terms.result(), seen)
        return [(gradient_of[variable], variable) for variable in variables]

    def close(self) -> None:
        """Ends the trace. Its values become plain data, and later updates wait for its reads."""
        self.trace.closed = True
        if self._jax is not None:  # the host has waited for JAX already
            return
        _wait_for_current_streams(self._leaves, "native")
        _wait_for_current_streams(self._tensors, "torch")

    def _is_wanted(self, variable: Variable) -> bool:
        if variable.dtype.kind not in "fV":  # bfloat16 is of kind V in ml_dtypes
            return False
        return self._wanted is None or variable in self._wanted

    def _terms_of(self, variable: Variable) -> TermAccumulator:
        if variable not in self._terms:
            self._terms[variable] = TermAccumulator(self._method, keep_rows=True)
        return self._terms[variable]

    def _read_tensor(self, variable: Variable, copy: Buffer) -> Any:
        """Returns a tensor that shares the variable's memory and requires a gradient."""
        if copy not in self._tensors:
            tensor = from_buffer(copy, "torch")
            if self._is_wanted(variable):
                self._terms_of(variable)
                tensor = tensor.detach().requires_grad_()
            self._tensors[copy] = (variable, tensor)
        return self._tensors[copy][1]

    def _differentiate_tensor(self, value: Any, grad_loss: Any) -> None:
        copies = [copy for copy, (_, tensor) in self._tensors.items() if tensor.requires_grad]
        leaves = [self._tensors[copy][1] for copy in copies]
        for copy, gradient in zip(copies, tensor_gradients(value, leaves, grad_loss), strict=True):
            self._terms_of(self._tensors[copy][0]).push(gradient, (0, 0), copy.device)

    def _read_jax(self, variable: Variable, copy: Buffer) -> Any:
        if self._jax is None:
            raise ValueError(
                'a Variable is read as a JAX array: pass engine="jax" to compute_gradients'
            )
        is_wanted = self._is_wanted(variable)
        if is_wanted:
            self._terms_of(variable)
        return self._jax.read(variable, copy, is_wanted=is_wanted)


def _wait_for_current_streams(copies: Iterable[Buffer], kind: Kind) -> None:
    """Makes the devices of ``copies`` wait for the work that the library ``kind`` has queued."""
    for copy in copies:
        if copy.device.mesh_state.has_streams:
            # Nothing can write a failed device, so it need not wait.
            with suppress(BackendUnavailableError, CollectiveError):
                wait_for_current_stream([copy], kind)


def _plain(copy: Buffer) -> Any:
    """Returns a read-only array that shares the memory of a copy of a Variable."""
    array = from_buffer(copy, "native")
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _check_loss(value: Any) -> None:
    """Raises ``InvalidVariableError`` unless a value is a number or an array of floats."""
    if isinstance(value, bool | str) or not (is_array(value) or isinstance(value, int | float)):
        raise InvalidVariableError(
            f"the loss returned {type(value).__name__}; it must return a number or an array "
            "computed from Variables, or an iterator of them"
        )
    if is_array(value) and value.dtype not in _ALLOWED:
        raise InvalidVariableError(
            f"Invalid type {value.dtype} of the loss: allowed are {', '.join(_ALLOWED.values())}"
        )


def _validate_seed(grad_loss: Any) -> Any:
    """Validates ``grad_loss``; reads Variables in it before the loss is called."""
    if grad_loss is None:
        return None
    seed = resolve(grad_loss)
    if isinstance(seed, np.ndarray):
        check_operands([seed])
    name = str(seed.dtype if is_array(seed) else np.asarray(seed).dtype)
    if not any(kind in name for kind in ("float", "int", "bool")):
        raise ValueError(f"grad_loss has dtype {name}; it must be real numbers")
    return seed


def _seed(value: Any, grad_loss: Any) -> Any:
    """Returns ``grad_loss``, or ones, with the shape, dtype and library of the loss."""
    if grad_loss is None:
        return np.ones_like(value)
    like = None if isinstance(value, np.generic) else value
    seed = np.asarray(grad_loss, like=like)
    check_seed_shape(seed, value)
    return seed.astype(value.dtype)  # a copy, because a gradient may be this array itself


def _own(gradient: Any, seen: set[int]) -> Any:
    """Copies a gradient unless no other array uses its memory.

    A rule may return its input, also for several operands, or a view of its input.
    """
    if isinstance(gradient, IndexedSlices):
        rows = _own(gradient.values, seen)
        return IndexedSlices.of(rows, gradient.indices, gradient.dense_shape)
    if isinstance(gradient, np.generic):
        return np.asarray(gradient)
    if gradient is None:
        return None
    base = getattr(gradient, "base", None)
    if base is not None or id(gradient) in seen:
        gradient = gradient.copy()
    seen.add(id(gradient))
    return gradient
