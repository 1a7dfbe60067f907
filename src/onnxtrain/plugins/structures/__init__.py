"""Structures that can be removed from a model: channels, heads, hidden units."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain shrink``."""
    register_command("shrink", f"{__name__}.command")
