"""The native libraries: kernels, without which standard operators do all work, and CUDA optimizer kernels.

Sessions whose first provider is CUDA use the second one, and update parameters with standard operators without it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OnnxTrainError, OptionError, StepError


def library_name(platform: str) -> str:
    """Return the library's file name for a value of ``sys.platform``; CMakeLists.txt has the same names."""
    return "libonnxtrain_kernels" + {"darwin": ".dylib", "win32": ".dll"}.get(platform, ".so")


_FOLDER = Path(__file__).resolve().parent.parent / "lib"
_LIBRARY = _FOLDER / library_name(sys.platform)


class Tensors(ctypes.Structure):
    """C struct of one parameter with its gradient and states."""

    _fields_ = (
        ("type", ctypes.c_int64),  # 0 float32, 1 float64
        ("count", ctypes.c_int64),
        ("parameter", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 2),
    )


class Attribute(ctypes.Structure):
    """C struct of one optimizer attribute."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("text", ctypes.c_char_p),  # None for a number
        ("number", ctypes.c_float),
    )


def load(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and declare its functions."""
    library = ctypes.CDLL(str(path))
    number, text = ctypes.c_double, ctypes.c_char_p
    tensors, attributes = ([ctypes.c_void_p, ctypes.c_size_t] for _ in range(2))  # an array and its length
    signatures = {
        "onnxtrain_instruction_set": ([], text),
        "onnxtrain_multiplies_bfloat16": ([], ctypes.c_int),
        "onnxtrain_error": ([], text),
        # name, tensors, threads, R, T, attributes
        "onnxtrain_update": ([text, *tensors, ctypes.c_int, number, ctypes.c_int64, *attributes], text),
        "onnxtrain_stream": (
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int],
            number,
        ),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
    error = library.onnxtrain_error()
    if error is not None:
        raise OnnxTrainError(error.decode())
    return library


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or ``None`` and the reason after one warning."""
    try:
        return load(_LIBRARY), ""
    except (OSError, AttributeError, OnnxTrainError) as error:
        # A build without a C++ compiler has no library: see pyproject.toml.
        reason = str(error) if _LIBRARY.exists() else f"{_LIBRARY} is missing: this installation was built without it"
        warnings.warn(
            f"onnxtrain's native kernels cannot be loaded, training runs on slower standard operators: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None, reason


def kernels_available() -> bool:
    """Return whether the native kernels can be loaded.

    If not, the first call issues one ``RuntimeWarning`` with the reason.
    """
    return _loaded()[0] is not None


def library() -> ctypes.CDLL:
    """Return the loaded library."""
    loaded, reason = _loaded()
    if loaded is None:
        raise OnnxTrainError(
            f"The native kernels cannot be loaded ({reason}): install a wheel of onnxtrain that was built "
            "for this system, or install a C++ compiler and build it with `pip install .`."
        )
    return loaded


def custom_ops_library() -> Path:
    """Return the path of the custom-operator library, for ``register_custom_ops_library`` in any language.

    It contains ``Adagrad``, ``Adam`` and ``Momentum`` of the domain ``ai.onnx.preview.training`` and all native
    operators of the domain ``onnxtrain``, for ONNX Runtime 1.20 and newer.

    Raises:
        OnnxTrainError: The library cannot be loaded on this system.
    """
    library()
    return _LIBRARY


def instruction_set() -> str:
    """Return the instruction set of the kernels in use: ``"baseline"``, ``"avx2"`` or ``"avx512"``.

    It is the best that the CPU has, unless the environment variable ``ONNXTRAIN_INSTRUCTION_SET`` names another.
    """
    name: bytes = library().onnxtrain_instruction_set()
    return name.decode()


def multiplies_bfloat16() -> bool:
    """Return whether the kernels multiply bfloat16 in hardware, faster than float32."""
    return bool(library().onnxtrain_multiplies_bfloat16())


CUDA_VARIABLE = "ONNXTRAIN_CUDA_LIBRARY"
"""Environment variable with the path of the library, for a library outside the package."""

HOW_TO_GET_CUDA = (
    "build it on a machine with nvcc by `cmake -S . -B build -DONNXTRAIN_CUDA=ON && cmake --build build` and give its "
    f"path in the environment variable {CUDA_VARIABLE}, or leave kernels out to update with standard operators"
)


class CudaUpdates(NamedTuple):
    """The optional library of CUDA optimizer kernels, built on request (docs/devices.md), that was loaded."""

    path: Path
    operators: frozenset[str]


def cuda_in_package() -> Path:
    """Return the path of the library in an installation that was built with it."""
    return _FOLDER / library_name(sys.platform).replace("kernels", "cuda")


def find_cuda() -> CudaUpdates | None:
    """Load the library that the environment variable names, or that of the package; return ``None`` without either."""
    named = os.environ.get(CUDA_VARIABLE)
    if named:
        path, whose = Path(named), f"The environment variable {CUDA_VARIABLE} names {named!r}"
        if not path.is_file():
            raise OptionError(f"{whose}, which is not a file; {HOW_TO_GET_CUDA}.").about(CUDA_VARIABLE, got=named)
        found, reason = _load_cuda(path.resolve())
        if found is None:
            raise OptionError(
                f"The environment variable {CUDA_VARIABLE} names {named!r}, which cannot be loaded: {reason}."
            ).about(CUDA_VARIABLE, got=named)
        return found
    path = cuda_in_package()
    return _load_cuda(path)[0] if path.is_file() else None


@functools.cache
def _load_cuda(path: Path) -> tuple[CudaUpdates | None, str]:
    """Return the library, or ``None`` and the reason; warn once where the library in the package fails to load."""
    try:
        operators = ctypes.CDLL(str(path)).onnxtrain_cuda_operators
    except (OSError, AttributeError) as error:
        if path == cuda_in_package():
            warnings.warn(
                f"onnxtrain's CUDA library cannot be loaded, standard operators update the parameters: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        return None, str(error)
    operators.argtypes, operators.restype = [], ctypes.c_char_p
    return CudaUpdates(path, frozenset(operators().decode().split())), ""


Action = Callable[[np.ndarray], None]
"""Replaces every element of a vector by its sum over all ranks, in place.

