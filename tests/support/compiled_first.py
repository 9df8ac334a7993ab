"""Watches which kernels public calls compile: none late, a second time, or with a lock held."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import gradreduce as gr
from gradreduce.device import Device, Mesh

PACKAGE = str(Path(gr.__file__).parent)
Kernels = list[tuple[int, str, tuple]]  # physical device, name, template
# Makes public calls on a mesh; yields after each.
Calls = Callable[[Mesh], Iterator[None]]


class CompileWatch:
    """The kernels that the devices of a mesh have compiled since the last ``start``.

    Attributes:
        compiled: all of them.
        late: those that were compiled after the first launch, or while an accumulator was locked.
        finds_calls: whether each public call begins with no launch, without ``start``.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, str, tuple]] = set()
        self.finds_calls = False
        self.start()

    def start(self) -> None:
        self.compiled: Kernels = []
        self.late: Kernels = []
        self._has_launched = False
        self._call: FrameType | None = None

    def uses(self, device: Device, kernel, template, *, launches: bool) -> None:
        call = _public_call() if self.finds_calls else None
        is_helper = call is not None and call.f_code.co_name == "compile_some"  # in a thread
        if call is not self._call and not is_helper:
            self._call, self._has_launched = call, False
        used = device.physical, kernel.name, template
        if used not in self._known:
            self._known.add(used)
            self.compiled.append(used)
            accumulators = [key for key, _ in device.mesh.mesh_state.listeners()]
            if self._has_launched or any(each.lock._is_owned() for each in accumulators):
                self.late.append(used)
        self._has_launched |= launches


def _public_call() -> FrameType:
    """The frame of the function of the library that its user has called."""
    frame: FrameType | None = sys._getframe()
    found = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found = frame
        frame = frame.f_back
    assert found is not None
    return found


@contextmanager
def watched_compiles(mesh: Mesh) -> Iterator[CompileWatch]:
    """Watches a mesh that has compiled nothing; a plain simulation acts as if it compiled."""
    watch = CompileWatch()

    def watched(device, method, launches):
        def noted(kernel, template, *rest):
            watch.uses(device, kernel, template, launches=launches)
            return method(kernel, template, *rest)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for device in mesh.devices:
            patch.setattr(device, "compiles", True)
            patch.setattr(device, "_compile_kernel", watched(device, device._compile_kernel, False))
            patch.setattr(device, "_make_launch", watched(device, device._make_launch, True))
        yield watch


def check_compiled_first(mesh: Mesh, calls: Calls) -> None:
    """Checks that no call compiles after its first launch, and that a second one does not at all.

    Nor does the mesh log what finds out what must be compiled.
    """
    rounds = []
    with watched_compiles(mesh) as watch:
        for turn in range(2):
            with mesh.journal() as journal:
                for _ in calls(mesh):
                    assert watch.late == []
                    assert turn == 0 or watch.compiled == []
                    watch.start()
            rounds.append(journal.launches)
    assert rounds[0] == rounds[1] > 0


def check_program(mesh: Mesh, program: Callable[[Mesh], object]) -> None:
    """The same for a function that makes several public calls."""
    with watched_compiles(mesh) as watch:
        watch.finds_calls = True
        for turn in range(2):
            program(mesh)
            assert watch.late == []
            assert turn == 0 or watch.compiled == []
            watch.start()
