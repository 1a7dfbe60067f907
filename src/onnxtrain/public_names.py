"""A ``__dir__`` for packages, so that completion shows their public names and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable


def public_names(package: str) -> Callable[[], list[str]]:
    """Return a ``__dir__`` for a package: its public names, without the modules and helpers that it imports."""

    def names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted({*found["__all__"], *(name for name in found if name.startswith("__") and name.endswith("__"))})

    return names
