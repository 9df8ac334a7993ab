"""NVRTC through ctypes, called as CuPy calls it. Needs no GPU, no driver, no CuPy."""

import ctypes
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from support.skip_rules import find_compiler

from gradreduce.device.run.kernel import OPTIONS

WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
# The options that CuPy 14.2 adds to ours.
CUPY_OPTIONS = ("-arch=sm_{arch}", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Entry:
    """The result of NVRTC for one instantiation."""

    parameters: str  # in the PTX
    body: str  # in the PTX
    code: bytes  # the machine code
    registers: int  # of a thread
    spills: int  # bytes of stack, of spill stores and of spill loads together
    barriers: int  # that a block uses


@dataclass(frozen=True)
class Program:
    """The result of NVRTC for a text and one architecture."""

    ptx: str  # of all entries
    entries: dict[str, Entry]  # by the C++ names that were asked for


def options(arch: int) -> tuple[str, ...]:
    """The options that CuPy passes for a GPU of this architecture."""
    return (*OPTIONS, *(option.format(arch=arch) for option in CUPY_OPTIONS))


def options_of_cupy(arch: int) -> tuple[str, ...]:
    """The options with which the real CuPy compiles for the CUDA backend; needs no GPU.

    CuPy asks the driver for the current GPU in functions that it memoizes for each one: here they
    are called as they are. In place of NVRTC stands a class that keeps the options.
    """
    from cupy.cuda import compiler

    from gradreduce.backends.cuda import compile

    class Asked(Exception):
        pass

    class Program:
        def __init__(self, *_, **__):
            pass

        def compile(self, options, log_stream=None):
            raise Asked(*options)

    plain = compiler._get_arch_for_options_for_nvrtc.__wrapped__
    changed = {
        (compiler, "_NVRTCProgram"): Program,
        (compiler, "_get_arch"): lambda: str(arch),
        (compiler, "_get_arch_for_options_for_nvrtc"): plain,
        (compiler, "_get_nvrtc_version"): lambda: (13, 0),
    }
    before = {(place, name): getattr(place, name) for place, name in changed}
    try:
        for (place, name), value in changed.items():
            setattr(place, name, value)
        compile.compile_code("", "add_n<float>")
    except Asked as asked:
        return asked.args
    finally:
        for (place, name), value in before.items():
            setattr(place, name, value)
    raise RuntimeError("CuPy has compiled without a program of NVRTC")


@cache
def library(version: int) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(find_compiler(WHEELS[version])))
    loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
    return loaded


def call(version: int, name: str, *arguments) -> None:
    status = getattr(library(version), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: {library(version).nvrtcGetErrorString(status).decode()}")


def compiled(text: str, names: Sequence[str], arch: int, version: int = 12) -> Program:
    """Compiles ``text`` with these template instantiations; other threads can run meanwhile.

    Args:
        text: the source, with everything that it includes.
        names: C++ name expressions of the entries.
        arch: 80 for sm_80.
        version: of NVRTC, 12 or 13.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    program = ctypes.c_void_p()
    source = text.encode(), b"kernel.cu", 0, None, None
    call(version, "nvrtcCreateProgram", ctypes.byref(program), *source)
    try:
        for name in names:
            call(version, "nvrtcAddNameExpression", program, name.encode())
        given = [option.encode() for option in (*options(arch), "--ptxas-options=-v")]
        try:
            call(version, "nvrtcCompileProgram", program, len(given), _strings(given))
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{_made(version, program, 'ProgramLog')}") from None
        ptx = _made(version, program, "PTX")
        found = re.findall(r"\.entry (\w+)\((.*?)\)[^{]*\{(.*?)\n\}", ptx, re.DOTALL)
        bodies = {lowered: (parameters, body) for lowered, parameters, body in found}
        codes = _codes(_bytes(version, program, "CUBIN"))
        used = _used(_made(version, program, "ProgramLog"))
        lowered = {name: _lowered(version, program, name) for name in names}
        entries = {
            name: Entry(*bodies[low], codes[low], *used[low]) for name, low in lowered.items()
        }
        return Program(ptx, entries)
    finally:
        call(version, "nvrtcDestroyProgram", ctypes.byref(program))


def _strings(values: Sequence[bytes]) -> ctypes.Array:
    return (ctypes.c_char_p * len(values))(*values)


def _bytes(version: int, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    call(version, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    call(version, f"nvrtcGet{what}", program, made)
    return made.raw


def _made(version: int, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(version, program, what).rstrip(b"\0").decode()


def _lowered(version: int, program: ctypes.c_void_p, name: str) -> str:
    lowered = ctypes.c_char_p()
    call(version, "nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
    return lowered.value.decode()


def _used(log: str) -> dict[str, tuple[int, int, int]]:
    """Registers, spills and barriers of each entry, from the output of ptxas -v."""
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers, used (\d+) barriers", log, re.DOTALL
    )  # fmt: skip
    return {
        name: (int(registers), sum(map(int, spills)), int(barriers))
        for name, *spills, registers, barriers in found
    }


def _codes(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each entry: the sections ``.text.<entry>`` of an ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, start + i * size) for i in range(count)]
    made = {}
    for place, _, _, _, offset, nbytes in sections:
        first = sections[of_names][4] + place
        name = cubin[first : cubin.index(b"\0", first)].decode()
        if name.startswith(".text."):
            made[name.removeprefix(".text.")] = cubin[offset : offset + nbytes]
    return made
