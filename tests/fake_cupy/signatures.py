"""Compares the signatures of the fake with those recorded from CuPy 14.2, in both directions.

The first line of the docstring of CuPy's compiled callables holds their C-typed signature.
``python -m fake_cupy.signatures`` with the real CuPy compares it with the record;
``--write`` records it anew; a new name is first added to the record by hand. Needs no GPU.
"""

import contextlib
import importlib
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("signatures.json")
# Parameters that are not compared: the fake has fewer, or CuPy's signature is not right.
NOT_COMPARED = {
    "cupy.cuda.Function": "the fake's are made by Module only",
    "cupy.cuda.Graph": "no caller makes one",
    "cupy.cuda.Stream": "the docstring is prose; __init__ is compared",
    "cupy.cuda.ExternalStream": "the docstring is prose; __init__ is compared",
    "cupy.cuda.Event": "the docstring is prose; __init__ is compared",
    "cupy.ndarray.get": "CuPy's own arguments are not used",
    "cupy.ndarray.copy": "CuPy's own argument is not used",
    "cupy.asarray": "a Python function of CuPy's, used in tests only",
    "cupy.ascontiguousarray": "a Python function of CuPy's, used with one argument",
    "cupy.cuda.is_available": "no docstring",
}


def found(name: str) -> Any:
    """The object of a dotted name, in the imported CuPy."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            holder = getattr(holder, part)
        return holder
    raise ImportError(name)


def described(name: str) -> str | int | bool:
    """A constant itself, ``property``, or the first line of the docstring."""
    what = found(name)
    if isinstance(what, (bool, int)):
        return what
    if not callable(what):
        return "property"
    text = getattr(what, "__doc__", None) or ""
    return text.strip().splitlines()[0].strip() if text.strip() else ""


def recorded_now() -> dict[str, str | int | bool]:
    """The record of the CuPy that is imported; a warning about one of the names is raised."""
    with warnings.catch_warnings():
        _import_all()
        warnings.simplefilter("error")
        made = {}
        for name in RECORD:
            if name in ("cupy.cuda.Device.id", "cupy.cuda.nccl.available"):
                made[name] = ""  # of an object, and of the machine
            else:
                made[name] = described(name)
        return made


def _import_all() -> None:
    """Imports before warnings become errors: warnings about the installation do not count."""
    warnings.simplefilter("ignore")
    for name in RECORD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.rpartition(".")[0])


RECORD: dict[str, str | int | bool] = json.loads(_FILE.read_text())


def parameters(line: str) -> list[tuple[str, str | None]] | None:
    """Names and defaults in ``name(int a, b=1) -> int``; None if it is no signature."""
    head, bracket, rest = line.partition("(")
    if not bracket or " " in head.strip():
        return None
    made = []
    for part in rest.rpartition(")")[0].split(","):
        left, _, default = part.strip().partition("=")
        words = left.split()
        if words and words[-1] not in ("self", "*"):
            made.append((words[-1], default or None))
    return made


def differences() -> list[str]:
    """The differences between the signatures of the imported fake and the record."""
    wrong = []
    for name, line in RECORD.items():
        if isinstance(line, (bool, int)):
            if found(name) != line:
                wrong.append(f"{name} is {found(name)}, not {line}")
            continue
        if line and (line == "property") == callable(found(name)):
            wrong.append(f"{name} is a property in one of the two only")
        wanted = parameters(line)
        if name not in NOT_COMPARED and wanted is not None:
            wrong += _compared(name, wanted)
    return wrong


def _compared(name: str, wanted: list[tuple[str, str | None]]) -> list[str]:
    """The fake's parameters are the first of CuPy's; the others have defaults."""
    what = found(name)
    mine = [
        (
            "*" * (one.kind is one.VAR_POSITIONAL) + one.name,
            None if one.default is one.empty else _spelled(one.default),
        )
        for one in inspect.signature(what).parameters.values()
        if one.name != "self"
    ]
    if mine != wanted[: len(mine)] or any(default is None for _, default in wanted[len(mine) :]):
        return [f"{name} takes {mine}, CuPy {wanted}"]
    return []


def _spelled(default: Any) -> str:
    return default.__name__ if isinstance(default, type) else repr(default)


# An expression -> the exception that CuPy's own check of arguments raises; "" if it takes them.
# A warning counts as an exception, as in our tests, because deprecated calls are not used.
# Without a GPU the real CuPy gets as far as the driver, or NCCL, and fails there.
PROBES = {
    "runtime.memcpyAsync(np.int64(4096), 4096, 4, 1, 0)": "TypeError",
    "runtime.memcpyAsync(4096.0, 4096, 4, 1, 0)": "TypeError",
    "runtime.memcpyAsync(4096, 4096, -4, 1, 0)": "OverflowError",
    "runtime.memcpyAsync(4096, 4096, 4, 1, None)": "TypeError",
    "runtime.memcpyPeerAsync(4096, 0, np.int64(4096), 1, 4, 0)": "TypeError",
    "runtime.memsetAsync(np.int64(4096), 0, 4, 0)": "TypeError",
    "runtime.deviceCanAccessPeer(0, 1)": "",
    "runtime.eventRecord(np.int64(4096), 0)": "TypeError",
    "runtime.eventRecord(4096, None)": "TypeError",
    "runtime.streamWaitEvent(None, 4096)": "TypeError",
    "runtime.streamWaitEvent(0, np.int64(4096))": "TypeError",
    "cuda.UnownedMemory(np.int64(4096), 4, None, 0)": "TypeError",
    "cuda.UnownedMemory(4096.0, 4, None, 0)": "TypeError",
    "cuda.UnownedMemory(4096, 0, None, 0)": "",
    "cuda.function.CNumpyArray(np.zeros(1))": "",
    "cuda.function.CNumpyArray(5)": "AttributeError",
    "cuda.ExternalStream(5, 0)": "DeprecationWarning",
    "cuda.Device(1)": "",
    "cuda.Event(disable_timing=True)": "",
    "cuda.Stream(non_blocking=True)": "",
    "cuda.MemoryPool().malloc(8)": "",
    "cuda.MemoryPool().malloc(np.int64(8))": "",
    "cuda.alloc_pinned_memory(8)": "",
    "cuda.get_current_stream(0)": "",
    "cuda.compiler.compile_using_nvrtc("
    "'', ('-std=c++17', '-fmad=false'), name_expressions=(), cache_in_memory=True)": "",
    "cuda.function.Module().load(bytearray(8))": "TypeError",
    "cupy.ndarray((2,), ml_dtypes.bfloat16, "
    "cuda.MemoryPointer(cuda.UnownedMemory(4096, 0, None, 0), 0))": "",
    "nccl.NcclCommunicator.initAll((0,))": "ValueError",
    "nccl.NcclCommunicator.initAll([0])": "",
    "nccl.NcclCommunicator.initAll(1)": "",
    "nccl.groupEnd()": "",
}


def probed(expression: str) -> str:
    """The result of an expression with the imported CuPy."""
    with warnings.catch_warnings():
        _import_all()
    cupy = importlib.import_module("cupy")
    names = {
        "cupy": cupy,
        "np": importlib.import_module("numpy"),
        "ml_dtypes": importlib.import_module("ml_dtypes"),
        "nccl": importlib.import_module("cupy.cuda.nccl"),
        "cuda": cupy.cuda,
        "runtime": cupy.cuda.runtime,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            eval(expression, names)
    except (names["runtime"].CUDARuntimeError, names["nccl"].NcclError):
        return ""
    except Exception as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    now = recorded_now() | {name: probed(name) for name in PROBES}
    RECORD = {**RECORD, **PROBES}
    if "--write" in sys.argv:
        kept = {name: now[name] for name in RECORD if name not in PROBES}
        _FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    wrong_now = [name for name in now if now[name] != RECORD.get(name, "")]
    sys.stdout.write("".join(f"{name}: {now[name]!r}\n" for name in wrong_now))
    sys.exit(bool(wrong_now) and "--write" not in sys.argv)
