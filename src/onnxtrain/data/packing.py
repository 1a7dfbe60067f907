"""Short sequences of tokens, several in a row, so that a training spends its time on few places of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.errors import DataError, OptionError
from onnxtrain.spelling import checks_arguments

PACKED_NAMES: Final = ("input_ids", "position_ids", "segment_ids", "attention_mask", "labels")
"""Names of the arrays of a packed row."""


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence."""

    sequence: int
    start: int
    stop: int


@checks_arguments
class PackedSequences:
    """Sequences of tokens for a language model, several in a row of one length; what :func:`pack` makes.

    For an index it gives a row, a mapping with:

    - ``input_ids`` [length]: the tokens of some sequences, one sequence behind the other, then padding.
    - ``position_ids`` [length]: from 0 in each sequence.
    - ``segment_ids`` [length]: 1 for the tokens of the first sequence, 2 for those of the second, ...; 0 for padding.
    - ``attention_mask`` [1, length, length]: whether a place sees another: one of its own sequence, not behind it.
    - ``labels`` [length]: for the loss ``next_token``: the tokens again, or their labels; ``ignore_index`` for padding
      and for the first token of each sequence, which does not follow from the sequence before.

    Attributes:
        length: Places of a row.
    """

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
        """The share of places that hold a token."""
        taken = sum(piece.stop - piece.start for row in self._rows for piece in row)
        return taken / (len(self._rows) * self.length)

    def rows(self, indices: Sequence[int], names: Sequence[str] = PACKED_NAMES) -> dict[str, Array]:
        """Some rows, put together, of the arrays of these names."""
        shape = (len(indices), self.length)
        tokens, labels = np.full(shape, self._padding), np.full(shape, self._ignored)
        positions, segments = np.tile(np.arange(self.length), (len(indices), 1)), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            place = 0
            for number, piece in enumerate(self._rows[index], start=1):
                size = piece.stop - piece.start
                own = slice(place, place + size)
                tokens[row, own] = self._tokens[piece.sequence][piece.start : piece.stop]
                labels[row, own] = self._labels[piece.sequence][piece.start : piece.stop]
                labels[row, place] = self._ignored
                segments[row, own] = number
                place += size
                positions[row, place:] = np.arange(self.length - place)
                positions[row, own] = np.arange(size)
        found = {"input_ids": tokens, "position_ids": positions, "segment_ids": segments, "labels": labels}
        if "attention_mask" in names:
            own_sequence = segments[:, :, None] == segments[:, None, :]
            found["attention_mask"] = np.tril(own_sequence)[:, None]
        return {name: found[name] for name in names}

    def fingerprint(self) -> str:
        """Return an identifier of the rows' content."""
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
    """Put sequences of tokens into rows, several in one, for a model that keeps them apart; data for ``fit``.

    Each sequence goes into the fullest row that has room for it, the longest sequences first. What is longer than a row
    is cut into pieces, each a sequence of its own. The model's inputs get the part of a row that they are named for:
    ``position``, ``segment``, ``mask``, else tokens. A mask has three or four axes: True, or 1, where a place sees
    another; floating masks have 0 there and the lowest number elsewhere. A model that reads neither positions, segments
    nor such a mask is refused.

    Args:
        sequences: Lists or arrays of token numbers, of any lengths.
        length: Tokens of a row.
        labels: What is to be predicted, for each token of each sequence: the token itself, or ``ignore_index``, as for
            the words of a question. By default all tokens but the first of each sequence.
        padding: The token at the end of a row.
        ignore_index: The label of what does not count.

    Raises:
        OptionError: ``length`` is below 2.
        DataError: There is no sequence of two tokens, a sequence is none of whole numbers, labels do not fit.

    Example:
        >>> rows = pack([[5, 6, 7], [8, 9], [4, 3, 2]], 6)
        >>> rows[0]["input_ids"].tolist(), rows[0]["labels"].tolist()
        ([5, 6, 7, 4, 3, 2], [-100, 6, 7, -100, 3, 2])
        >>> rows[1]["position_ids"].tolist(), rows[1]["segment_ids"].tolist()
        ([0, 1, 0, 1, 2, 3], [1, 1, 0, 0, 0, 0])
    """
    return PackedSequences(sequences, length, labels=labels, padding=padding, ignore_index=ignore_index)


