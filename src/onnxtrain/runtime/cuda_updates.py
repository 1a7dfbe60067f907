"""Find and load the optional library of CUDA optimizer kernels.

It is built on request (docs/devices.md) and used by sessions whose first provider is CUDA. Without it those sessions
update parameters with standard operators.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from onnxtrain.errors import OptionError
from onnxtrain.runtime.native import library_name

VARIABLE = "ONNXTRAIN_CUDA_LIBRARY"
"""Environment variable with the path of the library, for a library outside the package."""

HOW_TO_GET_IT = (
    "build it on a machine with nvcc by `cmake -S . -B build -DONNXTRAIN_CUDA=ON && cmake --build build` and give its "
    f"path in the environment variable {VARIABLE}, or leave kernels out to update with standard operators"
)


class CudaUpdates(NamedTuple):
    """A library that was loaded."""

    path: Path
    operators: frozenset[str]


def in_package() -> Path:
    """Return the path of the library in an installation that was built with it."""
    name = library_name(sys.platform).replace("kernels", "cuda")
    return Path(__file__).resolve().parent.parent / "lib" / name


def find() -> CudaUpdates | None:
    """Load the library that the environment variable names, or that of the package; return ``None`` without either."""
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise OptionError(
                f"The environment variable {VARIABLE} names {named!r}, which is not a file; {HOW_TO_GET_IT}."
            ).about(VARIABLE, got=named)
        found, reason = _load(path.resolve())
        if found is None:
            raise OptionError(
                f"The environment variable {VARIABLE} names {named!r}, which cannot be loaded: {reason}."
            ).about(VARIABLE, got=named)
        return found
    path = in_package()
    return _load(path)[0] if path.is_file() else None


@functools.cache
def _load(path: Path) -> tuple[CudaUpdates | None, str]:
    """Return the library, or ``None`` and the reason; warn once where the library in the package fails to load."""
    try:
        operators = ctypes.CDLL(str(path)).onnxtrain_cuda_operators
    except (OSError, AttributeError) as error:
        if path == in_package():
            warnings.warn(
                f"onnxtrain's CUDA library cannot be loaded, standard operators update the parameters: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        return None, str(error)
    operators.argtypes, operators.restype = [], ctypes.c_char_p
    return CudaUpdates(path, frozenset(operators().decode().split())), ""
