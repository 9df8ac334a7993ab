"""How a loss in plain NumPy is differentiated: what it did is written down, and walked backwards.

**Forward.** A Variable that a loss reads becomes a ``Traced`` value. NumPy asks such a value what
to do with it: ``np.tanh(x)`` calls its ``__array_ufunc__``, ``np.sum(x)`` its
``__array_function__``, and operators and methods end in one of the two. Each time ``apply`` does
the operation on the plain arrays, by the same NumPy function, which CuPy's arrays answer in turn,
and asks the operation's *rule* how a change of the result goes back to each operand. The result is
a new ``Traced`` value: the array, and a ``Node`` that knows its parents and, for each, a function
from the gradient of the result to a *term* of the gradient of the parent. Such a function holds
only the operands that it needs; the node itself holds no array, so that a value ends when neither
the loss nor a rule needs it.

**Backward.** A tensor that was used n times gets n terms. ``walk.py`` starts at the loss with its
gradient. Of all nodes whose terms have all come it takes the one that leads to the earliest use of
a tensor, has its terms combined to its gradient, and hands each parent its term. So the terms of
one tensor come in the order of its uses, as far as no use waits for a later one, as the steps of a
recurrent network do; ``TermAccumulator`` combines them, by the AggregationMethod of the call, as
they come.

**Twice.** A loss may compute gradients itself. Each call is a ``Trace`` with a level, one above
that of the call around it; an operation belongs to the highest trace among its operands, which sees
the values of the others as plain arrays, and they may in turn be traced values of an outer one.
Rules are written with NumPy's functions, so that the outer trace sees the inner walk like any
other arithmetic.

Nothing here is shared between threads, and nothing outlives a call but what it has returned.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradreduce.arrays.convert_gpu import on_gpu_of
from gradreduce.arrays.trace_context import Traceable, holds_traceable, made_like
from gradreduce.device import Device

from .accumulate_terms import TermAccumulator
from .array_methods import ArrayMethods
from .registry import COMPOSED, CONSTANT, JOINS, RULES, VIEWS, VJP, Maker
from .unsupported import (
    beside_tensor,
    check_keywords,
    check_operand,
    is_float,
    name_of,
    no_rule,
    out_of,
    view_written,
    would_write,
)

__all__ = ["Node", "Trace", "Traced", "apply", "resolve"]


class Trace:
    """One call of a loss.

    Args:
        outer: the call around it.

    Attributes:
        level: how many calls are around it.
        closed: whether it is over; what it made is then plain data.
    """

    __slots__ = ("closed", "level", "num_nodes")

    def __init__(self, outer: Trace | None = None) -> None:
        self.level: int = 0 if outer is None else outer.level + 1
        self.closed = False
        self.num_nodes = 0

    def leaf(self, value: Any, device: Device, terms: TermAccumulator) -> Traced:
        """A value to differentiate by; ``terms`` gathers its gradient."""
        node = Node(self, value, device, (), ())
        node.terms = terms
        return Traced(value, node)


class Node:
    """How a traced value was made; holds neither the value nor its gradient.

    Attributes:
        trace: of which call.
        number: how many nodes of the trace were made before.
        shape: of the value.
        dtype: of the value.
        device: the logical device that it is thought to lie on: that of its first parent.
        parents: of the operands that are traced.
        vjps: for each, from this gradient to a term of its.
        terms: of a leaf, where its terms go.
    """

    __slots__ = ("device", "dtype", "number", "parents", "shape", "terms", "trace", "vjps")

    def __init__(
        self,
        trace: Trace,
        value: Any,
        device: Device,
        parents: Sequence[Node],
        vjps: Sequence[VJP],
    ) -> None:
        self.trace = trace
        self.number = trace.num_nodes
        trace.num_nodes += 1
        self.shape, self.dtype = value.shape, value.dtype
        self.device = device
        self.parents, self.vjps = parents, vjps
        self.terms: TermAccumulator | None = None


class Traced(ArrayMethods, Traceable):
    """An array whose uses a loss writes down. Never written; arithmetic makes new ones.

    Attributes:
        value: the array: NumPy's, CuPy's, or a traced value of the call around this one.
        node: how it was made.
        is_view: whether it lies in the memory of another, which ``+=`` on arrays would change too.
    """

    __slots__ = ("is_view", "node", "value")
    _instead = ": gr.autodiff.stop_gradient(x) is the plain value of what a loss computes with"
    __array_priority__ = 1000  # above CuPy's 100

    def __init__(self, value: Any, node: Node, *, is_view: bool = False) -> None:
        self.value = value
        self.node = node
        self.is_view = is_view

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return self.node.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Any:
        """As of an array."""
        return self.node.dtype

    def copy(self, order: str = "C") -> Traced:
        """As of an array; of the same memory, which is never written."""
        return Traced(self.value, self.node)

    def _replaced(self, made: Any) -> Any:
        if not self.shape:
            return made  # as of one of NumPy's numbers, whose += makes another
        if self.is_view and not self.node.trace.closed:
            raise view_written()
        if made.shape != self.shape:
            raise ValueError(
                f"non-broadcastable output operand with shape {self.shape} doesn't match the "
                f"broadcast shape {made.shape}"
            )
        return made if made.dtype == self.dtype else made.astype(self.dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if (out is not None or method != "__call__") and not _is_open(inputs, kwargs):
            return getattr(ufunc, method)(*map(resolve, inputs), **_resolve_all(kwargs, out))
        if out is not None:
            raise would_write(name_of(ufunc))
        if method == "reduce" and ufunc in _REDUCED:
            return apply(_REDUCED[ufunc], inputs, {"axis": 0, **kwargs})
        if method != "__call__":
            raise no_rule(f"{ufunc.__name__}.{method}")
        if kwargs:
            check_keywords(ufunc, kwargs)
        return apply(ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = out_of(function, args, kwargs)
        if out is not None:
            if not _is_open(args, kwargs):
                return function(*map(resolve, args), **_resolve_all(kwargs, out))
            raise would_write(name_of(function))
        if "out" in kwargs:
            kwargs = {name: given for name, given in kwargs.items() if name != "out"}
        if not any(holds_traceable(given) for given in (*args, *kwargs.values())):
            with on_gpu_of(self.node.device):
                return made_like(function, args, kwargs, _unwrap(self))
        return apply(function, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """CuPy's own functions, which do not know NumPy's protocols, ask this."""
        function = getattr(np, str(kernel.name).removeprefix("cupy_"), None)
        if isinstance(function, np.ufunc):
            if len(args) > function.nin:
                raise would_write(name_of(function))
            return self.__array_ufunc__(function, "__call__", *args, **kwargs)
        if function not in RULES:
            raise no_rule(str(kernel.name))
        return self.__array_function__(function, (), args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise beside_tensor()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = np.asarray(_after_loss(self, "a plain array"), dtype)
        return made.copy() if copy else made

    def __float__(self) -> float:
        return float(_after_loss(self, "a number"))

    def __int__(self) -> int:
        return int(_after_loss(self, "a number"))

    def __complex__(self) -> complex:
        return complex(_after_loss(self, "a number"))

    def __index__(self) -> int:
        return operator.index(_after_loss(self, "an index"))

    def __repr__(self) -> str:
        return f"Traced({self.value!r})"


def _after_loss(given: Traced, what: str) -> Any:
    """The plain data that a traced value has become with the end of its loss."""
    plain = resolve(given)
    if isinstance(plain, Traced):
        raise TypeError(
            f"a traced value cannot become {what} inside its loss, where its gradient would be "
            "lost: np.stack joins several, gr.autodiff.stop_gradient(x) is the plain value"
        )
    return plain


def _is_open(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operand is traced by a loss that is being computed."""
    given = [resolve(each) for each in (*args, *kwargs.values())]
    return _highest(given) is not None


