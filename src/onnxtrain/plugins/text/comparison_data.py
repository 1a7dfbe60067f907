"""Rows of texts that a loss compares: chosen and rejected answers, judged answers, queries with documents."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.map_dataset import ExampleSource
from onnxtrain.data.text_file import padded, token_role
from onnxtrain.data.tokenizer import Encoded, Text, cut_text
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.formatting import plural
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.groups import IGNORED
from onnxtrain.plugins.text.rows import (
    Broken,
    Row,
    forms_in_words,
    holds_arrays,
    in_blocks,
    is_nan,
    is_text_file,
    kind_in_words,
    name_of,
    read_records,
    text_of,
)
from onnxtrain.plugins.text.token_rows import LONGEST, RowExamples, TokenRow, TokenRows, learned_tokens, roles_of
from onnxtrain.plugins.text.tokenizer_files import LONGEST_ROW, ChatTokenizer

FORMS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "pairs": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "rewards": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "judged": (("prompt", "completion", "label"),),
    "embeddings": (("query", "positive"), ("anchor", "positive")),
    "ranking": (("query", "documents", "labels"), ("query", "positive", "negative")),
    "prompts": (("prompt",),),
}
"""Columns of each form of a row, by the kind of rows that a loss reads; the first form that fits."""

_OF_CHATS: Final = ("system", "tools", "chat_template_kwargs")
_MORE: Final = ("margin", *_OF_CHATS, "negative")

_BLOCK: Final = 128
"""Examples that are encoded at a time."""

_OWN_INPUTS: Final = ("labels", "chosen_labels", "last")
"""Inputs that losses add to those of the model."""


@checks_arguments
@dataclass(frozen=True)
class ComparisonData:
    """Rows of texts for losses that compare them, such as ``dpo``, ``reward`` or ``multiple_negatives``.

    The loss says which columns a row needs; texts may be plain or, of answers, lists of messages:

    - ``dpo``, ``ipo``, ``simpo``, ``cpo``, ``orpo``, ``reward``: ``chosen`` and ``rejected``, mostly with a
      ``prompt``; else the prompt is what both begin with. ``reward`` takes a ``margin``, too.
    - ``kto``: ``prompt``, ``completion`` and ``label``, true for a desirable completion.
    - ``multiple_negatives``: ``query`` (or ``anchor``), ``positive`` and perhaps ``negative``, a text or a list.
    - ``listnet``, ``ranknet``: ``query``, ``documents`` and ``labels``, for each document a number of at least 0 that
      is higher for a better one; or ``query``, ``positive`` and ``negative``. The model reads a query with a document.

    Args:
        source: As of :class:`ChatData`, but for ``.txt`` files.
        tokenizer: As of :class:`ChatData`.
        max_length: Tokens at which a row is cut; by default the model's length, else 1024 or the tokenizer's maximum.
            Pairs for ``reward`` with a longer row are left out, since their last token counts.
        chat_template: Path of a chat template in Jinja, instead of the tokenizer's.
        skip_broken: As of :class:`ChatData`.

    Raises:
        OptionError: A value is not accepted.
    """

    source: Any
    tokenizer: Any = None
    max_length: int | None = None
    chat_template: str | os.PathLike[str] | None = None
    skip_broken: bool = False

    def __post_init__(self) -> None:
        value = self.max_length
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 2):
            raise OptionError(f"max_length is {value!r}; it needs an integer of at least 2.")

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        return name_of(self.source)


class Group(NamedTuple):
    """An example before it is encoded.

    Attributes:
        label: The row in messages.
        rows: Its rows: texts for the chat template or plain, or texts and pairs of texts with special tokens.
        numbers: Its margin or label, or one label for each row.
    """

    label: str
    rows: Sequence[Row | Text]
    numbers: Sequence[float]


def read_groups(source: Any, kind: str) -> Iterator[Group | DataError]:
    """Read the examples of a source; an error for each that cannot be read."""
    forms = FORMS[kind]
    columns = (*dict.fromkeys(column for form in forms for column in form), *_MORE)
    for label, row in read_records(source, forms, columns):
        try:
            yield _group(row, label, forms, kind)
        except DataError as error:
            yield error


def _group(row: Any, label: str, forms: Sequence[Sequence[str]], kind: str) -> Group:
    if isinstance(row, DataError):
        raise row
    held = {name: value for name, value in row.items() if not is_nan(value)} if isinstance(row, Mapping) else {}
    form = next((form for form in forms if all(held.get(column) is not None for column in form)), None)
    if form is None:
        shown = ", ".join(repr(name) for name in list(held)[:8] if held[name] is not None)
        shown = f"holds {shown or 'nothing'}" if isinstance(row, Mapping) else f"is {kind_in_words(row)}"
        raise DataError(f"{label} {shown}; a row needs {forms_in_words(forms)}.")
    return _READERS[kind](held, label)


def _answers(row: Mapping[str, Any], label: str, names: Sequence[str]) -> list[Row]:
    """Return the rows of some answers to one prompt."""
    for name in names:
        if isinstance(row["prompt"], str) != isinstance(row[name], str):
            raise DataError(
                f"{name} of {label} is {kind_in_words(row[name])}, but its prompt is {kind_in_words(row['prompt'])}; "
                "both must be texts, or both lists of messages."
            )
        if isinstance(row[name], list | tuple | np.ndarray) and not len(row[name]):
            raise DataError(f"{name} of {label} is empty; it needs a list of messages with role and content.")
    more = {name: row[name] for name in _OF_CHATS if row.get(name) is not None}
    return [Row.of({"prompt": row["prompt"], "completion": row[name], **more}, f"{label} ({name})") for name in names]


def _pair(row: Mapping[str, Any], label: str) -> Group:
    if row.get("prompt") is None:
        lists = {name: row[name].tolist() for name in ("chosen", "rejected") if isinstance(row[name], np.ndarray)}
        row = {**row, **lists}
        size = _shared(row["chosen"], row["rejected"], label)
        row = {**row, "prompt": row["chosen"][:size]}
        row |= {name: row[name][size:] for name in ("chosen", "rejected")}
    return Group(label, _answers(row, label, ("chosen", "rejected")), [0.0])


def _whole_pair(row: Mapping[str, Any], label: str) -> Group:
    margin = row.get("margin")
    numbers = [0.0 if _is_empty(margin) else _number(margin, "margin", label)]
    if row.get("prompt") is not None:
        return Group(label, _answers(row, label, ("chosen", "rejected")), numbers)
    more = {name: row[name] for name in _OF_CHATS if row.get(name) is not None}
    rows = []
    for name in ("chosen", "rejected"):
        column = "text" if isinstance(row[name], str) else "messages"
        rows.append(Row.of({column: row[name], **more}, f"{label} ({name})"))
    return Group(label, rows, numbers)


def _shared(chosen: Any, rejected: Any, label: str) -> int:
    """Return how many messages, or characters, both answers begin with; a space belongs to the answer."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list | tuple):
        raise DataError(f"chosen and rejected of {label} must both be texts, or both lists of messages.")
    pairs = zip(chosen, rejected, strict=False)
    size = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and size and chosen[size - 1] == " ":
        size -= 1
    if not size:
        raise DataError(f"{label} has no prompt, and chosen and rejected begin differently; add the prompt.")
    return size


def _judged(row: Mapping[str, Any], label: str) -> Group:
    given = row["label"]
    if isinstance(given, str):
        given = {"true": 1, "1": 1, "false": 0, "0": 0}.get(given.strip().lower(), given)
    if not isinstance(given, bool | int | float | np.bool_ | np.number) or given not in (0, 1):
        raise DataError(f"label of {label} is {given!r}; it needs true for a desirable completion, else false.")
    return Group(label, _answers(row, label, ("completion",)), [float(given)])


def _query(row: Mapping[str, Any], label: str) -> Group:
    query = "query" if row.get("query") is not None else "anchor"
    negatives = [] if _is_empty(row.get("negative")) else _texts(row["negative"], "negative", label)
    return Group(label, [text_of(row, query, label), text_of(row, "positive", label), *negatives], [0.0])


def _ranked(row: Mapping[str, Any], label: str) -> Group:
    query = text_of(row, "query", label)
    if row.get("documents") is None:
        documents = [text_of(row, "positive", label), *_texts(row["negative"], "negative", label)]
        return Group(label, [(query, each) for each in documents], [1.0] + [0.0] * (len(documents) - 1))
    documents = _texts(row["documents"], "documents", label)
    given = row["labels"]
    labels = [
        _number(each, "a label", label) for each in (given if isinstance(given, list | tuple | np.ndarray) else ())
    ]
    if len(labels) != len(documents) or min(labels) < 0:
        raise DataError(
            f"labels of {label} must be a list of {plural(len(documents), 'number')} of at least 0, one for each "
            f"document, but got {given!r:.80}."
        )
    return Group(label, [(query, each) for each in documents], labels)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], Group]]] = {
    "pairs": _pair,
    "rewards": _whole_pair,
    "judged": _judged,
    "embeddings": _query,
    "ranking": _ranked,
}


def _is_empty(given: Any) -> bool:
    """Return whether an optional value is missing; a table has an empty cell then."""
    return given is None or (isinstance(given, str) and not given)


def _texts(given: Any, name: str, label: str) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple | np.ndarray) else []
    if not found or not all(isinstance(each, str) for each in found):
        raise DataError(f"{name} of {label} needs a text, or a list of texts.")
    return found


def _number(given: Any, name: str, label: str) -> float:
    try:
        found = float(given)
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not abs(found) <= np.finfo(np.float32).max:
        raise DataError(f"{name} of {label} is {given!r:.80}; it needs a number.")
    return found


class GroupTokens(TokenRows):
    """The tokens of all rows of all examples."""

    def __init__(self, data: ComparisonData, kind: str, tokenizer: ChatTokenizer, limit: int, paired: int = 0) -> None:
        super().__init__()
        self.kind, self.limit, self.paired = kind, limit, paired
        counts: list[int] = []
        numbers: list[float] = []
        queries: dict[str, int] = {}
        cut = same = 0
        groups, broken = read_groups(data.source, kind), Broken(skip=data.skip_broken)
        for block in in_blocks(groups, _BLOCK, _size_of_group):
            own = [group for group in block if not isinstance(group, DataError)]
            refused = Broken(skip=data.skip_broken)
            encoded = iter(self._encoded(tokenizer, [row for group in own for row in group.rows], refused))
            for group in block:
                self.read += 1
                if isinstance(group, DataError):
                    broken.add(group)
                    continue
                found = [next(encoded) for _ in group.rows]
                whole = [each for each in found if each is not None]
                if len(whole) < len(found):
                    broken.add(DataError(refused.first))
                    continue
                is_long = any(len(each.ids) > limit for each, _ in whole)
                cut += is_long
                rows = [self._cut(*row) for row in whole]
                if not self._usable(rows, is_long=is_long):
                    continue
                if kind == "embeddings" and counts and len(rows) != counts[0]:
                    raise DataError(
                        f"{group.label} has {len(rows) - 2} negatives, but the first row has {counts[0] - 2}; all rows "
                        "need the same number."
                    )
                same += kind in ("pairs", "rewards") and np.array_equal(rows[0][0], rows[1][0])
                for row in rows:
                    self.append(*row)
                counts.append(len(rows))
                self.kept.append(self.read - 1)
                given = group.numbers
                if kind == "embeddings":  # equal queries are not negatives of each other
                    given = [float(queries.setdefault(str(group.rows[0]), len(queries)))]
                numbers += given
        read = self.read
        if not counts:
            few = f"none of the {read:,} rows has an answer within {limit} tokens" if read else "there are no rows"
            if broken.count:
                few = f"{broken.count:,} of {read:,} rows cannot be read, for example: {broken.first.rstrip('.')}"
            raise DataError(f"{data.name} has nothing to learn: {few}.")
        if kind == "judged" and len(counts) < 2:
            raise DataError(f"{data.name} has one row, but kto compares each with another; it needs two at least.")
        self.finish()
        self._counts = np.asarray(counts)
        self._lasts = np.cumsum(self._counts)
        self.numbers: Array = np.asarray(numbers, np.float32)
        left_out = read - len(counts) - broken.count
        self.hints = (*broken.hints(data.name, read), *_hints(data.name, kind, read, cut, left_out, limit))
        if same:
            text = f"{same:,} of {read:,} rows have chosen and rejected answers of the same tokens; they teach nothing."
            self.hints += (f"{data.name}: {text}",)
        if kind == "ranking" and (single := counts.count(1)):
            self.hints += (f"{data.name}: {single:,} of {read:,} rows have one document, so that nothing is ranked.",)

    def _encoded(
        self, tokenizer: ChatTokenizer, rows: Sequence[Row | Text], broken: Broken
    ) -> list[tuple[Encoded, Array | None] | None]:
        """Return the tokens of rows, and whether each is learned; ``None`` for texts, of which all are.

        A row that is skipped is ``None`` itself.
        """
        prompts = [row for row in rows if isinstance(row, Row)]
        if prompts:
            answers = self.kind != "rewards"
            return [
                None if each is None else (each[0], learned_tokens(each[0].starts, each[0].ends, each[1]))
                for each in tokenizer.encode(prompts, answers=answers, broken=broken)
            ]
        texts = [row for row in rows if not isinstance(row, Row)]
        if (longest := max(map(_size, texts), default=0)) > LONGEST_ROW:
            raise DataError(f"a text has {longest:,} characters; it has at most {LONGEST_ROW:,}: divide it.")
        return [(each, None) for each in tokenizer.encoder.encode(texts)]

    def _cut(self, whole: Encoded, learned: Array | None) -> tuple[Array, Array, Array]:
        """Return the ids of a row within the limit, whether each is learned, and their types."""
        if learned is None:
            text = cut_text(whole, self.limit)
            return text.ids, np.ones(len(text.ids), bool), text.types
        return whole.ids[: self.limit], learned[: self.limit], whole.types[: self.limit]

    def _usable(self, rows: Sequence[tuple[Array, Array, Array]], *, is_long: bool) -> bool:
        """Return whether every row has something to learn."""
        if self.kind == "rewards":
            return not is_long and all(len(ids) for ids, _, _ in rows)
        if self.kind in ("pairs", "judged"):
            return all(learned[1:].any() for _, learned, _ in rows)  # no earlier token predicts the first
        return all(len(ids) for ids, _, _ in rows)

    def check_comparable(self, name: str) -> None:
        """Refuse rows that a loss cannot compare with anything; they can be predicted only."""
        if self.kind == "embeddings" and self._counts[0] == 2 and not self.numbers.any():
            raise DataError(
                f"{name} has one query, but multiple_negatives compares a query with the documents of others; it needs "
                "two queries at least, or a negative."
            )
        if self.kind == "ranking" and self._counts.max() == 1:
            raise DataError(f"{name} has one document in each row; listnet and ranknet rank two at least.")

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def lengths(self) -> Array:
        """Tokens of the longest row of each example."""
        return np.maximum.reduceat(self.sizes, self._lasts - self._counts)

    def rows_of(self, example: int) -> range:
        """Return the indices of the rows of an example."""
        return range(int(self._lasts[example] - self._counts[example]), int(self._lasts[example]))

    def rows(self, example: int) -> list[TokenRow]:
        """Return the rows of an example; of a judged answer, the prompt with another answer is the second."""
        found = [self.row(index) for index in self.rows_of(example)]
        if self.kind == "judged":
            (own,), other = found, self.row(self._before(example))
            parts = {
                name: np.concatenate([own[name][: _first(own)], other[name][_first(other) :]])[: self.limit]
                for name in own
            }
            found.append(parts)
        return found

    def _before(self, example: int) -> int:
        """Return the example before another one among those that are paired, the last one for the first."""
        size = self.paired if self.paired > 1 else len(self)
        start = example - example % size
        return example - 1 if example > start else min(start + size, len(self)) - 1

    def fingerprint(self, *more: Array) -> str:
        """Return an identifier of the content."""
        return super().fingerprint(self._counts, self.numbers)


def _size_of_group(group: Group | DataError) -> int:
    return 0 if isinstance(group, DataError) else sum(map(_size, group.rows))


def _size(row: Row | Text) -> int:
    """Return the characters of a row."""
    if isinstance(row, Row):
        return row.size
    return len(row) if isinstance(row, str) else sum(map(len, row))


def _first(row: Mapping[str, Array]) -> int:
    """Return where the answer begins."""
    return int(np.argmax(row["learned"]))


def _hints(name: str, kind: str, read: int, cut: int, left_out: int, limit: int) -> Iterator[str]:
    if cut and kind != "rewards":
        yield f"{name}: {cut:,} of {read:,} rows are longer than {limit} tokens and are cut (max_length=)."
    if left_out:
        reason = f"are longer than {limit} tokens (max_length=)" if kind == "rewards" else "have no answer to learn"
        yield f"{name}: {left_out:,} of {read:,} rows {reason} and are left out."


class Comparisons(ExampleSource):
    """`ComparisonData` for the rows that a loss reads."""

    def __init__(self, data: ComparisonData, kind: str, *, has_reference: bool) -> None:
        self.data, self.kind, self.has_reference = data, kind, has_reference
        self.reference: Array | None = None
        self.paired = 0
        self.name = data.name
        self._tokens: GroupTokens | None = None

    def with_reference(self, reference: Array) -> Self:
        """Return the same rows with the predictions of the reference [N, 2]."""
        found = copy.copy(self)
        found.reference = reference
        return found

    def examples(self, specs: Sequence[TensorSpec], *, need_target: bool = True) -> GroupExamples:
        """Return the rows as examples of a model; see `ExampleSource.examples`."""
        data = self.data
        if data.tokenizer is None:
            raise DataError(
                f"{self.name} holds texts; name the tokenizer of the model: onnxtrain.text.ComparisonData(path, "
                "tokenizer='tokenizer.json')."
            )
        if need_target and self.has_reference and self.reference is None:
            raise DataError(
                f"{self.name}: the loss compares with a reference, the model before its training, and a file has none; "
                "measure it while training, with validation data, or by trainer.evaluate(data)."
            )
        lengths = [spec.shape[2] for spec in specs if spec.shape is not None and len(spec.shape) == 3]
        fixed = next((size for size in lengths if isinstance(size, int)), None)
        if self._tokens is None:
            if fixed is not None and data.max_length is not None and data.max_length > fixed:
                raise OptionError(f"max_length is {data.max_length}, but the model takes {fixed} tokens.")
            tokenizer = ChatTokenizer.open(data.tokenizer, data.chat_template)
            limit = data.max_length or fixed or min(LONGEST, tokenizer.longest or LONGEST)
            self._tokens = GroupTokens(data, self.kind, tokenizer, limit, self.paired)
            self._padding = tokenizer.encoder.padding
        if need_target:
            self._tokens.check_comparable(self.name)
        roles = roles_of(specs, role_in_groups, inputs="the inputs")
        return GroupExamples(self._tokens, roles, fixed, self._padding, self.reference, need_target=need_target)


