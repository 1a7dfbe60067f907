"""Compile pruned models for kernels that skip zeros."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain sparsify``."""
    register_command("sparsify", f"{__name__}.command")
