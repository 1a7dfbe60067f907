"""Rows of texts as examples of the loss that reads them, with the tokenizer beside the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.data import Dataset
from onnxtrain.data.conversion import is_array_like
from onnxtrain.data.map_dataset import is_stream
from onnxtrain.errors import DataError
from onnxtrain.losses.cross_entropy import NextToken, SoftmaxCrossEntropy
from onnxtrain.losses.custom_loss import CustomLoss
from onnxtrain.losses.groups import GroupLoss

if TYPE_CHECKING:
    from onnxtrain.training.data_adapter import Reading


def read_texts(source: Any, reading: Reading) -> Any:
    """Return rows of texts with the tokenizer of the model, and other data as they are."""
    loss = reading.loss
    if isinstance(loss, NextToken | GroupLoss):
        source = _with_listed_rows(source, loss)
    if isinstance(source, tuple | Dataset | Mapping) or is_array_like(source) or callable(source):
        return source
    from onnxtrain.plugins.text.chat_data import ChatData, with_texts  # a single step does not need file readers
    from onnxtrain.plugins.text.comparison_data import ComparisonData

    if isinstance(loss, GroupLoss):
        return _with_comparisons(source, loss, reading)
    if isinstance(source, ComparisonData):
        shown = "is an output" if loss is None else f"{loss.name} compares none"
        raise DataError(
            f"{source.name} holds texts to compare, but the loss {shown}; use dpo, orpo, kto, reward, "
            "multiple_negatives, listnet or ranknet."
        )
    found = with_texts(source, reading.folder, rows=isinstance(loss, NextToken))
    if not isinstance(found, ChatData) or loss is None or isinstance(loss, NextToken | CustomLoss):
        return found
    reads = "predictions with other targets than tokens"
    if isinstance(loss, SoftmaxCrossEntropy):
        reads = "the logits at each token with this token"
    raise DataError(
        f"{found.name} holds texts, but the loss {loss.name} compares {reads}; use next_token, which compares the "
        "logits at a token with the next one, or a loss of your own."
    ).about(found.name, got=loss.name)


def _with_listed_rows(source: Any, loss: NextToken | GroupLoss) -> Any:
    """Return rows of texts in a sequence, a stream or an iterator as a list; others, such as batches, as they are."""
    given, source = source, iter(source) if is_stream(source) else source
    is_iterator = isinstance(source, Iterator)
    if not is_iterator and (not isinstance(source, Sequence) or isinstance(source, str | list) or not source):
        return source
    from onnxtrain.plugins.text.comparison_data import FORMS
    from onnxtrain.plugins.text.rows import FORMS as OF_CHATS
    from onnxtrain.plugins.text.rows import is_row

    first = [*itertools.islice(source, 1)]
    again = _joined(first, source) if is_iterator else source
    if first and is_row(first[0], FORMS[loss.texts] if isinstance(loss, GroupLoss) else OF_CHATS):
        return [*again]
    return given if is_stream(given) else again


def _joined(first: Iterable[Any], rest: Iterable[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _with_comparisons(source: Any, loss: GroupLoss, reading: Reading) -> Any:
    """Return rows of texts as the examples that a loss compares, and other data as they are."""
    from onnxtrain.plugins.text.chat_data import ChatData
    from onnxtrain.plugins.text.comparison_data import ComparisonData, Comparisons, holds_comparisons

    if isinstance(source, ChatData):
        raise DataError(f"{source.name} holds single texts, but the loss {loss.name} compares several; give the path.")
    if not isinstance(source, ComparisonData):
        if not holds_comparisons(source, loss.texts):
            return source
        source = ComparisonData(source)
    if source.tokenizer is None and reading.folder is not None:
        source = dataclasses.replace(source, tokenizer=reading.folder)
    found = Comparisons(source, loss.texts, has_reference=loss.has_reference)
    if not loss.has_reference or reading.config is None:
        return found
    from onnxtrain.plugins.text.reference_model import predict_reference

    found.paired = reading.paired
    return found.with_reference(predict_reference(reading.config, found))
