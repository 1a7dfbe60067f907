"""What all tests share. ``tests`` is on the import path: ``from zoo import ...`` works in every folder."""

from __future__ import annotations

import os
from pathlib import Path

# Tests run in parallel processes; a thread pool in each would only get in the others' way.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep the doctest collector away from helpers: tests import them, where what they need is installed."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper else None
