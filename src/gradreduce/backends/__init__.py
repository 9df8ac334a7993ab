"""Opens meshes: picks the backend and the devices.

``docs/environment.md`` lists the environment variables that it reads.
"""

from __future__ import annotations

import importlib.util
import os
import reprlib
from collections.abc import Container, Iterable, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from types import ModuleType
from typing import Any, Literal, get_args
from weakref import WeakSet

from gradreduce.comm.launchers import (
    check_processes,
    detect,
    first_number,
    join_processes,
    telling_processes,
)
from gradreduce.comm.process_group import LocalGroup
from gradreduce.device import (
    BackendKind,
    Mesh,
    MeshState,
    ModuleLock,
    as_deadline,
    as_flag,
    as_index,
    flight_path,
)
from gradreduce.errors import INSTALL_CUDA, BackendUnavailableError, brief, log_warning

__all__ = ["default_mesh", "open_mesh"]

SIMULATION = BackendKind("sim", shares_host_memory=True, has_streams=False)
CUDA = BackendKind("cuda", shares_host_memory=False, has_streams=True)
# Limit for devices of a mesh and for threads. A larger number is a mistake and would need too much
# memory.
MOST = 1024
BackendName = Literal["cuda", "sim"]
Launcher = Literal["torchrun", "mpi", "slurm", "auto", "none"]
Kernels = Literal["numpy", "compiled", "exact", "sanitized"]
_BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# kernels= -> build of the .cu text (None: the NumPy reference)
_BUILDS = {"numpy": None, "compiled": "fast", "exact": "exact", "sanitized": "sanitized"}
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def open_mesh(  # noqa: PLR0913  # options, each independent of the others
    devices: int | Sequence[int] | None = None,
    *,
    backend: BackendName | None = None,
    processes: Launcher | None = None,
    process_group: Any = None,
    communicator: Any = None,
    devices_per_process: int | None = None,
    timeout: float | None = 1800.0,
    peer_access: bool | Set[tuple[int, int]] = True,
    kernels: Kernels = "numpy",
    strict: bool | None = None,
    schedule_seed: int | None = None,
) -> Mesh:
    """Opens devices as a mesh; never replaces the requested backend by another.

    GPUs ignore ``peer_access``, ``kernels``, ``strict`` and ``schedule_seed``.

    Args:
        devices: the number of logical devices, each on its own physical device; or a list with the
            physical device of each: ``[0, 0, 1, 1]`` means four logical devices on two physical
            ones. At most 1,024. Default: every visible GPU; with several processes the GPU of the
            local rank (GPU 0 if only one is visible); in the simulation ``GRADREDUCE_SIM_DEVICES``
            or 4.
        backend: ``"cuda"`` for GPUs, ``"sim"`` for simulated devices. Default:
            ``GRADREDUCE_BACKEND``; else GPUs if CuPy sees any; else the simulation, with a logged
            warning that says why.
        processes: the launcher of the processes whose replicas are summed together: ``"torchrun"``,
            ``"mpi"`` (mpiexec), ``"slurm"`` (srun), or ``"auto"`` to detect it. ``"none"``: sum in
            this process only. Default: this process only, and an error if a launcher has started
            several. Under torchrun and srun the mesh uses torch.distributed's default group. If
            there is none, the mesh makes it with gloo (on GPUs also nccl) and destroys it when it
            closes.
        process_group: instead of ``processes``, a ``torch.distributed`` group. GPU memory travels
            by its nccl backend if it has one, else through host memory.
        communicator: instead of ``processes``, an mpi4py communicator. GPU memory travels by NCCL,
            which has a rank for each GPU of all processes.
        devices_per_process: instead of ``devices``, the number of logical devices of this process;
            on GPUs they share the GPU of its local rank. Without a launcher they are on the visible
            GPUs in turn.
        timeout: seconds that this call, and each later call without an earlier deadline, waits for
            other processes. None: no limit.
        peer_access: simulation only: True if a launch can access the memory of other physical
            devices, False if memory must be copied; or the set of pairs ``(a, b)`` of physical
            devices where a can access the memory of b.
        kernels: simulation only: ``"numpy"`` runs the NumPy reference of each kernel,
            ``"compiled"`` the shipped ``.cu`` text built by g++. For tests: ``"exact"`` and
            ``"sanitized"``, builds that run each GPU thread.
        strict: simulation only: fill fresh memory with NaN (integers: 0xA5 bytes). Default:
            ``GRADREDUCE_SIM_STRICT``, else False.
        schedule_seed: simulation only, for tests of code that queues work: run the queues in a
            random order that the waits between them allow, and fill freed memory with NaN. 0 runs
            work as late as possible, 1 as early as possible, any other seed in its own order.
            Default: None; work runs at once.

    Returns:
        A mesh of new devices. Several meshes can be open at once; they share no memory. Under a
        launcher, the first mesh becomes ``gr.default_mesh()``.

    Raises:
        BackendUnavailableError: the requested backend cannot run here; the error says what to
            install.
        RuntimeError: a launcher has started several processes, and none of ``processes``,
            ``process_group`` and ``communicator`` is passed.
        CollectiveError: another process does not open the mesh in time, or opens it with another
            backend, or another version of gradreduce or NCCL.
        TypeError: ``peer_access`` or ``strict`` is not a boolean, or ``schedule_seed`` not an
            integer.
        ValueError: another argument or environment variable is wrong; the error names it. Or
            ``process_group`` has only nccl, which cannot be used for these devices.

    Example:
        >>> with gr.open_mesh([0, 0, 1, 1], backend="sim") as mesh:
        ...     print(mesh, [device.physical for device in mesh])
        <Mesh sim [0, 0, 1, 1]> [0, 0, 1, 1]
    """
    check_processes(processes, process_group, communicator)
    seconds = as_deadline(timeout, "timeout")
    with telling_processes(processes, process_group, communicator, seconds):
        _check_no_name(devices)
        if devices is not None and devices_per_process is not None:
            raise ValueError("pass devices or devices_per_process, not both")
        if backend is None:
            backend = _backend_from_environment()
        if not _is_one_of(backend, _BACKENDS):
            raise _no_backend("backend=", backend)
        check_kernels(kernels)
        if backend == "cuda":
            try:
                mesh = _open_cuda(devices, devices_per_process)
            except BackendUnavailableError as error:
                raise BackendUnavailableError(f"backend='cuda' cannot run here: {error}") from error
        else:
            named = (
                devices if devices_per_process is None else _validate_number(devices_per_process)
            )
            mesh = _open_sim(named, peer_access, kernels, strict, schedule_seed)
    _join(mesh, processes, process_group, communicator, seconds)
    _offer_as_default(mesh)
    return mesh


