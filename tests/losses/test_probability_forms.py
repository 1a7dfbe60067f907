"""Endings of classifiers: what the nodes prove about the outputs decides whether a loss takes them as probabilities."""

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import TrainingHint
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.inference.forward import kind_of_output
from sentences import warns_sentence

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)

CONSTANTS = """float zero = {0}, float one = {1}, float two = {2}, float half = {0.5}, float six = {6},
    float tiny = {1e-6}, float most = {0.999999}, float third = {0.3}, float rest = {0.7},
    float[3] scale = {0.9, 0.9, 0.9}, float step = {0.00392157}, uint8 z8 = {0}, float[2, 1, 1] shares = {0.25, 0.75},
    float[3, 2] coarse = {1, 0, 0, 1, 0, 1}, int64[4] pads = {0, 0, 0, 1}, int64[1] i0 = {0}, int64[1] i1 = {1},
    int64[1] i2 = {2}, int64[1] i3 = {3}, int64[1] last = {-1}, int64[2] rows = {-1, 3}, int64[3] cube = {-1, 3, 1},
    int64[3] lead = {1, -1, 3}, int64[3] order = {2, 0, 1}, float[3] b = {0.1, -0.2, 0.05},
    float[4, 3] w = {0.5, -0.3, 0.2, 0.7, -0.6, 0.4, -0.2, 0.1, 0.9, 0.3, -0.8, 0.6}"""


