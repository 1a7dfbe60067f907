"""Chats, prompts with completions, instructions and plain texts as rows of tokens for a language model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.map_dataset import Examples, ExampleSource
from onnxtrain.data.packing import LONGEST_ROW, PackedSequences
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.groups import IGNORED
from onnxtrain.plugins.text.rows import Broken, in_blocks, name_of, read_rows
from onnxtrain.plugins.text.token_rows import (
    LONGEST,
    RowExamples,
    TokenRows,
    encoded_rows,
    labels_of,
    learned_tokens,
    roles_of,
)
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer

_BLOCK: Final = 256
"""Rows that are encoded at a time."""


class NothingToLearnError(DataError):
    """No row has an answer."""


@checks_arguments
@dataclass(frozen=True)
class ChatData(ExampleSource):
    """Rows of texts as tokens with labels for the loss ``next_token``.

    A row is a chat (``messages``: a list with ``role`` and ``content``), a question with its answer (``prompt`` and
    ``completion``, texts or messages; or ``instruction``, ``output`` and perhaps ``input``), or a plain ``text``. Chats
    and instructions become text by the tokenizer's chat template; instructions without one by Alpaca's prompt. Plain
    texts, and completions of plain prompts, end with the tokenizer's end token. ``conversations`` are messages with
    ``from`` and ``value``, as ShareGPT has them.

    Args:
        source: A ``.jsonl`` file (a row per line), a ``.json`` file (an array of rows), a ``.txt`` file (a text per
            line that is not blank), these compressed (``.jsonl.gz``), a ``.csv`` or ``.parquet`` file, a dataset of
            Hugging Face, a list or an iterator of rows, or a function that returns an iterator. Several files are a
            list of paths, or a mapping from path to weight: 2 reads each row twice, 0.5 every second row.
        tokenizer: A folder with ``tokenizer.json``, the path of that file, a ``tokenizers.Tokenizer``, or a tokenizer
            of ``transformers``; by default the one in the folder of the model. Files beside it have the chat template
            (``tokenizer_config.json``, ``chat_template.jinja``).
        train_on: ``"answers"``: the messages of the assistant, completions and outputs; all of a plain text.
            ``"all"``: all tokens.
        max_length: Tokens at which a row is cut; by default the model's length, else 1024 or the tokenizer's maximum.
            With ``pack`` there is no default, and long rows continue in another row.
        pack: Put several rows into one of this many tokens, see :func:`onnxtrain.data.pack`.
        chat_template: Path of a chat template in Jinja, instead of the tokenizer's.
        skip_broken: Leave out rows that are no JSON, have no form of a row, or that the chat template refuses; a hint
            counts them.

    Raises:
        OptionError: A value is not accepted.
    """

    source: Any
    tokenizer: Any = None
    train_on: Literal["answers", "all"] = "answers"
    max_length: int | None = None
    pack: int | None = None
    chat_template: str | os.PathLike[str] | None = None
    skip_broken: bool = False

    def __post_init__(self) -> None:
        if self.train_on not in ("answers", "all"):
            raise OptionError(f"train_on is {self.train_on!r}; it is 'answers' or 'all'.").about(
                "train_on", got=self.train_on
            )
        for name, value in (("max_length", self.max_length), ("pack", self.pack)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise OptionError(f"{name} is {value!r}; it needs an integer.")
            if value is not None and value < 2:
                raise OptionError(
                    f"{name} is {value}; it needs at least 2 tokens, one to predict from the other."
                ).about(name, got=value)
        if self.pack is not None and self.pack > LONGEST_ROW:
            raise OptionError(f"pack is {self.pack:,}; a row has at most {LONGEST_ROW:,} tokens.").about(
                "pack", got=self.pack, wanted=LONGEST_ROW
            )
        if self.chat_template is not None and not isinstance(self.chat_template, str | os.PathLike):
            raise OptionError(f"chat_template is {self.chat_template!r}; it needs the path of a template.").about(
                "chat_template", got=self.chat_template
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the source in messages."""
        return name_of(self.source)

    def examples(self, specs: Sequence[TensorSpec], *, need_target: bool = True) -> Examples:
        """Return the rows as examples of a model; see `ExampleSource.examples`."""
        if self.tokenizer is None:
            raise DataError(
                f"{self.name} holds texts; name the tokenizer of the model: onnxtrain.text.ChatData(path, "
                "tokenizer='tokenizer.json')."
            ).about(self.name)
        tokenizer = ChatTokenizer.open(self.tokenizer, self.chat_template)
        fixed = None if self.pack else _fixed_length(specs)
        limit = self._limit(fixed, tokenizer.longest)
        tokens, padding = _read(self, tokenizer, limit), tokenizer.encoder.padding
        if self.pack is None:
            return RowExamples(tokens, roles_of(specs), fixed, padding, need_target=need_target)
        rows = [tokens.row(index) for index in range(len(tokens))]
        labels = [labels_of(row) for row in rows]
        packed = PackedSequences(
            [row["ids"] for row in rows], self.pack, labels=labels, padding=padding, ignore_index=IGNORED
        )
        found = packed.examples(specs, need_target=need_target)
        found.hints = tokens.hints
        return found

    def _limit(self, fixed: int | None, longest: int | None) -> int | None:
        if fixed is not None:
            if self.max_length is not None and self.max_length > fixed:
                raise OptionError(f"max_length is {self.max_length}, but the model takes {fixed} tokens.").about(
                    "max_length", got=self.max_length, wanted=fixed
                )
            return self.max_length or fixed
        return self.max_length or (None if self.pack else min(LONGEST, longest or LONGEST))


