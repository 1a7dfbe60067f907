"""Reinforcement of language models (GRPO): sample answers, reward them, make the better ones more likely."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.text_file import padded
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.groups import IGNORED
from onnxtrain.plugins.text.answers import distinct
from onnxtrain.plugins.text.comparison_data import role_in_groups
from onnxtrain.plugins.text.generation import end_tokens, generate, next_scores, of_one_length
from onnxtrain.plugins.text.policy_loss import GRPO
from onnxtrain.plugins.text.reading import reference
from onnxtrain.plugins.text.rows import kind_in_words, read_records
from onnxtrain.plugins.text.token_rows import roles_of
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from onnxtrain.training.trainer import Trainer

_CURRENT = 1.0
"""Log-probability, above all others, that stands for the one of the step itself."""

_SMALLEST_DEVIATION = 1e-4
"""Added to the deviation of the rewards of a group, as in TRL."""


RewardFunction = Callable[..., Sequence[float | None]]
"""Returns a reward for each completion: ``f(prompts, completions, **columns)``; ``None`` where it has no opinion."""


@dataclass(frozen=True)
class Answers:
    """Sampled answers: tokens of each prompt and of each answer, which has its end token.

    Attributes:
        prompts: Token ids of the prompt of each answer.
        completions: Token ids of each answer.
        advantages: Advantage of each answer [N].
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    advantages: Array

    def arrays(self, specs: Sequence[TensorSpec], padding: int) -> tuple[dict[str, Array], Array]:
        """Return the inputs of a model in groups of one row, and the targets of the loss, with p as p_old."""
        rows = [np.asarray([*prompt, *answer]) for prompt, answer in zip(self.prompts, self.completions, strict=True)]
        labels = [
            np.asarray([*[IGNORED] * len(prompt), *answer])
            for prompt, answer in zip(self.prompts, self.completions, strict=True)
        ]
        roles = roles_of(specs, role_in_groups)
        fixed = [spec.shape[2] for spec in specs if spec.shape is not None and len(spec.shape) == 3]
        length = next((size for size in fixed if isinstance(size, int)), max(map(len, rows)))
        arrays = {
            "ids": padded(rows, length, padding),
            "mask": padded([np.ones(len(row)) for row in rows], length, 0),
            "types": np.zeros((len(rows), length), np.int64),
            "positions": np.tile(np.arange(length), (len(rows), 1)),
            "labels": padded(labels, length, IGNORED),
        }
        inputs = {spec.name: arrays[roles[spec.name]][:, None].astype(spec.dtype) for spec in specs}
        targets = np.zeros((len(rows), 4, length), np.float32)
        targets[:, 0, :-1] = arrays["labels"][:, 1:] != IGNORED
        targets[:, 1] = self.advantages[:, None] * targets[:, 0]
        targets[:, 2] = _CURRENT
        return inputs, targets


def advantages_of(rewards: Array) -> Array:
    """Return the advantages of rewards [groups, answers]: less the mean of the group, over its deviation, as in TRL."""
    middle, deviation = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
    found: Array = (rewards - middle) / (deviation + _SMALLEST_DEVIATION)
    return found


