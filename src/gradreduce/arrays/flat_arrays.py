"""Arrays of flat buffers, and ``.grad`` of PyTorch parameters as views of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

from gradreduce.device import Attached, Block, Buffer
from gradreduce.errors import DeviceMismatchError, about, brief

from .caller_streams import StreamScope
from .convert import (
    as_result_kind,
    as_view_kind,
    check_tensor,
    from_buffer,
    from_buffers,
    hand_over,
    is_module,
    shape_and_dtype,
)
from .convert_gpu import wait_for_current_stream


def share_arrays(buffers: Sequence[Sequence[Buffer]], output_type: str | None) -> list[list[Any]]:
    """See ``FlatBuffer.arrays``."""
    device = buffers[0][0].device if buffers and buffers[0] else None
    kind = as_view_kind(output_type, device, "filled in place")
    with StreamScope():
        return [[from_buffer(buffer, kind) for buffer in row] for row in buffers]


def wait_for_library(buffers: Sequence[Buffer], output_type: str | None) -> None:
    """Makes our queues wait for the library's current streams; host arrays are ready."""
    if buffers[0].device.mesh_state.has_streams and output_type != "buffer":
        wait_for_current_stream(buffers, as_result_kind(output_type, "native"))


def make_library_wait(buffers: Sequence[Buffer], output_type: str | None) -> None:
    """Makes the library's current streams wait for our queues; the host for host arrays."""
    if output_type != "buffer":
        hand_over(buffers, as_result_kind(output_type, "native"))


def attach_grads(
    views: Sequence[Sequence[Buffer]], parameters: Iterable[Any], names: list[str]
) -> list[Attached]:
    """See ``FlatBuffer.attach``; replaces the names if the parameters have some."""
    pairs = [_split_names(index, row) for index, row in enumerate(parameters)]
    named, rows = [names for names, _ in pairs], [row for _, row in pairs]
    counts, wanted = [len(row) for row in rows], [len(row) for row in views]
    if counts != wanted:
        raise ValueError(
            f"parameters must have {wanted[0]} for each of {len(wanted)} devices, one for each "
            f"tensor of the flat buffer; it has {brief(counts)}"
        )
    _check_names(named)
    seen: dict[int, str] = {}
    for index, row in enumerate(rows):
        for tensor, parameter in enumerate(row):
            name = _name_of(index, tensor, named[0] or names)
            _check_parameter(parameter, name)
            if id(parameter) in seen:
                raise ValueError(
                    f"{name} is the same tensor as {seen[id(parameter)]}, which can have only "
                    "one gradient: list a shared parameter once"
                )
            seen[id(parameter)] = name
    if named and named[0]:
        names[:] = named[0]
    return [
        _AttachedGradients(replica, row, of_device, names.copy())
        for replica, (row, of_device) in enumerate(zip(rows, views, strict=True))
    ]


def _split_names(index: int, row: Any) -> tuple[list[str], list[Any]]:
    """Returns the names (if any) and the parameters of a device."""
    if is_module(type(row)):
        row = row.named_parameters()
    if not isinstance(row, Iterable):
        raise TypeError(
            f"parameters[{index}] is {type(row).__name__}; pass the module, the parameters or the "
            "named_parameters() of each device: [model.parameters() for model in models]"
        )
    found = list(row)
    if not all([isinstance(each, tuple) and len(each) == 2 for each in found]):
        return [], found
    return [str(name) for name, _ in found], [parameter for _, parameter in found]


def _check_names(named: Sequence[Sequence[str]]) -> None:
    """Raises ``ValueError`` unless the names are equal on all devices."""
    for index, own_names in enumerate(named):
        for one, other in zip(named[0], own_names, strict=False):
            if one != other:
                raise ValueError(
                    f"parameters[{index}] has {other!r} where parameters[0] has {one!r}: list the "
                    "same parameters in the same order"
                )


def _name_of(replica: int, tensor: int, names: Sequence[str]) -> str:
    return f"parameters[{replica}][{repr(names[tensor]) if names else tensor}]"


