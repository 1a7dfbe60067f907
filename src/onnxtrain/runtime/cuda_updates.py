"""The library with the updates of optimizers as kernels for CUDA: where it is looked for, and what it has.

It is built on request (docs/devices.md) and used by sessions whose first provider is CUDA's; without it their updates
are in standard operators.
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
"""The environment variable that names the library's file, where it is not in the package."""

HOW_TO_GET_IT = (
    "build it where nvcc is with `cmake -S . -B build -DONNXTRAIN_CUDA=ON && cmake --build build` and name the file in "
    f"the environment variable {VARIABLE}, or leave kernels out for updates in standard operators"
)


class CudaUpdates(NamedTuple):
    """A library that was found.

    Attributes:
        path: Its file.
        operators: The names of the optimizers that it has.
    """

    path: Path
    operators: frozenset[str]


def in_package() -> Path:
    """Where an installation that was built with the library has it."""
    name = library_name(sys.platform).replace("kernels", "cuda")
    return Path(__file__).resolve().parent.parent / "lib" / name


def find() -> CudaUpdates | None:
    """The library that the environment variable names, or that of the package; ``None`` where there is none.

    One of the package that cannot be loaded gives one ``RuntimeWarning`` that says why.

    Raises:
        OptionError: The environment variable names a file that is missing or cannot be loaded.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise OptionError(
                f"The environment variable {VARIABLE} names {named!r}, which is no file; {HOW_TO_GET_IT}."
            )
        found, reason = _load(path.resolve())
        if found is None:
            raise OptionError(f"The environment variable {VARIABLE} names {named!r}, which cannot be loaded: {reason}.")
        return found
    path = in_package()
    return _load(path)[0] if path.is_file() else None


@functools.cache
def _load(path: Path) -> tuple[CudaUpdates | None, str]:
    """The library, or why it cannot be had; that of the package is warned about, once."""
    try:
        operators = ctypes.CDLL(str(path)).onnxtrain_cuda_operators
    except (OSError, AttributeError) as error:
        if path == in_package():
            warnings.warn(
                f"onnxtrain's library for CUDA cannot be loaded, updates are in standard operators: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        return None, str(error)
    operators.argtypes, operators.restype = [], ctypes.c_char_p
    return CudaUpdates(path, frozenset(operators().decode().split())), ""
