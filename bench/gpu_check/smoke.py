"""Smoke test: uploads two arrays to the GPU, adds them, downloads the sum.

python -W error -m gpu_check.smoke [--json FILE] [--quick]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from measure.runner import keep, options_of

import gradreduce as gr


def main(arguments: Sequence[str] | None = None) -> None:
    """Adds two arrays, and compares with NumPy's sum."""
    options = options_of(__doc__, arguments)
    array = np.arange(1000, dtype=np.float32)
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        total = gr.add_n([device.put(array), device.put(array)]).numpy()
    if not np.array_equal(total, 2 * array):
        raise AssertionError(f"{total[:8]} is not {2 * array[:8]}")
    keep({"compared": total.size}, options.json)


if __name__ == "__main__":
    main()
