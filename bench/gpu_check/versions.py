"""Lists installed libraries and tools, and the links between the GPUs.

python -m gpu_check.versions [--json FILE] [--quick]
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata

from measure.runner import keep, options_of

from .section import find_tool

# Words in the names of packages that matter here.
WORDS = ("cuda", "cupy", "gradreduce", "hypothesis", "jax", "ml-dtypes", "nccl", "numpy", "nvidia",
         "pytest", "torch", "triton")  # fmt: skip
TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "g++", "nvcc")
SMI_SECONDS = 30.0


def packages() -> dict[str, str]:
    """Returns the versions of installed packages and tools."""
    found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    named = {name: version for name, version in found.items() if name is not None}
    chosen = {name for name in named if any(word in name.lower() for word in WORDS)}
    return {name: named[name] for name in sorted(chosen, key=str.lower)}


def reduction_groups() -> str:
    """Returns the topology that ``nvidia-smi`` prints, or the reason if it fails."""
    tool = find_tool("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not installed"
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True,
                              timeout=SMI_SECONDS, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"nvidia-smi has not answered in {SMI_SECONDS:g} s"
    return done.stdout or done.stderr


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints and saves the findings."""
    options = options_of(__doc__, arguments)
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": packages(),
        "tools": {name: find_tool(name) for name in TOOLS},
        "reduction_groups": reduction_groups(),
    }
    print(json.dumps(found, indent=1))
    keep(found, options.json)


if __name__ == "__main__":
    main()
