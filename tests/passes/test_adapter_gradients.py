"""Norms and gated products that adapters alone read in the backward pass: recomputed instead of kept."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.passes.memory import recompute, reuse_activations
from zoo.language_model import LAYERS, WORDS, language_model

IDS = np.random.default_rng(0).integers(0, WORDS, (2, 9))
DATA = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}


def trained(bits: int | None, **options) -> tuple[onnxtrain.Trainer, list[float]]:
    lora = onnxtrain.Lora(rank=2, targets="all-linear")
    trainer = onnxtrain.Trainer(language_model(bits=bits), loss="next_token", output="logits", lora=lora, **options)
    return trainer, [trainer.train_step(DATA, IDS) for _ in range(3)]


def again(trainer: onnxtrain.Trainer, operators: set[str]) -> int:
    graph = trainer._session._steps[0].step.model.graph
    return sum(node.op_type in operators and str(node.outputs[0].name).startswith("again/") for node in graph)


@pytest.mark.parametrize("bits", [None, 4])
def test_they_are_recomputed_and_change_no_bit(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, losses = trained(bits)
    norms, products = again(trainer, {"SimplifiedLayerNormalization"}), again(trainer, {"Mul"})
    assert norms == 2 * LAYERS - 1  # the first norm reads the embedding, which has no gradient
    assert products == LAYERS
    for module in (recompute, reuse_activations):
        monkeypatch.setattr(module, "only_adapters_read", lambda value, carrying: False)
    kept, same = trained(bits)
    assert again(kept, {"SimplifiedLayerNormalization", "Mul"}) == 0
    assert losses == same
    for name, value in kept.parameters.items():
        assert np.array_equal(trainer.parameters[name], value)


def test_weights_that_are_trained_in_full_keep_what_their_gradients_read() -> None:
    trainer = onnxtrain.Trainer(language_model(), loss="next_token", output="logits")
    trainer.train_step(DATA, IDS)
    assert again(trainer, {"SimplifiedLayerNormalization", "Mul"}) == 0