def open_group_mesh(process_group: Any, gpu: int | None, kernels: Kernels, timeout: float) -> Mesh:
    """Opens one device of this process, like ``open_mesh``, but not as the default mesh.

    Args:
        process_group: see ``open_mesh``.
        gpu: the number of the GPU; None: a simulated device.
        kernels: see ``open_mesh``.
        timeout: see ``open_mesh``.
    """
    with telling_processes(None, process_group, None, timeout):
        mesh = _open_sim(1, True, kernels, None, None) if gpu is None else _open_cuda([gpu], None)
    _join(mesh, None, process_group, None, timeout)
    return mesh


def _join(
    mesh: Mesh, processes: str | None, process_group: Any, communicator: Any, timeout: float | None
) -> None:
    """Joins the processes; closes the mesh if that fails."""
    try:
        join_processes(mesh, processes, process_group, communicator, timeout)
    except BaseException:
        mesh.close()
        raise


def check_kernels(kernels: Any) -> None:
    """Raises ``ValueError`` unless ``kernels`` is a build of the kernels."""
    if not _is_one_of(kernels, _BUILDS):
        raise ValueError(f"kernels={brief(kernels)} is not one of {tuple(_BUILDS)}")


def _is_one_of(name: Any, names: Container[str]) -> bool:
    """Whether ``name`` is one of these strings; False for an array."""
    return isinstance(name, str) and name in names


def _no_backend(label: str, name: Any) -> ValueError:
    """Returns the error for the name of a backend that there is not."""
    hint = {"'cpu'": ": 'sim' computes on the CPU", "'gpu'": ": 'cuda' computes on GPUs"}
    text = brief(name)
    return ValueError(f"{label}{text} is not one of {_BACKENDS}{hint.get(text.lower(), '')}")


def _check_no_name(devices: Any) -> None:
    """Raises ``ValueError`` for the name of a backend or device, such as PyTorch's ``"cuda:1"``."""
    if not isinstance(devices, str):
        return
    name, _, number = devices.lower().partition(":")
    backend = {"cuda": "cuda", "gpu": "cuda", "sim": "sim", "cpu": "sim"}.get(name)
    if backend is not None:
        first = f"[{number}], " if number.isdecimal() else ""
        raise ValueError(f"devices={brief(devices)} is a name: pass {first}backend={backend!r}")


