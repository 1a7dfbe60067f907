"""Chats, prompts with completions, instructions and plain texts as rows of tokens for a language model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.files import GrowingArray
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.map_dataset import Examples, ExampleSource, of_rows
from onnxtrain.data.packing import LONGEST_ROW, PackedSequences
from onnxtrain.data.text_file import padded, token_role
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.plugins.text.rows import holds_texts, in_blocks, is_json_lines, name_of, read_rows
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer

IGNORED: Final = -100
"""Label of tokens that are not learned."""

_LONGEST: Final = 1024
"""Tokens at which rows are cut by default."""

_BLOCK: Final = 256
"""Rows that are encoded at a time."""


@checks_arguments
@dataclass(frozen=True)
class ChatData(ExampleSource):
    """Rows of texts as tokens with labels for the loss ``next_token``.

    A row is a chat (``messages``: a list with ``role`` and ``content``), a question with its answer (``prompt`` and
    ``completion``, texts or messages; or ``instruction``, ``output`` and perhaps ``input``), or a plain ``text``. Chats
    and instructions become text by the tokenizer's chat template. Plain texts, and completions of plain prompts, end
    with the tokenizer's end token.

    Args:
        source: A ``.jsonl`` file (a row per line), a ``.txt`` file (a text per line that is not blank), a ``.csv`` or
            ``.parquet`` file, a dataset of Hugging Face, or a list or an iterator of rows.
        tokenizer: A folder with ``tokenizer.json``, the path of that file, a ``tokenizers.Tokenizer``, or a tokenizer
            of ``transformers``; by default the one in the folder of the model. Files beside it have the chat template
            (``tokenizer_config.json``, ``chat_template.jinja``).
        train_on: ``"answers"``: the messages of the assistant, completions and outputs; all of a plain text.
            ``"all"``: all tokens.
        max_length: Tokens at which a row is cut; by default the model's length, else 1024 or the tokenizer's maximum.
            With ``pack`` there is no default, and long rows continue in another row.
        pack: Put several rows into one of this many tokens, see :func:`onnxtrain.data.pack`.
        chat_template: Path of a chat template in Jinja, instead of the tokenizer's.

    Raises:
        OptionError: A value is not accepted.
    """

    source: Any
    tokenizer: Any = None
    train_on: Literal["answers", "all"] = "answers"
    max_length: int | None = None
    pack: int | None = None
    chat_template: str | os.PathLike[str] | None = None

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
        tokens = TokenRows(self, tokenizer, limit)
        if self.pack is None:
            return ChatExamples(tokens, specs, fixed, tokenizer.encoder.padding, need_target=need_target)
        everything = range(len(tokens))
        ids, labels = [tokens.ids(row) for row in everything], [tokens.labels(row) for row in everything]
        packed = PackedSequences(ids, self.pack, labels=labels, padding=tokenizer.encoder.padding, ignore_index=IGNORED)
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
        return self.max_length or (None if self.pack else min(_LONGEST, longest or _LONGEST))


def with_texts(source: Any, folder: str | os.PathLike[str] | None, *, rows: bool) -> Any:
    """Return texts as `ChatData` with the tokenizer of a model's folder; any other data as they are."""
    if not isinstance(source, ChatData) and (holds_texts(source) if rows else is_json_lines(source)):
        source = ChatData(source)
    if isinstance(source, ChatData) and source.tokenizer is None and folder is not None:
        return dataclasses.replace(source, tokenizer=folder)
    return source