def _check_parameter(parameter: Any, name: str) -> None:
    """Raises unless this is a PyTorch tensor whose ``.grad`` can be a view."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is {type(parameter).__name__}; pass a PyTorch tensor")
    try:
        check_tensor(parameter)
    except TypeError as error:
        raise about(name, error) from None
    if not parameter.is_leaf:
        raise ValueError(
            f"{name} is computed from other tensors (is_leaf is False) and gets no .grad; pass "
            "the parameter itself"
        )


class _AttachedGradients:
    """Keeps the ``.grad`` of parameters as views of one device's flat buffer.

    Does not keep parameters and views alive: they keep the block alive, which keeps this object
    alive.

    Args:
        replica: the index of the device, for errors.
        parameters: PyTorch tensors.
        views: the views that become their gradients.
        names: the names of the parameters, for errors; empty if they have none.
    """

    def __init__(
        self,
        replica: int,
        parameters: Sequence[Any],
        views: Sequence[Buffer],
        names: Sequence[str],
    ) -> None:
        self._replica, self._names = replica, names
        self._spans = [(view.device, view.offset, view.shape, view.dtype) for view in views]
        self._rows = [
            (ref(parameter), view.address)
            for parameter, view in zip(parameters, views, strict=True)
        ]

    def find_replaced(self) -> list[tuple[int, Any, Any]]:
        """Finds the parameters whose ``.grad`` is not in their view; see ``Attached``."""
        replaced = []
        for tensor, (owner, address) in enumerate(self._rows):  # runs in each replay
            parameter = owner()
            if parameter is not None:
                grad = parameter.grad
                try:
                    if grad.data_ptr() == address:
                        continue
                except (AttributeError, RuntimeError):  # None, or it has no own memory
                    pass
                replaced.append((tensor, parameter, grad))
        for tensor, parameter, grad in replaced:
            name = _name_of(self._replica, tensor, self._names)
            self._check(tensor, parameter, name)
            if grad is not None:
                self._check(tensor, grad, f"{name}.grad")
        return replaced

    def _check(self, tensor: int, grad: Any, name: str) -> None:
        """Raises unless the view has the shape, dtype and device of this gradient or parameter."""
        device, _, shape, dtype = self._spans[tensor]
        if grad.layout is not sys.modules["torch"].strided:
            raise ValueError(f"{name} has layout {grad.layout}; only dense gradients are allowed")
        found = shape_and_dtype(grad)
        if found != (shape, dtype):
            raise ValueError(
                f"{name} is {found[1]}{list(found[0])}, but its view in the flat buffer is "
                f"{dtype}{list(shape)}; make a new flat buffer or DataParallel"
            )
        wanted = (
            ("cpu", None) if device.mesh_state.shares_host_memory else ("cuda", device.physical)
        )
        if (grad.device.type, grad.device.index) != wanted:
            raise DeviceMismatchError(
                f"{name} is on {grad.device}, but its view is on {device.name}"
            )

    def attach_again(self, block: Block, replaced: list[tuple[int, Any, Any]]) -> None:
        """Replaces gradients by their views, on PyTorch's current stream; see ``Attached``."""
        buffers = [Buffer(block, *self._spans[tensor][1:]) for tensor, _, _ in replaced]
        views = from_buffers(buffers, "torch")
        for view, (_, parameter, grad) in zip(views, replaced, strict=True):
            if grad is None:
                view.zero_()
                if not parameter.requires_grad:
                    continue  # frozen: with a .grad its optimizer would change it
            else:
                view.copy_(grad.detach())
            parameter.grad = view
        if block.device.mesh_state.has_streams:
            wait_for_current_stream(buffers[:1], "torch")


def attach_again(blocks: Iterable[Block], *, keeps_none: bool = False) -> None:
    """Sets the ``.grad`` of the attached parameters to their views again.

    Args:
        blocks: the memory of the views.
        keeps_none: whether a ``.grad`` that is None stays None. Otherwise its view is zeroed.

    Raises:
        ValueError, DeviceMismatchError: a gradient does not fit its view; nothing was changed.
    """
    replaced_rows = [
        (block, block.attached, block.attached.find_replaced())
        for block in blocks
        if block.attached is not None
    ]
    if keeps_none:
        replaced_rows = [
            (block, parameters, [row for row in rows if row[2] is not None])
            for block, parameters, rows in replaced_rows
        ]
    rest = [each for each in replaced_rows if each[2]]
    for block, _, _ in rest:
        block.device.mesh_state.check_usable(block.device)
    for block, parameters, replaced in rest:
        parameters.attach_again(block, replaced)
