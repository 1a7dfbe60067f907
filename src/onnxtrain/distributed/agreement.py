"""Checks that all ranks have the same weights and batches; an error says which rank has what."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from onnxtrain.distributed.communicator import Communicator
from onnxtrain.errors import ParallelError

SAME_CALLS = "call the same methods on every rank, in the same order"

_WHOLE_BATCHES = "give every rank the same whole batches, of which it takes its rows"


def check_weights(communicator: Communicator, values: Mapping[str, np.ndarray]) -> None:
    """Check that all ranks have the same values."""
    found = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in values.items()}
    records = communicator.gather_objects(found)
    for rank, record in enumerate(records):
        other = [name for name, checksum in record.items() if checksum != records[0][name]]
        if other:
            raise ParallelError(
                f"Rank {rank} has other values of {', '.join(other[:5])} than rank 0: something changed them in one "
                "process alone, such as a callback or a script that asks for its rank."
            )


def check_same(where: str, rows: Sequence[float], contents: Sequence[float]) -> None:
    """Check that all ranks were given the same batch or batches, by their numbers of rows and checksums."""
    for rank, (count, content) in enumerate(zip(rows, contents, strict=True)):
        if (count, content) != (rows[0], contents[0]):
            how = f"{int(count)} rows, and rank 0 {int(rows[0])}" if count != rows[0] else "other values than rank 0"
            raise ParallelError(f"{where}, rank {rank} was given {how}; {_WHOLE_BATCHES}.")


def check_ends(communicator: Communicator, number: int, *, ended: bool) -> None:
    """Check that the data of all ranks ended after this number of batches, or of none."""
    ends = np.zeros((communicator.size, 1), np.uint8)
    ends[communicator.rank] = ended
    communicator.all_gather_(ends)
    if ends.min() != ends.max():
        first, other = int(ends.argmax()), int(ends.argmin())
        raise ParallelError(
            f"The data of rank {first} ended after {number} batches, and rank {other} has more; {_WHOLE_BATCHES}."
        )
