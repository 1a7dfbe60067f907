"""Register pruning."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain prune``."""
    register_command("prune", "onnxtrain.plugins.pruning.command")
