"""NVRTC through ctypes: one function, and what it made. Needs no GPU, no driver, no CuPy."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from skips import find_nvrtc

OPTIONS = ("-std=c++17", "-fmad=false", "--ptxas-options=-v")


@dataclass(frozen=True)
class Program:
    """What NVRTC made of a text for one architecture.

    Attributes:
        ptx: of all entries.
        log: of ptxas: registers, stack and spills of each entry.
        entries: C++ name as asked for -> (its parameters, its body) in the PTX.
    """

    ptx: str
    log: str
    entries: dict[str, tuple[str, str]]


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(find_nvrtc()))
    loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
    return loaded


def call(name: str, *arguments) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: {library().nvrtcGetErrorString(status).decode()}")


def architectures() -> set[int]:
    """The compute capabilities that this NVRTC compiles for, as 80 for 8.0."""
    count = ctypes.c_int()
    call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    call("nvrtcGetSupportedArchs", found)
    return set(found)


def compiled(text: str, names: Sequence[str], arch: int, *, ptx_only: bool = False) -> Program:
    """Compiles ``text`` with these template instantiations; other threads go on meanwhile.

    Args:
        text: the source, with everything that it includes.
        names: C++ name expressions of the entries.
        arch: 80 for sm_80.
        ptx_only: leave out ptxas: no log.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        for name in names:
            call("nvrtcAddNameExpression", program, name.encode())
        target = f"--gpu-architecture={'compute' if ptx_only else 'sm'}_{arch}"
        options = [option.encode() for option in (*OPTIONS, target)]
        try:
            call("nvrtcCompileProgram", program, len(options), _strings(options))
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{_text(program, 'ProgramLog')}") from None
        ptx = _text(program, "PTX")
        found = re.findall(r"\.entry (\w+)\((.*?)\)\s*\{(.*?)\n\}", ptx, re.DOTALL)
        bodies = {lowered: (parameters, body) for lowered, parameters, body in found}
        entries = {name: bodies[_lowered(program, name)] for name in names}
        return Program(ptx, _text(program, "ProgramLog"), entries)
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def _strings(values: Sequence[bytes]) -> ctypes.Array:
    return (ctypes.c_char_p * len(values))(*values)


def _text(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call(f"nvrtcGet{what}", program, text)
    return text.value.decode()


def _lowered(program: ctypes.c_void_p, name: str) -> str:
    lowered = ctypes.c_char_p()
    call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
    return lowered.value.decode()