def _seed(seed: int) -> int:
    try:
        return as_index(seed)
    except TypeError:
        raise TypeError(f"schedule_seed={brief(seed)} must be an integer or None") from None


def _own_gpus(num_gpus: int) -> Sequence[int]:
    """Returns all visible GPUs; under a launcher the GPU of the local rank."""
    if num_gpus == 1 or detect(os.environ) is None:
        return range(num_gpus)
    launched = first_number(os.environ, _LOCAL_RANKS, 0)
    if launched is None:
        names = ", ".join(_LOCAL_RANKS)
        raise BackendUnavailableError(
            f"no environment variable ({names}) has this process's local rank: pass devices=, a "
            f"list of GPU numbers from 0 to {num_gpus - 1}"
        )
    name, rank = launched
    if rank >= num_gpus:
        raise BackendUnavailableError(
            f"{name}={rank}, but CuPy sees {num_gpus} GPUs in this process: pass devices="
        )
    return [rank]


def _open_sim(
    devices: int | Sequence[int] | None,
    peer_access: bool | Set[tuple[int, int]],
    kernels: str,
    strict: bool | None,
    schedule_seed: int | None,
) -> Mesh:
    from gradreduce.backends.sim.collective import SimCollective
    from gradreduce.backends.sim.device import SimDevice, SimOptions
    from gradreduce.backends.sim.host_compile import find_compiler
    from gradreduce.backends.sim.scheduler import RandomScheduler, Scheduler
    from gradreduce.backends.sim.workers import Workers

    if strict is None:
        strict = _integer("GRADREDUCE_SIM_STRICT", 0, minimum=0, maximum=1) > 0
    strict = as_flag("strict", strict)
    build = _BUILDS[kernels]
    if build is not None:
        find_compiler(build)
    placement = _placement(devices)
    workers = Workers(_integer("GRADREDUCE_SIM_THREADS", num_cores()))
    scheduler = Scheduler() if schedule_seed is None else RandomScheduler(_seed(schedule_seed))
    options = SimOptions(build, strict, workers, scheduler)
    mesh_state = _mesh_state(SIMULATION, peer_access)
    mesh_state.on_wake.append(scheduler.wake)
    made = [
        SimDevice(mesh_state, index, physical, options) for index, physical in enumerate(placement)
    ]
    return Mesh(made, mesh_state, cache(partial(SimCollective, mesh_state)), workers.close)


def _open_cuda(devices: int | Sequence[int] | None, per_process: int | None) -> Mesh:
    cuda, nccl, streams = _cuda_backend()
    num_gpus = streams.visible_gpus()
    if devices is None:
        devices = own = _own_gpus(num_gpus)
        if per_process is not None:  # several GPUs are assigned in turn
            devices = [own[index % len(own)] for index in range(_validate_number(per_process))]
    placement = _placement(devices)
    if max(placement) >= num_gpus:
        raise BackendUnavailableError(
            f"devices={reprlib.repr(devices)} names GPU {max(placement)}, but CuPy sees only GPUs "
            f"0 to {num_gpus - 1}"
        )
    physicals = tuple(dict.fromkeys(placement))
    mesh_state = _mesh_state(CUDA, streams.enable_peer_access(physicals))
    mesh_state.nvtx = streams.NVTX
    states: dict[int, Any] = {}  # streams of each GPU, which its devices share
    cuda_devices = [
        cuda.CudaDevice(mesh_state, index, gpu, states) for index, gpu in enumerate(placement)
    ]
    collective = nccl.NcclCollective(mesh_state)

    def close() -> None:
        for device in cuda_devices:
            device.close()
        collective.close()

    return Mesh(cuda_devices, mesh_state, collective.load, close)


def _mesh_state(kind: BackendKind, peer_access: bool | Set[tuple[int, int]]) -> MeshState:
    if not isinstance(peer_access, Set):
        peer_access = as_flag("peer_access", peer_access)
    mesh_state = MeshState(kind, LocalGroup(), peer_access=peer_access)
    mesh_state.flight_path = flight_path(os.environ.get("GRADREDUCE_FLIGHT_RECORD", ""))
    return mesh_state