def model(body: str, shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
        f (float[n, 4] x) => (float[{shape}] y) <{CONSTANTS}>
        {{ v = MatMul(x, w) z = Add(v, b) u = Neg(z) {body} }}""")


BINARY = {  # shape of y, nodes
    "sigmoid": ("n,3", "y = Sigmoid(z)"),
    "identity": ("n,3", "p = Sigmoid(z) y = Identity(p)"),
    "squeeze": ("n", "s = Slice(z, i0, i1, i1) p = Sigmoid(s) y = Squeeze(p, i1)"),
    "reshape": ("n", "s = Slice(z, i0, i1, i1) p = Sigmoid(s) y = Reshape(p, last)"),
    "flatten": ("n,3", "c = Reshape(z, cube) p = Sigmoid(c) y = Flatten(p)"),
    "slice": ("n,2", "p = Sigmoid(z) y = Slice(p, i1, i3, i1)"),
    "select": ("n", "p = Sigmoid(z) g = Gather<axis = 1>(p, i1) y = Squeeze(g, i1)"),
    "concat": ("n,6", "p = Sigmoid(z) q = Sigmoid(u) y = Concat<axis = 1>(p, q)"),
    "transpose": ("n,1,3", "c = Reshape(z, cube) p = Sigmoid(c) y = Transpose<perm = [0, 2, 1]>(p)"),
    "clamp": ("n,3", "p = Sigmoid(z) y = Clip(p, tiny, most)"),
    "max and min": ("n,3", "p = Sigmoid(z) q = Max(p, tiny) y = Min(q, most)"),
    "mean over frames": ("n", "p = Sigmoid(z) y = ReduceMean<keepdims = 0>(p, i1)"),
    "largest": ("n", "p = Sigmoid(z) y = ReduceMax<keepdims = 0>(p, i1)"),
    "complement": ("n,3", "p = Sigmoid(z) y = Sub(one, p)"),
    "complement, squeezed": ("n", "s = Slice(z, i0, i1, i1) p = Sigmoid(s) q = Sub(one, p) y = Squeeze(q, i1)"),
    "hard sigmoid": ("n,3", "y = HardSigmoid<alpha = 0.1666667, beta = 0.5>(z)"),
    "hard sigmoid in parts": ("n,3", "t = Add(z, six) r = Clip(t, zero, six) y = Div(r, six)"),
    "tanh": ("n,3", "t = Tanh(z) h = Mul(t, half) y = Add(h, half)"),
    "tanh plus one": ("n,3", "t = Tanh(z) h = Add(t, one) y = Div(h, two)"),
    "one over one plus exp": ("n,3", "e = Exp(u) t = Add(e, one) y = Div(one, t)"),
    "reciprocal": ("n,3", "e = Exp(u) t = Add(one, e) y = Reciprocal(t)"),
    "exp over one plus exp": ("n,3", "e = Exp(z) t = Add(e, one) y = Div(e, t)"),
    "softsign": ("n,3", "t = Softsign(z) h = Add(t, one) y = Mul(h, half)"),
    "error function": ("n,3", "t = Erf(z) h = Add(t, one) y = Mul(h, half)"),
    "exp of minus softplus": ("n,3", "t = Softplus(u) m = Neg(t) y = Exp(m)"),
    "one minus exp": ("n,3", "t = Softplus(z) m = Neg(t) e = Exp(m) y = Sub(one, e)"),
    "gaussian": ("n,3", "q = Mul(z, z) m = Neg(q) y = Exp(m)"),
    "product": ("n,3", "p = Sigmoid(z) q = Sigmoid(u) y = Mul(p, q)"),
    "noisy or": (
        "n,3",
        "p = Sigmoid(z) q = Sigmoid(u) a = Sub(one, p) b0 = Sub(one, q) c = Mul(a, b0) y = Sub(one, c)",
    ),
    "power": ("n,3", "p = Sigmoid(z) y = Pow(p, two)"),
    "root": ("n,3", "p = Sigmoid(z) y = Sqrt(p)"),
    "ensemble": ("n,3", "p = Sigmoid(z) q = Sigmoid(v) s = Add(p, q) y = Div(s, two)"),
    "mean of two": ("n,3", "p = Sigmoid(z) q = Sigmoid(v) y = Mean(p, q)"),
    "masked": ("n,3", "p = Sigmoid(z) m = Greater(z, zero) y = Where(m, p, tiny)"),
    "padded": ("n,4", "p = Sigmoid(z) y = Pad(p, pads)"),
    "one class of a softmax": ("n", "p = Softmax(z) g = Gather<axis = 1>(p, i1) y = Squeeze(g, i1)"),
    "softmax": ("n,3", "y = Softmax(z)"),
    "clipped": ("n,3", "y = Clip(z, zero, one)"),
    "pooled": ("n,1,3", "p = Sigmoid(z) c = Unsqueeze(p, i1) y = AveragePool<kernel_shape = [3], pads = [1, 1]>(c)"),
    "quantized": ("n,3", "p = Sigmoid(z) q = QuantizeLinear(p, step, z8) y = DequantizeLinear(q, step, z8)"),
    "float16": ("n,3", "h = Cast<to = 10>(z) p = Sigmoid(h) y = Cast<to = 1>(p)"),
    "branches": (
        "n,3",
        "t = ReduceSum<keepdims = 0>(z) c = Greater(t, zero) y = If(c) <then_branch = g () => (float[n,3] a) "
        "{ a = Sigmoid(z) }, else_branch = h () => (float[n,3] d) { d = Sigmoid(u) }>",
    ),
    "logarithm": ("n,3", "p = Sigmoid(z) y = Log(p)"),
    "minus softplus": ("n,3", "t = Softplus(u) y = Neg(t)"),
}

CLASSES = {
    "softmax": ("n,3", "y = Softmax(z)"),
    "squeeze": ("n,3", "c = Unsqueeze(z, i2) p = Softmax<axis = 1>(c) y = Squeeze(p, i2)"),
    "reshape": ("n,3", "c = Reshape(z, cube) p = Softmax<axis = 1>(c) y = Reshape(p, rows)"),
    "flatten": ("n,3", "c = Reshape(z, cube) p = Softmax<axis = 1>(c) y = Flatten(p)"),
    "transpose": ("n,3,1", "c = Unsqueeze(z, i1) p = Softmax(c) y = Transpose<perm = [0, 2, 1]>(p)"),
    "identity": ("n,3", "p = Softmax(z) y = Identity(p)"),
    "clamp": ("n,3", "p = Softmax(z) y = Clip(p, tiny, most)"),
    "plus epsilon": ("n,3", "p = Softmax(z) y = Add(p, tiny)"),
    "reordered": ("n,3", "p = Softmax(z) y = Gather<axis = 1>(p, order)"),
    "slice of a padding": (
        "n,3",
        "p = Softmax(z) q = Concat<axis = 0>(p, p) c = Unsqueeze(q, i0) d = Reshape(c, rows) "
        "s = Shape<start = 0, end = 1>(x) y = Slice(d, i0, s, i0)",
    ),
    "by hand": ("n,3", "m = ReduceMax(z, i1) d = Sub(z, m) e = Exp(d) t = ReduceSum(e, i1) y = Div(e, t)"),
    "by reciprocal": ("n,3", "e = Exp(z) t = ReduceSum(e, i1) r = Reciprocal(t) y = Mul(e, r)"),
    "exp of log softmax": ("n,3", "p = LogSoftmax(z) y = Exp(p)"),
    "exp of differences": ("n,3", "t = ReduceLogSumExp(z, i1) d = Sub(z, t) y = Exp(d)"),
    "sigmoids over their sum": ("n,3", "p = Sigmoid(z) t = ReduceSum(p, i1) s = Add(t, tiny) y = Div(p, s)"),
    "positive over their sum": ("n,3", "p = Softplus(z) t = ReduceSum(p, i1) y = Div(p, t)"),
    "squares over their sum": ("n,3", "p = Mul(z, z) t = ReduceSum(p, i1) y = Div(p, t)"),
    "ensemble": ("n,3", "p = Softmax(z) q = Softmax(u) s = Add(p, q) y = Mul(s, half)"),
    "mixture": ("n,3", "p = Softmax(z) q = Softmax(u) a = Mul(p, third) c = Mul(q, rest) y = Add(a, c)"),
    "stacked": (
        "n,3",
        "p = Softmax(z) q = Softmax(u) a = Unsqueeze(p, i0) c = Unsqueeze(q, i0) s = Concat<axis = 0>(a, c) "
        "y = ReduceMean<keepdims = 0>(s, i0)",
    ),
    "shares": (
        "n,3",
        "p = Softmax(z) q = Softmax(u) a = Reshape(p, lead) c = Reshape(q, lead) s = Concat<axis = 0>(a, c) "
        "m = Mul(s, shares) y = ReduceSum<keepdims = 0>(m, i0)",
    ),
    "experts": (
        "n,3",
        "p = Softmax(z) q = Softmax(u) a = Unsqueeze(p, i1) c = Unsqueeze(q, i1) s = Concat<axis = 1>(a, c) "
        "k = Slice(z, i0, i2, i1) g = Softmax(k) e = Unsqueeze(g, i1) t = MatMul(e, s) y = Squeeze(t, i1)",
    ),
    "experts by Einsum": (
        "n,3",
        "p = Softmax(z) q = Softmax(u) a = Unsqueeze(p, i1) c = Unsqueeze(q, i1) s = Concat<axis = 1>(a, c) "
        'k = Slice(z, i0, i2, i1) g = Softmax(k) y = Einsum<equation = "ne, nec -> nc">(g, s)',
    ),
    "hierarchy": (
        "n,6",
        "k = Slice(z, i0, i1, i1) g = Sigmoid(k) h = Sub(one, g) p = Softmax(z) q = Softmax(u) a = Mul(g, p) "
        "c = Mul(q, h) y = Concat<axis = 1>(a, c)",
    ),
    "hierarchy of a split": (
        "n,7",
        "g = Softmax(z) r, s, t = Split<axis = 1, num_outputs = 3>(g) q = Softmax(u) a = Mul(r, g) c = Mul(q, s) "
        "y = Concat<axis = 1>(a, t, c)",
    ),
    "hierarchy of slices": (
        "n,7",
        "g = Softmax(z) r = Gather<axis = 1>(g, i0) s = Slice(g, i1, i2, i1) t = Slice(g, last, i3, i1) q = Softmax(u) "
        "a = Mul(r, g) c = Mul(q, s) y = Concat<axis = 1>(a, t, c)",
    ),
    "coarse classes": ("n,2", "p = Softmax(z) y = MatMul(p, coarse)"),
    "pair": ("n,2", "s = Slice(z, i0, i1, i1) p = Sigmoid(s) q = Sub(one, p) y = Concat<axis = 1>(q, p)"),
    "pair of sigmoids": (
        "n,2",
        "s = Slice(z, i0, i1, i1) m = Neg(s) p = Sigmoid(s) q = Sigmoid(m) y = Concat<axis = 1>(q, p)",
    ),
    "pair, stacked": (
        "n,2",
        "s = Slice(z, i0, i1, i1) p = Sigmoid(s) q = Sub(one, p) c = Squeeze(p, i1) d = Squeeze(q, i1) "
        "a = Unsqueeze(c, i1) e = Unsqueeze(d, i1) y = Concat<axis = 1>(e, a)",
    ),
    "mean over frames": (
        "n,3",
        "c = Unsqueeze(z, i1) m = Neg(c) f = Concat<axis = 1>(c, m) p = Softmax(f) y = ReduceMean<keepdims = 0>(p, i1)",
    ),
    "frames": ("n,2,3", "c = Unsqueeze(z, i1) m = Neg(c) f = Concat<axis = 1>(c, m) y = Softmax(f)"),
    "pooled": ("n,3", "c = Reshape(z, cube) p = Softmax<axis = 1>(c) g = GlobalAveragePool(p) y = Flatten(g)"),
    "no class": ("n,4", "p = Softmax(z) y = Pad(p, pads)"),
    "normalized": ("n,3", "p = Sigmoid(z) y = LpNormalization<axis = 1, p = 1>(p)"),
    "branches": (
        "n,3",
        "t = ReduceSum<keepdims = 0>(z) c = Greater(t, zero) y = If(c) <then_branch = g () => (float[n,3] a) "
        "{ a = Softmax(z) }, else_branch = h () => (float[n,3] d) { d = Softmax(u) }>",
    ),
    "log softmax": ("n,3", "y = LogSoftmax(z)"),
    "logarithm": ("n,3", "p = Softmax(z) y = Log(p)"),
    "guarded logarithm": ("n,3", "p = Softmax(z) q = Add(p, tiny) y = Log(q)"),
    "log softmax, reshaped": ("n,3", "c = Reshape(z, cube) p = LogSoftmax<axis = 1>(c) y = Reshape(p, rows)"),
}
LOGARITHMS = ("log", "minus softplus", "guarded log")

LOGITS = {
    "logits": ("n,3", "y = Identity(z)"),
    "scaled": ("n,3", "y = Mul(z, half)"),
    "tanh": ("n,3", "y = Tanh(z)"),
    "capped": ("n,3", "t = Div(z, six) h = Tanh(t) y = Mul(h, six)"),
    "relu": ("n,3", "y = Relu(z)"),
    "relu of 6": ("n,3", "y = Clip(z, zero, six)"),
    "sum of sigmoids": ("n,3", "p = Sigmoid(z) q = Sigmoid(u) y = Add(p, q)"),
    "sigmoids times six": ("n,3", "p = Sigmoid(z) y = Mul(p, six)"),
    "swish": ("n,3", "p = Sigmoid(z) y = Mul(z, p)"),
    "layer behind a sigmoid": ("n,4", "p = Sigmoid(z) t = Transpose(w) y = MatMul(p, t)"),
    "learned scale": ("n,3", "p = Tanh(z) q = Mul(p, b) y = Add(q, b)"),
    "learned weights": ("n,3", "p = Sigmoid(z) q = Mul(p, scale)  y = Add(q, tiny)"),
    "cosines": ("n,3", "t = ReduceL2(z, i1) y = Div(z, t)"),
    "distances": ("n,3", "q = Mul(z, z) y = Neg(q)"),
    "hierarchy without one place": (
        "n,6",
        "g = Softmax(z) r, s, t = Split<axis = 1, num_outputs = 3>(g) q = Softmax(u) a = Mul(r, g) c = Mul(q, s) "
        "m = Sub(a, t) y = Concat<axis = 1>(m, c)",
    ),
    "one place twice": (
        "n,7",
        "g = Softmax(z) r, s, t = Split<axis = 1, num_outputs = 3>(g) q = Softmax(u) a = Mul(r, g) c = Mul(q, r) "
        "d = Sub(t, s) y = Concat<axis = 1>(a, d, c)",
    ),
    "logit": ("n,3", "p = Sigmoid(z) q = Sub(one, p) t = Div(p, q) y = Log(t)"),
}


def true_loss(kind: str, y: np.ndarray, targets: np.ndarray, meaning: str) -> float:
    """The loss of a model's own outputs, with logarithms of at least -100."""
    y = y.astype(np.float64)
    with np.errstate(all="ignore"):
        if meaning == "logarithms":
            y = np.exp(y)
        if kind == "bce":
            p = 1 / (1 + np.exp(-y)) if meaning == "logits" else y
            one, other = (np.maximum(np.log(np.clip(each, 0, None)), -100) for each in (p, 1 - p))
            return float(-(targets * one + (1 - targets) * other).mean())
        p = np.exp(y) / np.exp(y).sum(class_axis(y), keepdims=True) if meaning == "logits" else y
        picked = np.take_along_axis(p, np.expand_dims(targets, class_axis(y)), class_axis(y))
        return float(-np.maximum(np.log(picked), -100).mean())


def class_axis(y: np.ndarray) -> int:
    return 1 if y.ndim != 3 or y.shape[2] == 1 else 2


def check(proto: onnx.ModelProto, kind: str, meaning: str, *, rows: int = 12, **options) -> onnxtrain.Trainer:
    """Compare the loss of a step, of an evaluation, and metrics with those of the model's own outputs."""
    y = onnxtrain.predict(proto, X)
    rng = np.random.default_rng(1)
    if kind == "bce":
        targets = rng.integers(0, 2, y.shape).astype(np.float32)
    else:
        shape = [size for axis, size in enumerate(y.shape) if axis != class_axis(y)]
        targets = rng.integers(0, y.shape[class_axis(y)] - (y.shape[1] == 4), shape)
    options = {"loss": kind, "optimizer": "sgd(lr=0.01)", "train": ["w", "b"], **options}
    trainer = onnxtrain.Trainer(proto, **options)
    expected = true_loss(kind, y, targets, meaning)
    name = {"bce": "binary_cross_entropy", "cross_entropy": "softmax_cross_entropy"}[kind]
    found = trainer.evaluate(X, targets, metrics=["accuracy", name])
    assert found["loss"] == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert found[name] == pytest.approx(expected, rel=3e-3)  # it divides by sums, which may be rounded
    threshold = {"logits": 0, "probabilities": 0.5, "logarithms": np.log(0.5)}[meaning]
    right = (y > threshold) == (targets > 0.5) if kind == "bce" else y.argmax(class_axis(y)) == targets
    assert found["accuracy"] == pytest.approx(right.mean())
    if meaning != "logits":
        own = np.exp(y) if meaning == "logarithms" else y
        if y.ndim == 1:
            own = np.stack([1 - own, own], 1)
        np.testing.assert_allclose(trainer.predict_proba(X), own, atol=1e-5)
    assert trainer.train_step(X, targets) == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert trainer.train_step(X, targets) < expected + 1e-7
    return trainer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BINARY)
