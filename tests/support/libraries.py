"""``from support.libraries import torch``: the library, or None where it is not installed.

Tests that use it have its marker, so that they do not run without it.
"""

from importlib import import_module
from importlib.util import find_spec

_MODULES = {
    "autograd": "autograd",
    "hips": "autograd.numpy",
    "jax": "jax",
    "jnp": "jax.numpy",
    "ray": "ray",
    "torch": "torch",
}


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(name)
    return import_module(_MODULES[name]) if find_spec(_MODULES[name].partition(".")[0]) else None
