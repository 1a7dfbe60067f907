"""Classifiers that also output a class: the nodes that make their scores tell whether these are probabilities."""

import numpy as np
import onnx
import pytest

import onnxtrain

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8) % 2

PROBABILITIES = {
    "one minus p": "s = Slice(z, zero, one, axis) p = Sigmoid(s) q = Sub(unit, p) scores = Concat<axis = 1>(q, p)",
    "the other order": "s = Slice(z, zero, one, axis) p = Sigmoid(s) q = Sub(unit, p) scores = Concat<axis = 1>(p, q)",
    "two sigmoids": "s = Slice(z, zero, one, axis) p = Sigmoid(s) n = Neg(s) q = Sigmoid(n)"
    " scores = Concat<axis = 1>(q, p)",
    "divided by the sum": "p = Sigmoid(z) t = ReduceSum(p, axis) scores = Div(p, t)",
    "kept from zero": "p = Sigmoid(z) t = ReduceL1<axes = [1]>(p) b = Cast<to = 9>(t) n = Not(b) f = Cast<to = 1>(n)"
    " u = Add(t, f) scores = Div(p, u)",
    "sum of magnitudes": "p = Exp(z) a = Abs(p) t = ReduceSum(a, axis) u = Add(t, tiny) scores = Div(p, u)",
    "mean of softmaxes": "p = Softmax(z) v = Neg(z) q = Softmax(v) t = Add(p, q) scores = Div(t, two)",
    "mean of stacked softmaxes": "p = Softmax(z) a = Reshape(p, stack) v = Neg(z) q = Softmax(v) b = Reshape(q, stack)"
    " c = Concat<axis = 0>(a, b) scores = ReduceMean<axes = [0], keepdims = 0>(c)",
    "normalized": "p = Sigmoid(z) scores = LpNormalization<axis = 1, p = 1>(p)",
    "no sum of zero": "p = Sigmoid(z) t = ReduceSum(p, axis) b = Cast<to = 9>(t) n = Not(b) f = Cast<to = 1>(n)"
    " u = Add(p, f) m = Mul(f, two) d = Add(t, m) scores = Div(u, d)",
    "exponential": "t = ReduceLogSumExp<axes = [1]>(z) d = Sub(z, t) scores = Exp(d)",
    "mean": "p = Softmax(z) v = Neg(z) q = Softmax(v) scores = Mean(p, q)",
}

LOGITS = {
    "temperature": "scores = Div(z, two)",
    "learned temperature": "e = Exp(two) scores = Div(z, e)",
    "two heads": "a = Slice(z, zero, one, axis) b = Slice(z, one, end, axis) scores = Concat<axis = 1>(a, b)",
    "minus another": "a = Slice(z, zero, one, axis) q = Sub(two, a) scores = Concat<axis = 1>(a, q)",
    "one minus another value": "a = Slice(z, zero, one, axis) b = Slice(z, one, end, axis) q = Sub(unit, b)"
    " scores = Concat<axis = 1>(a, q)",
    "divided by the norm": "t = ReduceL2<axes = [1]>(z) scores = Div(z, t)",
    "divided by another sum": "v = Exp(z) t = ReduceSum(v, axis) scores = Div(z, t)",
    "exponential of another difference": "t = ReduceMax<axes = [1]>(z) d = Sub(z, t) scores = Exp(d)",
    "normalized to length one": "scores = LpNormalization<axis = 1>(z)",
    "sum of softmaxes": "p = Softmax(z) v = Neg(z) q = Softmax(v) t = Add(p, q) scores = Div(t, unit)",
}


def classifier(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        f (float[n, 3] x) => (float[n, 2] scores, int64[n] label)
        <float unit = {{1}}, float two = {{2}}, float tiny = {{1e-6}}, int64[1] axis = {{1}}, int64[1] zero = {{0}},
         int64[1] one = {{1}}, int64[1] end = {{2}}, int64[3] stack = {{1, -1, 2}},
         float[3, 2] w = {{0.5, -0.3, 0.2, 0.7, -0.6, 0.4}}>
        {{ z = MatMul(x, w) {body} label = ArgMax<axis = 1, keepdims = 0>(scores) }}""")


def first_loss(body: str) -> tuple[float, np.ndarray]:
    """The loss of the first step, and the scores before it."""
    model = classifier(body)
    scores = onnxtrain.predict(model, X)
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", train=["w"], optimizer="sgd(lr=0.1)")
    return trainer.train_step(X, Y), scores["scores"] if isinstance(scores, dict) else scores


@pytest.mark.parametrize("name", PROBABILITIES)
def test_the_loss_takes_the_logarithm_of_probabilities(name: str):
    loss, scores = first_loss(PROBABILITIES[name])
    np.testing.assert_allclose(scores.sum(1), 1, atol=1e-4)
    assert loss == pytest.approx(-np.log(scores[np.arange(8), Y]).mean(), rel=1e-4)


@pytest.mark.parametrize("name", LOGITS)
def test_the_loss_takes_other_scores_as_logits(name: str):
    loss, scores = first_loss(LOGITS[name])
    logits = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    assert loss == pytest.approx(-logits[np.arange(8), Y].mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("activation", "loss"), [("Softmax", "cross_entropy"), ("LogSoftmax", "cross_entropy"), ("Sigmoid", "bce")]
)
@pytest.mark.parametrize("tail", ["", "Identity"])
def test_a_final_activation_is_found_behind_an_operator_without_shapes(activation: str, loss: str, tail: str):
    """Its inputs then have no known shape; the loss would take probabilities as logits."""
    end = f"s = {activation}(z) scores = {tail}(s)" if tail else f"scores = {activation}(z)"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
        f (float[n, 3] x) => (float[n, 2] scores) <float[3, 2] w = {{0.5, -0.3, 0.2, 0.7, -0.6, 0.4}}>
        {{ a = ai.onnx.ml.Normalizer<norm = "L2">(x) z = MatMul(a, w) {end} }}""")
    z = X / np.linalg.norm(X, axis=1, keepdims=True) @ np.array([[0.5, -0.3], [0.2, 0.7], [-0.6, 0.4]])
    targets = Y if loss == "cross_entropy" else np.stack([Y, 1 - Y], 1).astype(np.float32)
    expected = np.log1p(np.exp(z)) - targets * z if loss == "bce" else np.log(np.exp(z).sum(1)) - z[np.arange(8), Y]
    trainer = onnxtrain.Trainer(model, loss=loss, optimizer="sgd(lr=0.1)")
    assert trainer.train_step(X, targets) == pytest.approx(expected.mean(), rel=1e-5)