def test_binary_cross_entropy_takes_probabilities(name: str):
    shape, body = BINARY[name]
    meaning = "logarithms" if name.startswith(LOGARITHMS) else "probabilities"
    check(model(body, shape), "bce", meaning, straight_through=name == "quantized")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy_takes_probabilities(name: str):
    shape, body = CLASSES[name]
    check(model(body, shape), "cross_entropy", "logarithms" if name.startswith(LOGARITHMS) else "probabilities")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["bce", "cross_entropy"])
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")
def test_other_scores_are_logits(name: str, kind: str):
    shape, body = LOGITS[name]
    trainer = check(model(body, shape), kind, "logits", train=["w", "b", "scale"] if "scale" in body else ["w", "b"])
    assert trainer.objective.heads[0].loss.from_logits is True


@pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")
def test_a_place_that_two_nodes_take_counts_twice():
    body = (
        "g = Softmax(z) r, s, t = Split<axis = 1, num_outputs = 3>(g) k = Slice(g, i0, i1, i1) q = Softmax(u) "
        "a = Mul(k, q) y = Concat<axis = 1>(a, r, s, t)"
    )
    check(model(body, "n,6"), "cross_entropy", "logits")


def test_nothing_is_proved_by_values_that_are_trained():
    shape, body = CLASSES["shares"]
    with pytest.warns(TrainingHint, match="sum to 1, but its nodes do not prove"):
        check(model(body, shape), "cross_entropy", "logits", train=["w", "b", "shares"])


