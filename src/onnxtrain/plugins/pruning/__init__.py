"""Pruning: train with sparsity promotion, cut, fine-tune; sparse files and reports."""

import lazy_loader

from onnxtrain.errors.registries import register_command

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add ``onnxtrain prune``."""
    register_command("prune", f"{__name__}.command")
