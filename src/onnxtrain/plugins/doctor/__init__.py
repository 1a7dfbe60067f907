"""Findings about an exported model: what stops or changes its training, and the export call that avoids it."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain doctor``."""
    register_command("doctor", f"{__name__}.command")
