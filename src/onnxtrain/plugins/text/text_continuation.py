"""Continue texts with a model that is trained, with its KV cache where the file has one."""

from __future__ import annotations

import dataclasses
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.losses.cross_entropy import NextToken
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.plugins.text.generation import CachedModel, TextGenerator, WholeModel
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.prepare import prepare
from onnxtrain.training.trained_model import TrainedModel
from onnxtrain.training.working_copy.kv_cache import cache_outputs, head_size
from onnxtrain.training.working_copy.training_modes import Modes


def text_generator(trainer: TrainedModel, tokenizer: Any = None, chat_template: Any = None) -> TextGenerator:
    """Return a generator that continues prompts with the current weights of a trainer."""
    tokenizer = trainer.data_adapter.folder if tokenizer is None else tokenizer
    if tokenizer is None:
        raise OptionError("The model is in memory, so that its tokenizer is unknown; give tokenizer=.")
    config, objective, states = trainer.config, trainer.objective, trainer.executor.states
    if isinstance(objective.loss, GroupLoss):  # an example is several rows, a sample is one
        if objective.loss.texts not in ("pairs", "judged"):
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
        if sizes.keys() == caches.keys():
            scores = str(cached.prediction.name)
            run = Evaluator(cached, states, config.runtime).runner([scores, *caches.values()])
            return TextGenerator(CachedModel(cached.inputs, run, scores, caches, sizes), tokenizer, chat_template)
    whole = prepare(config, modes=Modes(), copies=copies, table=table)
    scores = str(whole.prediction.name)
    run = Evaluator(whole, states, config.runtime).runner([scores])
    return TextGenerator(WholeModel(whole.inputs, run, scores), tokenizer, chat_template)