def test_probabilities_are_trained_through_the_logits_behind_them():
    """Logits are reached through nodes that move elements alone."""
    shape, body = BINARY["complement, squeezed"]
    trainer = onnxtrain.Trainer(model(body, shape), loss="bce", optimizer="sgd", train=["w"])
    assert trainer.objective.prediction is not trainer.objective.output
    sharp = model(body, shape)
    for tensor in sharp.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full((4, 3), 400, np.float32), "w"))
    trainer = onnxtrain.Trainer(sharp, loss="bce", optimizer="sgd", train=["w"])
    z = X.sum(1) * 400 + 0.1
    expected = np.logaddexp(0, -z).mean()  # the loss of 1 - p for targets of 0: far beyond 100
    assert trainer.evaluate(X, np.zeros(12, np.float32))["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["evaluate", "train_step", "fit"])
@pytest.mark.parametrize("kind", ["bce", "cross_entropy"])
def test_a_hint_says_what_was_assumed(kind: str, method: str):
    proto = model(
        "e = Celu(z) a = Mul(e, e) f = Elu(e) c = Mul(f, f) s = Sub(a, c) t = Mul(s, zero) m = Softplus(z) "
        "k = ReduceSum(m, i1) l = Add(k, t) r = Identity(l) d = Max(r, t) y = Div(m, d)",
        "n,3",
    )
    targets = np.eye(3, dtype=np.float32)[np.arange(12) % 3] if kind == "bce" else np.arange(12) % 3
    for given, meaning in ((None, "logits"), (True, "logits"), (False, "probabilities")):
        loss = kind if given is None else f"{kind}(from_logits={given})"
        trainer = onnxtrain.Trainer(proto, loss=loss, optimizer="sgd(lr=0.01)", train=["w", "b"])
        call = getattr(trainer, method)
        options = {"progress": False, "batch_size": 12, "shuffle": False} if method == "fit" else {}
        if given is None:
            with warns_sentence("unproven_probabilities"):
                found = call(X, targets, **options)
            assert sum("from_logits" in hint for hint in trainer.hints) == 1
        else:
            found = call(X, targets, **options)
        found = found["loss"] if method == "evaluate" else found.rows[0]["loss"] if method == "fit" else found
        expected = true_loss(kind, onnxtrain.predict(proto, X), targets, meaning)
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"), [("bce", "squeeze"), ("cross_entropy", "reshape"), ("cross_entropy", "softmax")]
)
def test_from_logits_overrides_what_is_proved(kind: str, name: str):
    shape, body = (BINARY if kind == "bce" else CLASSES)[name]
    check(model(body, shape), kind, "logits", loss=f"{kind}(from_logits=True)")