def _read(data: ChatData, tokenizer: ChatTokenizer, limit: int | None) -> TokenRows:
    """Read the tokens of all rows."""
    found, rows, broken = TokenRows(), read_rows(data.source), Broken(skip=data.skip_broken)
    cut = tokens = lost = 0
    for block in in_blocks(rows, _BLOCK, lambda row: 0 if isinstance(row, DataError) else row.size):
        for each in encoded_rows(block, tokenizer, answers=data.train_on == "answers", broken=broken):
            found.read += 1
            if each is None:
                continue
            encoded, spans = each
            size = len(encoded.ids)
            tokens += size
            if limit is not None and size > limit:
                cut, lost = cut + 1, lost + size - limit
            learned = learned_tokens(encoded.starts, encoded.ends, spans)[:limit]
            if learned[1:].any():  # no earlier token predicts the first
                found.append(encoded.ids[:limit], learned)
                found.kept.append(found.read - 1)
    read, left_out = found.read, found.read - len(found.kept) - broken.count
    if not found.kept:
        few = "there are no rows"
        if read:
            few = f"none of the {read:,} rows has an answer within {limit} tokens"
        if read and not cut:
            few = (
                f"none of the {read:,} rows has an answer, which is a message of the role 'assistant', a completion, "
                "an output, or a text of two tokens"
            )
        if broken.count:
            few = f"{broken.count:,} of {read:,} rows cannot be read, for example: {broken.first.rstrip('.')}"
        raise NothingToLearnError(f"{data.name} has nothing to learn: {few}.")
    found.hints = broken.hints(data.name, read)
    if cut:
        found.hints += (
            f"{data.name}: {cut:,} of {read:,} rows are longer than {limit} tokens and are cut; {lost:,} of "
            f"{tokens:,} tokens are lost (max_length=).",
        )
    if left_out:
        found.hints += (f"{data.name}: {left_out:,} of {read:,} rows have no answer to learn and are left out.",)
    found.finish()
    return found


def _fixed_length(specs: Sequence[TensorSpec]) -> int | None:
    """Return the number of tokens that the model takes, if it is fixed."""
    shapes = [spec.shape for spec in specs if spec.shape is not None and len(spec.shape) == 2]
    return next((int(shape[1]) for shape in shapes if isinstance(shape[1], int)), None)
