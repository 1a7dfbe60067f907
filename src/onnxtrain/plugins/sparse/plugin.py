"""Register sparse models."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain sparsify``."""
    register_command("sparsify", "onnxtrain.plugins.sparse.command")
