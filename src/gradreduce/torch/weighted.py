"""``weighted``: weights of micro-batches for DDP's hook and FSDP2's reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel

from gradreduce.device import Mesh
from gradreduce.errors import brief
from gradreduce.weights import as_weight, to_units

from .data_parallel import DataParallel
from .weights import StepDivisor, divide


class Period:
    """The micro-batches of a module since the last reduction of its gradients.

    Args:
        mesh: the devices of the processes that reduce them.

    Attributes:
        units: the exact sum of the weights; see ``gradreduce.weights``.
        is_weighted: whether there was a weight.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._end: ref[Callable[[], None]] | None = None  # called at the end of a backward
        self._forget()

    def _forget(self) -> None:
        self.units, self.is_weighted = 0, False
        self._divisor: StepDivisor | None = None

    def count(self, weight: float) -> None:
        """Counts a micro-batch in its backward.

        PyTorch frees the function that it calls at the end of a backward if an error ends it: then
        the period is forgotten.
        """
        if self._end is None:
            end = partial(self._queue_end)
            self._end = ref(end, lambda _: self._drop())
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self.units += to_units(weight)
        self.is_weighted = True

    def divisor(self, run: Callable[[Callable[[], None]], object]) -> StepDivisor:
        """Returns the divisor of the reductions of this backward.

        Args:
            run: runs a call before these reductions, in all processes.
        """
        if not self.is_weighted:
            return StepDivisor()
        if self._divisor is None:
            self._divisor = StepDivisor()
            self._divisor.reads = self.units > 0
            run(partial(self._divisor.add, self.units, self._mesh))
        return self._divisor

    def divide_alone(self, gradients: Any) -> None:
        """Divides gradients of FSDP2 over one process, which calls no reduce-scatter."""
        divisor = self.divisor(lambda call: call())
        if divisor.error is not None:
            gradients.zero_()
        divide(gradients, divisor.total)

    def _queue_end(self) -> None:
        """Queues what follows after the functions of DDP and FSDP that end a backward."""
        end = partial(self._end_backward)
        self._end = ref(end, lambda _: self._drop())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self) -> None:
        """Ends a backward, and the period if gradients were reduced; raises the divisor's error."""
        self._end = None
        if self._divisor is not None:
            error = self._divisor.error
            self._forget()
            if error is not None:
                raise error

    def _drop(self) -> None:
        self._end = None
        self._forget()


def weighted(loss: Any, weight: float, model: Any) -> Any:
    """Weighs a micro-batch of DDP or FSDP2 that our reductions average.

    If the processes or micro-batches of a step have different numbers of tokens, the mean of their
    means is not the mean over all tokens. Let each loss be a mean, and weigh it by its number::

        for number, (x, num_tokens) in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with nullcontext() if is_last else ddp.no_sync():
                gr.torch.weighted(ddp(x).mean(), num_tokens, ddp).backward()

    Example: see ``docs/pytorch.md``.

    Each gradient of the step is the sum of weight * gradient over all micro-batches since the last
    reduction, of all processes, divided once by the sum of all these weights. This sum is exact,
    and equal in all processes. The weight counts when the ``backward`` of the result runs.

    - **Weigh each micro-batch in all processes of a step, or none.**
    - If all weights of a process in a step are 0, its gradients are not used; they may be NaN.
    - After a ``backward`` that an error has ended, zero the gradients: its period is forgotten.
    - DDP's ``join`` does not work with weights.
    - FSDP2 must reduce in float32 or bfloat16, without ``set_gradient_divide_factor`` and
      ``set_force_sum_reduction_for_comms``, and without hybrid sharding.

    Args:
        loss: the mean loss of a micro-batch, a tensor.
        weight: a finite number of at least 0, on the host.
        model: the ``DistributedDataParallel`` with ``gr.torch.comm_hook``, or the root module of
            ``fully_shard``, all of whose modules have ``gr.torch.ReduceScatter``. A DataParallel
            has ``dp.weight`` instead.

    Returns:
        ``loss * weight``. With weight 0 it is 0, even if the loss is NaN.

    Raises:
        TypeError: ``weight`` is no number, ``loss`` no tensor, or ``model`` another module.
        ValueError: ``weight`` is negative, infinite or NaN; or ``model`` does not use our hook or
            reduce-scatter, is not the root, or shards with copies (hybrid sharding). Also raised by
            ``backward``, in all processes, if all weights of a step are 0.
    """
    number = as_weight("weight", weight)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss={brief(loss)} is not a tensor")
    return _Weigh.apply(loss, number, _period_of(model))


class _Weigh(torch.autograd.Function):  # type: ignore[misc]  # PyTorch need not be installed
    """Multiplies a loss by a weight, which its backward counts."""

    @staticmethod
    def forward(context: Any, loss: Any, weight: float, period: Period) -> Any:
        context.weight, context.period = weight, period
        return loss * weight if weight else torch.zeros_like(loss)

    @staticmethod
    def backward(context: Any, grad: Any) -> Any:
        context.period.count(context.weight)
        return grad * context.weight, None, None


def _period_of(model: Any) -> Period:
    """Returns the period of a model, or raises; see ``weighted``."""
    if isinstance(model, DistributedDataParallel):
        periods = [getattr(hook, "period", None) for hook, _ in model._comm_hooks]
        found = next(filter(None, periods), None)
        if not isinstance(found, Period):
            raise ValueError(
                "model has not gr.torch.comm_hook, which divides by the weights: call "
                "model.register_comm_hook(None, gr.torch.comm_hook(ops)) before weighted"
            )
        return found
    if isinstance(model, DataParallel):
        raise TypeError("model is a DataParallel: use `with model.weight(w): loss.backward()`")
    if not isinstance(model, torch.nn.Module) or not any(_groups_of(model)):
        raise TypeError(
            f"model={brief(model)} is neither a DistributedDataParallel nor the root of fully_shard"
        )
    if model not in _periods:
        _periods[model] = _share_period(model)
    return _periods[model]


_periods: WeakKeyDictionary[Any, Period] = WeakKeyDictionary()


def _share_period(model: Any) -> Period:
    """Makes all reduce-scatters of a root of FSDP2 use one period."""
    if hasattr(model, "_get_fsdp_state") and model._get_fsdp_state()._is_root is False:
        raise ValueError("model is inside another module of fully_shard: pass the root")
    users, modules = [], []
    for name, module, group in _groups_of(model):
        user = group._reduce_scatter_comm
        if not hasattr(user, "use_period"):
            raise ValueError(
                f"{name or 'the root'} has not gr.torch.ReduceScatter, which divides by the "
                "weights: call its set_custom_reduce_scatter(gr.torch.ReduceScatter(ops))"
            )
        if "HSDP" in type(group.mesh_info).__name__ or group._all_reduce_hook is not None:
            raise ValueError(
                f"{name or 'the root'} averages copies of its shards (hybrid sharding), which have "
                "other sums of weights: shard over all processes"
            )
        users.append(user)
        modules.append(module)
    period = Period(users[0].mesh)
    for user, module in zip(users, modules, strict=True):
        user.use_period(period)
        if user.mesh.num_processes == 1:
            module.set_all_reduce_hook(period.divide_alone)
    return period


def _groups_of(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the names and modules of FSDP2, with their parameter groups."""
    for name, module in model.named_modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # PyTorch 2.11 has one or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield name, module, group
