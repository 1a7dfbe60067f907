"""Greedy generation with a language model that is in training: prompts as token ids, and the most probable answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.text_file import token_role
from onnxtrain.errors import DataError
from onnxtrain.text.tokenizer_files import ChatTokenizer, end_ids

Scores = Callable[[dict[str, Array]], Array]
"""Returns the logits [1, tokens, vocabulary] for inputs by name."""


class TextGenerator:
    """Continues prompts greedily: each token is the most probable one after those before it.

    The model reads the whole sequence for each token, since training has no KV cache.

    Args:
        specs: The inputs of the model.
        tokenizer: A folder with ``tokenizer.json``, that file, or a tokenizer, see :class:`onnxtrain.text.ChatData`.
        chat_template: Another chat template.

    Raises:
        DataError: The inputs are not those of a language model, or the tokenizer cannot be read.
    """

    def __init__(self, specs: Sequence[TensorSpec], tokenizer: Any, chat_template: Any = None) -> None:
        self._specs, self._roles = specs, {spec.name: token_role(spec) for spec in specs}
        if list(self._roles.values()).count("ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"samples of text need one model input for token ids, but the model's inputs are {shown}.")
        self._tokenizer = ChatTokenizer.open(tokenizer, chat_template)
        names = filter(None, (self._tokenizer.tokens.get("eos_token"), "<|im_end|>", "<|eot_id|>", "<end_of_turn>"))
        found = {self._tokenizer.encoder.id_of(name) for name in names}
        folder = Path(tokenizer) if isinstance(tokenizer, str | Path) else None
        self._ends = {one for one in found if one is not None} | (set() if folder is None else end_ids(folder))
        fixed = [spec.shape[1] for spec in specs if spec.shape is not None and isinstance(spec.shape[1], int)]
        self._length = fixed[0] if fixed else None

    def answer(self, prompt: str, scores: Scores, tokens: int) -> str:
        """Return the text that follows a prompt, which is a message of the user where there is a chat template."""
        ids = self._tokenizer.prompt(prompt)
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens.")
        made = continued(ids, lambda known: self._last(known, scores), tokens, self._ends, self._length)
        return self._tokenizer.encoder.decode(made)

    def _last(self, ids: Sequence[int], scores: Scores) -> Array:
        """Return the logits [vocabulary] after the last token."""
        size = len(ids)
        length = self._length or size
        arrays: Mapping[str, Array] = {
            "ids": np.pad(np.asarray(ids, np.int64), (0, length - size)),
            "mask": np.pad(np.ones(size, np.int64), (0, length - size)),
            "types": np.zeros(length, np.int64),
            "positions": np.arange(length),
        }
        found = scores({spec.name: arrays[self._roles[spec.name]][None].astype(spec.dtype) for spec in self._specs})
        return np.asarray(found[0, size - 1])


def continued(
    ids: Sequence[int], last: Callable[[Sequence[int]], Array], tokens: int, ends: Collection[int], longest: int | None
) -> list[int]:
    """Return the tokens that follow others greedily.

    Args:
        ids: The tokens before.
        last: Returns the logits [vocabulary] after some tokens.
        tokens: Maximum number of tokens to add.
        ends: Tokens that end the text, which are not returned.
        longest: Maximum length with the tokens before; ``None`` for no limit.
    """
    known = list(ids)
    while len(known) < len(ids) + tokens and (longest is None or len(known) < longest):
        token = int(np.argmax(last(known)))
        if token in ends:
            break
        known.append(token)
    return known[len(ids) :]