def _resolve_all(kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """Named arguments as plain data, where the result is written to ``out``."""
    if any(isinstance(each, Traced) for each in (out if isinstance(out, tuple) else (out,))):
        raise TypeError("a traced value cannot be written, after its loss either")
    return {name: resolve(given) for name, given in kwargs.items()}


_REDUCED = {np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min}


def apply(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` of which some operands are traced: a traced value.

    A plain one where nothing of it can change: comparisons, integers.

    Raises:
        NotImplementedError: ``function`` has no rule, or the result is complex.
    """
    if kwargs:
        args, kwargs = _bound(function, args, kwargs)
    args = [resolve(given) for given in args]
    top = _highest(args)
    if top is None:
        return function(*args, **kwargs)
    if function in COMPOSED:
        return _by_rule(function, COMPOSED[function], args, kwargs)
    operands: list[tuple[int, int | None, Node]] = []
    raw = [_plain(given, top, index, operands) for index, given in enumerate(args)]
    parents = [node for _, _, node in operands]
    with on_gpu_of(parents[0].device):
        if function in CONSTANT:
            return function(*raw, **kwargs)
        rule = RULES.get(function)
        if rule is None:
            raise no_rule(name_of(function))
        value = function(*raw, **kwargs)
        if not is_float(function, value):
            return value
        makers = _by_rule(function, rule, [value, *raw], kwargs)
        vjps = [_vjp(function, makers, index, item) for index, item, _ in operands]
    is_view = function in VIEWS and _is_part(value, raw[0])
    return Traced(value, Node(top, value, parents[0].device, parents, vjps), is_view=is_view)


def _vjp(function: Any, makers: Sequence[Maker], place: int, item: int | None) -> VJP:
    """That of one operand: an argument, or the element of a list of arrays."""
    if place >= len(makers):
        raise no_rule(f"{name_of(function)} with a traced argument {place}")
    if item is None:
        return makers[place]()
    if function not in JOINS:
        raise no_rule(f"{name_of(function)} of a list of traced values, unless np.stack joins it,")
    return makers[place](item)


def _is_part(value: Any, of: Any) -> bool:
    """Whether an array lies in the memory of another."""
    value, of = _unwrap(value), _unwrap(of)
    base = getattr(value, "base", None)
    return base is not None and (base is of or base is getattr(of, "base", None))


def _by_rule(function: Any, rule: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a rule says; of arguments that it has not, that there is none."""
    try:
        return rule(*args, **kwargs)
    except TypeError:  # to bind them first would cost as much as the operation
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError as error:
            raise no_rule(f"{name_of(function)} with these arguments ({error})") from None
        raise


def _bound(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Operands given by name, by their place in the rule, whose parameters are named alike."""
    check_operand([*kwargs.values()])
    if not any(holds_traceable(given) for given in kwargs.values()):
        return args, kwargs
    if function in CONSTANT:
        return args, {name: _unwrap(given) for name, given in kwargs.items()}
    rule = COMPOSED.get(function) or RULES.get(function)
    if rule is None:
        raise no_rule(name_of(function))
    names = list(inspect.signature(rule).parameters)[0 if function in COMPOSED else 1 :]
    placed, rest = list(args), dict(kwargs)
    for name in names[len(args) :]:
        if name not in rest:
            break
        placed.append(rest.pop(name))
    if any(holds_traceable(given) for given in rest.values()):
        raise no_rule(f"{name_of(function)} with {', '.join(rest)}= of traced values")
    return placed, rest


def _unwrap(given: Any) -> Any:
    """An argument that nothing can be differentiated by, as a plain array."""
    given = resolve(given)
    while isinstance(given, Traced):
        given = given.value
    return given


def resolve(given: Any) -> Any:
    """An argument with its Variables read, and what an earlier loss has left as plain data."""
    if isinstance(given, Traced):
        while isinstance(given, Traced) and given.node.trace.closed:
            given = given.value
        return given
    if isinstance(given, Traceable):
        return given.read()  # type: ignore[attr-defined]  # a Variable
    if isinstance(given, list | tuple) and holds_traceable(given):
        within = [resolve(each) for each in given]
        return tuple(within) if isinstance(given, tuple) else within
    return given


def _highest(args: Sequence[Any]) -> Trace | None:
    """The innermost trace of the operands."""
    top: Trace | None = None
    for given in args:
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, Traced) and (top is None or each.node.trace.level > top.level):
                top = each.node.trace
    return top


def _plain(given: Any, top: Trace, place: int, operands: list[tuple[int, int | None, Node]]) -> Any:
    """An argument as ``top`` sees it, below its own level; its operands are noted."""
    if isinstance(given, Traced):
        if given.node.trace is not top:
            return given
        operands.append((place, None, given.node))
        return given.value
    check_operand(given)
    if not isinstance(given, list | tuple) or not any(isinstance(each, Traced) for each in given):
        return given
    within = []
    for item, each in enumerate(given):
        if isinstance(each, Traced) and each.node.trace is top:
            operands.append((place, item, each.node))
            within.append(each.value)
        else:
            within.append(each)
    return within
