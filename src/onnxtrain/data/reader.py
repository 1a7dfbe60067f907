"""Base class of file readers: a path, its name in error messages, and the dataset that it opens."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.data.conversion import TensorSpec


@dataclass(frozen=True)
class Reader(ABC):
    """A file or folder of examples.

    Args:
        path: where it is.
    """

    path: str | os.PathLike[str]

    @property
    def name(self) -> str:
        """Name of the file in error messages."""
        return f"'{Path(self.path)}'"

    @abstractmethod
    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """All examples.

        Args:
            specs: what the model needs of its inputs, in their order.
            target: the name of the target, where the reader knows several.
            need_target: whether there must be targets.

        Returns:
            The inputs by name, and the targets or None.

        Raises:
            DataError: it cannot be read, or does not fit the model.
        """
