"""Ignore warnings of other packages for a while, in any number of threads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_lock = threading.RLock()
_depth = 0
_restoring = ExitStack()


@contextmanager
def ignored_warnings(category: type[Warning] = Warning, module: str = "") -> Iterator[None]:
    """Ignore warnings of a category from modules that match a pattern.

    ``warnings.catch_warnings`` alone restores the filters of another thread's block when blocks overlap; here the last
    block to end restores those of before the first.
    """
    global _depth
    with _lock:
        if not _depth:
            _restoring.enter_context(warnings.catch_warnings())
        _depth += 1
        warnings.filterwarnings("ignore", category=category, module=module)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _restoring.close()
