"""The native operators of onnxtrain for ONNX Runtime, without the trainer."""

import sys
from pathlib import Path

__all__ = ["library"]


def library() -> str:
    """Return the path of the library, for ``SessionOptions.register_custom_ops_library``."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    return str(Path(__file__).resolve().parent / "lib" / f"libonnxtrain_kernels{suffix}")
