"""What every test shares: the law of skips (``skips.py``) and the fixtures."""

from __future__ import annotations

# As a plugin, not an import: pytest then finds its option and its hooks by itself.
pytest_plugins = ("skips",)