FRAMES = "c = Unsqueeze(z, i1) k = Unsqueeze(u, i1) f = Concat<axis = 1>(c, k) "
ENDINGS = {  # of logits f, [n, 2, 3] or [n, 3]: behind nodes that move elements, and computed by hand
    "distribution": (
        "s = Softmax(f) t = Shape(f) y = Reshape(s, t)",
        "m = ReduceMax(f, last) d = Sub(f, m) e = Exp(d) r = ReduceSum(e, last) y = Div(e, r)",
    ),
    "independent": (
        "s = Sigmoid(f) t = Shape(f) y = Reshape(s, t)",
        "n0 = Neg(f) e = Exp(n0) d = Add(e, one) y = Div(one, d)",
    ),
}
LABELS, SOFT = np.arange(12) % 3, np.full((12, 3), [0.2, 0.3, 0.5], np.float32)
YES = np.eye(3, dtype=np.float32)[LABELS]
EVERY_LOSS = [
    ("distribution", False, "cross_entropy(label_smoothing=0.1)", LABELS),
    ("distribution", False, "cross_entropy(class_weights=(1, 2, 3))", LABELS),
    ("distribution", False, "cross_entropy", SOFT),
    ("distribution", False, "focal", LABELS),
    ("distribution", False, "focal(class_weights=(1, 2, 3))", SOFT),
    ("distribution", False, "distillation(teacher={teacher})", LABELS),
    ("distribution", True, "cross_entropy(ignore_index=1)", np.stack([LABELS, LABELS[::-1]], 1)),
    ("distribution", True, "next_token", np.stack([LABELS, LABELS[::-1]], 1)),
    ("distribution", True, "dice", np.stack([LABELS, LABELS[::-1]], 1)),
    ("distribution", True, "ctc", 1 + LABELS[:, None] % 2),
    ("independent", False, "bce(positive_weight=2)", YES),
    ("independent", False, "binary_focal", YES),
    ("independent", True, "dice(activation=sigmoid)", np.stack([YES, 1 - YES], 1)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "frames", "loss", "targets"), EVERY_LOSS, ids=[f"{case[2]}" for case in EVERY_LOSS])