def _cuda_backend() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Imports the CUDA backend: its modules ``device``, ``nccl`` and ``streams``.

    Raises:
        BackendUnavailableError: CuPy is missing, too old or built for AMD GPUs, or sees no GPU; the
            error says what to install.
    """
    if importlib.util.find_spec("cupy") is None:
        raise BackendUnavailableError(f"CuPy is not installed; {INSTALL_CUDA}")
    try:
        from .cuda import streams

        streams.visible_gpus()  # before imports that another CuPy may not have
        from .cuda import device as cuda
        from .cuda import nccl
    except ImportError as error:
        raise BackendUnavailableError(
            f"CuPy cannot be imported ({error}); {INSTALL_CUDA}"
        ) from error
    return cuda, nccl, streams


_opened: WeakSet[Mesh] = WeakSet()  # by the program, and not freed, but they may be closed
_default: list[Mesh] = []
_default_lock = ModuleLock()


def default_mesh() -> Mesh:
    """Returns the mesh that ``mesh=None`` means, which all callers share.

    The first call opens it by ``open_mesh()``. After it was closed, or in a forked child, the next
    call opens a new one. With several processes it is the first open mesh that the program has
    opened; ``default_mesh`` does not open one.

    Raises:
        RuntimeError: a launcher has started several processes, and no mesh is open.
        ValueError, BackendUnavailableError: what ``open_mesh`` raises.

    Example:
        >>> gr.default_mesh() is gr.default_mesh()
        True
    """
    with _default_lock.lock:
        if _open_default() is None:
            _default.append(open_mesh())
            _opened.discard(_default[0])  # the program has not asked for this one
        return _default[0]


def only_mesh() -> Mesh:
    """Returns the mesh that the program has open; if it has none or several, the default mesh.

    A mesh that has failed does not count, because the program may have dropped it.
    """
    with _default_lock.lock:
        found = [mesh for mesh in _opened if _is_open(mesh) and mesh.mesh_state.reason is None]
    return found[0] if len(found) == 1 else default_mesh()


def _is_open(mesh: Mesh) -> bool:
    """Whether a mesh can be used: it was not closed, and is not of a parent process."""
    try:
        mesh.mesh_state.check_open()
    except BackendUnavailableError:
        return False
    return True


def _offer_as_default(mesh: Mesh) -> None:
    """With several processes, makes the first mesh the default mesh."""
    with _default_lock.lock:
        _opened.add(mesh)
        if detect(os.environ) is not None and _open_default() is None:
            _default.append(mesh)


def _open_default() -> Mesh | None:
    """Returns the default mesh if it is open; the caller holds the lock."""
    if _default and not _is_open(_default[0]):
        _default.clear()
    return _default[0] if _default else None


def _backend_from_environment() -> BackendName:
    named = os.environ.get("GRADREDUCE_BACKEND", "")
    if named:
        if named in _BACKENDS:
            return named
        raise _no_backend("GRADREDUCE_BACKEND=", named)
    try:
        _cuda_backend()
    except BackendUnavailableError as error:
        if first_number(os.environ, _LOCAL_RANKS, 1) is None:  # one process of each node warns
            _warn_once(str(error))
        return "sim"
    return "cuda"


@cache
def _warn_once(why: str) -> None:
    log_warning(
        "gradreduce",
        "gradreduce runs on simulated devices (NumPy): %s. GRADREDUCE_BACKEND=sim silences this, "
        "GRADREDUCE_BACKEND=cuda makes it an error.",
        why,
    )


def _validate_number(devices_per_process: int) -> int:
    """Returns the number of devices as an integer.

    Raises:
        ValueError: it is not a number from 1 to ``MOST``.
    """
    with suppress(TypeError):
        number = as_index(devices_per_process)
        if 0 < number <= MOST:
            return number
    raise ValueError(
        f"devices_per_process={reprlib.repr(devices_per_process)} must be a number from 1 to {MOST}"
    )


def _placement(devices: int | Sequence[int] | None) -> tuple[int, ...]:
    named = _integer("GRADREDUCE_SIM_DEVICES", 4) if devices is None else devices
    with suppress(TypeError):
        named = range(as_index(named))
    try:
        listed = islice(named, MOST + 1) if isinstance(named, Iterable) else ()
        placement = tuple(as_index(physical) for physical in listed)
    except TypeError:
        placement = ()
    if not 0 < len(placement) <= MOST or min(placement) < 0:
        raise ValueError(
            f"devices={reprlib.repr(devices)} must be a number from 1 to {MOST}, or a list of at "
            f"most {MOST} physical device numbers from 0 up"
        )
    return placement


def _integer(variable: str, default: int, *, minimum: int = 1, maximum: int = MOST) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    # Check the length first: int() raises another error for thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or not minimum <= int(text) <= maximum:
        raise ValueError(
            f"{variable}={reprlib.repr(text)} must be a number from {minimum} to {maximum}"
        )
    return int(text)


def num_cores() -> int:
    """Returns the cores this process may use (all of the machine's on macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