class TokenRows:
    """The tokens of all rows of a source, and whether each is learned."""

    def __init__(self, data: ChatData, tokenizer: ChatTokenizer, limit: int | None) -> None:
        ids, learned = GrowingArray((), np.dtype(np.int32)), GrowingArray((), np.dtype(bool))
        lengths: list[int] = []
        self.kept: list[int] = []
        rows = read_rows(data.source)
        read = cut = tokens = lost = 0
        for block in in_blocks(rows, _BLOCK, lambda row: row.size):
            for encoded, spans in tokenizer.encode(block, answers=data.train_on == "answers"):
                size = len(encoded.ids)
                read, tokens = read + 1, tokens + size
                if limit is not None and size > limit:
                    cut, lost = cut + 1, lost + size - limit
                marks = learned_tokens(encoded.starts, encoded.ends, spans)[:limit]
                if marks[1:].any():  # no earlier token predicts the first
                    ids.append(encoded.ids[:limit])
                    learned.append(marks)
                    lengths.append(len(marks))
                    self.kept.append(read - 1)
        if not lengths:
            few = "there are no rows"
            if read:
                few = f"none of the {read:,} rows has an answer within {limit} tokens"
            if read and not cut:
                few = (
                    f"none of the {read:,} rows has an answer, which is a message of the role 'assistant', a "
                    "completion, an output, or a text of two tokens"
                )
            raise DataError(f"{data.name} has nothing to learn: {few}.")
        self.read = read
        self._ids, self._learned = ids.finish(), learned.finish()
        self.lengths: Array = np.asarray(lengths)
        self._ends = np.cumsum(self.lengths)
        hints = []
        if cut:
            hints.append(
                f"{data.name}: {cut:,} of {read:,} rows are longer than {limit} tokens and are cut; {lost:,} of "
                f"{tokens:,} tokens are lost (max_length=)."
            )
        if read > len(lengths):
            hints.append(
                f"{data.name}: {read - len(lengths):,} of {read:,} rows have no answer to learn and are left out."
            )
        self.hints = tuple(hints)

    def __len__(self) -> int:
        return len(self.lengths)

    def _own(self, row: int) -> slice:
        return slice(int(self._ends[row] - self.lengths[row]), int(self._ends[row]))

    def ids(self, row: int) -> Array:
        """Return the token ids of a row."""
        return self._ids[self._own(row)]

    def labels(self, row: int) -> Array:
        """Return the labels of a row: its token ids, `IGNORED` where they are not learned."""
        own = self._own(row)
        return np.where(self._learned[own], self._ids[own], IGNORED)

    def fingerprint(self) -> str:
        """Return an identifier of the content."""
        found = Fingerprint()
        for array in (self._ids, self._learned, self.lengths):
            found.add_large_array(array)
        return found.digest()


def learned_tokens(starts: Array, ends: Array, spans: Sequence[tuple[int, int]]) -> Array:
    """Return the tokens that overlap with spans of characters; one span over everything has all tokens."""
    found = np.zeros(len(starts), bool)
    for start, end in spans:
        found |= (starts < end) & (ends > start) & (ends > starts)
    if len(spans) == 1 and spans[0][0] == 0:  # tokens that the tokenizer adds have no characters
        found |= ends <= starts
    return found


def _fixed_length(specs: Sequence[TensorSpec]) -> int | None:
    """Return the number of tokens that the model takes, if it is fixed."""
    shapes = [spec.shape for spec in specs if spec.shape is not None and len(spec.shape) == 2]
    return next((int(shape[1]) for shape in shapes if isinstance(shape[1], int)), None)


class ChatExamples:
    """Rows of tokens as examples of a `MapDataset`; a batch is padded on the right to its longest row."""

    def __init__(
        self, tokens: TokenRows, specs: Sequence[TensorSpec], length: int | None, padding: int, *, need_target: bool
    ) -> None:
        self._tokens, self._length, self._padding, self._need_target = tokens, length, padding, need_target
        self._roles = {spec.name: token_role(spec) for spec in specs}
        if list(self._roles.values()).count("ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"texts need one model input for token ids, but the model's inputs are {shown}.")
        self.columns: dict[str, tuple[str, ...]] = {}
        self.declared_labels: tuple[str, ...] = ()
        self.of_tokens = True
        self.hints = tokens.hints
        self.lengths = None if length else tokens.lengths

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, rows: Sequence[int]) -> object:
        """Return some rows as inputs by name, and labels."""
        ids = [self._tokens.ids(row) for row in rows]
        length = self._length or max(len(each) for each in ids)
        of_roles: dict[str, Callable[[], Array]] = {
            "ids": lambda: padded(ids, length, self._padding),
            "mask": lambda: padded([np.ones(len(each)) for each in ids], length, 0),
            "types": lambda: np.zeros((len(ids), length), np.int32),
            "positions": lambda: np.tile(np.arange(length, dtype=np.int32), (len(ids), 1)),
        }
        inputs = {name: of_roles[role]() for name, role in self._roles.items()}
        if not self._need_target:
            return inputs
        labels = padded([self._tokens.labels(row) for row in rows], length, IGNORED)
        return inputs, labels.astype(np.int64)

    def weights_of(self, weights: Array, name: str) -> Array:
        """Return the weights of the rows that were not left out."""
        return of_rows(weights, self._tokens.read, name, self._tokens.kept)

    def all_targets(self) -> Array | None:
        """Return None: rows have different lengths."""
        return None

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the rows."""
        return self._tokens.fingerprint()
