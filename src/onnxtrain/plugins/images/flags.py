"""Flags of images with masks, boxes or keypoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtrain.cli.flags import READING, flag, grouped
from onnxtrain.cli.reader_flags import DataFlags


@grouped(READING)
@dataclass(frozen=True)
class ImageFlags(DataFlags):
    """Settings of annotated images."""

    images: Path | None = flag(None, "COCO: folder of images.  [default: beside the file]", metavar="DIR")

    def read(self, path: str, loss: str | None) -> Any:
        """Return images with masks, or those of a COCO file; ``None`` for other data."""
        from onnxtrain.plugins.images import CocoFile, MaskFolder

        if MaskFolder.reads(path):
            return MaskFolder(path, **self.of_images(path))
        if CocoFile.reads(path):
            return CocoFile(path, images=self.images, **self.of_images(path, "images"))
        return None
