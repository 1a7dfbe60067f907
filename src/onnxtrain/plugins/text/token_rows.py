"""Rows of tokens that were read from texts, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.files import GrowingArray
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.map_dataset import Examples, of_rows
from onnxtrain.data.text_file import padded, token_role
from onnxtrain.errors import DataError
from onnxtrain.losses.groups import IGNORED
from onnxtrain.plugins.text.rows import Broken, Row

if TYPE_CHECKING:
    from onnxtrain.data.tokenizer import Encoded
    from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer

LONGEST = 1024
"""Tokens at which rows are cut by default."""

TokenRow = Mapping[str, Array]
"""The ``ids`` of a row, whether each is ``learned``, and their ``types``, of which there may be none."""


class TokenRows:
    """The tokens of all rows, one row after the other.

    Attributes:
        read: Rows of the source so far.
        kept: Numbers of those that are examples.
        hints: Sentences about those that were cut or left out.
    """

    def __init__(self) -> None:
        columns = {"ids": np.int32, "learned": bool, "types": np.int32}
        self._growing = {name: GrowingArray((), np.dtype(dtype)) for name, dtype in columns.items()}
        self._lengths: list[int] = []
        self.read = 0
        self.kept: list[int] = []
        self.hints: tuple[str, ...] = ()

    def append(self, *row: Array) -> None:
        """Add the ids of a row, whether each is learned, and perhaps their types."""
        for array, values in zip(self._growing.values(), row, strict=False):
            array.append(values)
        self._lengths.append(len(row[0]))

    def finish(self) -> None:
        """End the reading."""
        self._arrays = {name: array.finish() for name, array in self._growing.items()}
        self.sizes: Array = np.asarray(self._lengths)
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def lengths(self) -> Array:
        """Tokens of the longest row of each example."""
        return self.sizes

    def row(self, index: int) -> TokenRow:
        """Return the ids, learned tokens and types of a row."""
        own = slice(int(self._ends[index] - self.sizes[index]), int(self._ends[index]))
        return {name: array[own] for name, array in self._arrays.items()}

    def fingerprint(self, *more: Array) -> str:
        """Return an identifier of the content."""
        found = Fingerprint()
        for array in (*self._arrays.values(), self.sizes, *more):
            if array.size:
                found.add_large_array(array)
        return found.digest()


def encoded_rows(
    rows: Sequence[Row | DataError], tokenizer: ChatTokenizer, *, answers: bool, broken: Broken
) -> Iterator[tuple[Encoded, list[tuple[int, int]]] | None]:
    """Yield the tokens of rows, and the spans of characters to learn; ``None`` for a row that is skipped."""
    for row in rows:
        if isinstance(row, DataError):
            broken.add(row)
    made = iter(tokenizer.encode([row for row in rows if isinstance(row, Row)], answers=answers, broken=broken))
    yield from (None if isinstance(row, DataError) else next(made) for row in rows)


def learned_tokens(starts: Array, ends: Array, spans: Sequence[tuple[int, int]]) -> Array:
    """Return the tokens that overlap with spans of characters; one span over everything has all tokens."""
    found = np.zeros(len(starts), bool)
    for start, end in spans:
        found |= (starts < end) & (ends > start) & (ends > starts)
    if len(spans) == 1 and spans[0][0] == 0:  # tokens that the tokenizer adds have no characters
        found |= ends <= starts
    return found


def labels_of(row: TokenRow) -> Array:
    """Return the labels of a row: its token ids, `IGNORED` where they are not learned."""
    return np.where(row["learned"], row["ids"], IGNORED)


def roles_of(
    specs: Sequence[TensorSpec],
    role: Callable[[TensorSpec], str] = token_role,
    *,
    need: str = "texts need",
    inputs: str = "the model's inputs",
) -> dict[str, str]:
    """Return what each input of a model gets of a row; one gets the token ids."""
    roles = {spec.name: role(spec) for spec in specs}
    if list(roles.values()).count("ids") != 1:
        shown = ", ".join(f"'{spec.name}'" for spec in specs)
        raise DataError(f"{need} one model input for token ids, but {inputs} are {shown}.")
    return roles


class RowExamples(Examples):
    """Rows of tokens as examples of a `MapDataset`; a batch is padded on the right to its longest row."""

    def __init__(
        self, tokens: TokenRows, roles: Mapping[str, str], length: int | None, padding: int, *, need_target: bool
    ) -> None:
        self._tokens, self._roles, self._length, self._padding = tokens, roles, length, padding
        self._need_target = need_target
        self.of_tokens = True
        self.hints = tokens.hints
        self.lengths = None if length else tokens.lengths

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, rows: Sequence[int]) -> object:
        """Return some rows as inputs by name, and labels."""
        found = [self._tokens.row(row) for row in rows]
        length = self._length_of(found)
        inputs = {name: self._array(role, found, length) for name, role in self._roles.items()}
        return (inputs, self._array("labels", found, length)) if self._need_target else inputs

    def _length_of(self, rows: Sequence[TokenRow]) -> int:
        return self._length or max(len(row["ids"]) for row in rows)

    def _array(self, role: str, rows: Sequence[TokenRow], length: int) -> Array:
        """Return what an input gets of some rows [rows, length]."""
        if role == "positions":
            return np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
        if role == "labels":
            return padded([labels_of(row) for row in rows], length, IGNORED).astype(np.int64)
        if role == "mask":
            return padded([np.ones(len(row["ids"])) for row in rows], length, 0)
        return padded([row[role] for row in rows], length, self._padding if role == "ids" else 0)

    def weights_of(self, weights: Array, name: str) -> Array:
        """Return the weights of the examples that were not left out."""
        return of_rows(weights, self._tokens.read, name, self._tokens.kept)

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the rows."""
        return self._tokens.fingerprint()
