"""Gradients that are sent with fewer bits, or in part; what is left out is added to those of the next step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxtrain.distributed.communicator import Communicator, Compression
from onnxtrain.errors import OptionError
from onnxtrain.spelling import checks_arguments


class Rounding(Compression):
    """Gradients rounded to float16 or bfloat16.

    They are divided by the power of two above the largest of what a rank sends at a time, so that none leaves the
    range of the type. Each rank gets its share of all, adds them up, and sends the sum, rounded again: that residual is
    kept by the one that adds. It sends 2 (N - 1) / N of the elements, as without compression, in 2 bytes each.

    Args:
        name: ``"float16"`` (11 bits of precision) or ``"bfloat16"`` (8 bits).
    """

    def __init__(self, name: str) -> None:
        if name == "bfloat16":
            import ml_dtypes

            self._dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        else:
            self._dtype = np.dtype(name)

    def __repr__(self) -> str:
        return repr(str(self._dtype))

    def reduce_(
        self, communicator: Communicator, gradients: np.ndarray, residual: np.ndarray, *, scatter: bool = False
    ) -> None:
        """Replace gradients by the sum of what all ranks send of theirs; see :class:`Compression`."""
        rank, dtype = communicator.rank, gradients.dtype
        shares, residuals = (array.reshape(communicator.size, -1) for array in (gradients, residual))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # it is found in the loss
            residuals += shares
            sent = self._written(residuals)
            residuals -= self._read(sent, dtype)
            communicator.all_to_all_(sent)
            total = np.zeros(shares.shape[1], dtype)
            for part in sent:
                total += self._read(part, dtype)
            if scatter:
                shares[rank] = total
                return
            sent[rank] = self._written(total)
            residuals[rank] += total - self._read(sent[rank], dtype)
            communicator.all_gather_(sent)
            shares[...] = self._read(sent, dtype)

    def _written(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers [..., n] as bytes [..., 4 + 2 n]: an exponent, the same in all rows, and what it scales."""
        largest = float(np.max(np.abs(numbers), initial=0))
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
        found = np.empty((*numbers.shape[:-1], 4 + 2 * numbers.shape[-1]), np.uint8)
        found[..., :4] = np.asarray([exponent], np.int32).view(np.uint8)
        found[..., 4:] = np.ldexp(numbers, -exponent).astype(self._dtype).view(np.uint8)
        return found

    def _read(self, written: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        exponents = np.ascontiguousarray(written[..., :4]).view(np.int32)
        numbers = np.ascontiguousarray(written[..., 4:]).view(self._dtype).astype(dtype)
        return np.asarray(np.ldexp(numbers, exponents))


@checks_arguments
class TopK(Compression):
    """The largest gradients alone: of each bucket the share that is given, at least one.

    Every rank sends the numbers and the places of its largest to all others: (N - 1) times 8 bytes for each. What is
    not among them waits in the residual until it is.

    Args:
        share: Above 0, at most 1: the share of the elements that are sent.

    Raises:
        OptionError: The share is out of this range.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise OptionError(f"TopK has the share {share}; it needs a number above 0 and at most 1, such as 0.01.")
        self.share = float(share)

    def __repr__(self) -> str:
        return f"TopK({self.share:g})"

    def reduce_(
        self, communicator: Communicator, gradients: np.ndarray, residual: np.ndarray, *, scatter: bool = False
    ) -> None:
        """Replace gradients by the sum of what all ranks send of theirs; see :class:`Compression`."""
        residual += gradients
        count = max(1, math.ceil(self.share * residual.size))
        largest = np.argpartition(np.abs(residual), residual.size - count)[residual.size - count :]  # NaN is the last
        place = np.dtype(np.int32 if residual.size < 1 << 31 else np.int64)
        sent = np.empty((communicator.size, count * (place.itemsize + residual.itemsize)), np.uint8)
        bound = count * place.itemsize
        sent[communicator.rank, :bound] = largest.astype(place).view(np.uint8)
        sent[communicator.rank, bound:] = residual[largest].view(np.uint8)
        residual[largest] = 0
        communicator.all_gather_(sent)
        gradients[...] = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for part in sent:  # a rank has each place at most once
                gradients[part[:bound].view(place)] += np.ascontiguousarray(part[bound:]).view(residual.dtype)


def choose_compression(given: object) -> Compression | None:
    """Return the compression that the argument ``compress`` names.

    Raises:
        OptionError: There is nothing of that name.
    """
    if given is None or isinstance(given, Compression):
        return given
    if given in ("float16", "bfloat16"):
        return Rounding(str(given))
    raise OptionError(f"compress is {given!r}; it is 'float16', 'bfloat16' or onnxtrain.distributed.TopK(0.01).")
