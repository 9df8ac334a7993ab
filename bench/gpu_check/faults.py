"""What other code of the process does to our captures and to our devices.

    python -m gpu_check.faults threads|torch-graph|torch-assert [--json FILE] [--quick]

Each way needs a process of its own. ``threads``: what another thread does to a GPU while a step is
captured there; the capture is whole or raises ``CaptureError``, and the device goes on either way.
``torch-graph``: a call of ours inside ``torch.cuda.graph`` raises ``CaptureError``, and PyTorch's
graph is what it would have been. ``torch-assert``: after a failed assertion of a PyTorch kernel,
which ruins the CUDA context (error 710), every call of ours says that the device is lost.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from measure.report import keep

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Capture, Device
from gradreduce.errors import BackendUnavailableError, CaptureError

SIZE = 1000
NBYTES = 2**20
JOIN_SECONDS = 20.0  # for a thread that does one thing


def threads() -> Mapping[str, Any]:
    """What came of each capture, and of what the other thread did."""
    with gr.open_mesh(1, backend="cuda") as mesh, gr.open_mesh(1, backend="cuda") as other:
        return {
            name: captured_beside(mesh.devices[0], act)
            for name, act in acts(other.devices[0]).items()
        }


def acts(other: Device) -> dict[str, Callable[[], object]]:
    """What a thread may do meanwhile; ``other`` is a device of another mesh on the same GPU."""
    pool = cupy.cuda.MemoryPool()

    def free() -> None:
        pool.malloc(NBYTES)
        pool.free_all_blocks()

    made: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "synchronises the device": cupy.cuda.Device(other.physical).synchronize,
        "allocates and frees memory": free,
        "uses another mesh": lambda: other.upload(np.ones(SIZE)).numpy(),
        "trims another mesh": other.trim,
    }
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            torch.ones(1, device="cuda")  # PyTorch's start is no part of what is tried
            made["torch.cuda.synchronize"] = torch.cuda.synchronize
            made["torch.cuda.empty_cache"] = torch.cuda.empty_cache
    return made


def captured_beside(device: Device, act: Callable[[], object]) -> str:
    """A capture in the middle of which another thread does something; in words how they ended.

    Raises:
        AssertionError: the thread hangs, or a sum is wrong.
    """
    ones, out = device.upload(np.ones(SIZE, np.float32)), device.zeros((SIZE,), "float32")
    ops.add_n([out], [[ones, ones]], device=device)  # compiled
    device.synchronize()
    capture = Capture([device])
    said = ["the other thread is done"]
    try:
        with capture.recorded():
            ops.add_n([out], [[ones, ones]], device=device)
            said = in_a_thread(act)
            ops.add_n([out], [[out, ones]], device=device)
        capture()
        found, wanted = "captured", 3
    except CaptureError as error:
        found, wanted = f"CaptureError: {error}", 2
        ops.add_n([out], [[ones, ones]], device=device)
    equal(out.numpy(), wanted)
    return f"{found}; {said[0]}"


def in_a_thread(act: Callable[[], object]) -> list[str]:
    """Does it in another thread, and waits for that."""
    said: list[str] = []

    def run() -> None:
        try:
            act()
            said.append("the other thread is done")
        except Exception as error:  # whatever CUDA says of it
            said.append(f"the other thread: {error!r}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(JOIN_SECONDS)
    if not said:
        raise AssertionError(f"the other thread has not ended in {JOIN_SECONDS:g} s")
    return said


def torch_graph() -> Mapping[str, Any]:
    """What our call inside PyTorch's capture said."""
    torch = importlib.import_module("torch")
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        reduce = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        grads = [[torch.ones(SIZE, device="cuda")] for _ in mesh]
        equal(reduce.all_reduce(grads, op=gr.ReduceOp.SUM)[0][0].cpu().numpy(), 2)
        torch.cuda.synchronize()
        graph, said = torch.cuda.CUDAGraph(), ""
        with torch.cuda.graph(graph):
            doubled = grads[0][0] * 2
            try:
                reduce.all_reduce(grads, op=gr.ReduceOp.SUM)
            except CaptureError as error:
                said = str(error)
        if not said:
            raise AssertionError("a call inside torch.cuda.graph raised no CaptureError")
        grads[0][0].fill_(3)
        graph.replay()
        equal(doubled.cpu().numpy(), 6)
        equal(reduce.all_reduce(grads, op=gr.ReduceOp.SUM)[0][0].cpu().numpy(), 4)
    return {"said": said}


def torch_assert() -> Mapping[str, Any]:
    """What the first call behind a failed assertion said."""
    torch = importlib.import_module("torch")
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        buffers = [device.upload(np.ones(SIZE, np.float32)) for device in mesh]
        mesh.synchronize()
        index = torch.tensor([SIZE], device="cuda")
        torch.ones(1, device="cuda")[index]  # out of bounds: the kernel asserts that it is not
        said = [lost(device.synchronize) for device in mesh]
        said += [lost(buffer.numpy) for buffer in buffers]
        said += [lost(lambda: gr.add_n(buffers))]
    return {"said": said}


def lost(call: Callable[[], object]) -> str:
    """What a call on a lost device says."""
    try:
        call()
    except BackendUnavailableError as error:
        return str(error)
    raise AssertionError("a call on a device that is lost raised nothing")


def equal(found: np.ndarray[Any, Any], wanted: float) -> None:
    """All elements are the number."""
    if not (found == wanted).all():
        raise AssertionError(f"{found[:8]} is not {wanted}")


WAYS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "threads": threads,
    "torch-graph": torch_graph,
    "torch-assert": torch_assert,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Goes one of the ways, prints and keeps what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="changes nothing")
    options = parser.parse_args(arguments)
    found = WAYS[options.way]()
    for name, said in found.items():
        print(f"{name}: {said}")
    keep(found, options.json)


if __name__ == "__main__":
    main()
