"""ArcFace and CosFace: values, gradients at special angles, the layer of centres, training and resuming."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.editing.layers import Activation, Cosine, Linear
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import ArcFace, CosFace
from sentences import raises_sentence

RNG = np.random.default_rng(5)


def cosines():
    """A model whose output is its input."""
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 3] y) <float[1] w = {1}> { y = Div(x, w) }""")


def reference(cosine, labels, scale, changed):
    """Mean of -log softmax at the label, whose cosine is changed; in float64."""
    logits = cosine.astype(np.float64)
    rows = np.arange(len(labels))
    logits[rows, labels] = [changed(c) for c in logits[rows, labels]]
    logits = scale * logits
    return float(np.mean(np.log(np.exp(logits - logits[rows, labels][:, None]).sum(1))))


def turned(margin):
    def of(cosine):
        angle = math.acos(min(1.0, max(-1.0, cosine)))
        return math.cos(angle + margin) if angle + margin < math.pi else cosine - margin * math.sin(margin)

    return of


COSINES = RNG.uniform(-1, 1, (40, 3)).astype(np.float32)
LABELS = RNG.integers(0, 3, 40)
LOSSES = [(ArcFace(8.0, margin), (8.0, turned(margin))) for margin in (0.0, 0.5, 1.5)] + [
    (CosFace(8.0, 0.35), (8.0, lambda cosine: cosine - 0.35))
]


@pytest.mark.parametrize(("loss", "expected"), LOSSES)
def test_values_are_the_definitions(loss, expected):
    found = onnxtrain.evaluate(cosines(), (COSINES, LABELS), loss=loss)["loss"]
    assert found == pytest.approx(reference(COSINES, LABELS, *expected), rel=1e-5)


def gradient_of(loss, cosine, labels):
    """The gradient with respect to the cosines."""
    model = cosines()
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones(cosine.shape, np.float32), "w"))
    trainer = onnxtrain.Trainer(model, loss=loss, optimizer="sgd(lr=1)")
    trainer.train_step(cosine, labels)
    return (np.array(trainer.parameters["w"]) - 1) / cosine  # with y = x / w and w = 1, dw = -x dy


