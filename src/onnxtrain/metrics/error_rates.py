"""Character and word error rates of text and speech recognition: edit distance per true character or word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments


def edit_distance(one: Sequence[object], other: Sequence[object]) -> int:
    """Compute the Levenshtein distance of two sequences: the least number of insertions, deletions and replacements.

    >>> edit_distance("kitten", "sitting")
    3
    """
    codes: dict[object, int] = {}
    first, second = (np.array([codes.setdefault(item, len(codes)) for item in items], int) for items in (one, other))
    positions = np.arange(len(second) + 1)
    row = positions.copy()
    for item in first:
        after = np.minimum(row[:-1] + (second != item), row[1:] + 1)
        # Insertions propagate from the left at a cost of 1 each.
        row = np.minimum.accumulate(np.concatenate([[row[0] + 1], after]) - positions) + positions
    return int(row[-1])


@checks_arguments
@dataclass(frozen=True)
class CharacterErrorRate:
    """Edit distance of predicted and true characters, per true character, over the whole dataset.

    Predictions are scores [N, T, C] (or [T, N, C]) of a model trained by connectionist temporal classification.
    Decoding is greedy: the best class of every step, equal neighbours merged, blanks removed. Targets are labels
    [N, S], padded with negative numbers or the blank. The rate may exceed 1.

    Args:
        blank: The blank class.
        time_axis: 1 for scores [N, T, C], 0 for [T, N, C].
    """

    blank: int = 0
    time_axis: int = 1
    name: str = "character_error_rate"
    of_output: bool = False

    def start(self) -> tuple[int, int]:
        """Return no edits and no labels."""
        return 0, 0

    def update(self, state: tuple[int, int], y_true: Array, y_pred: Array, /) -> tuple[int, int]:
        """Return the number of edits and of true labels, with those of a batch added.

        Raises:
            DataError: The shapes are wrong.
        """
        if y_pred.ndim != 3 or y_true.ndim != 2:
            raise DataError(
                f"{self.name} needs scores [N, T, C] and labels [N, S], but they have the shapes {y_pred.shape} and "
                f"{y_true.shape}."
            ).about(self.name, got=y_pred.shape, wanted=y_true.shape)
        edits, length = state
        for labels, found in zip(np.asarray(y_true), self.decode(np.asarray(y_pred)), strict=True):
            truth = self.items([int(label) for label in labels if label >= 0 and label != self.blank])
            edits += edit_distance(truth, self.items(found))
            length += len(truth)
        return edits, length

    def merge(self, state: tuple[int, int], other: tuple[int, int], /) -> tuple[int, int]:
        """Return the sums of both."""
        return state[0] + other[0], state[1] + other[1]

    def result(self, state: tuple[int, int], /) -> float:
        """Return the rate; NaN without true labels."""
        return state[0] / state[1] if state[1] else float("nan")

    def items(self, labels: list[int]) -> Sequence[object]:
        """Return the units to compare: the labels."""
        return labels

    def decode(self, scores: Array) -> list[list[int]]:
        """Decode scores greedily, by the best class of every step."""
        best = np.moveaxis(scores, self.time_axis, 1).argmax(-1)
        fresh = np.concatenate([np.ones_like(best[:, :1], bool), best[:, 1:] != best[:, :-1]], axis=1)
        kept = fresh & (best != self.blank)
        return [row[keep].tolist() for row, keep in zip(best, kept, strict=True)]


@checks_arguments
@dataclass(frozen=True)
class WordErrorRate(CharacterErrorRate):
    """Edit distance of predicted and true words, per true word, over the whole dataset.

    As :class:`CharacterErrorRate`; words are the labels between spaces.

    Args:
        space: The class of the space; required.
        blank: The blank class.
        time_axis: 1 for scores [N, T, C], 0 for [T, N, C].

    Raises:
        OptionError: `space` is not given.
    """

    name: str = "word_error_rate"
    space: int | None = None

    def __post_init__(self) -> None:
        if self.space is None:
            raise OptionError("WordErrorRate needs the class of the space between words: WordErrorRate(space=1).")

    def items(self, labels: list[int]) -> Sequence[object]:
        """Return the units to compare: the words."""
        words: list[tuple[int, ...]] = [()]
        for label in labels:
            if label == self.space:
                words.append(())
            else:
                words[-1] = (*words[-1], label)
        return [word for word in words if word]