class GroupExamples(RowExamples):
    """Groups of rows of tokens as examples."""

    _tokens: GroupTokens

    def __init__(
        self,
        tokens: GroupTokens,
        roles: Mapping[str, str],
        length: int | None,
        padding: int,
        reference: Array | None,
        *,
        need_target: bool,
    ) -> None:
        super().__init__(tokens, roles, length, padding, need_target=need_target)
        self._reference, self.of_tokens = reference, False

    def batch(self, rows: Sequence[int]) -> object:
        """Return some examples as inputs by name, and targets."""
        groups = [self._tokens.rows(example) for example in rows]
        count = max(map(len, groups))
        # A missing document is a row of one token of padding.
        missing = {"ids": np.array([self._padding]), "types": np.zeros(1, int), "learned": np.zeros(1, bool)}
        flat = [row for group in groups for row in (*group, *[missing] * (count - len(group)))]
        length = self._length_of(flat)
        labels = self._array("labels", flat, length)
        whole = padded([row["ids"] for row in flat], length, IGNORED)
        inputs = {}
        for name, role in self._roles.items():
            if role == "chosen_labels":
                inputs[name] = whole[::count].astype(np.int64)
                continue
            if role == "last":
                array = np.array([len(row["ids"]) - 1 for row in flat])
            else:
                array = labels if role == "labels" else self._array(role, flat, length)
            inputs[name] = array.reshape(len(rows), count, *array.shape[1:])
        if not self._need_target:
            return inputs
        return inputs, self._targets(rows, labels, whole, count)

    def _targets(self, rows: Sequence[int], labels: Array, whole: Array, count: int) -> Array:
        """Return the targets of the loss: the reference's predictions, numbers of tokens, margins or labels."""
        tokens, index = self._tokens, np.asarray(rows)
        if tokens.kind == "ranking":
            found = np.full((len(rows), count), -1, np.float32)
            for values, example in zip(found, rows, strict=True):
                own = tokens.rows_of(example)
                values[: len(own)] = tokens.numbers[own.start : own.stop]
            return found
        numbers: Array = tokens.numbers[index]
        if tokens.kind == "embeddings":
            return numbers.astype(np.int64)
        if tokens.kind == "rewards":
            return numbers
        if self._reference is None:
            answers = (labels[:, 1:] != IGNORED).sum(1).reshape(len(rows), 2)
            chosen = (whole[::count, 1:] != IGNORED).sum(1)[:, None]
            needs_chosen = "chosen_labels" in self._roles.values()
            return np.concatenate([answers, chosen], axis=1).astype(np.float32)[:, : 2 + needs_chosen]
        reference: Array = self._reference[index]
        return np.concatenate([reference, numbers[:, None]], axis=1) if tokens.kind == "judged" else reference


def role_in_groups(spec: TensorSpec) -> str:
    """Return the array of a group that an input [N, k, T] takes."""
    own = spec.name.rstrip("_")
    if own in _OWN_INPUTS:
        return own
    shape = spec.shape
    if shape is None or len(shape) != 3:
        raise DataError(
            f"texts become integers [batch, rows, tokens], but the input '{spec.name}' is {spec.dtype} "
            f"{spec.describe_shape()}."
        )
    return token_role(TensorSpec(spec.name, spec.dtype, (shape[0], shape[2])))


def holds_comparisons(source: Any, kind: str) -> bool:
    """Return whether a source has rows of texts: a file by its ending, a dataset by the columns of a kind, a list."""
    if isinstance(source, list):
        first = source[0] if source else None
        return isinstance(first, Mapping) and not holds_arrays(first)
    columns = getattr(source, "column_names", None)
    known = {name for form in FORMS[kind] for name in form} - {"label", "labels"}  # those may be targets of arrays
    return is_text_file(source) or (isinstance(columns, list) and not known.isdisjoint(columns))