def test_every_loss_has_the_value_and_gradient_that_it_has_on_logits(kind, frames, loss, targets, tmp_path):
    start = FRAMES if frames else "f = Identity(z) "
    shape = "n,2,3" if frames else "n,3"
    endings = ["y = Identity(f)", *ENDINGS[kind]]
    values, weights = [], []
    for index, ending in enumerate(endings):
        proto = model(start + ending, shape)
        teacher = tmp_path / f"teacher{index}.onnx"
        onnx.save(model("o = Mul(z, two) f = Sub(o, half) " + ending, shape), teacher)
        given = loss.replace("{teacher}", repr(str(teacher)))
        trainer = onnxtrain.Trainer(proto, loss=given, optimizer="sgd(lr=0.5)", train=["w", "b"])
        values.append([trainer.train_step(X, targets), trainer.evaluate(X, targets)["loss"]])
        weights.append(np.array(trainer.parameters["w"]))
    for value, weight in zip(values[1:], weights[1:], strict=True):
        np.testing.assert_allclose(value, values[0], rtol=2e-5)
        np.testing.assert_allclose(weight, weights[0], atol=2e-5)


def test_certain_probabilities_have_finite_gradients():
    """PyTorch's BCELoss has 100 for an answer that is certain and wrong."""
    proto = model("y = Clip(z, zero, one)", "n,3")
    for tensor in proto.graph.initializer:
        if tensor.name == "b":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(3, 9, np.float32), "b"))
    trainer = onnxtrain.Trainer(proto, loss="bce", optimizer="sgd(lr=1)", train=["w", "b"])
    assert trainer.train_step(X, np.zeros((12, 3), np.float32)) == pytest.approx(100)
    assert all(np.isfinite(array).all() for array in trainer.parameters.values())


