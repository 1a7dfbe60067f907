"""Updates fused with clipping by norm and masks: the resulting nodes, and unchanged training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import parser

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
    assert found["Where"] == 2
    assert found["Mul"] == 0


@pytest.mark.parametrize("options", [{}, {"clip_value": 0.1}])
def test_without_either_the_operator_stays(options):
    found = nodes(trainer(Adam(0.01), **options))
    assert found["Adam"] == 1
    assert found["FusedAdam"] == 0


def test_a_step_graph_for_any_runtime_has_standard_operators():
    lowered = onnxtrain.lower(trainer(Adam(0.01), clip_norm=1.0, masked=WEIGHTS).training_model())
    assert {node.domain for node in lowered.graph.node} == {""}


def embedding_trainer(optimizer, *, kernels=True, **options):
    rng = np.random.default_rng(0)
    table, head = (", ".join(map(str, rng.normal(size=size))) for size in (50 * 4, 8 * 3))
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (int64[n, 2] tokens) => (float[n, 3] y) '
        f"<float[50, 4] table = {{{table}}}, float[8, 3] head = {{{head}}}, int64[2] flat = {{0, 8}}> "
        "{ rows = Gather(table, tokens) h = Reshape(rows, flat) y = MatMul(h, head) }"
    )
    runtime = RuntimeOptions(1, kernels=kernels)
    return onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=optimizer, runtime=runtime, **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_rows_of_an_embedding_update_it_like_a_dense_gradient(optimizer, masked):
    rng = np.random.default_rng(1)
    tokens, labels = rng.integers(0, 30, (10, 8, 2)), rng.integers(0, 3, (10, 8))
    ways = [embedding_trainer(optimizer, kernels=kernels) for kernels in (True, False)]
    losses = []
    for made in ways:
        if masked:
            made.set_masks({"table": np.arange(200).reshape(50, 4) % 3 > 0})
        losses.append([made.train_step(*batch) for batch in zip(tokens, labels, strict=True)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(ways[0].parameters["table"], ways[1].parameters["table"], rtol=1e-4, atol=1e-6)


def test_rows_of_an_embedding_are_given_to_its_update():
    found = nodes(embedding_trainer(Adam(0.01)))
    assert found["GatherGradient"] == 0
    assert found["FusedAdam"] == 2  # the head has a dense gradient


def test_rows_whose_norm_is_taken_are_added_up():
    assert nodes(embedding_trainer(Adam(0.01), clip_norm=1.0))["GatherGradient"] == 1
