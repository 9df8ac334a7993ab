"""Compiles the kernels of a call before its first launch, in parallel.

A dry run of the code that launches finds the kernels, so nobody has to list them. Two calls compile
each kernel at its first launch: a sum of a generator, whose terms, and so whose kernels, become
known one by one, and the conversion of sparse gradients that become dense.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence, Set

from gradreduce.device import Buffer, Device, DType, Kernel, Template, run_in_thread

from . import num_cores
from .dry_run import DryRunMesh


def compile_ahead(
    devices: Sequence[Device], key: Hashable, work: Callable[[DryRunMesh], object]
) -> None:
    """Compiles the kernels that ``work`` launches, once for each ``key``.

    The caller holds no lock and has launched nothing yet. The log of the mesh records nothing. Does
    nothing for devices that compile nothing. Calls inside ``work`` compile for the whole.

    Args:
        devices: the devices of the work, of one mesh.
        key: the kind of work, and all that its kernels depend on besides the devices.
        work: launches on a dry-run copy of the whole mesh, and changes nothing else.

    Raises:
        BackendUnavailableError: the compiler is missing.
    """
    mesh_state = devices[0].mesh_state
    for device in devices:
        mesh_state.check_usable(device)
    if not devices[0].compiles:
        return
    key = (key, tuple([device.index for device in devices]))
    if key in mesh_state.compiled_keys:
        return
    dry_run = DryRunMesh.like(devices[0].mesh, compiles=True)
    dry_state = dry_run.mesh.mesh_state
    dry_state.compiled_keys |= {*mesh_state.compiled_keys, key}
    work(dry_run)
    _compile(devices[0], dry_state.compiled)
    mesh_state.compiled_keys |= dry_state.compiled_keys


def compile_rows(
    what: Hashable,
    launch: Callable[[list[list[Buffer]], Device], object],
    dtypes: Set[tuple[DType, ...]],
    device: Device,
) -> None:
    """Compiles the kernels of ``launch(rows, device)`` for rows of Buffers of these dtypes.

    Args:
        what: names the work: another ``launch`` for the same dtypes has another name.
        launch: launches, and changes nothing else. Called with small dry-run Buffers.
        dtypes: the dtypes of each kind of row.
        device: a device of the mesh.

    Raises:
        BackendUnavailableError: the compiler is missing.
    """

    def work(dry_run: DryRunMesh) -> None:
        at = dry_run.mesh.devices[0]
        launch([[at.empty((2, 2), dtype) for dtype in row] for row in dtypes], at)

    compile_ahead([device], (what, frozenset(dtypes)), work)


def _compile(device: Device, kernels: Collection[tuple[Kernel, Template]]) -> None:
    """Compiles kernels in several threads; raises the first error."""
    left, errors = iter(kernels), list[BaseException]()

    def compile_some() -> None:
        for kernel, template in left:  # a thread takes the next one in one step
            if errors:
                return
            try:
                device.compile_kernel(kernel, template)
            except BaseException as error:
                errors.append(error)

    num_threads = min(len(kernels), num_cores())
    others = [run_in_thread(compile_some) for _ in range(num_threads - 1)]
    compile_some()
    for other in others:
        other.wait()
    if errors:
        raise errors[0]
