"""Packing: several short sequences of tokens in one row, so that little time is spent on padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.map_dataset import Examples, ExampleSource
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments

PACKED_NAMES: Final = ("input_ids", "position_ids", "segment_ids", "attention_mask", "labels")
"""Arrays of a packed row."""

LONGEST_ROW: Final = 1 << 24
"""Maximum tokens of a row."""


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence."""

    sequence: int
    start: int
    stop: int


@checks_arguments
class PackedSequences(ExampleSource):
    """Packed sequences of tokens for a language model, in rows of one length; the result of :func:`pack`.

    An index returns a row, a mapping with:

    - ``input_ids`` [length]: the concatenated tokens of some sequences, then padding.
    - ``position_ids`` [length]: positions from 0 in each sequence.
    - ``segment_ids`` [length]: 1 for the tokens of the first sequence, 2 for those of the second, ...; 0 for padding.
    - ``attention_mask`` [1, length, length]: True where a token attends to another: an earlier one of its sequence, or
      itself.
    - ``labels`` [length]: for the loss ``next_token``: the tokens, or the given labels; ``ignore_index`` for padding
      and for the first token of each sequence, which the previous sequence cannot predict.

    Attributes:
        length: Tokens per row.
    """

    name = "the packed sequences"

    def __init__(
        self,
        sequences: Sequence[Any],
        length: int,
        *,
        labels: Sequence[Any] | None = None,
        padding: int = 0,
        ignore_index: int = -100,
    ) -> None:
        if length < 2:
            raise OptionError(f"length is {length}; a row needs at least 2 tokens, one to predict from the other.")
        if length > LONGEST_ROW:
            raise OptionError(f"length is {length:,}; a row has at most {LONGEST_ROW:,} tokens.")
        self.length = length
        self._padding, self._ignored = padding, ignore_index
        self._tokens = [_tokens(sequence, "sequence", index) for index, sequence in enumerate(sequences)]
        self._labels = self._tokens if labels is None else [_tokens(one, "labels", i) for i, one in enumerate(labels)]
        _check_labels(self._tokens, self._labels)
        self._rows = _packed([len(tokens) for tokens in self._tokens], length)
        if not self._rows:
            raise DataError("There is no sequence of two tokens or more to pack.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Array]:
        return {name: array[0] for name, array in self.rows([row]).items()}

    @property
    def filled(self) -> float:
        """Fraction of positions that are not padding."""
        taken = sum(piece.stop - piece.start for row in self._rows for piece in row)
        return taken / (len(self._rows) * self.length)

    def rows(self, indices: Sequence[int], names: Sequence[str] = PACKED_NAMES) -> dict[str, Array]:
        """Return some rows of the named arrays."""
        shape = (len(indices), self.length)
        tokens, labels = np.full(shape, self._padding), np.full(shape, self._ignored)
        positions, segments = np.tile(np.arange(self.length), (len(indices), 1)), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            position = 0
            for number, piece in enumerate(self._rows[index], start=1):
                size = piece.stop - piece.start
                own = slice(position, position + size)
                tokens[row, own] = self._tokens[piece.sequence][piece.start : piece.stop]
                labels[row, own] = self._labels[piece.sequence][piece.start : piece.stop]
                labels[row, position] = self._ignored
                segments[row, own] = number
                position += size
                positions[row, position:] = np.arange(self.length - position)
                positions[row, own] = np.arange(size)
        found = {"input_ids": tokens, "position_ids": positions, "segment_ids": segments, "labels": labels}
        if "attention_mask" in names:
            own_sequence = segments[:, :, None] == segments[:, None, :]
            found["attention_mask"] = np.tril(own_sequence)[:, None]
        return {name: found[name] for name in names}

    def examples(self, specs: Sequence[TensorSpec], *, need_target: bool = True) -> PackedExamples:
        """Return the rows as examples; see `ExampleSource.examples`."""
        return PackedExamples(self, specs, need_target=need_target)

    def fingerprint(self) -> str:
        """Return an identifier of the content."""
        found = Fingerprint()
        for arrays in (self._tokens, [] if self._labels is self._tokens else self._labels):
            for array in arrays:
                found.add_array(array)
        found.add_text(f"{self.length} {self._padding} {self._ignored}")
        return found.digest()


@checks_arguments
def pack(
    sequences: Sequence[Any],
    length: int,
    *,
    labels: Sequence[Any] | None = None,
    padding: int = 0,
    ignore_index: int = -100,
) -> PackedSequences:
    """Pack sequences of tokens into rows, for a model that keeps them apart; the result is data for ``fit``.

    Each sequence goes into the fullest row with enough room, the longest sequences first. Sequences that are longer
    than a row are split. The names of the model's inputs select the arrays of a row: ``position``, ``segment``,
    ``mask``, else tokens. A mask has three or four axes: True or 1 where a token attends to another; floating masks
    have 0 there and the lowest number elsewhere. A mask of two axes numbers the sequences of a row in the working copy
    of ``fit`` and ``evaluate``, which keeps them apart; without a mask, positions do. A model that reads neither
    positions, segments nor a mask is refused.

    Args:
        sequences: Lists or arrays of token ids, of any lengths.
        length: Tokens per row.
        labels: Label of each token of each sequence: the token itself, or ``ignore_index``, for example in prompts. By
            default all tokens except the first of each sequence.
        padding: Token id of padding.
        ignore_index: Label that the loss ignores.

    Raises:
        OptionError: ``length`` is below 2 or above 16,777,216.
        DataError: No sequence has two tokens, a sequence has other values than integers, or labels do not fit.

    Example:
        >>> rows = pack([[5, 6, 7], [8, 9], [4, 3, 2]], 6)
        >>> rows[0]["input_ids"].tolist(), rows[0]["labels"].tolist()
        ([5, 6, 7, 4, 3, 2], [-100, 6, 7, -100, 3, 2])
        >>> rows[1]["position_ids"].tolist(), rows[1]["segment_ids"].tolist()
        ([0, 1, 0, 1, 2, 3], [1, 1, 0, 0, 0, 0])
    """
    return PackedSequences(sequences, length, labels=labels, padding=padding, ignore_index=ignore_index)


class PackedExamples(Examples):
    """Packed rows as examples of a `MapDataset`."""

    of_tokens = True

    def __init__(self, packed: PackedSequences, specs: Sequence[TensorSpec], *, need_target: bool = True) -> None:
        self._packed, self._need_target = packed, need_target
        self._inputs = {spec.name: "segment_ids" if spec.documents else _role(spec) for spec in specs}
        self._formed = {spec.name: _form(spec) for spec in specs if self._inputs[spec.name] == "attention_mask"}
        roles = list(self._inputs.values())
        if roles.count("input_ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"packed sequences need one model input for token ids, but the model's inputs are {shown}.")
        if len(roles) == 1:
            raise DataError(
                f"packed sequences: the model reads '{specs[0].name}' only, so that nothing tells its attention where "
                "a sequence of a row begins; export it with position_ids or attention_mask, or train it without pack."
            ).about(specs[0].name)

    def __len__(self) -> int:
        return len(self._packed)

    def batch(self, rows: Sequence[int]) -> object:
        """Return some rows as inputs by name, and labels."""
        names = list(dict.fromkeys([*self._inputs.values(), *(["labels"] if self._need_target else [])]))
        found = self._packed.rows(rows, names)
        inputs = {name: found[role] for name, role in self._inputs.items()}
        inputs |= {name: form(inputs[name]) for name, form in self._formed.items()}
        return (inputs, found["labels"]) if self._need_target else inputs

    def weights_of(self, weights: Array, name: str) -> Array:
        """Refuse weights: a row holds several sequences."""
        raise DataError(
            "sample_weight is one weight per example, but a packed row holds several sequences; train without packing, "
            "or set the labels of sequences that do not count to the label that the loss ignores."
        )

    def all_targets(self) -> Array | None:
        """Return the labels of all rows."""
        if not self._need_target:
            return None
        return self._packed.rows(range(len(self._packed)), ["labels"])["labels"]

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the rows."""
        return self._packed.fingerprint()


def _role(spec: TensorSpec) -> str:
    """Return the name of the array of a packed row for an input."""
    name = spec.name.lower()
    parts = {"mask": "attention_mask", "position": "position_ids", "segment": "segment_ids"}
    return next((role for part, role in parts.items() if part in name), "input_ids")


def _form(spec: TensorSpec) -> Callable[[Array], Array]:
    """Return a function that converts a mask [rows, 1, length, length] for an input."""
    rank = None if spec.shape is None else len(spec.shape)
    if rank not in (3, 4):
        raise DataError(
            f"packed sequences: the mask '{spec.name}' has shape {spec.describe_shape()}, which marks padding only, so "
            "that tokens would attend to other sequences; fit and evaluate take packed sequences for such a model."
        ).about(spec.name, got=spec.shape)

    def formed(mask: Array) -> Array:
        mask = mask if rank == 4 else mask[:, 0]
        if spec.dtype.kind in "biu":
            return mask.astype(spec.dtype)
        lowest = np.finfo(np.float16 if spec.dtype.itemsize == 2 else np.float32).min  # bfloat16 rounds the latter up
        return np.where(mask, 0, lowest).astype(spec.dtype)

    return formed


def _tokens(values: Any, subject: str, index: int) -> Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(
            f"{subject} {index} has the type {array.dtype} and the shape {array.shape}; it needs integers, the "
            "token ids of one text."
        )
    return array.astype(np.int64, copy=False)


def _check_labels(tokens: Sequence[Array], labels: Sequence[Array]) -> None:
    if len(labels) != len(tokens):
        raise DataError(f"labels has {len(labels)} sequences, but there are {len(tokens)}.")
    for index, (one, other) in enumerate(zip(tokens, labels, strict=True)):
        if len(one) != len(other):
            raise DataError(f"labels {index} has {len(other)} numbers, but sequence {index} has {len(one)} tokens.")


def _packed(sizes: Sequence[int], length: int) -> list[list[Piece]]:
    """Return the pieces of each row: the longest first, each in the fullest row with enough room."""
    pieces = [
        Piece(index, start, min(start + length, size))
        for index, size in enumerate(sizes)
        for start in range(0, size, length)
    ]
    pieces = [piece for piece in pieces if piece.stop - piece.start > 1]  # a single token has no label
    pieces.sort(key=lambda piece: piece.start - piece.stop)
    rows: list[list[Piece]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: some row has room for r tokens
    for piece in pieces:
        size = piece.stop - piece.start
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows
