"""Interface of adapters: parameters that are added to a model and trained beside its frozen weights."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.large_data import MadeArrays

Arrays = Mapping[str, np.ndarray]


class Adaptation(abc.ABC):
    """Settings of an adapter; a value object: equal settings add the same parameters."""

    @property
    @abc.abstractmethod
    def drops(self) -> bool:
        """True where the adapter has dropout."""

    @abc.abstractmethod
    def attach(self, model: ir.Model, file: ModelFile, *, output: str | None, seed: int, training: bool) -> Adapted:
        """Add initializers and nodes to the main graph of a working copy, in place."""


class Adapted(abc.ABC):
    """An adapter that was added to a working copy."""

    @property
    @abc.abstractmethod
    def parameters(self) -> Sequence[str]:
        """Names of the added initializers."""

    @property
    @abc.abstractmethod
    def initial(self) -> dict[str, np.ndarray]:
        """Values of the file's initializers that differ from the file: they were trained with the adapter before."""

    @property
    @abc.abstractmethod
    def resumed(self) -> Sequence[str]:
        """Names of these that are trained again."""

    @property
    @abc.abstractmethod
    def weights(self) -> Sequence[str]:
        """Names of the file's weights that the adapter changes; they cannot be trained beside it."""

    @property
    @abc.abstractmethod
    def rate_scales(self) -> Mapping[str, float]:
        """Multipliers of the learning rate of added initializers, where not 1; those of groups multiply them."""

    @abc.abstractmethod
    def writes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path names a file of the adapter alone, not of a model."""

    @abc.abstractmethod
    def check_writes(self, path: str | os.PathLike[str], file: ModelFile, trained: Iterable[str]) -> None:
        """Check before training whether :meth:`write` can write the values that are trained in full."""

    @abc.abstractmethod
    def hints(self, file: ModelFile, trained: Iterable[str]) -> list[str]:
        """Return sentences about trained values that another form of the file cannot hold."""

    @abc.abstractmethod
    def write(
        self,
        path: str | os.PathLike[str],
        file: ModelFile,
        values: Arrays,
        base_model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the adapter, and the initializers that are trained beside it."""

    @abc.abstractmethod
    def check_mergeable(self) -> None:
        """Check before training whether :meth:`merged` will succeed."""

    @abc.abstractmethod
    def merged(self, file: ModelFile, values: Arrays) -> MadeArrays:
        """Merge the adapter: return new weights, with which the model without the adapter computes the same."""
