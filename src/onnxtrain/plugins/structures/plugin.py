"""Register structures."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain shrink``."""
    register_command("shrink", "onnxtrain.plugins.structures.command")
