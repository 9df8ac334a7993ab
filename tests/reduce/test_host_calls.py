"""How many Python calls a reduction makes before its launches."""

import sys
from collections.abc import Callable
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


def above_launches(call: Callable[[], object]) -> AboveLaunch:
    for _ in range(3):  # the first compiles and plans
        call()
    above = AboveLaunch()
    sys.setprofile(above)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert above.calls > 0
    return above


def tensors() -> list[np.ndarray]:
    return [np.ones(shape, np.float32) for shape in ((3, 2), (5,))]


def test_a_reduction_of_two_tensors_makes_few_python_calls():
    mesh = gr.open_mesh(4, backend="sim")
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1)
    values = [gr.PerReplica([each] * 4, mesh) for each in tensors()]
    pairs = [(value, value) for value in values]
    above = above_launches(lambda: ops.batch_reduce(gr.ReduceOp.SUM, pairs))
    assert 0 < above.frames <= 9  # with that of the lambda
    assert 0 < len(above.files) <= 19, sorted(above.files)
    assert above.calls <= 250


def test_public_calls_make_few_python_calls():
    mesh = gr.open_mesh(4, backend="sim")
    grads = [dict(zip("wb", tensors(), strict=True)) for _ in mesh]
    above = above_launches(lambda: gr.all_reduce(grads, mesh=mesh))
    assert above.calls <= 550
    assert len(above.files) <= 33, sorted(above.files)
    variables = [gr.Variable(each, device=mesh) for each in tensors()]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1)
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(0.1), ops)
    terms = [[[each] for each in tensors()] for _ in mesh]
    assert above_launches(lambda: step(terms)).calls <= 800
    accumulator = gr.ConditionalAccumulator("float32", (3,), device=mesh[0])
    gradient = np.ones(3, np.float32)
    assert (
        above_launches(lambda: accumulator.apply_grad(gradient, 0)).calls <= 75
    )  # with that of the lambda
    center = gr.AGNCenter(mesh)
    calls: list[int] = []

    def work() -> None:
        getter = gr.AGNCustomGetter(mesh[0], center=center)
        w = gr.get_variable("w", np.zeros(2), custom_getter=getter)
        optimizer = gr.AGNOptimizer(gr.MomentumOptimizer(0.1, 0.5), 1, getter, 1)

        def minimize() -> None:
            optimizer.minimize(lambda: np.sum((w - 3.0) ** 2), var_list=[w])

        calls.append(above_launches(minimize).calls)

    center.start_worker(0, work).join()
    assert 0 < calls[0] <= 352


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
