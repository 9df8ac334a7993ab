"""CrossDeviceOps, the base of reductions across devices, and ReductionToOneDevice.

Sources: tf.distribute.CrossDeviceOps and ReductionToOneDevice (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope, SuspendedScope
from gradreduce.arrays.convert import bool_view, is_bool
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import Mirrored, Part, PerReplica, ReduceOp, buffer_of
from gradreduce.arrays.types import OutputType
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.device_names import DeviceLike, as_device, is_device_like
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.comm.process_group import check_one_process, group_of
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    Mesh,
    as_count,
    as_flag,
)
from gradreduce.errors import brief

from .arguments import (
    Request,
    as_reduced,
    destination_devices,
    find_mesh,
    label_of,
    make_requests,
    names_of,
    single_value,
    validate_mesh,
)
from .checked_call import CheckedCall, validate_call
from .one_device import Accumulate, copy_to_each, quotients, sum_on
from .pipeline import reduce_to_one
from .process_values import broadcast_from
from .requests import copy_to_out, rehearse_alone
from .weighting import (
    Weighting,
    divide_sums,
    rehearse_weights,
    scale_requests,
    weighting_of,
)


class CrossDeviceOps(ABC):
    """Base class of reductions across devices (tf.distribute.CrossDeviceOps).

    Checks arguments; a subclass implements ``reduce_batch``.

    Attributes:
        mesh: the mesh for host arrays. None: the mesh of the devices in the destination, else
            ``gr.default_mesh()``.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        >>> isinstance(ops, gr.CrossDeviceOps), ops.mesh is mesh
        (True, True)
    """

    mesh: Mesh | None = None
    _elementwise = False  # whether ``reduce_batch`` accepts arrays in memory order

    def __repr__(self) -> str:
        fields = [*self._repr_fields(), *([] if self.mesh is None else [f"mesh={self.mesh!r}"])]
        return f"<{type(self).__name__}{' ' if fields else ''}{', '.join(fields)}>"

    def _repr_fields(self) -> list[str]:
        """Returns the fields that ``repr`` shows besides the class and the mesh."""
        return []

    def reduce(  # noqa: PLR0913  # options of one call
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        *,
        coalesce: bool = False,
        output_type: OutputType | None = None,
        out: Any = None,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> Mirrored:
        """Combines the replicas of one value: a ``batch_reduce`` with one pair.

        The arguments and errors are those of ``batch_reduce``; ``out`` has the arrays of this value
        only. Returns the ``Mirrored``.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> value = gr.PerReplica([np.array([1.0]), np.array([5.0])], mesh)
            >>> gr.HierarchicalCopyAllReduce().reduce(gr.ReduceOp.MEAN, value, "sim:1").values
            (array([3.]),)
        """
        (result,) = self.batch_reduce(
            reduce_op,
            [(per_replica_value, destinations)],
            coalesce=coalesce,
            output_type=output_type,
            out=None if out is None else [out],
            weights=weights,
            deadline=deadline,
        )
        return result

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> list[Mirrored]:
        """Combines the replicas of each value.

        Returns when all work has been launched, without waiting for a device. Arrays on GPUs may
        then be overwritten in the order of their library's current stream. The first call for a
        dtype compiles kernels, and connects the GPUs if NCCL is needed; that may take seconds.

        Args:
            reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.MEAN``. MEAN divides the sum by the number of
                replicas in the accumulate dtype, and rounds once. (NCCL adds float16 and bfloat16
                in their own dtype, so a sum may overflow although its mean would not.) Integers are
                added modulo 2**bits. The mean of integers is this sum divided: float32 for 8 and 16
                bits, float64 for 32 and 64 bits.
            value_destination_pairs: a list or tuple of pairs. A value is a ``PerReplica`` or
                ``Mirrored`` with replicas of one shape and dtype, or a single replica: an array of
                any library, Buffer or IndexedSlices. SUM of a ``Mirrored``, which would add its
                copies, is an error if it has several. So is MEAN of a single replica for the
                devices of a ``PerReplica``, ``Mirrored``, ``Variable`` or ``Mesh`` of several,
                because a ``PerReplica`` was forgotten. A destination names the devices of the
                result: a ``PerReplica``, ``Mirrored``, ``Variable`` or ``Mesh`` means its devices;
                or pass a Device, a device name (``"gpu:1"``, ``"sim:0"``, ``"/device:GPU:1"``), a
                ``torch.device``, or a list of these three. Names are looked up in the mesh of the
                value.
            coalesce: if all replicas are IndexedSlices: True adds rows with the same index; False
                concatenates the rows of all replicas. MEAN divides every row.
            output_type: the kind of the result arrays: ``"numpy"``, ``"cupy"``, ``"torch"``,
                ``"jax"`` or ``"buffer"``. Default: the kind of the value's arrays.
            out: memory for the results: for each pair a ``PerReplica``, ``Mirrored``, list or tuple
                of arrays, one on each device of the result, in order; dense, writable, of the
                result's shape and dtype. An array may be a replica of the same value, for a
                reduction in place; it must not overlap anything else. No extra copy is made for
                arrays in a ``mesh.flat_buffer``, on a single GPU, or in our own memory, if their
                strides are those of the value. Not for IndexedSlices.
            weights: for each replica of this process a number of at least 0, such as the number of
                examples in its batch; the same for all values. MEAN is then the sum of weight times
                gradient, divided by the sum of the weights of all replicas in all processes; SUM is
                the sum of weight times gradient. A product is rounded once, to the accumulate
                dtype, in which 16-bit floats are then transferred if there is no ``wire_dtype``. A
                replica with weight 0 is not read. Default: all weights are 1. All processes pass
                weights, or none.
            deadline: seconds from now; if the devices take longer, the mesh fails. For the first
                call of a dtype this includes compiling and connecting GPUs.

        Returns:
            One ``Mirrored`` for each pair, in order, with the shape and dtype of a replica (for
            means of integers see ``reduce_op``). It is on the devices of the destination, in its
            order; if these are the devices of the value, in the value's order. The memory is new;
            results of one call may share an allocation. No input is written. If all replicas have
            the same axis order in memory, such as channels_last, the results have it too. Replicas
            that are ``torch.sparse_coo`` tensors give such results if ``output_type`` is "torch" or
            None. With ``out``, the ``Mirrored`` has the arrays of ``out``, and the host waits if
            they are in host memory.

        Raises:
            ValueError: the operation, a pair, a destination, ``output_type``, ``out`` or
                ``deadline`` is wrong, or replicas differ in shape or dtype; there is not one weight
                for each replica, a weight is negative or not finite, all weights are 0, or integers
                have weights for a MEAN, or weights that are not whole. Nothing was launched.
            DeviceMismatchError: (a ``ValueError``) value and destination are on different meshes.
            TypeError: a dtype cannot be added, or a weight is not a number on the host.
            BackendUnavailableError: NCCL is missing and needed for two or more physical GPUs.
                Nothing was launched.
            CollectiveError: NCCL failed.
            MemoryError, BackendUnavailableError: memory ran out or a device failed half way. Then
                ``out`` may contain a part of the results; a note of the error says so. Without
                ``out`` none of the caller's arrays was written.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> value = gr.PerReplica([np.array([1.0]), np.array([5.0])], mesh)
            >>> ops = gr.HierarchicalCopyAllReduce()
            >>> results = ops.batch_reduce(gr.ReduceOp.SUM, [(value, mesh), (value, "sim:0")])
            >>> [result.values for result in results]
            [(array([6.]), array([6.])), (array([6.]),)]
        """
        if coalesce is not False:
            coalesce = as_flag("coalesce", coalesce)
        with StreamScope():
            call = self._validate_call(reduce_op, value_destination_pairs, output_type, out)
            with call.running("batch_reduce", deadline):
                if weights is None:
                    with SuspendedScope():  # may run code of a caller's subclass
                        reduced = self.reduce_batch(reduce_op, call.requests, coalesce=coalesce)
                else:
                    reduced = self._reduce_weighted(
                        reduce_op, call.requests, weights, coalesce=coalesce
                    )
                if call.outs:
                    reduced = copy_to_out(call.requests, reduced)
            return call.finish(reduced)

    def _reduce_weighted(
        self, reduce_op: ReduceOp, requests: list[Request], weights: Any, *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Does what ``reduce_batch`` does, with a weight for each replica, not checked."""
        weighting = weighting_of(requests, reduce_op, weights)
        if weighting is None:
            with SuspendedScope():  # may run code of a caller's subclass
                return self.reduce_batch(reduce_op, requests, coalesce=coalesce)
        return self._reduce_by(weighting, reduce_op, requests, coalesce=coalesce)

    def _reduce_by(
        self, weighting: Weighting, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Reduces weighted requests by ``reduce_batch``, which knows no weights."""
        for request in requests:
            rehearse_weights(request, weighting)
        scaled = scale_requests(requests, weighting)
        with SuspendedScope():  # may run code of a caller's subclass
            sums = self.reduce_batch(ReduceOp.SUM, scaled, coalesce=coalesce)
        return divide_sums(requests, sums, weighting.total if reduce_op is ReduceOp.MEAN else 1)

    def _validate_call(
        self,
        reduce_op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        output_type: OutputType | None = None,
        out: Any = None,
    ) -> CheckedCall:
        """Checks the arguments of ``batch_reduce``; launches nothing."""
        requests = make_requests(
            pairs, reduce_op, self.mesh, elementwise=self._elementwise, out=out
        )
        return validate_call(requests, reduce_op, output_type, out)

    @StreamScope()
    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        process: int = 0,
        output_type: OutputType | None = None,
        out: Any = None,
        deadline: float | None = None,
    ) -> Any:
        """Copies ``tensor`` to every destination, without waiting for a device.

        With several processes, copies the tensor of one process to the destinations of all.

        Args:
            tensor: an array of any library, a number or bool, a Variable, a Buffer, IndexedSlices,
                a ``Mirrored``, or a ``PerReplica`` of one device; or a list or tuple of these. Not
                written. Arrays of bools are copied too; their Buffers have uint8.
            destinations: the destination, see ``batch_reduce``; the same for all tensors.
            process: the rank of the process whose tensor is copied. The other processes pass a
                tensor of the same shape and dtype.
            output_type: the kind of the result arrays. Default: the kind of ``tensor``. A number
                counts as a NumPy array, a Variable as what its ``read`` returns.
            out: memory for the copies: an entry as in ``batch_reduce``, or for a list of tensors a
                list of entries. An array may be ``tensor`` itself. Not for IndexedSlices.
            deadline: see ``batch_reduce``.

        Returns:
            A ``Mirrored`` on the devices of the destination, in its order; a list of them for a
            list of tensors. The memory on each device is new, also on the device of ``tensor``.
            With ``out``, the ``Mirrored`` has its arrays, and the host waits if they are in host
            memory.

        Raises:
            ValueError: the destination, ``output_type``, ``out`` or ``deadline`` is wrong, or a
                tensor is not an array. Nothing was launched.
            DeviceMismatchError: destinations or arrays of ``out`` are on other devices or meshes.
            TypeError: a dtype cannot be added.

        Example:
            >>> mesh = gr.open_mesh(3, backend="sim")
            >>> gr.HierarchicalCopyAllReduce(mesh=mesh).broadcast(np.arange(2), mesh).values
            (array([0, 1]), array([0, 1]), array([0, 1]))
        """
        many = isinstance(tensor, list | tuple)
        tensors = tensor if many else [tensor]
        out = out if many or out is None else [out]
        bools = [index for index, each in enumerate(tensors) if is_bool(each)]
        if bools:  # which are not added, so no kernel knows them
            tensors, out = _as_bytes(tensors, bools), _as_bytes(out, bools)
        requests = self._to_copy(tensors, destinations, out, many=many)
        call = validate_call(requests, ReduceOp.SUM, output_type, out)
        wait_for_inputs([buffer_of(request.value.parts[0]) for request in requests])
        rank = as_count("process=", process)
        with call.running("broadcast", deadline):
            copied = []
            for request in call.requests:
                rehearse_alone(
                    request,
                    "broadcast",
                    lambda dry, _: copy_to_each(dry.value.parts[0], dry.devices, dry.out),
                )
            for index, part in enumerate(_from_process(rank, call.requests)):
                request = call.requests[index]
                with buffer_of(part).device.mesh_state.pack_scope(label_of(call.requests, [index])):
                    copied.append(copy_to_each(part, request.devices, request.out))
        results = call.finish(copied)
        for index in bools:
            if results[index].kind != "buffer":
                results[index]._keep_arrays(
                    [bool_view(each, as_bytes=False) for each in results[index].values]
                )
        return results if many else results[0]

    def _to_copy(
        self, tensors: Sequence[Any], destinations: Any, out: Any, *, many: bool
    ) -> list[Request]:
        """Makes a request for each tensor, as a value with one replica."""
        requests = []
        for index, tensor in enumerate(tensors):
            name = f"tensor[{index}]" if many else "tensor"
            replicas = single_value(tensor, name, self.mesh or find_mesh(destinations))
            devices = destination_devices(destinations, 0, replicas.mesh)
            value, form = as_reduced(replicas, index, out)
            requests.append(Request(value, devices, None, form))
        return requests

    @abstractmethod
    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Reduces checked requests; returns arrays in new memory on each request's devices.

        Subclasses override it to reduce in their own way; ``reduce``, ``batch_reduce`` and
        ``all_reduce`` call it.

        Accumulators call it with their locks held, to add the partial sums of their devices. So it
        must not wait for another thread or call an accumulator.

        Args:
            reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.MEAN``.
            requests: the values (``request.value``) and the devices of the result
                (``request.devices``).
            coalesce: see ``batch_reduce``.

        Returns:
            For each request a tuple with a Buffer, or IndexedSlices of one, for each of its
            devices.
        """

    def reduce_buffers(
        self,
        gradients: Sequence[Sequence[Buffer]],
        *,
        divisor: float = 1,
        weight: float | None = None,
        out_dtypes: Sequence[DType] | None = None,
        consume: ExitStack | None = None,
        names: Sequence[str] = (),
        num_words: int = 1,
    ) -> list[tuple[Buffer, ...]]:
        """Sums ``gradients[tensor][replica]`` on every device, for accumulators.

        Args:
            gradients: the Buffers, of real floats.
            divisor: divides each sum, which has the dtype of ``gradients``.
            weight: divides instead of ``divisor``, if it is not None: the sum of the weights of all
                gradients in all processes.
            out_dtypes: the dtype of each tensor's result. Default: that of its gradients.
            consume: if not None, ``gradients`` may be overwritten, see ``pipeline.reduce_batch``.
                This implementation does not overwrite them.
            names: the names of the tensors, for errors and the flight record; empty if they have
                none.
            num_words: how many neighbours in a row of ``gradients`` are the words of one replica;
                more than 1 only with ``exact=True``.

        Returns:
            ``[tensor][replica]``: the sum on the device of each replica.
        """
        values = [
            PerReplica.of(row, "native", name=names[index] if names else "")
            for index, row in enumerate(gradients)
        ]
        requests = [Request(value, value.devices) for value in values]
        with SuspendedScope():  # may run code of a caller's subclass
            reduced = self.reduce_batch(ReduceOp.SUM, requests, coalesce=False)
        dtypes = out_dtypes or [row[0].dtype for row in gradients]
        sums = [buffer_of(part) for parts in reduced for part in parts]
        wanted = [dtype for dtype, parts in zip(dtypes, reduced, strict=True) for _ in parts]
        made = iter(quotients(sums, divisor if weight is None else weight, wanted))
        return [tuple([next(made) for _ in parts]) for parts in reduced]

    def _rehearse_sums(
        self, devices: Sequence[Device], dtype: DType, out_dtype: DType, num_words: int = 1
    ) -> None:
        """Compiles the kernels of ``reduce_buffers`` that are known in advance.

        Args:
            devices: the devices of the gradients.
            dtype: the dtype of the gradients.
            out_dtype: the dtype of the results.
            num_words: see ``reduce_buffers``.
        """

        def work(dry_run: DryRunMesh) -> None:
            here = dry_run.devices_like(devices)
            row = [device.empty((1,), dtype) for device in here]
            sums = map(buffer_of, copy_to_each(sum_on(here[0], row), here, keep=True))
            quotients([*sums], 1, [out_dtype] * len(here))

        compile_ahead(devices, ("sums on one device", dtype, out_dtype), work)


class ReductionToOneDevice(CrossDeviceOps):
    """Adds all replicas on one device, left to right, and copies the result out.

    For values on few devices, and for devices without fast links
    (tf.distribute.ReductionToOneDevice).

    Args:
        reduce_to_device: the device that adds: a Device, a device name or a ``torch.device`` in the
            mesh of the value. Default: the first device of the destination.
        accumulation_fn: a function that is called with the list of a value's replicas (arrays of
            the value's kind on that device) and returns their sum, of the same shape and dtype. It
            must not change them. Default: the sum of ``gr.add_n``. Not called for IndexedSlices.
        mesh: the mesh for host arrays.

    Raises:
        ValueError: ``reduce_to_device`` is not a device or a name, ``accumulation_fn`` is not
            callable, or ``mesh`` is not a Mesh. A reduction raises it too: before anything is
            launched, if the device is not in the value's mesh; and if ``accumulation_fn`` returns
            another shape or dtype, possibly after other values of the batch were added.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> value = gr.PerReplica([np.array([1.0]), np.array([5.0])], mesh)
        >>> gr.ReductionToOneDevice("sim:0").reduce(gr.ReduceOp.MEAN, value, mesh).values
        (array([3.]), array([3.]))
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: Accumulate | None = None,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        if reduce_to_device is not None and not is_device_like(reduce_to_device):
            raise ValueError(
                f"reduce_to_device={brief(reduce_to_device)} must be a device or a device name"
            )
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise ValueError(f"accumulation_fn={brief(accumulation_fn)} is not callable")
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._elementwise = accumulation_fn is None
        self.mesh = validate_mesh(mesh)

    def _repr_fields(self) -> list[str]:
        names = ("reduce_to_device", "accumulation_fn")
        return [f"{name}={vars(self)[name]!r}" for name in names if vars(self)[name] is not None]

    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """See ``CrossDeviceOps.reduce_batch``."""
        for request in requests:
            check_one_process(request.devices[0], "ReductionToOneDevice")
        homes = [self._home(request, index) for index, request in enumerate(requests)]
        if self.accumulation_fn is None:
            for request, home in zip(requests, homes, strict=True):
                rehearse_alone(
                    request,
                    ("on one device", reduce_op, home.index, coalesce),
                    lambda dry, at: reduce_to_one(reduce_op, dry, at, coalesce=coalesce),
                    home,
                )
        results = []
        for index, (request, home) in enumerate(zip(requests, homes, strict=True)):
            with home.mesh_state.pack_scope(label_of(requests, [index])):
                try:
                    reduced = reduce_to_one(
                        reduce_op, request, home, coalesce=coalesce, accumulate=self.accumulation_fn
                    )
                except Exception as error:
                    error.add_note(f"It was about {request.value._name_of(index)}.")
                    raise
            results.append(reduced)
        return results

    def _home(self, request: Request, index: int) -> Device:
        if self.reduce_to_device is None:
            return request.devices[0]
        label = f"{request.value._name_of(index)}: reduce_to_device="
        home = as_device(self.reduce_to_device, label, request.value.mesh)
        return destination_devices(home, index, request.value.mesh)[0]


def _as_bytes(entries: Any, bools: Sequence[int]) -> Any:
    """Returns arguments of ``broadcast`` with the booleans among them as uint8.

    Args:
        entries: the tensors, or the lists of arrays of ``out``, not checked; or None.
        bools: the indices of the tensors that are booleans.
    """
    if not isinstance(entries, list | tuple):
        return entries
    as_numbers = list(entries)
    for index in [each for each in bools if each < len(as_numbers)]:
        entry = as_numbers[index]
        if isinstance(entry, list | tuple):
            as_numbers[index] = _as_bytes(entry, range(len(entry)))
        elif is_bool(entry):
            as_numbers[index] = bool_view(entry, as_bytes=True)
    return as_numbers


def _from_process(rank: int, requests: Sequence[Request]) -> list[Part]:
    """Returns the values of the process with this rank."""
    parts = [request.value.parts[0] for request in requests]
    size = group_of(requests[0].devices[0]).size if requests else 1
    if rank >= size:
        raise ValueError(f"process={rank} must be less than {size}, the number of processes")
    if size == 1:
        return parts
    return broadcast_from(rank, parts, names_of(requests, range(len(requests))))