FUNCTION = """<ir_version: 9, opset_import: ["": 18, "own": 1]>
    f (float[n, 4] x) => (float[n] y) <float[4, 1] w = {0.5, -0.3, 0.2, 0.7}, int64[1] last = {-1}>
    { z = MatMul(x, w) p = own.Gate(z) y = Squeeze(p, last) }
    <domain: "own", opset_import: ["": 18]>
    Gate (z) => (p) { half = Constant<value_float = 0.5>() t = Tanh(z) h = Mul(t, half) p = Add(h, half) }"""


def test_functions_are_read():
    proto = onnx.parser.parse_model(FUNCTION)
    y, targets = onnxtrain.predict(proto, X), (np.arange(12) % 2).astype(np.float32)
    expected = true_loss("bce", y, targets, "probabilities")
    assert onnxtrain.evaluate(proto, (X, targets), loss="bce")["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("bce", "tanh"), ("bce", "squeeze"), ("cross_entropy", "by hand")])
def test_quantized_probabilities_are_probabilities(kind: str, name: str):
    shape, body = (BINARY if kind == "bce" else CLASSES)[name]
    proto = model(body, shape)
    read = {name for node in proto.graph.node for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    trainer = onnxtrain.Trainer(onnxtrain.quantize(proto, X), loss=kind, qat=True)
    y = trainer.predict(X)
    targets = (np.arange(12) % 2).astype(np.float32 if kind == "bce" else np.int64)
    targets = targets if kind != "bce" or y.ndim == 1 else np.stack([targets] * y.shape[1], 1)
    expected = true_loss(kind, y, targets, "probabilities")
    assert trainer.evaluate(X, targets)["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in onnxtrain.examples.__all__ if name != "points"])
def test_outputs_of_networks_without_an_activation_are_logits(name: str):
    make = getattr(onnxtrain.examples, name)
    file = ModelFile.load(make((4, 3)) if name == "mlp" else make())
    assert kind_of_output(file, file.proto.graph.output[0].name) == "logits"
