"""Generate tokens with the current weights of a trainer, in batches, greedy or sampled, with the KV cache of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.editing.working_copy.kv_cache import cache_outputs, head_size
from onnxtrain.editing.working_copy.training_modes import Modes
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses.cross_entropy import NextToken
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.plugins.text.token_rows import roles_of
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer, end_ids
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.prepare import prepare
from onnxtrain.training.trained_model import TrainedModel

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Returns results by name for inputs by name."""

_ROWS = 64
"""Most sequences that are continued at a time."""


class NextScores:
    """A model that continues sequences: with a KV cache it reads each token once, else whole sequences each time.

    Attributes:
        length: Maximum number of tokens; ``None`` for no limit.
        rows: Number of sequences of a batch where the model fixes it; ``None`` for any.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], run: Run, scores: str, caches: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        self._run, self._scores, self._caches, self._sizes = run, scores, caches, sizes
        self._specs = [spec for spec in specs if spec.name not in caches]
        self._cached = [spec for spec in specs if spec.name in caches]
        self._roles = roles_of(self._specs, need="samples of text need")
        fixed = [spec.shape[1] for spec in self._specs if spec.shape is not None and isinstance(spec.shape[1], int)]
        self.length: int | None = fixed[0] if fixed and not caches else None
        given = [spec.shape[0] for spec in specs if spec.shape is not None and isinstance(spec.shape[0], int)]
        self.rows: int | None = given[0] if given else None
        self.begin()

    def check(self, prompt: Sequence[int], label: str) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        if self.length is not None and len(prompt) >= self.length:
            raise DataError(
                f"{label} has {len(prompt)} tokens, but the model takes {self.length} with the answer; shorten it."
            )

    def begin(self) -> None:
        """Begin other sequences, perhaps with other weights."""
        self._read = 0
        self._filled: dict[str, Array] = {}

    def keep(self, rows: Array) -> None:
        """Go on with some of the sequences."""
        self._filled = {name: np.asarray(array)[rows] for name, array in self._filled.items()}

    def __call__(self, ids: Sequence[int] | Array) -> Array:
        """Return the logits after the last token, [vocabulary], for sequences [N, T] [N, vocabulary].

        A cache has the tokens of the last call.
        """
        given = np.asarray(ids, np.int64)
        rows = np.atleast_2d(given)
        count, tokens = rows.shape
        old, padding = self._read, (self.length or tokens) - tokens
        ones, more = np.ones((count, 1), np.int64), ((0, 0), (0, padding))
        arrays = {
            "ids": np.pad(rows[:, old:], more),
            "mask": np.pad(ones.repeat(tokens, 1), more),
            "types": np.zeros((count, tokens - old + padding), np.int64),
            "positions": ones * np.arange(old, tokens + padding),
        }
        feeds = {spec.name: arrays[self._roles[spec.name]].astype(spec.dtype) for spec in self._specs}
        filled = self._filled or {spec.name: _empty(spec, count, self._sizes[spec.name]) for spec in self._cached}
        found = self._run({**feeds, **filled})
        if self._caches:
            self._read, self._filled = tokens, {name: found[output] for name, output in self._caches.items()}
        scores = np.asarray(found[self._scores][:, -1 - padding])
        return scores[0] if given.ndim == 1 else scores


def _empty(spec: TensorSpec, rows: int, size: int) -> Array:
    heads = (spec.shape or ())[1]
    assert isinstance(heads, int)
    return np.zeros([rows, heads, 0, size], spec.dtype)


def next_scores(trainer: TrainedModel) -> NextScores:
    """Return a model that continues sequences with the current weights of a trainer.

    Raises:
        OptionError: The model predicts no tokens.
    """
    config, objective, states = trainer.config, trainer.objective, trainer.executor.states
    if isinstance(objective.loss, GroupLoss):  # an example is several rows, a sample is one
        if objective.loss.texts not in ("pairs", "judged", "prompts"):
            raise OptionError(
                f"Samples of text need a model that predicts tokens, but the loss {objective.loss.name} trains scores "
                "or embeddings; leave samples out."
            ).about("samples", got=objective.loss.name)
        config = dataclasses.replace(config, loss=NextToken())
    copies, table = objective.copies, objective.table
    caches = cache_outputs(config.model.training_model().graph)
    if caches:
        cached = prepare(config, modes=Modes(), copies=copies, table=table, caches=True)
        sizes = {name: size for name in caches if (size := head_size(cached.model.graph, name)) is not None}
    if caches and sizes.keys() == caches.keys():
        objective = cached
    else:
        objective, caches, sizes = prepare(config, modes=Modes(), copies=copies, table=table), {}, {}
    scores = str(objective.prediction.name)
    run = Evaluator(objective, states, config.runtime).runner([scores, *caches.values()])
    return NextScores(objective.inputs, run, scores, caches, sizes)


def end_tokens(words: ChatTokenizer, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer, by a tokenizer, its template's usual names, and the files of a folder."""
    names = filter(None, (words.tokens.get("eos_token"), "<|im_end|>", "<|eot_id|>", "<end_of_turn>"))
    found = {words.encoder.id_of(name) for name in names}
    of_folder = end_ids(Path(tokenizer)) if isinstance(tokenizer, str | Path) else set()
    return {one for one in found if one is not None} | of_folder


