"""What the steps of one case share: a mesh, the way arrays are given, and what has a name."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.device import as_dtype

from .encoding import decoded, is_sparse

NUM_DEVICES = 8  # that the file knows


class AbsentError(Exception):
    """A step asks for something that has no counterpart here; its text says what."""


@dataclass
class World:
    """One case in progress."""

    mesh: gr.Mesh  # of eight logical devices
    as_buffers: bool  # else arrays are NumPy's, and plain lists stay lists
    names: dict[str, Any] = field(default_factory=dict)  # what the steps have stored
    cleanup: ExitStack = field(default_factory=ExitStack)

    def device(self, name: str) -> gr.Device:
        """The logical device of ``/cpu:k``."""
        return self.mesh.devices[int(name.removeprefix("/cpu:"))]

    def term(self, encoded: Any, device: gr.Device | None = None) -> Any:
        """An array or IndexedSlices of the file, on a device where the file names one."""
        if encoded is None:
            return None
        if isinstance(encoded, dict) and "device" in encoded:
            device = self.device(encoded["device"])
        if not is_sparse(encoded):
            return self.given(decoded(encoded), device)
        indices = np.array(encoded["indices"], encoded.get("indices_dtype", "int32"))
        values = self.given(decoded(encoded["values"]), device)
        return gr.IndexedSlices(values, indices, encoded["dense_shape"])

    def given(self, array: np.ndarray, device: gr.Device | None = None) -> Any:
        """An array as this world gives it: a Buffer if it must lie on some device."""
        if device is None and not self.as_buffers:
            return array
        try:
            as_dtype(array.dtype)
        except TypeError:  # such as bool, of which there are no Buffers
            return array
        return (device or self.mesh.devices[0]).upload(array)

    def named(self, reference: Any) -> Any:
        """What ``$name`` stands for; anything else itself."""
        if isinstance(reference, str) and reference.startswith("$"):
            return self.names[reference[1:]]
        return reference


# How a kind of step is done: what it gives is stored under the step's "as".
Doing = Callable[[World, dict[str, Any]], Any]