class PackedExamples:
    """Packed rows as a model reads them: examples of a `MapDataset`.

    Args:
        packed: The rows.
        specs: What the model needs of its inputs.
        need_target: Whether labels are wanted.

    Raises:
        DataError: An input is none that packed rows have, or the model cannot keep sequences apart.
    """

    def __init__(self, packed: PackedSequences, specs: Sequence[TensorSpec], *, need_target: bool = True) -> None:
        self._packed, self._need_target = packed, need_target
        self.columns: dict[str, tuple[str, ...]] = {}
        self.declared_labels: tuple[str, ...] = ()
        self._inputs = {spec.name: _role(spec) for spec in specs}
        self._formed = {spec.name: _form(spec) for spec in specs if self._inputs[spec.name] == "attention_mask"}
        roles = list(self._inputs.values())
        if roles.count("input_ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"packed sequences need one input for tokens, but the model's inputs are {shown}.")
        if len(roles) == 1:
            raise DataError(
                f"packed sequences: the only input is '{specs[0].name}', so that tokens would see those of other "
                "sequences in their row; export the model with position_ids, or with an attention_mask of four axes."
            )

    def __len__(self) -> int:
        return len(self._packed)

    def batch(self, rows: Sequence[int]) -> object:
        """Some rows as inputs by name, and labels."""
        names = list(dict.fromkeys([*self._inputs.values(), *(["labels"] if self._need_target else [])]))
        found = self._packed.rows(rows, names)
        inputs = {name: found[role] for name, role in self._inputs.items()}
        inputs |= {name: form(inputs[name]) for name, form in self._formed.items()}
        return (inputs, found["labels"]) if self._need_target else inputs

    def all_targets(self) -> Array | None:
        """The labels of all rows."""
        if not self._need_target:
            return None
        return self._packed.rows(range(len(self._packed)), ["labels"])["labels"]

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the rows."""
        return self._packed.fingerprint()


def _role(spec: TensorSpec) -> str:
    """Return the array of a packed row that an input takes, by the input's name."""
    name = spec.name.lower()
    parts = {"mask": "attention_mask", "position": "position_ids", "segment": "segment_ids"}
    return next((role for part, role in parts.items() if part in name), "input_ids")


def _form(spec: TensorSpec) -> Callable[[Array], Array]:
    """Return a function that converts a mask [rows, 1, length, length] for an input.

    Raises:
        DataError: It has two axes.
    """
    rank = None if spec.shape is None else len(spec.shape)
    if rank not in (3, 4):
        raise DataError(
            f"packed sequences: the mask '{spec.name}' has shape {spec.describe_shape()}, which says whether a token "
            "is padding, not which others it sees, so that it would see other sequences; export the model with a mask "
            "of four axes, or without a mask and with position_ids."
        )

    def formed(mask: Array) -> Array:
        mask = mask if rank == 4 else mask[:, 0]
        if spec.dtype.kind in "biu":
            return mask.astype(spec.dtype)
        lowest = np.finfo(np.float16 if spec.dtype.itemsize == 2 else np.float32).min  # bfloat16 rounds the latter up
        return np.where(mask, 0, lowest).astype(spec.dtype)

    return formed


def _tokens(values: Any, what: str, index: int) -> Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(
            f"{what} {index} has the type {array.dtype} and the shape {array.shape}; it needs whole numbers, the "
            "tokens of one text."
        )
    return array.astype(np.int64, copy=False)


def _check_labels(tokens: Sequence[Array], labels: Sequence[Array]) -> None:
    if len(labels) != len(tokens):
        raise DataError(f"labels has {len(labels)} sequences, but there are {len(tokens)}.")
    for index, (one, other) in enumerate(zip(tokens, labels, strict=True)):
        if len(one) != len(other):
            raise DataError(f"labels {index} has {len(other)} numbers, but sequence {index} has {len(one)} tokens.")


def _packed(sizes: Sequence[int], length: int) -> list[list[Piece]]:
    """The pieces of each row: the longest first, each into the fullest row that has room for it."""
    pieces = [
        Piece(index, start, min(start + length, size))
        for index, size in enumerate(sizes)
        for start in range(0, size, length)
    ]
    pieces = [piece for piece in pieces if piece.stop - piece.start > 1]  # one token alone predicts nothing
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