@checks_arguments
def grpo(
    trainer: Trainer,
    dataset: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    max_steps: int,
    batch_size: int = 4,
    num_generations: int = 8,
    num_iterations: int = 1,
    max_completion_length: int = 256,
    top_k: int = 0,
    reward_weights: Sequence[float] | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    use_genai: bool | None = None,
    on_step: Callable[[dict[str, float]], object] | None = None,
) -> list[dict[str, float]]:
    """Train a language model by reinforcement (GRPO): sample answers, and make those with better rewards more likely.

    A step takes ``batch_size`` prompts, samples ``num_generations`` answers to each, and updates the weights of a
    trainer with the loss ``grpo``, whose ``temperature`` is that of the samples, and whose ``beta`` ties the model to
    the one before the training, which is that without the new adapters. Names are TRL's.

    Args:
        trainer: A trainer with ``loss="grpo"``.
        dataset: Prompts: a list of texts, or rows with a column ``prompt`` in any form that fine-tuning takes. A prompt
            is a text, or a list of messages for the chat template.
        reward_funcs: A function, or several, of ``(prompts, completions, **columns)``, which returns a number for each
            completion, or ``None`` for no opinion. Rewards of several are added. Completions of messages are lists of
            one message. ``columns`` are the other columns of the rows, and ``completion_ids``.
        max_steps: Number of steps. Prompts come in random order, and again when all have been used.
        batch_size: Prompts of a step.
        num_generations: Answers to each prompt, at least 2.
        num_iterations: Updates from the same answers.
        max_completion_length: Maximum tokens of an answer.
        top_k: How many of the most probable tokens are sampled from; 0 for all.
        reward_weights: Factors of the reward functions, by default 1.
        tokenizer: As in :class:`onnxtrain.text.ChatData`; by default the one in the folder of the model.
        seed: Of the order of prompts and of the samples.
        use_genai: Whether onnxruntime-genai samples, which needs adapters beside a model of its builder; by default
            where that is so and it is installed. Else the answers are sampled with the KV cache of the file, or without
            one by whole sequences.
        on_step: Receives the figures of each step when it has ended.

    Returns:
        The figures of each step: ``step``, ``loss``, ``reward``, ``reward_std`` (the mean deviation in a group),
        ``completions/mean_length``, ``rewards/NAME/mean`` for several functions, and with ``beta`` ``kl``.

    Raises:
        OptionError: An argument is not accepted.
        DataError: Prompts cannot be read, or a reward is no number.

    Example:
        >>> def brevity(prompts, completions, **columns):
        ...     return [-len(text) for text in completions]
        >>> trainer = onnxtrain.Trainer("folder", loss="grpo", lora=onnxtrain.Lora())  # doctest: +SKIP
        >>> onnxtrain.text.grpo(trainer, ["What is two and two?"], brevity, max_steps=10)  # doctest: +SKIP
    """
    loss = trainer.objective.loss
    if not isinstance(loss, GRPO):
        raise OptionError(
            f'grpo trains a trainer with the loss {getattr(loss, "name", loss)}; give Trainer(..., loss="grpo").'
        )
    if trainer.config.parallel is not None and trainer.config.parallel.size > 1:
        raise OptionError(
            f"grpo samples and trains in one process, but {trainer.config.parallel.size} train together; leave "
            "distributed out."
        )
    whole = {"max_steps": (max_steps, 1), "batch_size": (batch_size, 1), "num_generations": (num_generations, 2)}
    whole |= {"num_iterations": (num_iterations, 1), "max_completion_length": (max_completion_length, 1)}
    for name, (value, least) in (whole | {"top_k": (top_k, 0)}).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name} is {value!r}; it needs an integer of at least {least}.")
    rewarding = _Rewards(reward_funcs, reward_weights)
    given = trainer.data_adapter.folder if tokenizer is None else tokenizer
    if given is None:
        raise OptionError("The model is in memory, so that its tokenizer is unknown; give tokenizer=.")
    words = ChatTokenizer.open(given)
    prompts = _read(dataset, words)
    random = np.random.default_rng(seed)
    ends = end_tokens(words, given)
    sample = _sampler(trainer, prompts, ends, max_completion_length, loss.temperature, top_k, random, use_genai)
    before = reference(trainer.config) if loss.beta else None
    order = _order(len(prompts), random)
    figures = []
    for step in range(1, max_steps + 1):
        chosen = [prompts[number] for number in itertools.islice(order, batch_size)]
        groups = [each for each in chosen for _ in range(num_generations)]
        completions = sample([each.ids for each in groups])
        texts = [words.encoder.decode(ids[:-1] if ids and ids[-1] in ends else ids) for ids in completions]
        rewards, means = rewarding(groups, completions, texts)
        by_group = rewards.reshape(batch_size, num_generations)
        answers = Answers([each.ids for each in groups], completions, advantages_of(by_group).reshape(-1))
        inputs, targets = answers.arrays(trainer.objective.inputs, words.encoder.padding)
        found = {"step": float(step), "reward": float(rewards.mean())}
        found |= {"reward_std": float(by_group.std(1, ddof=1).mean()), **means}
        found["completions/mean_length"] = float(np.mean([len(each) for each in completions]))
        part = max(1, len(groups) // trainer.config.accumulate)
        if num_iterations > 1 or before is not None:
            targets[:, 2] = trainer.predict(inputs, batch_size=part)
        if before is not None:
            (targets[:, 3],) = before(inputs, part).values()
            difference = (targets[:, 3] - targets[:, 2]).astype(np.float64)
            terms = (np.exp(difference) - difference - 1) * targets[:, 0]
            found["kl"] = float(terms.sum() / targets[:, 0].sum())
        losses = [trainer.train_step(inputs, targets) for _ in range(num_iterations)]
        figures.append({**found, "loss": losses[0]})
        if on_step is not None:
            on_step(figures[-1])
    return figures


@dataclass(frozen=True)
class _Prompt:
    """A prompt as its row has it, its token ids, and the other columns of the row."""

    given: Any
    ids: list[int]
    columns: Mapping[str, Any]


def _read(dataset: Any, words: ChatTokenizer) -> list[_Prompt]:
    """Read and encode prompts."""
    listed: Iterable[tuple[str, Any]]
    if isinstance(dataset, list | tuple):
        listed = ((f"row {number}", row) for number, row in enumerate(dataset))
    else:
        listed = read_records(dataset, (("prompt",),), None)
    found = []
    for label, row in listed:
        if isinstance(row, DataError):
            raise row
        columns = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(columns, Mapping) or not isinstance(columns.get("prompt"), str | list | tuple | np.ndarray):
            shown = kind_in_words(row)
            if isinstance(columns, Mapping):
                shown = f"a row with {', '.join(map(repr, list(columns)[:8]))}"
            raise DataError(f"{label} of the prompts is {shown}; it needs a text, or a column prompt.").about(label)
        given = columns["prompt"]
        given = given if isinstance(given, str) else list(given)
        ids = words.asking(given, label)
        if not ids:
            raise DataError(f"{label} of the prompts has no tokens.").about(label)
        found.append(_Prompt(given, ids, {name: value for name, value in columns.items() if name != "prompt"}))
    if not found:
        raise DataError("There are no prompts; give a list of texts, or rows with a column prompt.")
    return found


def _order(count: int, random: np.random.Generator) -> Iterator[int]:
    """Yield the numbers of prompts in random order, again and again."""
    while True:
        yield from random.permutation(count).tolist()


class _Rewards:
    """Reward functions with their weights."""

    def __init__(self, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None) -> None:
        self._functions = [functions] if callable(functions) else list(functions)
        if not self._functions or not all(map(callable, self._functions)):
            raise OptionError(
                f"reward_funcs is {functions!r:.80}; it needs a function of (prompts, completions, **columns), or "
                "several."
            )
        self._weights = [1.0] * len(self._functions) if weights is None else list(weights)
        if len(self._weights) != len(self._functions) or not np.isfinite(self._weights).all():
            raise OptionError(
                f"reward_weights is {weights!r:.80}; it needs a finite number for each of the "
                f"{len(self._functions)} reward functions."
            )
        self._names = distinct([getattr(each, "__name__", type(each).__name__) for each in self._functions])

    def __call__(
        self, prompts: Sequence[_Prompt], completions: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> tuple[Array, dict[str, float]]:
        """Return the reward of each completion [N], and the mean of each function where there are several."""
        answers = [
            text if isinstance(prompt.given, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        total, means = np.zeros(len(prompts)), {}
        for name, function, weight in zip(self._names, self._functions, self._weights, strict=True):
            given = function(
                prompts=[prompt.given for prompt in prompts],
                completions=answers,
                completion_ids=[list(ids) for ids in completions],
                **columns,
            )
            values = _numbers(name, given, len(prompts))
            means[f"rewards/{name}/mean"] = float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")
            total += weight * np.nan_to_num(values, nan=0.0)
        return total, means if len(self._functions) > 1 else {}


def _numbers(name: str, given: Any, count: int) -> Array:
    """Return the rewards of a function, NaN where it has no opinion."""
    try:
        given = list(given)
        values = [float("nan") if each is None else float(each) for each in given]
    except (TypeError, ValueError) as error:
        raise DataError(f"The reward function {name} returned {given!r:.80}; it needs a list of numbers.") from error
    pairs = zip(given, values, strict=True)
    if wrong := [each for each, number in pairs if each is not None and not np.isfinite(number)]:
        raise DataError(f"The reward function {name} returned {wrong[0]!r}; a reward is a finite number, or None.")
    if len(values) != count:
        raise DataError(f"The reward function {name} returned {len(values)} rewards for {count} completions.")
    return np.asarray(values)


Sampler = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Returns an answer to each prompt."""


def _sampler(
    trainer: Trainer,
    prompts: Sequence[_Prompt],
    ends: set[int],
    tokens: int,
    temperature: float,
    top_k: int,
    random: np.random.Generator,
    use_genai: bool | None,
) -> Sampler:
    """Return what samples answers with the current weights."""
    folder = trainer.data_adapter.folder
    fits = folder is not None and (Path(folder) / "genai_config.json").is_file() and trainer.config.lora is not None
    installed = importlib.util.find_spec("onnxruntime_genai") is not None
    if use_genai and not (fits and installed):
        reason = "it is not installed" if fits else "it needs adapters (lora=) beside a folder of its builder"
        raise OptionError(f"use_genai is True, but onnxruntime-genai cannot sample here: {reason}; leave it out.")
    if folder is not None and fits and installed and use_genai is not False:
        search = {"temperature": float(temperature), "top_k": top_k, "top_p": 1.0}
        return _OfGenai(trainer, Path(folder), ends, tokens, search, random)
    model = next_scores(trainer)
    for number, prompt in enumerate(prompts):
        model.check(prompt.ids, f"row {number} of the prompts")

    def sample(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return generate(model, prompts, tokens, ends, temperature=temperature, top_k=top_k, seed=random)

    return sample


_PLAIN = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1}
"""Settings of a folder of onnxruntime-genai that would sample from another distribution than the policy's."""


class _OfGenai:
    """Samples by onnxruntime-genai: a copy of the folder with slots, into which the current adapter is loaded."""

    def __init__(
        self, trainer: Trainer, folder: Path, ends: set[int], tokens: int, search: Mapping[str, Any], random: Any
    ) -> None:
        import onnxruntime_genai as genai

        from onnxtrain.adapters import add_slots

        self._trainer, self._ends, self._tokens, self._search, self._random = trainer, ends, tokens, search, random
        self._place = tempfile.TemporaryDirectory(prefix="onnxtrain-grpo-")
        copy = Path(self._place.name)
        for file in folder.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja"):
                shutil.copy(file, copy / file.name)
        self._adapter = copy / "current.onnx_adapter"
        trainer.save(self._adapter)
        assert trainer.config.model.path is not None
        add_slots(trainer.config.model.path, copy / Path(trainer.config.model.path).name, adapter=self._adapter)
        self._model = genai.Model(str(copy))

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return an answer to each prompt."""
        import onnxruntime_genai as genai

        self._trainer.save(self._adapter)
        adapters = genai.Adapters(self._model)
        adapters.load(str(self._adapter), "current")
        found: list[list[int]] = [[] for _ in prompts]
        for part in of_one_length(prompts):
            ids = np.asarray([prompts[row] for row in part], np.int32)
            length = ids.shape[1]
            settings = genai.GeneratorParams(self._model)
            settings.set_search_options(
                batch_size=len(part),
                max_length=length + self._tokens,
                do_sample=True,
                random_seed=int(self._random.integers(1 << 31)),
                **_PLAIN,
                **self._search,
            )
            generator = genai.Generator(self._model, settings)
            generator.set_active_adapter(adapters, "current")
            generator.append_tokens(ids)
            while not generator.is_done():
                generator.generate_next_token()
            for index, row in enumerate(part):
                answer = [int(one) for one in generator.get_sequence(index)[length:]]
                end = next((place for place, one in enumerate(answer) if one in self._ends), len(answer))
                found[row] = answer[: end + 1]
        return found
