"""Dropout masks follow from states: equal in any session, different at every step and in every node."""

import numpy as np
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.prng import mixed

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
f (float[n, 64] x) => (float[n, 64] y, float[n, 64] z)
<float[64] w = {WEIGHTS}, float ratio = {0.25}>
{ h = Mul(x, w)  y = Dropout(h, ratio)  z = Dropout(h, ratio) }
"""


def trainer(kernels: bool, text: str = MODEL, **options) -> onnxtrain.Trainer:
    options = {"accumulate": 1, **options}
    return onnxtrain.Trainer(
        parser.parse_model(text.replace("WEIGHTS", ", ".join(["1"] * 64))),
        loss=lambda op, prediction, target: op.ReduceMean(prediction * prediction, keepdims=0),
        optimizer=onnxtrain.Momentum(0.0, alpha=0.0, norm_coefficient=0.0),
        dropout=True,
        runtime=onnxtrain.RuntimeOptions(kernels=kernels),
        **options,
    )


X = np.ones((50, 64), np.float32)


@pytest.mark.parametrize("kernels", [False, True])
def test_every_step_and_seed_has_a_mask_of_its_own(kernels):
    one, other = trainer(kernels), trainer(kernels, seed=1)
    random = np.random.default_rng(0).random(X.shape, np.float32)  # no two subsets have the same sum of squares
    drawn = [trained.train_step(random, random) for trained in (one, other) for _ in range(5)]
    assert len(set(drawn)) == len(drawn)
    losses = [trained.train_step(X, X) for trained in (one, other) for _ in range(5)]
    kept = [loss * 0.75**2 for loss in losses]  # y is 1 / 0.75 where it is kept: the mean square counts them
    assert kept == pytest.approx([0.75] * len(kept), abs=4 * np.sqrt(0.75 * 0.25 / X.size))


def test_kernels_and_standard_operators_draw_the_same():
    assert [trainer(True).train_step(X, X) for _ in range(3)] == [trainer(False).train_step(X, X) for _ in range(3)]


def test_nodes_draw_apart():
    step = onnxtrain.lower(trainer(False).training_model())
    assert len({node.name for node in step.graph.node if "Dropout" in node.op_type}) == 0
    seeds = [mixed(seed) for seed in range(1000)]
    assert len(set(seeds)) == 1000


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("kernels", [False, True])
def test_states_alone_resume(kernels, accumulate):
    first = trainer(kernels, accumulate=accumulate)
    for _ in range(2):
        first.train_step(X, X)
    second = trainer(kernels, accumulate=accumulate)
    for name in second.executor.session.state:
        second.executor.session.state[name] = first.executor.session.state[name]
    assert [first.train_step(X, X) for _ in range(3)] == [second.train_step(X, X) for _ in range(3)]


def test_micro_batches_draw_apart():
    """Use equal rows: equal masks in five micro-batches would give five equal losses."""
    accumulating = trainer(True, accumulate=5)
    session = accumulating.executor.session
    names = accumulating.objective.names
    feeds = {"x": X[:10], names.target: X[:10], names.learning_rate: np.float32(0)}
    losses = [float(session.step(feeds, entry=0)[names.loss]) for _ in range(5)]
    assert len(set(losses)) == 5


def test_a_training_model_of_a_file_draws_the_same(tmp_path):
    live = trainer(False)
    live.save_training_model(tmp_path / "training.onnx")
    session = onnxtrain.TrainingSession(tmp_path / "training.onnx")
    names = live.objective.names
    feeds = {"x": X, names.target: X, names.learning_rate: np.float32(0)}
    for _ in range(3):
        assert live.train_step(X, X) == float(session.step(feeds)[names.loss])


@pytest.mark.parametrize("kernels", [False, True])
def test_a_mask_that_the_model_reads_is_that_of_its_result(kernels):
    """Check that the mask applied to the input gives the result."""
    masked = MODEL.replace(
        "y = Dropout(h, ratio)  z = Dropout(h, ratio)", "z, m = Dropout(h, ratio)  c = Cast <to = 1> (m)  y = Mul(z, c)"
    )
    plain = MODEL.replace("y = Dropout(h, ratio)  z = Dropout(h, ratio)", "y = Dropout(h, ratio)  z = Identity(h)")
    losses = [trainer(kernels, text=text).train_step(X, X) for text in (masked, plain)]
    assert losses[0] == losses[1]
