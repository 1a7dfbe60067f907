"""Models that refer to no file: what is returned to a user goes wherever the user saves it."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnxtrain.model_file.external import ExternalData, locate
from onnxtrain.model_file.skeleton import all_tensors


def with_external_data(
    proto: ModelProto, folder: str | os.PathLike[str] | None, moved: Mapping[str, str] | None = None
) -> ModelProto:
    """Read the data that lies in files beside a model into it, in place, and return it.

    Beyond 2 GiB such a model can be held but not written as one file: ``onnx.save(..., save_as_external_data=True)``
    writes it.

    Args:
        proto: The model.
        folder: Where its files are; ``None`` where that is not known.
        moved: Where data files are now, by where the model says they are.

    Raises:
        ModelError: A file is missing, too short or outside the folder.
    """
    for tensor, data in _external(proto, folder, moved=moved):
        with data.path.open("rb") as file:
            file.seek(data.offset)
            tensor.raw_data = file.read(data.length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return proto


def check_external_data(
    proto: ModelProto, folder: str | os.PathLike[str] | None, *, without: Container[str] = ()
) -> None:
    """Make sure that the files beside a model are there, but for those of some tensors.

    Raises:
        ModelError: One is missing, too short or outside the folder.
    """
    for _ in _external(proto, folder, without):
        pass


def _external(
    proto: ModelProto,
    folder: str | os.PathLike[str] | None,
    without: Container[str] = (),
    moved: Mapping[str, str] | None = None,
) -> Iterator[tuple[TensorProto, ExternalData]]:
    """The tensors whose data lies in files, and where."""
    place = None if folder is None else Path(folder)
    for tensor in all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL and tensor.name not in without:
            yield tensor, locate(tensor, place, moved)
