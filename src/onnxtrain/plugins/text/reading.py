"""Rows of texts as examples of the loss that reads them, with the tokenizer beside the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from onnxtrain.data import Dataset
from onnxtrain.data.map_dataset import is_stream
from onnxtrain.data.naming import is_array_like
from onnxtrain.data.opening import open_dataset
from onnxtrain.editing.working_copy.training_modes import Modes
from onnxtrain.errors import DataError
from onnxtrain.losses.cross_entropy import NextToken, SoftmaxCrossEntropy
from onnxtrain.losses.custom_loss import CustomLoss
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.runtime.states import new_states
from onnxtrain.training.prepare import prepare

if TYPE_CHECKING:
    from onnxtrain.plugins.text.chat_data import ChatData
    from onnxtrain.plugins.text.comparison_data import ComparisonData
    from onnxtrain.training.config import TrainingConfig
    from onnxtrain.training.data_adapter import Reading

_Texts = TypeVar("_Texts", "ChatData", "ComparisonData")

_BATCH_SIZE: Final = 8
"""Examples of a prediction of the reference."""


def read_texts(source: Any, reading: Reading) -> Any:
    """Return rows of texts with the tokenizer of the model, and other data as they are."""
    loss = reading.loss
    if isinstance(loss, NextToken | GroupLoss):
        source = _with_listed_rows(source, loss)
    if isinstance(source, tuple | Dataset | Mapping) or is_array_like(source) or callable(source):
        return source
    from onnxtrain.plugins.text.chat_data import ChatData  # a single step does not need file readers
    from onnxtrain.plugins.text.comparison_data import ComparisonData
    from onnxtrain.plugins.text.rows import holds_texts, is_json_lines

    if isinstance(loss, GroupLoss):
        return _with_comparisons(source, loss, reading)
    if isinstance(source, ComparisonData):
        shown = "is an output" if loss is None else f"{loss.name} compares none"
        raise DataError(
            f"{source.name} holds texts to compare, but the loss {shown}; use dpo, orpo, kto, reward, "
            "multiple_negatives, listnet or ranknet."
        )
    if not isinstance(source, ChatData):
        if not (holds_texts if isinstance(loss, NextToken) else is_json_lines)(source):
            return source
        source = ChatData(source)
    source = _with_tokenizer(source, reading)
    if loss is None or isinstance(loss, NextToken | CustomLoss):
        return source
    reads = "predictions with other targets than tokens"
    if isinstance(loss, SoftmaxCrossEntropy):
        reads = "the logits at each token with this token"
    raise DataError(
        f"{source.name} holds texts, but the loss {loss.name} compares {reads}; use next_token, which compares the "
        "logits at a token with the next one, or a loss of your own."
    ).about(source.name, got=loss.name)


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
    again = itertools.chain(first, source) if is_iterator else source
    if first and is_row(first[0], FORMS[loss.texts] if isinstance(loss, GroupLoss) else OF_CHATS):
        return [*again]
    return given if is_stream(given) else again


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
    if loss.texts == "prompts":
        raise DataError(
            f"{source.name} holds texts, but the loss {loss.name} learns from answers that the model samples; call "
            "onnxtrain.text.grpo(trainer, prompts, reward_funcs, max_steps=100)."
        )
    found = Comparisons(_with_tokenizer(source, reading), loss.texts, has_reference=loss.has_reference)
    if not loss.has_reference or reading.config is None:
        return found
    found.paired = reading.paired
    (predicted,) = reference(reading.config)(found, _BATCH_SIZE).values()
    return found.with_reference(predicted)


def _with_tokenizer(source: _Texts, reading: Reading) -> _Texts:
    """Return texts with the tokenizer in the folder of the model if they name none."""
    if source.tokenizer is None and reading.folder is not None:
        return dataclasses.replace(source, tokenizer=reading.folder)
    return source


def reference(config: TrainingConfig) -> Callable[[Any, int], dict[str, np.ndarray]]:
    """Return what predicts data by the model before training: the file's, with an adapter to continue."""
    from onnxtrain.training.inference.evaluation import Evaluator

    lora = config.lora if getattr(config.lora, "adapter", None) is not None else None
    plain = dataclasses.replace(config, lora=lora, qat=False, train=None, freeze=("*",), groups=())
    objective = prepare(plain, modes=Modes(), copies=(), table=())
    evaluator = Evaluator(objective, new_states({}, config.runtime), config.runtime)

    def predict(source: Any, batch_size: int) -> dict[str, np.ndarray]:
        dataset = open_dataset(source, objective.inputs, need_target=False, validate=False)
        return evaluator.predict(dataset, batch_size)

    return predict
