"""Rows of texts that are read as they are needed: streams of Hugging Face, generators, functions that return one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from onnxtrain.data.base import Batch, epoch_order
from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.map_dataset import Examples, by_length, is_stream
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError
from onnxtrain.plugins.text.chat_data import ChatData, NothingToLearnError

HELD: Final = 10_000
"""Rows of a stream that are held, and shuffled, at a time; a stream of no more is as a list."""


class _Rows(list[Any]):
    """Some rows of a stream; the first has this number."""

    first_row = 0


class Stream:
    """Rows of an iterable without a length, some at a time.

    Args:
        source: A function that returns an iterator, an iterable, or an iterator, which is read once.
        begun: An iterator of the source, for the first reading.
    """

    def __init__(self, source: Any, begun: Iterator[Any] | None = None) -> None:
        self._source, self._begun = source, begun

    @property
    def is_read_once(self) -> bool:
        """Return whether the source is an iterator."""
        return isinstance(self._source, Iterator)

    def blocks(self) -> Iterator[_Rows]:
        """Read the rows once."""
        rows, self._begun = self._begun, None
        if rows is None:
            if self.is_read_once:
                raise DataError("the data is a one-shot iterator, exhausted after one epoch.")
            rows = iter(self._source() if callable(self._source) else plain(self._source))
        first = 0
        while block := _Rows(itertools.islice(rows, HELD)):
            block.first_row, first = first, first + len(block)
            yield block


def plain(source: Any) -> Iterable[Any]:
    """Return a stream of Hugging Face with Python's values; others as they are."""
    found: Iterable[Any] = source.with_format(None) if is_stream(source) else source
    return found


class TextStream(IterableDataset):
    """Batches of a stream of rows: some rows at a time become tokens, are shuffled, and sorted by length."""

    def __init__(self, data: ChatData, specs: Sequence[TensorSpec] = ()) -> None:
        super().__init__((), Wanted(specs))
        self._data, self.name, self.of_tokens = data, data.name, True
        self._kept: list[Examples] | None = None  # of an iterator, which cannot be read again

    def in_order_of(self, specs: Sequence[TensorSpec]) -> TextStream:
        """Return the stream for a model; see `Dataset.in_order_of`."""
        found = TextStream(self._data, specs)
        found.validate()
        return found

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return None: the end of a stream is not known."""
        return None

    def _examples(self) -> Iterator[Examples]:
        if self._kept is not None:
            yield from self._kept
            return
        stream, kept = self._data.source, list[Examples]()
        for block in stream.blocks():
            try:
                examples = dataclasses.replace(self._data, source=block).examples(self._wanted.specs)
            except NothingToLearnError:
                if not block.first_row:
                    raise
                continue  # the first rows had answers
            if stream.is_read_once:
                kept.append(examples)
            self.hints = (*self.hints, *(hint for hint in examples.hints if hint not in self.hints))[:3]
            yield examples
        if stream.is_read_once:
            self._kept = kept

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Read all rows once; each block is shuffled in itself."""
        number = 0
        for examples in self._examples():
            order = epoch_order(len(examples), shuffled)
            rows = list(range(len(examples))) if order is None else order.tolist()
            if order is not None and examples.lengths is not None:
                rows = order[by_length(examples.lengths[order], batch_size)].tolist()
            for first in range(0, len(rows), batch_size):
                if number >= start:
                    yield self.batch_of(examples.batch(rows[first : first + batch_size]), f"batch {number}")
                number += 1


def open_stream(source: Any, is_rows: Callable[[Any], bool]) -> tuple[Any, bool]:
    """Return the rows of an iterable without a length as a list, or as a `Stream` where there are many.

    Of other data, return data that have the same items; True says that they are rows.
    """
    makes = callable(source) and not isinstance(source, Iterable)
    given = source() if makes else plain(source)
    if not isinstance(given, Iterable):
        return source, False
    rows = iter(given)
    first = list(itertools.islice(rows, 1))
    begun = itertools.chain(first, rows)
    if not first or not is_rows(first[0]):
        if not makes:
            return (begun if isinstance(source, Iterator) else source), False
        unread = [begun]
        return (lambda: unread.pop() if unread else source()), False
    held = list(itertools.islice(begun, HELD + 1))
    if len(held) <= HELD:
        return held, True
    return Stream(source, itertools.chain(held, begun)), True
