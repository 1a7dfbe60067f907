"""Optimizer in backward: number, order and dependencies of updates, and unchanged training."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.lowering import updates as update_passes
from onnxtrain.runtime.options import RuntimeOptions

OPTIMIZERS = [onnxtrain.Adagrad(0.05), onnxtrain.AdamW(0.01), onnxtrain.Momentum(0.1), onnxtrain.SSGD(0.1, alpha=0.5)]
WIDTHS = (8, 32, 32, 32, 4)
LAYER = 4 * 32 * 32


def trainer(optimizer="adam", activation="relu", **options):
    options = {"loss": "softmax_cross_entropy", "runtime": RuntimeOptions(1), **options}
    return onnxtrain.Trainer(onnxtrain.examples.mlp(WIDTHS, activation), optimizer=optimizer, **options)


def updates(made, *names):
    """Return positions of the updates and of the `After` nodes before them, and the number of nodes."""
    nodes = [node.op_type for node in made.executor.session._steps[0].step.model.graph]
    found = [place for place, name in enumerate(nodes) if name in names]
    return found, [place for place, name in enumerate(nodes) if name == "After"], len(nodes)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(update_passes, "LEAST_BYTES", LAYER)


def trained(made, steps=12):
    rng = np.random.default_rng(1)
    losses = [
        made.train_step(rng.standard_normal((16, 8)).astype(np.float32), rng.integers(0, 4, 16)) for _ in range(steps)
    ]
    return losses, {name: np.array(value) for name, value in made.executor.states.items()}


@pytest.mark.sampled("options")
@pytest.mark.parametrize("options", [{}, {"clip_value": 0.01}, {"masked": True}, {"accumulate": 4}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_training_is_the_same_to_the_bit_as_with_one_update(monkeypatch, optimizer, options):
    options = dict(options)
    masked = options.pop("masked", False)
    ways = []
    for least in (1, LAYER, 1 << 40):
        monkeypatch.setattr(update_passes, "LEAST_BYTES", least)
        made = trainer(optimizer, **options)
        if masked:
            rng = np.random.default_rng(0)
            made.set_masks({"layer2.weight": rng.random(made.parameters["layer2.weight"].shape) < 0.5})
        ways.append(trained(made))
    for losses, states in ways[1:]:
        assert losses == ways[0][0]
        for name, value in states.items():
            np.testing.assert_array_equal(value, ways[0][1][name])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_updates_stand_where_their_gradients_come(small_parts, activation):
    places, waits, count = updates(trainer(activation=activation), "Adam")
    assert len(places) == 2  # the rest is smaller than a part and joins the last
    assert places[0] < count - 2  # nodes of the backward pass follow
    # The first update writes the weights that the gradient of the layer's input reads: in the node that computes
    # the gradient of the weights, where Relu is before the layer, else in a separate one.
    assert waits == ([] if activation == "relu" else [places[0] - 1])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_weights_are_still_written_where_they_stand(small_parts, activation):
    made = trainer(activation=activation)
    _ = made.executor.session
    assert set(made.executor.session._steps[0].step.in_place) >= set(made.parameters)
    assert not set(made.executor.session._steps[0].second_buffers) & set(made.parameters)


def test_a_small_model_keeps_one_update():
    places, waits, _ = updates(trainer(), "Adam")
    assert (len(places), waits) == (1, [])


def test_the_norm_of_all_gradients_needs_them_all(small_parts):
    places, waits, _ = updates(trainer(clip_norm=0.1), "Adam", "FusedAdam")
    assert (len(places), waits) == (1, [])


def test_groups_are_spread_each(small_parts):
    made = trainer("adamw", groups=[onnxtrain.Group("*bias", weight_decay=0.0)])
    places, _, _ = updates(made, "AdamW")
    assert len(places) == 3  # the weights in two parts, the biases in one


def test_a_portable_step_graph_has_no_trace_of_it(small_parts):
    lowered = onnxtrain.lower(trainer().training_model())
    assert {node.domain for node in lowered.graph.node} == {""}
