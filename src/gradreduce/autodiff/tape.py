"""Reverse-mode differentiation of NumPy losses: records operations on a tape.

**Forward.** When a loss reads a Variable, it gets a ``Traced`` value. NumPy dispatches operations
on this value to it: ``np.tanh(x)`` calls its ``__array_ufunc__``, ``np.sum(x)`` calls its
``__array_function__``, and operators and methods call one of these two. They call ``apply``, which
calls the same NumPy function on the plain arrays (NumPy dispatches to CuPy for CuPy arrays), and
then the *rule* of the operation. The result is a new ``Traced`` value: the array, and a ``Node``.
The node has the parents of the value and, for each parent, a *VJP* (vector-Jacobian product): a
function that takes the gradient of the result and returns a *term* of the gradient of the parent. A
VJP keeps only the operands that it needs, and a node keeps no array. So an array is freed when
neither the loss nor a VJP needs it.

**Backward.** A tensor that was used n times gets n terms. ``backward.py`` starts at the loss with
the gradient of the loss. It repeatedly takes a node that has all its terms, adds them to its
gradient, and computes a term for each parent. Among several such nodes it takes the one that leads
to the earliest use of a tensor. Therefore the terms of a tensor arrive in the order in which the
loss used it, unless a use depends on a later use, as in a recurrent network. ``TermAccumulator``
combines the terms by the AggregationMethod.

Rules compute with plain arrays, so a gradient cannot be differentiated again. Threads share nothing
here, and a call keeps nothing except its results.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import Traceable, holds_traceable
from gradreduce.arrays.convert import host_array
from gradreduce.arrays.convert_gpu import on_gpu_of
from gradreduce.arrays.trace_context import bind_arguments, make_like, to_positional
from gradreduce.device import Device

from .accumulate_terms import TermAccumulator
from .frameworks import is_jax
from .registry import COMPOSED, CONSTANT, RULES, VJP
from .unsupported import (
    HARMLESS,
    NoMethodError,
    WriteError,
    beside_tensor,
    check_operands,
    is_float,
    name_of,
    no_rule,
    would_write,
)


class Trace:
    """One call of a loss.

    Attributes:
        closed: whether the call has ended. Then its traced values act as plain data.
        num_nodes: the number of nodes recorded so far.
    """

    __slots__ = ("closed", "num_nodes")

    def __init__(self) -> None:
        self.closed = False
        self.num_nodes = 0


class Node:
    """A recorded operation; keeps neither its result nor its gradient.

    Attributes:
        trace: the call of the loss that the node belongs to.
        number: the number of earlier nodes in the trace.
        shape: the shape of the result.
        dtype: the dtype of the result.
        device: the logical device of the result, which is that of the first parent.
        parents: for each traced operand, its node, and a function from the gradient of this node
            to a term of the operand's gradient.
        terms: for a leaf, accumulates its terms; None for other nodes.
    """

    __slots__ = ("device", "dtype", "number", "parents", "shape", "terms", "trace")

    def __init__(
        self,
        trace: Trace,
        value: Any,
        device: Device,
        parents: Sequence[tuple[Node, VJP]] = (),
        terms: TermAccumulator | None = None,
    ) -> None:
        self.trace = trace
        self.number = trace.num_nodes
        trace.num_nodes += 1
        self.shape, self.dtype = value.shape, value.dtype
        self.device = device
        self.parents, self.terms = parents, terms


Operand = tuple[int, int | None, Node]  # which argument, which element of a list, and its node


class Traced(Traceable):
    """A traced array: operations on it are recorded and return new traced arrays.

    Attributes:
        dtype: the dtype, as in a NumPy array.
        value: a NumPy or CuPy array.
        node: the recorded operation.
        is_view: whether the array shares memory with another value, so that NumPy's ``+=`` would
            change both.
    """

    __slots__ = ("dtype", "is_view", "node", "value")
    _hint = ": gr.autodiff.stop_gradient(x) is the plain value of what a loss computes with"
    __hash__ = None  # type: ignore[assignment]  # like an array: == compares elements

    def __init__(self, value: Any, node: Node, *, is_view: bool = False) -> None:
        self.value = value
        self.node = node
        self.dtype = node.dtype
        self.is_view = is_view

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as in a NumPy array."""
        return self.node.shape  # type: ignore[no-any-return]

    def numpy(self) -> Any:
        """Returns a copy of the value in host memory; a constant, without a gradient."""
        return host_array(self.value).copy()

    def _in_place_result(self, result: Any) -> Any:
        """Returns what ``self += x`` binds to the name; ``result`` is ``self + x``.

        Raises:
            NotImplementedError: in NumPy, the statement would also change another array.
            ValueError: ``result`` has another shape.
        """
        if not self.shape:
            return result  # like a NumPy scalar: += creates a new one
        if self.is_view and not self.node.trace.closed:
            raise WriteError(
                "a += b is not supported if a is a view of a traced value, because NumPy would "
                "change that value too: write a = a + b, or build the whole array with np.where, "
                "np.concatenate or np.stack"
            )
        if result.shape != self.shape:
            raise ValueError(
                f"non-broadcastable output operand with shape {self.shape} doesn't match the "
                f"broadcast shape {result.shape}"
            )
        return result if result.dtype == self.dtype else result.astype(self.dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "reduce" and ufunc in _REDUCED:
            return apply(_REDUCED[ufunc], inputs, {"axis": 0, **kwargs})
        return apply(ufunc if method == "__call__" else getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not any(map(holds_traceable, (*args, *kwargs.values()))):
            with on_gpu_of(self.node.device):
                return make_like(function, args, kwargs, self.value)
        return apply(function, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by CuPy's own functions, which do not use NumPy's protocols."""
        function = getattr(np, str(kernel.name).removeprefix("cupy_"), None)
        if isinstance(function, np.ufunc) and len(args) > function.nin:
            raise would_write(name_of(function))
        if function is None:
            raise no_rule(str(kernel.name))
        return apply(function, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise beside_tensor()

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "cannot write into a traced value: build the whole array with np.where, np.concatenate "
            "or np.stack"
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(np.ndarray, name):
            raise NoMethodError(
                f"ndarray.{name} has no derivative rule; use NumPy's functions, or return a "
                "PyTorch tensor from the loss, which PyTorch differentiates"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = np.asarray(_after_loss(self, "a plain array"), dtype)
        return made.copy() if copy else made

    def __float__(self) -> float:
        return float(_after_loss(self, "a number"))

    def __int__(self) -> int:
        return int(_after_loss(self, "a number"))

    def __repr__(self) -> str:
        return f"Traced({self.value!r})"


def _replacing(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an operator, such as ``+=``, that binds the name to a new value."""
    return lambda self, other: self._in_place_result(operation(self, other))


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
):  # fmt: skip
    setattr(Traced, f"__i{_name}__", _replacing(getattr(operator, f"__{_name}__")))


def _after_loss(value: Traced, what: str) -> Any:
    """Returns the plain data of a traced value; raises before its loss has ended."""
    if not value.node.trace.closed:
        raise TypeError(
            f"cannot convert a traced value to {what} inside its loss, because its gradient would "
            "be lost: join several with np.stack, or pass gr.autodiff.stop_gradient(x)"
        )
    return value.value


_REDUCED = {np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min}


def apply(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls ``function`` with traced operands, and records it; returns a traced value.

    Comparisons and operations with an integer result return a plain value.

    Raises:
        NotImplementedError: ``function`` has no rule or writes to ``out=``, or its result is
            complex.
    """
    if kwargs:
        args, kwargs = _resolve_keywords(function, args, kwargs)
    raw, operands = _unwrap(args)
    is_named = any(map(holds_traceable, kwargs.values()))
    if not operands and not is_named:
        return function(*raw, **kwargs)
    is_ufunc = isinstance(function, np.ufunc)
    named = kwargs if is_ufunc else bind_arguments(function, args, kwargs)
    if named.get("out") is not None:
        raise would_write(name_of(function))
    check_operands((*raw, *kwargs.values()))
    if function in COMPOSED:
        with on_gpu_of(operands[0][2].device if operands else None):
            return _by_rule(function, COMPOSED[function], [resolve(arg) for arg in args], kwargs)
    if is_named:
        raise no_rule(f"{name_of(function)} with {', '.join(kwargs)}= of traced values")
    for key in kwargs.keys() - HARMLESS if is_ufunc else ():
        raise no_rule(f"{name_of(function)}(..., {key}=)")
    return _call_and_record(function, raw, kwargs, operands)


def _resolve_keywords(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Resolves arguments, and converts keyword arguments to positional ones."""
    args, out = [resolve(arg) for arg in args], kwargs.get("out")
    if holds_traceable(out):
        raise would_write(name_of(function))
    named = {name: resolve(arg) for name, arg in kwargs.items() if name != "out" or out is not None}
    return (args, named) if isinstance(function, np.ufunc) else to_positional(function, args, named)


def _call_and_record(
    function: Any, raw: Sequence[Any], kwargs: dict[str, Any], operands: list[Operand]
) -> Any:
    """Calls ``function`` with the plain values of its operands, and creates the node."""
    *_, first = operands[0]
    with on_gpu_of(first.device):
        if function in CONSTANT:
            return function(*raw, **kwargs)
        rule = RULES.get(function)
        if rule is None:
            raise no_rule(name_of(function))
        value = function(*raw, **kwargs)
        if not is_float(function, value):
            return value
        named = {} if isinstance(function, np.ufunc) else kwargs
        made = _by_rule(function, rule, [value, *raw], named)
        of_arguments = (made,) if callable(made) else made
        parents = [
            (node, _vjp(function, of_arguments, index, item)) for index, item, node in operands
        ]
    base = getattr(value, "base", None)
    is_view = base is not None and (base is raw[0] or base is getattr(raw[0], "base", None))
    return Traced(value, Node(first.trace, value, first.device, parents), is_view=is_view)


def _vjp(function: Any, of_arguments: Sequence[Any], index: int, item: int | None) -> VJP:
    """Returns the VJP of an operand: an argument, or an item of a list argument."""
    if index >= len(of_arguments):
        raise no_rule(f"{name_of(function)} with a traced argument {index}")
    vjp = of_arguments[index]
    if item is not None and callable(vjp):
        raise no_rule(f"{name_of(function)} of a list of traced values, unless np.stack joins it,")
    if item is None and not callable(vjp):  # one array was passed as the list of its rows
        return lambda g: np.stack([of_row(g) for of_row in vjp])
    return vjp if item is None else vjp[item]  # type: ignore[no-any-return]


def _by_rule(function: Any, rule: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a rule; raises ``no_rule`` for arguments that the rule does not support."""
    try:
        return rule(*args, **kwargs)
    except TypeError:  # arguments are checked only now: a check takes as long as an operation
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError as error:
            raise no_rule(f"{name_of(function)} with these arguments ({error})") from None
        raise


def resolve(value: Any) -> Any:
    """Reads the Variables of an argument, and unwraps values of losses that have ended."""
    if isinstance(value, Traced):
        return value.value if value.node.trace.closed else value
    if isinstance(value, Traceable):
        return value.read()  # type: ignore[attr-defined]  # a Variable
    if isinstance(value, list | tuple) and holds_traceable(value):
        within = [resolve(each) for each in value]
        return tuple(within) if isinstance(value, tuple) else within
    return value


def _unwrap(args: Sequence[Any]) -> tuple[list[Any], list[Operand]]:
    """Reads Variables, and unwraps traced values; returns plain arguments and the operands."""
    raw: list[Any] = []
    operands: list[Operand] = []
    for position, arg in enumerate(args):
        value = resolve(arg) if isinstance(arg, Traceable | list | tuple) else arg
        if isinstance(value, Traced):
            operands.append((position, None, value.node))
            value = value.value
        elif isinstance(value, list | tuple) and holds_traceable(value):
            value = [*value]
            for item, element in enumerate(value):
                if isinstance(element, Traced):
                    operands.append((position, item, element.node))
                    value[item] = element.value
        elif is_jax(value):  # with a JAX array as operand, JAX would compute terms, in float32
            value = np.asarray(value)
        raw.append(value)
    return raw, operands
