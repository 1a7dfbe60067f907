"""Gradient compression with error feedback: rounding to 16 bits, and top-k sparsification."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.distributed.communicator import Communicator, Compression
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments


class Rounding(Compression):
    """Round gradients to float16 or bfloat16.

    A rank divides each message by a power of two above its largest magnitude, so that no value overflows. Each rank
    sums its share of the gradients and sends the sum, rounded again; it keeps the residual of this second rounding.
    N ranks send 2 (N - 1) / N of the elements each, as without compression, in 2 bytes per element.
    """

    def __init__(self, name: str) -> None:
        self._dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def __repr__(self) -> str:
        return repr(str(self._dtype))

    def reduce_(
        self, communicator: Communicator, gradients: np.ndarray, residual: np.ndarray, *, scatter: bool = False
    ) -> None:
        """Replace gradients by the sum of all ranks' rounded gradients; see :class:`Compression`."""
        rank, dtype = communicator.rank, gradients.dtype
        shares, residuals = (array.reshape(communicator.size, -1) for array in (gradients, residual))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # a check of the loss finds NaN
            residuals += shares
            sent = self._encode(residuals)
            residuals -= self._decode(sent, dtype)
            communicator.all_to_all_(sent)
            total = np.zeros(shares.shape[1], dtype)
            for part in sent:
                total += self._decode(part, dtype)
            if scatter:
                shares[rank] = total
                return
            sent[rank] = self._encode(total)
            residuals[rank] += total - self._decode(sent[rank], dtype)
            communicator.all_gather_(sent)
            shares[...] = self._decode(sent, dtype)

    def _encode(self, numbers: np.ndarray) -> np.ndarray:
        """Encode values [..., n] as bytes [..., 4 + 2 n]: a common exponent in each row, then the scaled values."""
        largest = float(np.max(np.abs(numbers), initial=0))
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
        found = np.empty((*numbers.shape[:-1], 4 + 2 * numbers.shape[-1]), np.uint8)
        found[..., :4] = np.asarray([exponent], np.int32).view(np.uint8)
        found[..., 4:] = np.ldexp(numbers, -exponent).astype(self._dtype).view(np.uint8)
        return found

    def _decode(self, encoded: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        exponents = np.ascontiguousarray(encoded[..., :4]).view(np.int32)
        numbers = np.ascontiguousarray(encoded[..., 4:]).view(self._dtype).astype(dtype)
        return np.asarray(np.ldexp(numbers, exponents))


@checks_arguments
class TopK(Compression):
    """Send only the largest gradients of each bucket, at least one.

    Every rank sends values and indices of its largest elements to all N - 1 others, 8 bytes for each float32 element.
    All other elements stay in the residual until they are among the largest.

    Args:
        share: Fraction of the elements to send, above 0 and at most 1.

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
        """Replace gradients by the sum of all ranks' largest gradients; see :class:`Compression`."""
        residual += gradients
        count = max(1, math.ceil(self.share * residual.size))
        largest = np.argpartition(np.abs(residual), residual.size - count)[residual.size - count :]  # NaN sorts last
        index_type = np.dtype(np.int32 if residual.size < 1 << 31 else np.int64)
        sent = np.empty((communicator.size, count * (index_type.itemsize + residual.itemsize)), np.uint8)
        bound = count * index_type.itemsize
        sent[communicator.rank, :bound] = largest.astype(index_type).view(np.uint8)
        sent[communicator.rank, bound:] = residual[largest].view(np.uint8)
        residual[largest] = 0
        communicator.all_gather_(sent)
        gradients[...] = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for part in sent:  # the indices of one rank are distinct
                gradients[part[:bound].view(index_type)] += np.ascontiguousarray(part[bound:]).view(residual.dtype)


def choose_compression(given: object) -> Compression | None:
    """Return the compression that the argument ``compress`` names."""
    if given is None or isinstance(given, Compression):
        return given
    if given in ("float16", "bfloat16"):
        return Rounding(str(given))
    raise OptionError(f"compress is {given!r}; it is 'float16', 'bfloat16' or onnxtrain.distributed.TopK(0.01).").about(
        "compress", got=given
    )