@pytest.mark.parametrize(("loss", "expected"), LOSSES)
def test_gradients_are_central_differences(loss, expected):
    cosine, labels = COSINES[:10], LABELS[:10]
    found = gradient_of(loss, cosine, labels)
    for index in np.ndindex(cosine.shape):
        near = [cosine.astype(np.float64), cosine.astype(np.float64)]
        near[0][index] += 1e-6
        near[1][index] -= 1e-6
        slope = (reference(near[0], labels, *expected) - reference(near[1], labels, *expected)) / 2e-6
        assert found[index] == pytest.approx(slope, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("loss", [ArcFace(), ArcFace(margin=0.0), CosFace()])
@pytest.mark.parametrize("cosine", [1.0, -1.0, 1.0000001, -1.0000001, 0.99999994])
def test_gradients_are_finite_where_vectors_are_parallel(loss, cosine):
    found = gradient_of(loss, np.full((2, 3), cosine, np.float32), np.array([0, 2]))
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 1e6


@pytest.mark.parametrize("margin", [0.1, 0.5, math.pi / 2])
def test_a_wider_angle_never_lowers_the_loss(margin):
    angles = np.linspace(0, math.pi, 12)
    rows = [np.array([[math.cos(angle), 0.25, 0.25]], np.float32) for angle in angles]
    label = np.zeros(1, np.int64)
    losses = [onnxtrain.evaluate(cosines(), (row, label), loss=ArcFace(4.0, margin))["loss"] for row in rows]
    assert (np.diff(losses) > 0).all()


def encoder():
    return onnxtrain.append(onnxtrain.examples.mlp((4, 16, 8)), Activation("Tanh"), Linear(3, name="embedding"))


def faces(count, seed):
    """Points around five directions."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 5, count)
    means = np.random.default_rng(1).normal(size=(5, 4))
    return (means[labels] + random.normal(0, 0.25, (count, 4))).astype(np.float32), labels


@pytest.mark.parametrize("loss", ["arcface(scale=16, margin=0.3)", "cosface(scale=16)"])
def test_embeddings_of_new_classes_separate(loss, tmp_path):
    model = encoder()
    embedding = model.graph.output[0].name
    trainer = onnxtrain.Trainer(onnxtrain.append(model, Cosine(5)), loss=loss, optimizer="adam(lr=0.01)")
    x, y = faces(200, 0)
    trainer.fit(x, y, epochs=15, batch_size=20, progress=False)
    assert trainer.evaluate((x, y), metrics="accuracy")["accuracy"] > 0.95
    trainer.save(tmp_path / "with_centres.onnx")

    saved = onnxtrain.cut(tmp_path / "with_centres.onnx", at=embedding)
    assert [node.op_type for node in saved.graph.node] == [node.op_type for node in model.graph.node]
    assert {t.name for t in saved.graph.initializer} == {t.name for t in model.graph.initializer}
    x, y = faces(100, 2)
    found = onnxtrain.predict(saved, x)
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    same = y[:, None] == y[None]
    cosine = unit @ unit.T
    assert cosine[same].mean() > 0.9
    assert cosine[~same].mean() < 0.4


def test_a_resumed_training_keeps_the_centres(tmp_path):
    x, y = faces(60, 0)

    def trainer():
        return onnxtrain.Trainer(onnxtrain.append(encoder(), Cosine(5)), loss="arcface(scale=16)", optimizer="adamw")

    options = {"batch_size": 20, "progress": False, "shuffle": False}
    whole = trainer()
    whole.fit(x, y, epochs=4, **options)
    half = trainer()
    half.fit(x, y, epochs=2, checkpoint=tmp_path / "half.ckpt", **options)
    resumed = trainer()
    resumed.fit(x, y, epochs=4, checkpoint=tmp_path / "half.ckpt", resume=True, **options)
    assert "head.weight" in whole.parameters
    for name, array in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], array)


def test_sample_weights_and_the_size_of_batches_do_not_change_the_loss():
    model = onnxtrain.append(encoder(), Cosine(5))
    x, y = faces(12, 0)
    weights = RNG.uniform(0, 2, 12).astype(np.float32)
    for loss in (ArcFace(8.0, 0.4), CosFace(8.0), CosFace(8.0, reduction="sum", weight=0.5)):
        found = [
            onnxtrain.Trainer(model, loss=loss).evaluate(x, y, sample_weight=weights, batch_size=size)["loss"]
            for size in (12, 7, 1)
        ]
        assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_vector_of_length_zero_has_cosine_zero_and_no_gradient():
    model = onnxtrain.append(encoder(), Cosine(5))
    for tensor in model.graph.initializer:
        if tensor.name.startswith("embedding"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
    trainer = onnxtrain.Trainer(model, loss="arcface", optimizer="sgd(lr=1)")
    x, y = faces(4, 0)
    assert trainer.predict(x) == pytest.approx(np.zeros((4, 5)))
    assert np.isfinite(trainer.train_step(x, y))
    assert all(np.isfinite(array).all() for array in trainer.parameters.values())


SEQUENCES = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> f (float[n,t,3] x) => (float[n,t,3] y) { y = Tanh(x) }'
)
CENTRES = onnxtrain.append(encoder(), Cosine(5))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: ArcFace(0.0), OptionError, "scale is 0.0; arcface needs a finite number above 0"),
        (lambda: ArcFace(margin=-0.1), OptionError, "margin is -0.1; arcface needs an angle from 0 to pi / 2"),
        (lambda: ArcFace(margin=28.6), OptionError, "margin is 28.6; arcface needs an angle .* in radians"),
        (lambda: CosFace(margin=2.5), OptionError, "margin is 2.5; cosface needs a number from 0 to 2"),
        (lambda: Cosine(0), OptionError, "classes of Cosine is 0; it must be an integer of at least 1"),
        (
            lambda: onnxtrain.append(SEQUENCES, Cosine(3)),
            OptionError,
            r"Cosine reads 'y' of shape .*, but needs embeddings \[batch, features\]",
        ),
        (
            lambda: onnxtrain.Trainer(encoder(), loss="arcface"),
            OptionError,
            r"arcface needs the cosines \[batch, classes\] .*append\(model, onnxtrain.layers.Cosine\(classes\)\)",
        ),
        (
            lambda: onnxtrain.Trainer(CENTRES, loss="cosface").train_step(faces(2, 0)[0], np.array([0, 5])),
            DataError,
            "has label 5 at example 1",
        ),
        (
            lambda: onnxtrain.Trainer(CENTRES, loss="cosface").train_step(faces(2, 0)[0], np.array([0, -1])),
            DataError,
            "has label -1 at example 1",
        ),
    ],
)
def test_mistakes_are_sentences(use, error, message):
    with pytest.raises(error, match=message):
        use()


@pytest.mark.parametrize(
    ("nodes", "taken"),
    [
        ("g = Sigmoid(x) h = Mul(x, g)", False),  # SiLU
        ("h = Mul(x, s)", False),
        ("l = ReduceL2<keepdims = 1>(x, last) c = Max(l, s) e = Shape(x) d = Expand(c, e) h = Div(x, d)", True),
        ("q = Mul(x, x) l = ReduceSum(q, last) r = Sqrt(l) i = Reciprocal(r) h = Mul(x, i)", True),
    ],
)
def test_products_count_as_cosines_behind_a_division_by_a_length(nodes, taken):
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 2] y)
        <float[3, 2] w = {{1, 0, 0, 1, 0, 0}}, float s = {{0.5}}, int64[1] last = {{-1}}>
        {{ {nodes} y = MatMul(h, w) }}""")
    if taken:
        assert np.isfinite(onnxtrain.Trainer(model, loss="arcface").train_step(np.ones((2, 3), np.float32), [0, 1]))
    else:
        with raises_sentence("loss_needs_cosines", what="y", got=("n", 2)):
            onnxtrain.Trainer(model, loss="arcface")
