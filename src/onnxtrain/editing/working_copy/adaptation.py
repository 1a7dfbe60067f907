"""Settings of adapters: parameters that are added to a model and trained beside its frozen weights."""

from __future__ import annotations

import abc
import os
from typing import Any

import onnx_ir as ir

from onnxtrain.model_file.file import ModelFile


class Adaptation(abc.ABC):
    """Base of :class:`onnxtrain.Lora`, which a training without adapters does not import."""

    adapter: str | os.PathLike[str] | None

    @property
    @abc.abstractmethod
    def drops(self) -> bool:
        """True where the adapter has dropout."""

    @abc.abstractmethod
    def attach(self, model: ir.Model, file: ModelFile, *, output: str | None, seed: int, training: bool) -> Any:
        """Add initializers and nodes to the main graph of a working copy, in place; return the ``Attached``."""
