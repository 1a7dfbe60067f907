"""What is trained beside a model's own weights, which stay as they are; adapters are the one kind so far."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.large_data import MadeArrays

Arrays = Mapping[str, np.ndarray]


class Adaptation(abc.ABC):
    """Settings of what is added to a model; a value: equal ones add the same."""

    @property
    @abc.abstractmethod
    def drops(self) -> bool:
        """Whether anything drops in training."""

    @abc.abstractmethod
    def attach(self, model: ir.Model, file: ModelFile, *, output: str | None, seed: int, training: bool) -> Adapted:
        """Add to a working copy, in place, as initializers of its main graph and nodes that read them.

        Args:
            model: A copy with types and shapes.
            file: What it is a copy of.
            output: The output that is trained on; ``None`` for the first floating one.
            seed: Of first values, and of dropout.
            training: Whether dropout drops.

        Raises:
            OptionError: There is nothing to add to.
            ModelError: First values are in a file that does not fit the model.
        """


class Adapted(abc.ABC):
    """What was added to a working copy."""

    @property
    @abc.abstractmethod
    def parameters(self) -> Sequence[str]:
        """The names of the initializers that were added."""

    @abc.abstractmethod
    def writes(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path names a file of what was added alone, and not one of a model."""

    @abc.abstractmethod
    def write(self, path: str | os.PathLike[str], file: ModelFile, values: Arrays) -> None:
        """Write what was added alone.

        Args:
            path: A file or a folder.
            file: The model that it was added to.
            values: The values of what was trained, by name.

        Raises:
            ModelError: It cannot be written.
        """

    @abc.abstractmethod
    def check_mergeable(self) -> None:
        """Find out before training whether :meth:`merged` will have an answer.

        Raises:
            OptionError: It will not.
        """

    @abc.abstractmethod
    def merged(self, file: ModelFile, values: Arrays) -> MadeArrays:
        """The weights of the model that make it compute the same without what was added, by name.

        Args:
            file: The model that it was added to.
            values: The values of what was trained, by name.

        Raises:
            OptionError: There are none, since weights are quantized, or shared.
        """
