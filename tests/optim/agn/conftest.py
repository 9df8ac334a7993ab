"""The kernels of the meshes."""

import pytest


@pytest.fixture(scope="session")
def implementation(request) -> str:
    """Most of these tests do not depend on it; see ``BOTH_IMPLEMENTATIONS``."""
    return getattr(request, "param", "numpy")
