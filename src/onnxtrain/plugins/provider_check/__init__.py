"""One step on an execution provider, compared with the CPU."""

from onnxtrain.errors.registries import register_command


def register() -> None:
    """Add ``onnxtrain check``."""
    register_command("check", f"{__name__}.command")
