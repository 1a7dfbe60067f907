"""Greedy generation with a language model that is in training: prompts as token ids, and the most probable answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.text_file import token_role
from onnxtrain.errors import DataError
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer, end_ids

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Returns results by name for inputs by name."""


class NextScores(Protocol):
    """Interface of models that continue a sequence."""

    length: int | None
    """Maximum number of tokens; ``None`` for no limit."""

    def begin(self) -> None:
        """Begin another sequence, perhaps with other weights."""

    def __call__(self, ids: Sequence[int]) -> Array:
        """Return the logits [vocabulary] after the last token."""


class WholeModel:
    """A model without KV cache, which reads the whole sequence for each token."""

    def __init__(self, specs: Sequence[TensorSpec], run: Run, scores: str) -> None:
        self._specs, self._roles, self._run, self._scores = specs, _roles(specs), run, scores
        fixed = [spec.shape[1] for spec in specs if spec.shape is not None and isinstance(spec.shape[1], int)]
        self.length: int | None = fixed[0] if fixed else None

    def begin(self) -> None:
        """Do nothing: each call reads the whole sequence."""

    def __call__(self, ids: Sequence[int]) -> Array:
        """Return the logits [vocabulary] after the last token."""
        size, padding = len(ids), (self.length or len(ids)) - len(ids)
        arrays = {
            "ids": np.pad(np.asarray(ids, np.int64), (0, padding)),
            "mask": np.pad(np.ones(size, np.int64), (0, padding)),
            "types": np.zeros(size + padding, np.int64),
            "positions": np.arange(size + padding),
        }
        feeds = {spec.name: arrays[self._roles[spec.name]][None].astype(spec.dtype) for spec in self._specs}
        return np.asarray(self._run(feeds)[self._scores][0, size - 1])


class CachedModel:
    """A model with a KV cache, which reads each token once."""

    length: int | None = None

    def __init__(
        self, specs: Sequence[TensorSpec], run: Run, scores: str, caches: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        self._specs = [spec for spec in specs if spec.name not in caches]
        self._roles, self._run, self._scores, self._caches = _roles(self._specs), run, scores, caches
        self._empty = {spec.name: _empty_cache(spec, sizes[spec.name]) for spec in specs if spec.name in caches}
        self.begin()

    def begin(self) -> None:
        """Empty the cache."""
        self._read, self._filled = 0, self._empty

    def __call__(self, ids: Sequence[int]) -> Array:
        """Return the logits [vocabulary] after the last token; the tokens before those of the last call are known."""
        old, new = self._read, len(ids) - self._read
        arrays = {
            "ids": np.asarray(ids[old:], np.int64),
            "mask": np.ones(len(ids), np.int64),
            "types": np.zeros(new, np.int64),
            "positions": np.arange(old, len(ids)),
        }
        feeds = {spec.name: arrays[self._roles[spec.name]][None].astype(spec.dtype) for spec in self._specs}
        found = self._run({**feeds, **self._filled})
        self._read, self._filled = len(ids), {name: found[output] for name, output in self._caches.items()}
        return np.asarray(found[self._scores][0, -1])


def _roles(specs: Sequence[TensorSpec]) -> dict[str, str]:
    roles = {spec.name: token_role(spec) for spec in specs}
    if list(roles.values()).count("ids") != 1:
        shown = ", ".join(f"'{spec.name}'" for spec in specs)
        raise DataError(f"samples of text need one model input for token ids, but the model's inputs are {shown}.")
    return roles


def _empty_cache(spec: TensorSpec, size: int) -> Array:
    heads = (spec.shape or ())[1]
    assert isinstance(heads, int)
    return np.zeros([1, heads, 0, size], spec.dtype)


class TextGenerator:
    """Continues prompts greedily: each token is the most probable one after those before it."""

    def __init__(self, model: NextScores, tokenizer: Any, chat_template: Any = None) -> None:
        self._model, self._tokenizer = model, ChatTokenizer.open(tokenizer, chat_template)
        names = filter(None, (self._tokenizer.tokens.get("eos_token"), "<|im_end|>", "<|eot_id|>", "<end_of_turn>"))
        found = {self._tokenizer.encoder.id_of(name) for name in names}
        folder = Path(tokenizer) if isinstance(tokenizer, str | Path) else None
        self._ends = {one for one in found if one is not None} | (set() if folder is None else end_ids(folder))

    def answer(self, prompt: str, tokens: int) -> str:
        """Return the text that follows a prompt, which is a message of the user where there is a chat template."""
        ids = self._tokenizer.prompt(prompt)
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens.")
        self._model.begin()
        return self._tokenizer.encoder.decode(continued(ids, self._model, tokens, self._ends, self._model.length))


def continued(
    ids: Sequence[int], last: Callable[[Sequence[int]], Array], tokens: int, ends: Collection[int], longest: int | None
) -> list[int]:
    """Return the tokens that follow others greedily."""
    known = list(ids)
    while len(known) < len(ids) + tokens and (longest is None or len(known) < longest):
        token = int(np.argmax(last(known)))
        if token in ends:
            break
        known.append(token)
    return known[len(ids) :]
