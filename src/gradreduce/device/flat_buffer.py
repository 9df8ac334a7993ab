"""Flat buffers: tensors stored one after another in one block per device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from numpy.typing import DTypeLike

from gradreduce.errors import brief, listed

from .buffer import Block, Buffer, flat_layout
from .deadlines import deadline_scope
from .dtypes import as_dtype, as_index
from .pending_calls import as_deadline

if TYPE_CHECKING:
    from .device import Device


class Step(Protocol):
    """The part of a ``PreparedStep`` that this module uses."""

    results: list[Any]

    def __call__(self, *, deadline: float | None = None) -> list[Any]:
        """Reduces again."""


@dataclass(frozen=True, repr=False)
class FlatBuffer:
    """Tensors stored one after another in one block on each device of a mesh.

    Made by ``mesh.flat_buffer``. Gradients that lie in it are not packed again by an all-reduce of
    all of them, or of a run of them in this order (with others of the same dtype between or beside
    them the batch needs another layout, and is packed), and other GPUs may read them where they
    are: as ``views``, or as ``arrays`` of any library,
    which are known by their memory when they come back, however they were viewed since. An array
    lives as long as anything that shares its memory; the flat buffer object need not be kept.

    Attributes:
        buffers: the flat buffer of each device, in mesh order; gaps are zero.
        views: ``views[device][tensor]``, the tensors in it.
        names: of the tensors, in order; empty until they have some.
    """

    buffers: tuple[Buffer, ...]
    views: tuple[tuple[Buffer, ...], ...]
    names: list[str] = field(default_factory=list, repr=False, compare=False)
    _kinds: set[str | None] = field(default_factory=set, repr=False, compare=False)

    # ``arrays`` and ``reduce`` set these: this module may not import them.
    array_converter: ClassVar[ModuleType]
    prepare_step: ClassVar[Callable[[FlatBuffer, Any, Any, float | None], Step]]

    def __repr__(self) -> str:
        first = self.buffers[0]
        names = listed(buffer.device.name for buffer in self.buffers)
        return (
            f"<FlatBuffer of {len(self.views[0])} tensors of {first.dtype}, {first.nbytes} bytes, "
            f"on {names}>"
        )

    @classmethod
    def on(cls, devices: Sequence[Device], shapes: Any, dtype: DTypeLike) -> Self:
        """Makes a flat buffer of zeros; see ``Mesh.flat_buffer``."""
        found = as_dtype(dtype)
        names: list[str] = []
        if isinstance(shapes, Mapping):
            names, shapes = [str(name) for name in shapes], list(shapes.values())
        if not isinstance(shapes, Iterable) or isinstance(shapes, str):
            raise TypeError(f"shapes={brief(shapes)} must be a list with the shape of each tensor")
        inside = [_as_shape(shape, index) for index, shape in enumerate(shapes)]
        sizes, itemsize = [math.prod(shape) for shape in inside], found.itemsize
        layout = flat_layout(sizes, itemsize)
        gaps = {
            (start + size) * itemsize: (span - size) * itemsize
            for start, size, span in zip(layout.offsets, sizes, layout.spans, strict=True)
            if size
        }
        buffers = tuple(device.zeros((layout.size,), found) for device in devices)
        views = tuple(tuple(map(flat.view, layout.offsets, inside)) for flat in buffers)
        for flat in buffers:
            flat.block.gaps = gaps
            flat.device.external_buffers.add(flat.block)
        return cls(buffers, views, names)

    def arrays(self, output_type: str | None = None) -> list[list[Any]]:
        """Returns ``arrays[device][tensor]``: arrays of a library on the same memory.

        Fill them, or let others do. For the gradients of PyTorch's parameters call ``attach``.

        Args:
            output_type: ``"numpy"``, ``"cupy"``, ``"torch"`` or ``"buffer"``. Default: NumPy on the
                simulation, CuPy on GPUs.

        Raises:
            ValueError: JAX, whose arrays are never written; NumPy of a GPU's memory, or CuPy of
                the simulation's; a library that is not imported, or an unknown name.
        """
        made: list[list[Any]] = self.array_converter.shared(self.views, output_type)
        self._kinds.add(output_type)
        return made

    def attach(self, parameters: Iterable[Any]) -> None:
        """Sets the ``.grad`` of PyTorch parameters to the views: ``backward()`` adds into them.

        Gradients that are there are copied into the views; where ``.grad`` is None the view becomes
        zero. ``zero()`` and every call of a prepared or captured step over this memory then do the
        same for each ``.grad`` that is not its view any more, before they launch anything. So
        ``optimizer.zero_grad()`` is allowed, and a parameter that was not used since contributes
        zero. (Momentum and weight decay then move it, as they do where ``.grad`` is zero.) It costs
        an allocation and a copy for each parameter, though: ``zero()`` and
        ``zero_grad(set_to_none=False)`` keep the views. A frozen parameter (``requires_grad`` is
        False) without a gradient contributes zero too, and its ``.grad`` stays None.

        Parameters are held weakly. Attaching others replaces them.

        Args:
            parameters: ``parameters[device][tensor]``, tensors of the shapes and dtype of this
                flat buffer, on its devices; none twice. Or a module for each device, or its
                ``named_parameters()``: then errors, and the log of a ``prepare_all_reduce`` that is
                called after this, have the names.

        Raises:
            ValueError: another number of devices or tensors, names that differ between devices, a
                parameter twice, a tensor that is no leaf, or a parameter or its gradient of another
                shape, dtype or layout. No ``.grad`` was changed. Later calls that find such a
                gradient raise the same, before they change anything.
            TypeError: what is no tensor of PyTorch, or no list of them for each device.
            DeviceMismatchError: a parameter on another device than its view.
            BackendUnavailableError: the mesh is closed, or a device failed.
        """
        names = self.names.copy()
        made = self.array_converter.attached(self.views, parameters, names)
        replaced = [each.replaced() for each in made]
        for buffer in self.buffers:
            buffer.device.mesh_state.check_usable(buffer.device)
        self._kinds.add("torch")
        self.names[:] = names
        for buffer, each, rows in zip(self.buffers, made, replaced, strict=True):
            buffer.block.attached = each
            each.attach_again(buffer.block, rows)

    def prepare_all_reduce(
        self, op: Any, *, cross_device_ops: Any = None, deadline: float | None = None
    ) -> Step:
        """Returns a prepared step that reduces all tensors in place, once per call.

        Each call comes behind what the current streams of the libraries of ``arrays`` and
        ``attach`` hold, and they behind it; for arrays in host memory the host waits. It reduces
        once when it is made, too: make it before the first gradients are computed.

        Args:
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            cross_device_ops: an ``AllReduceCrossDeviceOps``. Default: one by NCCL, in one pack.
            deadline: of this first time: seconds from now in which the devices must be done, or
                the mesh fails.

        Returns:
            A ``PreparedStep``. Its ``results`` are one ``Mirrored`` for each tensor, of the views.

        Raises:
            ValueError: ``op`` is no ``ReduceOp``, ``cross_device_ops`` cannot prepare, there is
                no tensor, or an attached gradient does not fit; see ``attach``.
            BackendUnavailableError, CollectiveError: what ``AllReduceCrossDeviceOps.prepare``
                raises.
        """
        return type(self).prepare_step(self, op, cross_device_ops, deadline)

    def zero(self, *, deadline: float | None = None) -> None:
        """Sets every element to zero, with one fill on each device.

        In order with the libraries of ``arrays``: adopts before, releases after. An attached
        ``.grad`` that was replaced is its view again.

        Args:
            deadline: seconds from now in which the devices must be done, or the mesh fails.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device failed. Nothing was cleared.
            CollectiveError: the mesh has failed, or failed while the host waited.
            ValueError: ``deadline`` is no number above 0, or an attached gradient does not fit;
                see ``attach``.
        """
        seconds = as_deadline(deadline)
        with deadline_scope("zero", seconds, [buffer.device for buffer in self.buffers]):
            attach_again([buffer.block for buffer in self.buffers])
            self.adopt()
            for buffer in self.buffers:
                buffer.device.fill_zero(buffer)
            self.release()

    def adopt(self) -> None:
        """Makes our queues wait for the current streams of the libraries of ``arrays``.

        Call it after filling the arrays and before reading their ``views``. It is not needed before
        a call that takes the arrays themselves, or a prepared step: they do it.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device failed.
        """
        for buffer in self.buffers:
            buffer.device.mesh_state.check_usable(buffer.device)
        for kind in self._kinds:
            self.array_converter.to_buffers(self.buffers, kind)

    def release(self, *, deadline: float | None = None) -> None:
        """Makes the current streams of the libraries of ``arrays`` wait for our queues.

        Call it after queueing work on the ``views``, before the arrays are read or filled again.
        On the simulation, where a host array has no stream, the host waits.

        Args:
            deadline: seconds from now in which the devices must be done, or the mesh fails.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device failed.
            CollectiveError: the mesh has failed, or failed while the host waited.
            ValueError: ``deadline`` is no number above 0.
        """
        seconds = as_deadline(deadline)
        with deadline_scope("release", seconds, [buffer.device for buffer in self.buffers]):
            for kind in self._kinds:
                self.array_converter.from_buffers(self.buffers, kind)


def _as_shape(shape: Sequence[int], index: int) -> tuple[int, ...]:
    try:
        extents = tuple(as_index(extent) for extent in shape)
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise ValueError(f"shapes[{index}]={brief(shape)} must be a list of integers from 0 up")
    return extents


def attach_again(blocks: Iterable[Block]) -> None:
    """Sets the ``.grad`` of the attached parameters to their views again.

    Raises:
        ValueError, DeviceMismatchError: a gradient does not fit its view; nothing was changed.
        BackendUnavailableError: the mesh is closed, or a device failed, where one was replaced.
    """
    attached = [(block, block.attached) for block in blocks if block.attached is not None]
    found = [(block, each, each.replaced()) for block, each in attached]
    rest = [each for each in found if each[2]]
    for block, _, _ in rest:
        block.device.mesh_state.check_usable(block.device)
    for block, each, replaced in rest:
        each.attach_again(block, replaced)