The library calls it on the thread that runs the session, so that any communication engine can serve, and MPI is called
from the thread that initialized it."""

_TYPES = (ctypes.c_float, ctypes.c_double)


class _Thread(threading.local):
    """Action of the ``AllReduce`` nodes that run on this thread, and the exception it raised."""

    action: Action | None = None
    error: BaseException | None = None


_thread = _Thread()


@contextmanager
def all_reducing(action: Action) -> Iterator[None]:
    """Run an action for each ``AllReduce`` node that executes on this thread within the block."""
    _install()
    _thread.action, _thread.error = action, None
    try:
        yield
    except StepError:
        if _thread.error is not None:
            raise _thread.error from None
        raise
    finally:
        _thread.action = _thread.error = None


def _reduce(kind: int, data: int, count: int) -> int:
    """Run the action on a C array; return 0 on success, 1 after an exception."""
    try:
        if _thread.action is None:
            raise StepError("A graph with AllReduce nodes, built for distributed training, runs in a single process.")
        pointer = ctypes.cast(data, ctypes.POINTER(_TYPES[kind]))
        _thread.action(np.ctypeslib.as_array(pointer, (count,)))
    except BaseException as error:  # an exception cannot pass through C
        _thread.error = error
        return 1
    return 0


@functools.cache
def _install() -> Any:
    """Register the callback; the returned function must live as long as the library may call it."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    install, function = library().onnxtrain_set_all_reduce, kind(_reduce)
    install.argtypes, install.restype = [kind], None
    install(function)
    return function
