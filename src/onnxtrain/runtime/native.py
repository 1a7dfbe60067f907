"""Find and load the library of native kernels; without it, standard operators do all work."""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from pathlib import Path

from onnxtrain.errors import OnnxTrainError


def library_name(platform: str) -> str:
    """Return the library's file name for a value of ``sys.platform``; CMakeLists.txt has the same names."""
    return "libonnxtrain_kernels" + {"darwin": ".dylib", "win32": ".dll"}.get(platform, ".so")


_LIBRARY = Path(__file__).resolve().parent.parent / "lib" / library_name(sys.platform)


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
