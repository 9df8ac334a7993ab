"""Tests our errors after a failed assertion in a PyTorch kernel: the device has failed.

An index out of bounds fails such an assertion. It makes the CUDA context of the process unusable
(error 710, ``cudaErrorAssert``) for every library, so this runs in its own process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError

SIZE = 1000


def fail_assertion() -> None:
    """Launches a PyTorch kernel with a failing assertion, and waits until it has failed."""
    torch = importlib.import_module("torch")
    index = torch.tensor([SIZE], device="cuda")
    torch.ones(1, device="cuda")[index]
    with suppress(RuntimeError):
        torch.cuda.synchronize()


def said_after(fail: Callable[[], None]) -> list[str]:
    """Returns the errors of our later calls on two logical devices of the GPU."""
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        buffers = [device.upload(np.ones(SIZE, np.float32)) for device in mesh]
        mesh.synchronize()
        fail()
        calls: list[Callable[[], object]] = [device.synchronize for device in mesh]
        calls += [*(buffer.numpy for buffer in buffers), lambda: gr.add_n(buffers)]
        return [failure_of(call) for call in calls]


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except BackendUnavailableError as error:
        return str(error)
    raise AssertionError("a call on a failed device raised nothing")


def said(quick: bool) -> dict[str, list[str]]:
    return {"said": said_after(fail_assertion)}
