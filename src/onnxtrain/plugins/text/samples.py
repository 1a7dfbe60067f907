"""Samples of the text that a language model writes while it is trained: greedy, with the KV cache of the file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.plugins.text.generation import NextScores, end_tokens, next_scores
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.trained_model import TrainedModel


class TextGenerator:
    """Continues prompts greedily: each token is the most probable one after those before it."""

    def __init__(self, model: NextScores, tokenizer: Any, chat_template: Any = None) -> None:
        self._model, self._tokenizer = model, ChatTokenizer.open(tokenizer, chat_template)
        self._ends = end_tokens(self._tokenizer, tokenizer)

    def answer(self, prompt: str, tokens: int) -> str:
        """Return the text that follows a prompt, which is a message of the user where there is a chat template."""
        ids = self.tokens_of(prompt)
        self._model.begin()
        return self._tokenizer.encoder.decode(continued(ids, self._model, tokens, self._ends, self._model.length))

    def tokens_of(self, prompt: str) -> list[int]:
        """Return the tokens that an answer follows; refuse a prompt that has none, or too many."""
        ids = self._tokenizer.prompt(prompt)
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens.")
        self._model.check(ids, f"the prompt {prompt!r:.80}")
        return ids


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


def text_generator(trainer: TrainedModel, tokenizer: Any = None, chat_template: Any = None) -> TextGenerator:
    """Return a generator that continues prompts with the current weights of a trainer."""
    tokenizer = trainer.data_adapter.folder if tokenizer is None else tokenizer
    if tokenizer is None:
        raise OptionError("The model is in memory, so that its tokenizer is unknown; give tokenizer=.")
    return TextGenerator(next_scores(trainer), tokenizer, chat_template)


@checks_arguments
class Samples(Callback):
    """Shows what the model answers to prompts, every some steps and after the training.

    An answer has the most probable token at each position. Where the tokenizer has a chat template, the prompt is a
    message of the user. Samples change nothing in the training.

    Args:
        prompts: A prompt, or several.
        every: Steps between samples; by default an epoch.
        tokens: Maximum tokens of an answer.
        tokenizer: As in :class:`onnxtrain.text.ChatData`; by default the one in the folder of the model.
        chat_template: Path of another chat template.
        show: Receives each line; by default it is printed to standard error.

    Attributes:
        rows: The samples so far: ``step``, ``prompt`` and ``answer``.

    Raises:
        OptionError: An argument is not accepted.
    """

    writes_only = True

    def __init__(
        self,
        prompts: str | Sequence[str],
        *,
        every: int | None = None,
        tokens: int = 64,
        tokenizer: Any = None,
        chat_template: Any = None,
        show: Callable[[str], object] | None = None,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self.prompts or not all(isinstance(prompt, str) and prompt for prompt in self.prompts):
            raise OptionError(f"prompts of Samples is {prompts!r}; it needs a text, or several.")
        for name, value in (("every", every), ("tokens", tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} of Samples is {value!r}; it needs an integer of at least 1.")
        self.every, self.tokens = every, tokens
        self.rows: list[dict[str, Any]] = []
        self._tokenizer, self._template, self._show = tokenizer, chat_template, show or _print
        self._generator: TextGenerator | None = None

    def on_fit_begin(self, state: TrainingState) -> None:
        """Open the tokenizer.

        Raises:
            DataError: It cannot be read, the model is no language model, or a prompt is too long for it.
            OptionError: The model has no folder, and no tokenizer is given.
        """
        self._generator = text_generator(state.trainer, self._tokenizer, self._template)
        for prompt in self.prompts:
            self._generator.tokens_of(prompt)

    def on_step_end(self, state: TrainingState) -> None:
        """Show samples, where it is time."""
        if self.every is not None and state.step % self.every == 0:
            self._sample(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Show samples of the epoch."""
        if self.every is None:
            self._sample(state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Show the last samples, where the last step had none."""
        if self.every is not None and state.step and (not self.rows or self.rows[-1]["step"] != state.step):
            self._sample(state)

    def _sample(self, state: TrainingState) -> None:
        assert self._generator is not None
        for prompt in self.prompts:
            answer = self._generator.answer(prompt, self.tokens)
            self.rows.append({"step": state.step, "prompt": prompt, "answer": answer})
            self._show(f"step {state.step}: {_line(prompt)} -> {_line(answer)}")


def _line(text: str) -> str:
    """Return a text in one line, without characters that control a terminal."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
