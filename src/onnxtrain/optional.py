"""Import of packages that onnxtrain needs for some features only."""

from __future__ import annotations

import importlib
from typing import Any

from onnxtrain.errors import OptionError


def import_optional(module: str, *, needs: str, packages: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The module's name.
        needs: Start of the error: who needs which package.
        packages: The packages to install, as for pip.

    Raises:
        OptionError: The package is not installed, or has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(f"{needs} ({error}); install it with pip install {packages}.") from None
