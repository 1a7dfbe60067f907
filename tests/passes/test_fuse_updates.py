"""Updates fused with clipping by norm and masks: the resulting nodes, and unchanged training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import onnxtrain
from onnxtrain import SSGD, Adagrad, Adam, AdamW, Momentum
from onnxtrain.runtime.options import RuntimeOptions

OPTIMIZERS = [
    Adagrad(0.05),
    Adam(0.01),
    Adam(0.01, norm_coefficient=0.01),
    AdamW(0.01),
    Momentum(0.1),
    SSGD(0.1),
    SSGD(0.1, alpha=0.9, regularization=1e-3),
]


def trainer(optimizer, *, kernels=True, masked=(), **options):
    model = onnxtrain.examples.mlp((4, 16, 3))
    found = onnxtrain.Trainer(
        model, loss="softmax_cross_entropy", optimizer=optimizer, runtime=RuntimeOptions(1, kernels=kernels), **options
    )
    rng = np.random.default_rng(0)
    found.set_masks({name: rng.random(found.parameters[name].shape) < 0.5 for name in masked})
    return found


def nodes(made):
    lowered = onnxtrain.lower(made.training_model(), kernels=True)
    return Counter(node.op_type for node in lowered.graph.node)


WEIGHTS = ("layer1.weight", "layer2.weight")


@pytest.mark.sampled("options")
@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"masked": WEIGHTS}, {"clip_norm": 0.1, "masked": WEIGHTS}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_training_is_the_same_as_in_standard_operators(optimizer, options):
    x = np.random.default_rng(1).standard_normal((20, 8, 4)).astype(np.float32)
    y = np.random.default_rng(2).integers(0, 3, (20, 8))
    ways = [trainer(optimizer, kernels=kernels, **options) for kernels in (True, False)]
    losses = [[made.train_step(*batch) for batch in zip(x, y, strict=True)] for made in ways]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    for name, value in ways[0].parameters.items():
        np.testing.assert_allclose(value, ways[1].parameters[name], rtol=1e-4, atol=1e-6)
    for name in options.get("masked", ()):
        assert not np.any(ways[0].parameters[name][~ways[0].masks[name]])


def test_a_mask_alone_becomes_part_of_the_update_of_the_masked():
    found = nodes(trainer(Adam(0.01), masked=WEIGHTS))
    assert found["FusedAdam"] == 2  # the biases have none
    assert found["Adam"] == found["Where"] == 0


def test_the_factor_of_clipping_by_norm_becomes_part_of_the_update():
    found = nodes(trainer(Momentum(0.01), clip_norm=1.0))
    assert found["FusedMomentum"] == 1
    assert found["Momentum"] == found["Mul"] == 0


def test_masked_gradients_whose_norm_is_taken_stay_values():
    found = nodes(trainer(Adam(0.01), clip_norm=1.0, masked=WEIGHTS))
    assert found["FusedAdam"] == 1
    assert found["Where"] + found["Elementwise"] == 2
    assert found["Mul"] == 0


@pytest.mark.parametrize("options", [{}, {"clip_value": 0.1}])
def test_without_either_the_operator_stays(options):
    found = nodes(trainer(Adam(0.01), **options))
    assert found["Adam"] == 1
    assert found["FusedAdam"] == 0


def test_a_step_graph_for_any_runtime_has_standard_operators():
    lowered = onnxtrain.lower(trainer(Adam(0.01), clip_norm=1.0, masked=WEIGHTS).training_model())
    assert {node.domain for node in lowered.graph.node} == {""}
