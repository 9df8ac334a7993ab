"""What PyTorch's autograd engine must do for a DataParallel: call it at the end of a backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from typing import Any
from weakref import ref

import torch


def check_engine() -> None:
    """Raises ``RuntimeError`` in a backward that does not call us at its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "a DataParallel does not work with compiled autograd, which does not say when a "
            "backward ends: set torch._dynamo.config.compiled_autograd = False, or call backward "
            "outside the compiled function"
        )
    check_values(())


def is_faking() -> bool:
    """Whether FakeTensorMode is active, in which tensors have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def check_values(parameters: Iterable[Any]) -> None:
    """Raises ``RuntimeError`` for parameters without values, or in FakeTensorMode."""
    if is_faking() or any([type(each).__name__ == "FakeTensor" for each in parameters]):
        raise RuntimeError(
            "a DataParallel averages values, which a FakeTensor does not have: make it, and call "
            "backward, outside FakeTensorMode"
        )


def check_value(what: str, tensor: Any) -> None:
    """Raises ``ValueError`` for a tensor of a lazy module, or on the meta device."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{what} of a lazy module has no shape yet: run a forward of the module before this"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on the meta device and has no values: call module.to_empty(device=...), "
            "and initialize or load the module, before this"
        )


def context_of_backward() -> Context | None:
    """Returns an object that PyTorch frees while an error leaves ``backward``, if there is one.

    There is no public way to learn which error has ended a ``backward``: callbacks do not run then.
    PyTorch 2.13 keeps a Context until it leaves. Where another version keeps none, our errors do
    not say what ended the ``backward``.
    """
    try:
        context = torch._C._get_obj_in_tls("context")
    except (AttributeError, RuntimeError):  # another version; or it is not kept in this thread
        return None
    return context if isinstance(context, Context) else None


def pass_on(end: ref[Callable[[], None]] | None) -> bool:
    """Queues a function in the outer backward, if there is one; returns whether there is.

    A reentrant checkpoint calls ``backward`` inside a node of an outer backward.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return False
    assert end is not None
    kept: list[Any] = [end()]  # a list, because a traceback would keep a local variable
    kept.append(node.register_hook(partial(_queue_again, kept)))
    return True


def _queue_again(kept: list[Any], *_: object) -> None:
    """Queues a function, ``kept[0]``; removes the hook that calls this, ``kept[1]``."""
    torch.autograd.Variable._execution_engine.queue_callback(kept.pop(0))
    kept.pop().remove()
