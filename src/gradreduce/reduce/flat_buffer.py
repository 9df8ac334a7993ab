"""Flat buffers: tensors stored one after another in one block per device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from gradreduce.arrays import flat_arrays
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.flat_arrays import attach_again
from gradreduce.device import (
    Buffer,
    Device,
    as_deadline,
    as_dtype,
    as_shape,
    deadline_scope,
    flat_layout,
)
from gradreduce.errors import brief, listed

from .all_reduce_ops import AllReduceCrossDeviceOps
from .prepared import PreparedStep
from .presets import default_ops

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


@dataclass(frozen=True, repr=False)
class FlatBuffer:
    """Tensors stored one after another in one block on each device of a mesh.

    Made by ``mesh.flat_buffer``. An all-reduce of all of its gradients, or of several consecutive
    ones in this order, uses this memory as its pack and copies nothing into another. If the batch
    has other gradients of the same dtype too, it is packed as usual. Other GPUs may read the memory
    in place.

    Pass gradients as ``views``, or as ``arrays`` of any library. An array or a view of it is
    recognized by its address. Arrays keep the memory alive; the FlatBuffer need not be kept.

    Attributes:
        buffers: the flat buffer of each device, in mesh order. Gaps between tensors are zero.
        views: ``views[device][tensor]``, a Buffer for each tensor.
        names: the names of the tensors, in order; empty if they have none.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> flat = mesh.flat_buffer([(2,), (3,)], "float32")
        >>> step = flat.prepare_all_reduce(gr.ReduceOp.SUM)
        >>> gradients = flat.arrays()
        >>> for rank in range(2):
        ...     gradients[rank][0][:] = rank + 1
        ...     gradients[rank][1][:] = 10
        >>> _ = step()
        >>> gradients[0][0], gradients[0][1]
        (array([3., 3.], dtype=float32), array([20., 20., 20.], dtype=float32))
    """

    buffers: tuple[Buffer, ...]
    views: tuple[tuple[Buffer, ...], ...]
    names: list[str] = field(default_factory=list, repr=False, compare=False)
    _kinds: set[str | None] = field(default_factory=set, repr=False, compare=False)

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
        own_dtype = as_dtype(dtype)
        names: list[str] = []
        if isinstance(shapes, Mapping):
            names, shapes = [str(name) for name in shapes], list(shapes.values())
        if not isinstance(shapes, Iterable) or isinstance(shapes, str):
            raise TypeError(f"shapes={brief(shapes)} must be a list with the shape of each tensor")
        inside = [as_shape(f"shapes[{index}]", shape) for index, shape in enumerate(shapes)]
        sizes, itemsize = [math.prod(shape) for shape in inside], own_dtype.itemsize
        layout = flat_layout(sizes, itemsize)
        gaps = {
            (start + size) * itemsize: (span - size) * itemsize
            for start, size, span in zip(layout.offsets, sizes, layout.spans, strict=True)
            if size
        }
        buffers = tuple(device.zeros((layout.size,), own_dtype) for device in devices)
        views = tuple(tuple(map(flat.view, layout.offsets, inside)) for flat in buffers)
        for flat in buffers:
            flat.block.gaps = gaps
            flat.block.shared = True
            flat.device.external_buffers.add(flat.block)
        return cls(buffers, views, names)

    def arrays(self, output_type: str | None = None) -> list[list[Any]]:
        """Returns ``arrays[device][tensor]``: arrays of a library on the same memory.

        Write gradients into them. For the gradients of PyTorch parameters call ``attach``.

        Args:
            output_type: ``"numpy"``, ``"cupy"``, ``"torch"`` or ``"buffer"``. Default: NumPy on the
                simulation, CuPy on GPUs.

        Raises:
            ValueError: ``output_type`` is ``"jax"`` (its arrays cannot be written), ``"numpy"`` on
                GPUs, ``"cupy"`` on the simulation, an unknown name, or a library that is not
                imported.
        """
        made: list[list[Any]] = flat_arrays.share_arrays(self.views, output_type)
        self._kinds.add(output_type)
        return made

    def attach(self, parameters: Iterable[Any]) -> None:
        """Sets the ``.grad`` of PyTorch parameters to the views: ``backward()`` adds into them.

        Existing gradients are copied into the views. Where ``.grad`` is None, the view becomes
        zero. Parameters are held weakly. Attaching other parameters replaces them.

        ``docs/pytorch.md`` has an example, and says what happens to a ``.grad`` that is missing or
        replaced.

        Args:
            parameters: ``parameters[device][tensor]``: tensors of the shapes and dtype of this flat
                buffer, on its devices, each once. Or for each device a module or its
                ``named_parameters()``: then errors and the log of a later ``prepare_all_reduce``
                use the names.

        Raises:
            ValueError: wrong number of devices or tensors, names that differ between devices, a
                repeated parameter, a tensor that is not a leaf, or a parameter or gradient of
                another shape, dtype or layout. No ``.grad`` was changed. Later calls that find such
                a gradient raise the same error before they change anything.
            TypeError: ``parameters`` is not a list of PyTorch tensors for each device.
            DeviceMismatchError: a parameter is on another device than its view.
        """
        names = self.names.copy()
        attached = flat_arrays.attach_grads(self.views, parameters, names)
        replaced = [each.find_replaced() for each in attached]
        for buffer in self.buffers:
            buffer.device.mesh_state.check_usable(buffer.device)
        self._kinds.add("torch")
        self.names[:] = names
        for buffer, each, rows in zip(self.buffers, attached, replaced, strict=True):
            buffer.block.attached = each
            each.attach_again(buffer.block, rows)

    def prepare_all_reduce(
        self, op: Any, *, cross_device_ops: Any = None, deadline: float | None = None
    ) -> PreparedStep:
        """Returns a prepared step that reduces all tensors in place, once per call.

        The work of each call runs after earlier work on the current streams of the libraries of
        ``arrays`` and ``attach``, and these streams wait for it. The host waits only for arrays in
        host memory.
        Preparing reduces once, too: prepare before the first gradients are computed.

        Args:
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            cross_device_ops: an ``AllReduceCrossDeviceOps``. Default: NCCL with one pack.
            deadline: seconds from now for this first reduction; if it takes longer, the mesh fails.

        Returns:
            A ``PreparedStep``. Its ``results`` are one ``Mirrored`` of the views for each tensor.

        Raises:
            ValueError: ``op`` is not a ``ReduceOp``, ``cross_device_ops`` cannot prepare a step,
                there is no tensor, or an attached gradient does not fit (see ``attach``).
            BackendUnavailableError, CollectiveError: what ``AllReduceCrossDeviceOps.prepare``
                raises.
        """
        ops = default_ops() if cross_device_ops is None else cross_device_ops
        if not isinstance(ops, AllReduceCrossDeviceOps):
            raise ValueError(
                f"cross_device_ops={brief(ops)} cannot prepare a step: pass an "
                "AllReduceCrossDeviceOps"
            )
        columns = list(zip(*self.views, strict=True))
        names = self.names or [""] * len(columns)
        values = [
            PerReplica.of(column, name=name) for column, name in zip(columns, names, strict=True)
        ]
        self.adopt()
        step = ops.prepare(op, [(value, value) for value in values], out=columns, deadline=deadline)
        step.shared = self
        self.release(deadline=deadline)
        return step

    def zero(self, *, deadline: float | None = None) -> None:
        """Sets every element to zero, with one fill on each device.

        Calls ``adopt`` before and ``release`` after. Sets an attached ``.grad`` that was replaced
        to its view again.

        Args:
            deadline: seconds from now; if the devices take longer, the mesh fails.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device failed. Nothing was cleared.
            ValueError: ``deadline`` is not a number above 0, or an attached gradient does not fit;
                see ``attach``.
        """
        self._zero(deadline)

    def _zero(self, deadline: float | None = None, *, keeps_none: bool = False) -> None:
        """Like ``zero``; with ``keeps_none``, a ``.grad`` that is None stays None."""
        seconds = as_deadline(deadline)
        with deadline_scope("zero", seconds, [buffer.device for buffer in self.buffers]):
            attach_again([buffer.block for buffer in self.buffers], keeps_none=keeps_none)
            self._fill_zero()

    def _fill_zero(self) -> None:
        """Sets every element to zero; a ``.grad`` that was replaced stays as it is."""
        self.adopt()
        for buffer in self.buffers:
            buffer.device.fill_zero(buffer)
        self.release()

    def adopt(self) -> None:
        """Makes our queues wait for the current streams of the libraries of ``arrays``.

        Call it after filling the arrays and before reading their ``views``. It is not needed before
        a call that takes the arrays themselves, or a prepared step: they do it.
        """
        for buffer in self.buffers:
            buffer.device.mesh_state.check_usable(buffer.device)
        for kind in self._kinds:
            flat_arrays.wait_for_library(self.buffers, kind)

    def release(self, *, deadline: float | None = None) -> None:
        """Makes the current streams of the libraries of ``arrays`` wait for our queues.

        Call it after queueing work on the ``views``, before the arrays are read or filled again.
        On the simulation, where a host array has no stream, the host waits.

        Args:
            deadline: seconds from now; if the devices take longer, the mesh fails.

        Raises:
            ValueError: ``deadline`` is not a number above 0.
        """
        seconds = as_deadline(deadline)
        with deadline_scope("release", seconds, [buffer.device for buffer in self.buffers]):
            for kind in self._kinds:
                flat_arrays.make_library_wait(self.buffers, kind)
