"""Sounds: folders of files by class, and mel spectrograms in front of a model."""

import lazy_loader

from onnxtrain.errors.registries import register_flags, register_reader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add the reader of folders of sounds, and its flag."""
    register_reader("sounds", f"{__name__}.reading:read_sounds")
    register_flags("sounds", f"{__name__}.flags:SoundFlags", of="data")
