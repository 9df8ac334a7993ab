"""How many Python calls a reduction makes before its launches."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.device import Device

PACKAGE = Path(gr.__file__).parent.as_posix()


class AboveLaunch:
    """Counts frames and calls above ``Device.launch``, by ``sys.setprofile``."""

    def __init__(self) -> None:
        self.calls = 0
        self.frames = 0  # from the caller's to that of a launch
        self.files: set[str] = set()
        self._depth = self._launch_depth = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":
            self._depth -= 1
            if self._depth < self._launch_depth:
                self._launch_depth = 0
        elif event == "call":
            self._depth += 1
            if self._launch_depth:
                return
            if frame.f_code is Device.launch.__code__:
                self._launch_depth = self._depth
                self.frames = max(self.frames, self._depth - 1)
                return
            self.calls += 1
            if frame.f_code.co_filename.startswith(PACKAGE):
                self.files.add(frame.f_code.co_filename)


def test_a_reduction_of_two_tensors_makes_few_python_calls():
    mesh = gr.open_mesh(4, backend="sim")
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1)
    values = [gr.PerReplica([np.ones(shape, np.float32)] * 4, mesh) for shape in ((3, 2), (5,))]
    pairs = [(value, value) for value in values]
    for _ in range(3):  # the first compiles and plans
        ops.batch_reduce(gr.ReduceOp.SUM, pairs)
    above = AboveLaunch()
    sys.setprofile(above)
    try:
        ops.batch_reduce(gr.ReduceOp.SUM, pairs)
    finally:
        sys.setprofile(None)
    assert 0 < above.frames <= 8
    assert 0 < len(above.files) <= 18, sorted(above.files)
    assert 0 < above.calls <= 250


def test_dtypes_of_one_element_share_launches():
    dtypes = ("int8", "uint8", "float32", "complex64", "int32", "uint32")
    mesh = gr.open_mesh(2, backend="sim")
    grads = [[np.ones(7, dtype) for dtype in dtypes] for _ in range(2)]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    with mesh.journal() as journal:
        ops.all_reduce(grads, gr.ReduceOp.SUM)
    assert (
        len(journal.of("launch")) == 3 * 2 + 3 * 2
    )  # for each of 3 element types: packed, and added
