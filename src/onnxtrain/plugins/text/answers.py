"""Measures of the answers that a language model generates while it is trained: exact match, ROUGE, own functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments, suggestion
from onnxtrain.plugins.text.generation import end_tokens, generate, next_scores
from onnxtrain.plugins.text.rows import Row, name_of, read_rows
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from onnxtrain.training.callbacks.base import Callback, TrainingState

Measure = Callable[[str, str], float]
"""Returns a number for an answer and its reference."""


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if both are the same text, without spaces at their ends; else 0.

    >>> exact_match("Four. ", "Four.")
    1.0
    """
    return float(answer.strip() == reference.strip())


def rouge(answer: str, reference: str, size: int) -> float:
    """Return ROUGE-N: the F1 score of the runs of ``size`` words that both texts have, in lower case.

    >>> round(rouge("the cat sat", "The cat sat down", 2), 2)
    0.8
    """
    own, wanted = (_runs(text, size) for text in (answer, reference))
    return _f1((own & wanted).total(), own.total(), wanted.total())


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L: the F1 score of the longest common subsequence of words, in lower case.

    >>> round(rouge_l("the cat sat", "The dog sat down"), 2)
    0.57
    """
    own, wanted = _words(answer), _words(reference)
    lengths = np.zeros(len(wanted) + 1, int)
    for word in own:
        before = lengths.copy()
        for place, other in enumerate(wanted):
            lengths[place + 1] = before[place] + 1 if word == other else max(before[place + 1], lengths[place])
    return _f1(int(lengths[-1]), len(own), len(wanted))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _runs(text: str, size: int) -> Counter[tuple[str, ...]]:
    words = _words(text)
    return Counter(tuple(words[place : place + size]) for place in range(len(words) - size + 1))


def _f1(common: int, own: int, wanted: int) -> float:
    return 2 * common / (own + wanted) if common else 0.0


MEASURES: Final[Mapping[str, Measure]] = {
    "exact_match": exact_match,
    "rouge1": lambda answer, reference: rouge(answer, reference, 1),
    "rouge2": lambda answer, reference: rouge(answer, reference, 2),
    "rougeL": rouge_l,
}
"""Measures by name."""


def distinct(names: Sequence[str]) -> list[str]:
    """Return names with a number behind each that is there again.

    >>> distinct(["score", "length", "score"])
    ['score', 'length', 'score_2']
    """
    return [
        name if name not in names[:at] else f"{name}_{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]


@checks_arguments
class Answers(Callback):
    """Measures what a language model answers, after each epoch: exact match, ROUGE, or a function of your own.

    The last answer of each row is the reference; the model answers what stands before it, by the most probable token at
    each position. The means are metrics of the epoch, ``val_rougeL``: in the history, for early stopping and for the
    best checkpoint.

    Args:
        data: Rows in any form of :class:`onnxtrain.text.ChatData` that has an answer.
        metrics: Names, ``exact_match``, ``rouge1``, ``rouge2`` or ``rougeL``, and functions of (answer, reference) that
            return a number; they have the names of the functions.
        tokens: Maximum tokens of an answer.
        tokenizer: As in :class:`onnxtrain.text.ChatData`; by default the one in the folder of the model.
        chat_template: Path of another chat template.

    Attributes:
        rows: The answers of the last epoch: ``answer`` and ``reference``.

    Raises:
        OptionError: An argument is not accepted.
    """

    def __init__(
        self,
        data: Any,
        metrics: str | Measure | Sequence[str | Measure] = ("exact_match", "rougeL"),
        *,
        tokens: int = 64,
        tokenizer: Any = None,
        chat_template: Any = None,
    ) -> None:
        given = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
        measures: list[Measure] = []
        for each in given:
            if not callable(each) and each not in MEASURES:
                known = ", ".join(MEASURES)
                raise OptionError(
                    f"metrics of Answers has {each!r}; it needs {known} or a function of (answer, reference)."
                    f"{suggestion(str(each), MEASURES)}"
                )
            measures.append(each if callable(each) else MEASURES[each])
        names = [getattr(each, "__name__", "score") if callable(each) else each for each in given]
        self._measures = dict(zip(distinct(names), measures, strict=True))
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise OptionError(f"tokens of Answers is {tokens!r}; it needs an integer of at least 1.")
        self._data, self._tokens, self._tokenizer, self._template = data, tokens, tokenizer, chat_template
        self.rows: list[dict[str, str]] = []

    def on_fit_begin(self, state: TrainingState) -> None:
        """Read the rows.

        Raises:
            DataError: They cannot be read, one has no answer, or is too long for the model.
            OptionError: The model has no folder, and no tokenizer is given.
        """
        given = state.trainer.data_adapter.folder if self._tokenizer is None else self._tokenizer
        if given is None:
            raise OptionError("The model is in memory, so that its tokenizer is unknown; give tokenizer=.")
        self._words = ChatTokenizer.open(given, self._template)
        self._ends = end_tokens(self._words, given)
        self._model = next_scores(state.trainer)
        self._prompts, self._references = [], []
        for row in read_rows(self._data):
            if isinstance(row, DataError):
                raise row
            prompt, reference = _parts(row, has_template=self._words.template is not None)
            self._prompts.append(self._words.asking(prompt, row.label))
            self._model.check(self._prompts[-1], f"the prompt of {row.label}")
            self._references.append(reference)
        if not self._prompts:
            raise DataError(f"{name_of(self._data)} has no rows; Answers needs one at least.")

    def on_epoch_end(self, state: TrainingState) -> None:
        """Answer, and add the means to the metrics of the epoch."""
        found = generate(self._model, self._prompts, self._tokens, self._ends)
        texts = [self._words.encoder.decode(ids[:-1] if ids and ids[-1] in self._ends else ids) for ids in found]
        self.rows = [
            {"answer": text, "reference": reference} for text, reference in zip(texts, self._references, strict=True)
        ]
        for name, measure in self._measures.items():
            values = [float(measure(row["answer"], row["reference"])) for row in self.rows]
            state.metrics[f"val_{name}"] = sum(values) / len(values)


def _parts(row: Row, *, has_template: bool) -> tuple[Any, str]:
    """Return what stands before the last answer of a row, and the answer."""
    if not has_template and row.plain is not None:
        row = row.plain
    if row.messages is None:
        if not row.start:
            raise DataError(
                f"{row.label} is a text without a prompt; Answers needs chats, or prompts with completions."
            )
        return row.text[: row.start], row.text[row.start :]
    places = [place for place, message in enumerate(row.messages) if message["role"] == "assistant" and place]
    content = row.messages[places[-1]]["content"] if places else None
    if not isinstance(content, str):
        raise DataError(f"{row.label} has no answer that is a text behind a question.")
    return row.messages[: places[-1]], content
