"""Images with masks, boxes or keypoints; flips, mixup and cutmix; predictions averaged over views of an image."""

import lazy_loader

from onnxtrain.errors.registries import register_flags, register_reader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add the readers of folders of masks and of COCO files, and their flags."""
    register_reader("images", f"{__name__}.reading:read_images")
    register_flags("images", f"{__name__}.flags:ImageFlags", of="data")
