"""Weights that a step graph was trained to elsewhere, written back into the model."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain import-states``."""
    register_command("import-states", f"{__name__}.command")
