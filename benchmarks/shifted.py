"""Training images, shifted by a few pixels in every epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class ShiftedImages:
    """Shuffled batches of images, each image shifted by up to ``reach`` pixels along both axes.

    The shifted edges are zero. Usable wherever onnxtrain accepts an iterable of batches.

    Args:
        images: float32 [N, C, H, W].
        labels: [N].
        batch_size: Images per batch; the last one may be smaller.
        reach: Maximum shift in pixels; 0 disables shifting.
        seed: Seed of the order and of the shifts.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, batch_size: int, reach: int, seed: int) -> None:
        padded = np.pad(images, ((0, 0), (0, 0), (reach, reach), (reach, reach)))
        # [N, C, 2 reach + 1, 2 reach + 1, H, W], a view: the last four axes are the shift and the image.
        self._moved = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
        self._labels, self._batch_size, self._reach = labels, batch_size, reach
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self._labels) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = self._random.permutation(len(self._labels))
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            down, right = self._random.integers(0, 2 * self._reach + 1, (2, len(chosen)))
            yield self._moved[chosen, :, down, right], self._labels[chosen]
