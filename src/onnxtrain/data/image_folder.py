"""Folders of pictures by class: ``folder/class/*.png``; the name of a folder is the target of what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.images import SUFFIXES, Layout, Picture, read_pictures
from onnxtrain.data.reader import Reader
from onnxtrain.errors import DataError
from onnxtrain.spelling import checks_arguments


@checks_arguments
@dataclass(frozen=True)
class ImageFolder(Reader):
    """Pictures in one folder for each class, which the folder's name names.

    Size, channels and layout are those of the model's input: [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, or
    [N, H, W] for grey. A picture of another size is stretched to it (bilinear), turned as its EXIF tag says, and
    converted to grey or RGB; of a GIF or TIFF the first frame is taken. Where the model leaves the size open, all must
    have the same. A model of floats gets (pixel / 255 - mean) / std, one of integers gets pixels from 0 to 255.

    All pictures are read once, and kept as bytes: in memory, or from 64 MiB on in a temporary file. Examples are in the
    order of their paths.

    Args:
        path: the folder.
        mean: one number, or one for each channel, that is subtracted.
        std: one number, or one for each channel, to divide by.
        skip_broken: leave out pictures that cannot be read and log how many, instead of raising an error.
    """

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    skip_broken: bool = False

    @property
    def name(self) -> str:
        """Name of the folder in error messages."""
        return f"the folder '{Path(self.path)}'"

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """The pictures by the name of the model's input, and the names of their classes or None.

        Where no targets are needed, pictures may lie in the folder itself.

        Raises:
            DataError: the folder holds no pictures, some cannot be read, or the model's input is not one for pictures.
        """
        if target is not None:
            raise DataError(
                f"{self.name} holds pictures, whose targets are the names of their folders; leave out target=."
            )
        if len(specs) != 1:
            raise DataError(f"{self.name} holds pictures, but the model has {len(specs)} inputs; it needs one.")
        Layout.of(specs[0], self.name)  # what fits no pictures is said first
        files = self._files(need_target)
        pixels, kept = read_pictures(
            (Picture(str(file), file) for file in files),
            specs[0],
            self.name,
            mean=self.mean,
            std=self.std,
            skip_broken=self.skip_broken,
            way_out="correct or remove them, or leave them out: onnxtrain.data.ImageFolder(path, skip_broken=True)",
        )
        folder = Path(self.path)
        classes = [files[index].relative_to(folder).parts[0] for index in kept] if need_target else None
        return {specs[0].name: pixels}, None if classes is None else np.array(classes)

    def files(self) -> list[Path]:
        """All pictures, in the order of their paths, in which predictions are."""
        return self._files(need_target=False)

    def _files(self, need_target: bool) -> list[Path]:
        folder = Path(self.path)
        if not folder.is_dir():
            raise DataError(f"'{folder}' is not a folder; pictures lie in one folder for each class.")
        loose = pictures(folder.iterdir())
        if not need_target:
            found = pictures(folder.rglob("*"))
            if not found:
                raise DataError(f"{self.name} holds no pictures ({', '.join(SUFFIXES)}).")
            return found
        if loose:
            raise DataError(
                f"{self.name} holds pictures itself, such as '{loose[0].name}'; for training they need to lie in one "
                "folder for each class."
            )
        found = []
        for each in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            inside = pictures(each.rglob("*"))
            if not inside:
                raise DataError(
                    f"the folder '{each}' holds no pictures ({', '.join(SUFFIXES)}); fill it, or remove it if it is no "
                    "class."
                )
            found += inside
        if not found:
            raise DataError(f"{self.name} is empty; it needs one folder of pictures for each class.")
        return found


def pictures(paths: Iterable[Path]) -> list[Path]:
    """The pictures among paths, as their names tell, sorted; hidden files are none."""
    return sorted(
        path for path in paths if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def is_image_folder(path: Path) -> bool:
    """Return whether a path is a folder with images, in itself or its subfolders, and without arrays."""
    if not path.is_dir() or next(path.rglob("*.npy"), None) is not None:
        return False
    return any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))
