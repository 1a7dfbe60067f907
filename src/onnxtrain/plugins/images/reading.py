"""Files of images with targets, for the loss that reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtrain.training.data_adapter import Reading


def read_images(source: Any, reading: Reading) -> Any:
    """Return images whose targets the loss decides, and other data as they are."""
    if not isinstance(source, str | os.PathLike) and not hasattr(source, "for_head"):
        return source
    from onnxtrain.plugins.images.coco import KEPT, CocoData, CocoFile  # a single step does not need file readers
    from onnxtrain.plugins.images.labelled import LabelledImages
    from onnxtrain.plugins.images.mask_folder import MaskFolder

    if isinstance(source, str | os.PathLike) and "\0" not in str(source):
        for kind in (MaskFolder, CocoFile):
            if kind.reads(source):
                source = kind(source)
                break
    if not isinstance(source, LabelledImages):
        return source
    source = source.for_head(reading.head)
    if not isinstance(source, CocoFile):
        return source
    known = reading.kept.get(KEPT)
    return CocoData(source.for_model(known if isinstance(known, list) else ()))