def generate(
    model: NextScores,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Collection[int] = (),
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: np.random.Generator | int = 0,
) -> list[list[int]]:
    """Continue sequences of tokens, in the order of the prompts.

    Args:
        model: The model, from :func:`next_scores`.
        prompts: The token ids of each prompt, at least one.
        tokens: Maximum tokens of an answer.
        ends: Tokens that end an answer; it has the one that ended it.
        temperature: 0 for the most probable token at each position, else what logits are divided by before a sample.
        top_k: How many of the most probable tokens are sampled from; 0 for all.
        seed: Of the samples, or a generator that goes on.
    """
    random = np.random.default_rng(seed)
    found: list[list[int]] = [[] for _ in prompts]
    for part in of_one_length(prompts, model.rows or _ROWS):
        rows, ids = np.asarray(part), np.asarray([prompts[row] for row in part], np.int64)
        model.begin()
        if model.rows is not None:  # the model fixes the size of a batch
            ids = np.pad(ids, ((0, model.rows - len(ids)), (0, 0)), mode="edge")
        alive = np.arange(len(rows))
        for _ in range(tokens):
            if not len(alive) or (model.length is not None and ids.shape[1] >= model.length):
                break
            chosen = _chosen(model(ids), temperature, top_k, random)
            ids = np.concatenate([ids, chosen[:, None]], 1)
            for place in alive:
                found[rows[place]].append(int(chosen[place]))
            going = np.array([place for place in alive if int(chosen[place]) not in ends], int)
            if model.rows is None and len(going) < len(alive):
                ids, rows = ids[going], rows[going]
                model.keep(going)
                going = np.arange(len(going))
            alive = going
    return found


def of_one_length(prompts: Sequence[Sequence[int]], most: int = _ROWS) -> Iterator[list[int]]:
    """Yield the numbers of prompts of one length, in batches: these need no padding, which a cache would keep."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    for numbers in by_length.values():
        yield from (numbers[start : start + most] for start in range(0, len(numbers), most))


def _chosen(scores: Array, temperature: float, top_k: int, random: np.random.Generator) -> Array:
    """Return the next token of each row [N]: the most probable, or a sample."""
    if not temperature:
        return np.asarray(scores.argmax(1))
    logits = scores.astype(np.float64) / temperature
    if 0 < top_k < logits.shape[1]:
        least = np.partition(logits, -top_k, axis=1)[:, -top_k, None]
        logits = np.where(logits < least, -np.inf, logits)
    return np.asarray((logits + random.gumbel(size=logits.shape)).argmax(1))  # a sample of the softmax
