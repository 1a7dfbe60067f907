"""The transducer loss against a forward-backward reference in NumPy, enumerated paths and central differences."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnxtrain
from losses.loss_models import loss_and_gradient
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import Transducer

RNG = np.random.default_rng(7)


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def forward_backward(z, labels, blank):
    """-log p and its gradient for one example [T, U + 1, C], cell by cell in float64."""
    log_p = log_softmax(z.astype(np.float64))
    frames, histories = z.shape[0], len(labels) + 1
    alpha = np.full((frames, histories), -np.inf)
    beta = np.full((frames + 1, histories + 1), -np.inf)
    alpha[0, 0] = 0
    for t, u in itertools.product(range(frames), range(histories)):
        if t:
            alpha[t, u] = np.logaddexp(alpha[t, u], alpha[t - 1, u] + log_p[t - 1, u, blank])
        if u:
            alpha[t, u] = np.logaddexp(alpha[t, u], alpha[t, u - 1] + log_p[t, u - 1, labels[u - 1]])
    beta[frames, histories - 1] = 0
    for t, u in itertools.product(reversed(range(frames)), reversed(range(histories))):
        beta[t, u] = beta[t + 1, u] + log_p[t, u, blank]
        if u < histories - 1:
            beta[t, u] = np.logaddexp(beta[t, u], beta[t, u + 1] + log_p[t, u, labels[u]])
    total = beta[0, 0]
    assert total == pytest.approx(alpha[-1, -1] + log_p[frames - 1, histories - 1, blank])
    occupied = np.zeros(z.shape)  # the expected number of times that each arc is taken
    for t, u in itertools.product(range(frames), range(histories)):
        occupied[t, u, blank] += np.exp(alpha[t, u] + log_p[t, u, blank] + beta[t + 1, u] - total)
        if u < histories - 1:
            occupied[t, u, labels[u]] += np.exp(alpha[t, u] + log_p[t, u, labels[u]] + beta[t, u + 1] - total)
    return -total, np.exp(log_p) * occupied.sum(-1, keepdims=True) - occupied


def expected(z, targets, lengths=None, blank=0):
    """The mean loss and its gradient."""
    total, gradient = 0.0, np.zeros(z.shape)
    for row, labels in enumerate(targets):
        real = [int(label) for label in labels if label >= 0 and label != blank]
        frames = z.shape[1] if lengths is None else int(lengths[row])
        value, slope = forward_backward(z[row, :frames, : len(real) + 1], real, blank)
        total += value
        gradient[row, :frames, : len(real) + 1] = slope
    return total / len(z), gradient / len(z)


def joint(shape):
    """A model whose scores are its input, scaled."""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[{shape}] x) => (float[{shape}] y) '
        "<float[5] w = {1, 2, 1, 0.5, 1}> { y = Mul(x, w) }"
    )


def ours(loss, z, targets, *, dynamic=True, lengths=None):
    """The loss and its gradient."""
    arrays = {"z": z, "target": targets} | ({} if lengths is None else {"lengths": lengths})
    return loss_and_gradient(loss, arrays, dynamic=dynamic)


PADDED = np.array([[1, 2, 2], [3, -1, -1], [-1, -1, -1], [2, 1, -1]])


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("frames", [2, 5, 9])
def test_values_and_gradients_are_forward_backward(frames, dynamic):
    z = RNG.normal(size=(4, frames, 4, 5)).astype(np.float32)
    value, gradient = ours(Transducer(), z, PADDED, dynamic=dynamic)
    true_value, true_gradient = expected(z, PADDED)
    assert value == pytest.approx(true_value, rel=1e-5)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-4, atol=1e-6)


def test_one_frame():
    z = RNG.normal(size=(4, 1, 4, 5)).astype(np.float32)
    value, gradient = ours(Transducer(), z, PADDED)
    true_value, true_gradient = expected(z, PADDED)
    assert value == pytest.approx(true_value, rel=1e-5)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-4, atol=1e-6)


def test_lengths_of_both():
    z = RNG.normal(size=(4, 6, 4, 5)).astype(np.float32)
    lengths = np.array([6, 1, 3, 5])
    value, gradient = ours(Transducer(input_lengths="lengths"), z, PADDED, lengths=lengths)
    true_value, true_gradient = expected(z, PADDED, lengths)
    assert value == pytest.approx(true_value, rel=1e-5)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-4, atol=1e-6)
    # What lies behind the lengths changes nothing, infinity excepted.
    z[1, 1:], z[2, :, 1:] = 50, -50
    assert ours(Transducer(input_lengths="lengths"), z, PADDED, lengths=lengths)[0] == pytest.approx(
        expected(z, PADDED, lengths)[0], rel=1e-5
    )


def test_another_blank_is_padding_too():
    z = RNG.normal(size=(2, 4, 3, 5)).astype(np.float32)
    targets = np.array([[0, 1], [2, 4]])
    value, gradient = ours(Transducer(blank=4), z, targets)
    true_value, true_gradient = expected(z, targets, blank=4)
    assert value == pytest.approx(true_value, rel=1e-5)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_a_central_difference_in_float64():
    z, targets = RNG.normal(size=(2, 3, 3, 3)), np.array([[1, 2], [2, -1]])
    _, gradient = ours(Transducer(), z, targets)
    for index in np.ndindex(z.shape):
        near = [z.copy(), z.copy()]
        near[0][index] += 1e-6
        near[1][index] -= 1e-6
        slope = (expected(near[0], targets)[0] - expected(near[1], targets)[0]) / 2e-6
        assert gradient[index] == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_a_long_lattice_with_certain_scores_stays_finite():
    z = (30 * RNG.normal(size=(2, 200, 41, 30))).astype(np.float32)
    targets = RNG.integers(1, 30, (2, 40))
    targets[1, 25:] = -1
    value, gradient = ours(Transducer(), z, targets)
    true_value, true_gradient = expected(z, targets)
    assert value == pytest.approx(true_value, rel=1e-5)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-2, atol=1e-3)


def network():
    """Frames [N, T, 6] and labels so far [N, U] to scores [N, T, U + 1, 4]: an encoder, a predictor and their sum."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, t, 6] frames, int64[n, u] labels) => (float[n, t, u1, 4] y)
        <int64[1] one = {1}, int64[1] two = {2}, int64[4] pads = {0, 1, 0, 0}, int64 start = {0}>
        { e = MatMul(frames, encoder_weight)  s0 = Pad(labels, pads, start)
          p = Gather(embedding_weight, s0)
          e4 = Unsqueeze(e, two)  p4 = Unsqueeze(p, one)  s = Add(e4, p4)  h = Tanh(s)
          y = MatMul(h, joint_weight) }""")
    for name, shape in (("encoder_weight", (6, 16)), ("embedding_weight", (4, 16)), ("joint_weight", (16, 4))):
        values = np.random.default_rng(0).normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def test_a_network_learns_sequences():
    targets = RNG.integers(1, 4, (48, 3))
    frames = np.zeros((48, 6, 6), np.float32)
    for row, labels in enumerate(targets):
        for at, label in enumerate(labels):
            frames[row, 2 * at, label] = 2
    trainer = onnxtrain.Trainer(network(), loss="transducer", optimizer="adam(lr=0.03)")
    data = {"frames": frames, "labels": targets}
    first = trainer.evaluate(data, targets)["loss"]
    trainer.fit(data, targets, epochs=60, batch_size=12, progress=False)
    assert trainer.evaluate(data, targets)["loss"] < 0.2 * first
    step = onnxtrain.lower(trainer.training_model())  # standard operators only
    assert not {node.domain for node in step.graph.node} - {""}


def test_a_final_softmax_is_skipped_and_micro_batches_make_the_same_step():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4, 3, 5] x) => (float[n, 4, 3, 5] y) <float[5] w = {1, 2, 1, 0.5, 1}>
        { h = Mul(x, w)  y = Softmax<axis = -1>(h) }""")
    z, targets = RNG.normal(size=(4, 4, 3, 5)).astype(np.float32), np.array([[1, 2], [2, -1], [-1, -1], [3, 3]])
    found = []
    for accumulate in (1, 2):
        trainer = onnxtrain.Trainer(model, loss="rnnt_loss", optimizer="sgd(lr=0.1)", accumulate=accumulate)
        loss = trainer.train_step(z, targets)
        assert loss == pytest.approx(expected(z * np.float32([1, 2, 1, 0.5, 1]), targets)[0], rel=1e-5)
        found.append(np.array(trainer.parameters["w"]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


FIXED = joint("n, 4, 3, 5")


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: Transducer(blank=-1), OptionError, "blank is -1; transducer needs the number of a class, 0 or more"),
        (
            lambda: onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="transducer"),
            OptionError,
            r"transducer needs scores \[N, T, U \+ 1, C\] of examples, frames, label histories and classes, but",
        ),
        (
            lambda: onnxtrain.Trainer(FIXED, loss="transducer(blank=5)"),
            OptionError,
            "blank is 5, but there are 5 classes, from 0",
        ),
        (
            lambda: onnxtrain.Trainer(FIXED, loss=Transducer(input_lengths="steps")),
            OptionError,
            "input_lengths is 'steps', but the model has no value of that name; its inputs are x",
        ),
        (
            lambda: onnxtrain.Trainer(FIXED, loss="transducer").train_step(
                np.zeros((1, 4, 3, 5), np.float32), np.array([[-1, 2]])
            ),
            DataError,
            "has a label after padding at example 0",
        ),
        (
            lambda: onnxtrain.Trainer(FIXED, loss="transducer").train_step(
                np.zeros((1, 4, 3, 5), np.float32), np.array([[1, 7]])
            ),
            DataError,
            "has label 7 at example 0, but labels must be below 5, and -1 for padding",
        ),
        (
            lambda: onnxtrain.Trainer(FIXED, loss="transducer").train_step(
                np.zeros((1, 4, 3, 5), np.float32), np.array([[1, 2, 3]])
            ),
            DataError,
            r"has shape \(1, 3\), but the model needs \(batch, 2\)",
        ),
    ],
)
def test_mistakes_are_sentences(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_the_padding_may_be_of_any_width():
    z = RNG.normal(size=(3, 5, 4, 5)).astype(np.float32)
    narrow = np.array([[1, 2], [3, -1], [-1, -1]])
    expected_value, expected_gradient = expected(z, narrow)
    for extra in (0, 1, 3):
        targets = np.pad(narrow, ((0, 0), (0, extra)), constant_values=-1)
        value, gradient = ours(Transducer(), z, targets)
        assert value == pytest.approx(expected_value, rel=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use", ["train_step", "fit", "evaluate"])
def test_more_labels_than_histories_are_a_sentence(use):
    trainer = onnxtrain.Trainer(joint("n, t, u, 5"), loss="transducer")
    message = (
        r"An example has more labels than the model's scores \[N, T, U \+ 1, C\] have room for, U; .*"
        r"The step got 'x' \(1, 4, 3, 5\), 'target' \(1, 3\)\.$"
    )
    with pytest.raises(DataError, match=message):
        getattr(trainer, use)(np.zeros((1, 4, 3, 5), np.float32), np.array([[1, 2, 3]]))
