"""A part of every batch: what one process of several that train together takes of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import Batch, Dataset, Divide, share
from onnxtrain.data.conversion import Array
from onnxtrain.data.target_checks import TargetCheck


def shared(dataset: Dataset, divide: Divide) -> Dataset:
    """A part of every batch of a dataset; where the data is in arrays nothing else is read.

    Args:
        dataset: the whole batches.
        divide: which rows to take.
    """
    return dataset.shared(divide) if isinstance(dataset, ArrayDataset) else Shares(dataset, divide)


def undivided(dataset: Dataset) -> Dataset:
    """The dataset whose batches a dataset reads."""
    return dataset.dataset if isinstance(dataset, Shares) else dataset


class Shares(Dataset):
    """A dataset of which every batch is read, and a part of it handed on.

    Args:
        dataset: the whole batches.
        divide: which rows to take.
    """

    def __init__(self, dataset: Dataset, divide: Divide) -> None:
        self.dataset = dataset
        self._divide = divide
        self.size, self.weighted = dataset.size, dataset.weighted

    @property
    def targets(self) -> Array | None:
        """The targets of the whole data."""
        return self.dataset.targets

    def fingerprint(self) -> str | None:
        """A hash of the whole data."""
        return self.dataset.fingerprint()

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """The parts of all batches; see `Dataset.batches`. A part may be empty."""
        batches = self.dataset.batches(batch_size, shuffle=shuffle, seed=seed, epoch=epoch, start=start)
        return (
            share(batch, self._divide(number, batch.size), batch.size) for number, batch in enumerate(batches, start)
        )

    def batch_count(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch."""
        return self.dataset.batch_count(batch_size)

    def validate(
        self,
        *,
        classes: int | None = None,
        ignore_index: int | None = None,
        check: TargetCheck | None = None,
        checks: Mapping[str, TargetCheck] | None = None,
    ) -> None:
        """Check the whole data."""
        self.dataset.validate(classes=classes, ignore_index=ignore_index, check=check, checks=checks)
