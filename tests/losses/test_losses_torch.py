"""Focal, Dice, CTC and contrastive losses, and distillation: values and gradients against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnxtrain
from losses.loss_models import loss_and_gradient
from onnxtrain import examples
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import CTC, BinaryFocal, Dice, Distillation, Focal, InfoNCE, Triplet
from onnxtrain.losses.base import TargetForm
from sentences import raises_sentence

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch

RNG = np.random.default_rng(11)


def ours(loss, prediction, target, *, dynamic=False, **others):
    return loss_and_gradient(loss, {"prediction": prediction, "target": target, **others}, dynamic=dynamic)


def theirs(function, prediction, target):
    z = torch.from_numpy(prediction.copy()).requires_grad_()
    value = function(z, torch.from_numpy(target.copy()))
    value.backward()
    return value.detach().numpy(), z.grad.numpy()


def compare(loss, function, prediction, target, tolerance=2e-5, **others):
    expected = theirs(function, prediction, target)
    for dynamic in (False, True):
        found = ours(loss, prediction, target, dynamic=dynamic, **others)
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance / 20)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def focal(gamma, weight=None, ignore=-100, axis=1):
    def of(z, t):
        z = z.movedim(axis, 1)
        if t.is_floating_point():
            t = t.movedim(axis, 1)
            p = z.softmax(1)
            w = torch.ones(z.shape[1]) if weight is None else torch.tensor(weight)
            w = w.reshape([-1] + [1] * (z.ndim - 2))
            return -(w * t * (1 - p) ** gamma * z.log_softmax(1)).sum(1).mean()
        loss = functional.cross_entropy(z, t, reduction="none", ignore_index=ignore)
        w = 1 if weight is None else torch.tensor(weight)[t.clamp(min=0)]
        return (w * (1 - torch.exp(-loss)) ** gamma * loss).sum() / (t != ignore).sum()

    return of


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5]])
def test_focal_on_labels(gamma, weights):
    loss = Focal(gamma, class_weights=weights, ignore_index=-100)
    labels = RNG.integers(0, 3, 8)
    labels[3] = -100
    compare(loss, focal(gamma, weights), 3 * normal(8, 3), labels)
    pictures = RNG.integers(0, 3, (2, 4, 5))
    compare(Focal(gamma, weights), focal(gamma, weights), normal(2, 3, 4, 5), pictures)
    compare(Focal(gamma, weights, axis=-1), focal(gamma, weights, axis=-1), normal(2, 4, 3), pictures[..., 0])


def test_focal_on_distributions():
    target = RNG.dirichlet([1.0, 2.0, 3.0], 6).astype(np.float32)
    compare(Focal(1.5, [1.0, 2.0, 1.0]), focal(1.5, [1.0, 2.0, 1.0]), normal(6, 3), target)


def test_focal_is_finite_for_certain_predictions():
    z = np.array([[100.0, -100.0], [-100.0, 100.0]], np.float32)
    for gamma in (0.5, 2.0):
        value, gradient = ours(Focal(gamma), z, np.array([0, 0]))
        assert value == pytest.approx(100.0, rel=1e-3)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_binary_focal(gamma, alpha):
    def of(z, t):  # as torchvision.ops.sigmoid_focal_loss
        p = torch.sigmoid(z)
        loss = functional.binary_cross_entropy_with_logits(z, t, reduction="none")
        loss = loss * ((1 - (p * t + (1 - p) * (1 - t))) ** gamma)
        return (loss if alpha is None else (alpha * t + (1 - alpha) * (1 - t)) * loss).mean()

    compare(BinaryFocal(gamma, alpha), of, 3 * normal(4, 5), RNG.integers(0, 2, (4, 5)).astype(np.float32))


def dice(p, t, smooth, first=0):
    axes = tuple(range(2, p.ndim))
    both, sums = (p * t, p + t) if not axes else ((p * t).sum(axes), (p + t).sum(axes))
    return (1 - (2 * both + smooth) / (sums + smooth))[:, first:].mean()


@pytest.mark.parametrize("background", [True, False])
def test_dice_on_labels(background):
    def of(z, t):
        there = functional.one_hot(t.clamp(min=0), 3).movedim(-1, 1) * (t != -100).unsqueeze(1)
        return dice(z.softmax(1) * (t != -100).unsqueeze(1), there, 0.1, 0 if background else 1)

    labels = RNG.integers(0, 3, (2, 4, 5))
    labels[0, 1] = -100
    loss = Dice(0.1, background=background, ignore_index=-100).with_form(TargetForm("indices"))
    compare(loss, of, normal(2, 3, 4, 5), labels)


def test_dice_on_masks():
    loss = Dice(1.0).with_form(TargetForm("values"))
    compare(loss, lambda z, t: dice(z.sigmoid(), t, 1.0), normal(2, 2, 6), RNG.integers(0, 2, (2, 2, 6)).astype("f4"))
    flat = RNG.integers(0, 2, (3, 7)).astype("f4")
    compare(loss, lambda z, t: dice(z.sigmoid()[:, None], t[:, None], 1.0), normal(3, 7), flat)


def triplets(margin, mining):
    def of(z, t):
        found = []
        for a in range(len(t)):
            positives = [p for p in range(len(t)) if p != a and t[p] == t[a]]
            negatives = [n for n in range(len(t)) if t[n] != t[a]]
            terms = [
                functional.relu((z[a] - z[p]).norm() - (z[a] - z[n]).norm() + margin)
                for p, n in itertools.product(positives, negatives)
            ]
            found += terms if mining == "all" else [torch.stack(terms).max()] if terms else []
        return torch.stack(found).mean()

    return of


@pytest.mark.parametrize("mining", ["hard", "all"])
@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_triplets(mining, margin):
    labels = np.array([0, 1, 0, 2, 1, 1, 3])
    compare(Triplet(margin, mining), triplets(margin, mining), normal(7, 4), labels, 1e-4)


def test_all_triplets_match_pytorch():
    z, labels = normal(6, 4), np.array([0, 0, 1, 1, 2, 0])

    def of(z, t):
        a, p, n = zip(
            *[(a, p, n) for a, p, n in itertools.permutations(range(6), 3) if t[a] == t[p] and t[a] != t[n]],
            strict=True,
        )
        return torch.nn.TripletMarginLoss(margin=0.7, eps=0.0)(z[list(a)], z[list(p)], z[list(n)])

    compare(Triplet(0.7, "all"), of, z, labels, 1e-4)


def contrastive(temperature):
    def of(z, t):
        z = functional.normalize(z, dim=1)
        s = z @ z.T / temperature
        s = s.masked_fill(torch.eye(len(t), dtype=torch.bool), float("-inf"))
        log_p, terms = s.log_softmax(1), []
        for i in range(len(t)):
            partners = [p for p in range(len(t)) if p != i and t[p] == t[i]]
            terms += [-log_p[i, partners].mean()] if partners else []
        return torch.stack(terms).mean()

    return of


def test_info_nce():
    compare(InfoNCE(0.2), contrastive(0.2), normal(7, 4), np.array([0, 1, 0, 2, 1, 1, 3]), 1e-4)


def test_info_nce_of_pairs_is_a_cross_entropy():
    def of(z, t):
        z = functional.normalize(z, dim=1)
        s = (z @ z.T / 0.5).masked_fill(torch.eye(6, dtype=torch.bool), float("-inf"))
        return functional.cross_entropy(s, torch.tensor([1, 0, 3, 2, 5, 4]))

    compare(InfoNCE(0.5), of, normal(6, 3), np.array([0, 0, 1, 1, 2, 2]), 1e-4)


@pytest.mark.parametrize("loss", [Triplet(), Triplet(mining="all"), InfoNCE()])
@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 0, 0]])
def test_batches_without_partners_have_finite_gradients(loss, labels):
    value, gradient = ours(loss, np.tile(normal(1, 4), (3, 1)), np.array(labels))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def ctc(reduction="mean", blank=0, zero_infinity=False, lengths=None, batch_first=True):
    def of(z, t):
        log_p = z.movedim(1, 0).log_softmax(-1) if batch_first else z.log_softmax(-1)
        real = (t >= 0) & (t != blank)
        steps = torch.full((t.shape[0],), log_p.shape[0]) if lengths is None else torch.from_numpy(lengths)
        return torch.nn.CTCLoss(blank, reduction, zero_infinity)(log_p, t.clamp(min=0), steps, real.sum(1))

    return of


LABELS = np.array([[1, 2, 2, 4], [3, -1, -1, -1], [-1, -1, -1, -1], [4, 4, 1, -1]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_ctc(reduction, batch_first):
    z = 2 * normal(4, 9, 5) if batch_first else 2 * normal(9, 4, 5)
    loss = CTC(reduction=reduction, time_axis=int(batch_first))
    compare(loss, ctc(reduction, batch_first=batch_first), z, LABELS, 2e-4)


def test_ctc_with_another_blank_as_padding():
    labels = np.where(LABELS < 0, 5, LABELS - 1)
    compare(CTC(blank=5), ctc(blank=5), normal(4, 12, 6), labels, 2e-4)


def test_ctc_with_invalid_steps():
    lengths = np.array([9, 3, 5, 6])
    loss = CTC(input_lengths="lengths")
    compare(loss, ctc(lengths=lengths), normal(4, 9, 5), LABELS, 2e-4, lengths=lengths)


def test_ctc_of_impossible_labels():
    z, labels = normal(2, 3, 4), np.array([[1, 1, 2], [1, 2, -1]])  # the first needs four steps
    assert ours(CTC(), z, labels)[0] == np.inf
    compare(CTC(zero_infinity=True), ctc(zero_infinity=True), z, labels, 2e-4)


def test_ctc_of_long_sequences_in_both_precisions():
    z = 4 * RNG.standard_normal((2, 200, 30))
    labels = RNG.integers(1, 30, (2, 60))
    compare(CTC(), ctc(), z, labels, 1e-9)
    compare(CTC(), ctc(), z.astype(np.float32), labels, 2e-3)


def teacher_file(tmp_path, softmax=False, seed=7):
    model = examples.mlp((4, 6, 3), activation="tanh", seed=seed)
    if softmax:
        model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
        model.graph.output[0].name = "probabilities"
    path = tmp_path / f"teacher_{softmax}.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("softmax", [False, True])
def test_distillation(tmp_path, softmax):
    path = teacher_file(tmp_path, softmax)
    x, y = normal(6, 4), RNG.integers(0, 3, 6)
    loss = Distillation(path, temperature=3.0, mix=0.7, class_weights=[1.0, 2.0, 1.0])
    student = onnxtrain.Trainer(examples.mlp((4, 3)), loss=loss, optimizer="sgd(lr=0.5)")
    taught = torch.from_numpy(onnxtrain.predict(examples.mlp((4, 6, 3), activation="tanh", seed=7), x))
    w, b = (torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in student.parameters.values())
    optimizer = torch.optim.SGD([w, b], lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        z = torch.from_numpy(x) @ w.T + b
        soft = functional.kl_div((z / 3).log_softmax(1), (taught / 3).softmax(1), reduction="none").sum(1)
        by_label = torch.tensor([1.0, 2.0, 1.0])[torch.from_numpy(y)]
        soft = (soft * by_label).sum() / by_label.sum()
        hard = functional.cross_entropy(z, torch.from_numpy(y), weight=torch.tensor([1.0, 2.0, 1.0]))
        value = 0.7 * 9 * soft + 0.3 * hard
        value.backward()
        optimizer.step()
        assert student.train_step(x, y) == pytest.approx(value.item(), rel=1e-4)
    np.testing.assert_allclose(next(iter(student.parameters.values())), w.detach().numpy(), rtol=1e-4, atol=1e-5)
    measured = student.evaluate(x, y, metrics="accuracy", batch_size=4)
    assert np.isfinite(measured["loss"])
    assert list(student.get_weights()) == ["layer1.weight", "layer1.bias"]


def test_distillation_skips_ignored_labels(tmp_path):
    path = teacher_file(tmp_path)
    x, y = normal(6, 4), np.array([0, 1, 2, -100, -100, 0])
    found = [
        onnxtrain.evaluate(examples.mlp((4, 3)), given, loss=f"distillation(teacher={path}, mix=0.5)")["loss"]
        for given in ((x, y), (x[y >= 0], y[y >= 0]))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_distillation_in_a_model_of_a_fixed_batch(tmp_path):
    path = teacher_file(tmp_path)
    fixed = examples.mlp((4, 3))
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.shape_inference.infer_shapes(fixed)
    del fixed.graph.value_info[:]
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    x, y = normal(6, 4), RNG.integers(0, 3, 6)
    loss = Distillation(path)
    expected = onnxtrain.evaluate(examples.mlp((4, 3)), (x, y), loss=loss)["loss"]
    assert onnxtrain.evaluate(fixed, (x, y), loss=loss)["loss"] == pytest.approx(expected, rel=1e-5)


def recognizer():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n,t,3] x) => (float[n,t,5] y)
        <float[3,5] w = {1,2,3,4,5,5,4,3,2,1,1,0,1,0,1}, float[5] b = {0,0,0,0,0}>
        { h = MatMul(x, w) z = Add(h, b) y = Softmax<axis=-1>(z) }""")


def test_ctc_trains_a_model_that_ends_in_a_softmax(tmp_path):
    x = normal(4, 9, 3)
    trainer = onnxtrain.Trainer(recognizer(), loss="ctc(blank=0)", optimizer="adam(lr=0.1)")
    expected = theirs(ctc(), x @ np.array(trainer.parameters["w"]), LABELS)[0]
    assert trainer.train_step(x, LABELS) == pytest.approx(float(expected), rel=1e-4)
    history = trainer.fit(x, LABELS, epochs=20, batch_size=2, validation=(x, LABELS))
    assert history.rows[-1]["val_loss"] < 0.6 * history.rows[0]["val_loss"]
    step = onnxtrain.lower(trainer.training_model())  # standard operators only
    assert not {node.domain for node in step.graph.node} - {""}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Focal(-1.0), OptionError, "gamma is -1.0; focal needs a finite number, 0 or more"),
        (lambda: BinaryFocal(alpha=2.0), OptionError, r"alpha is 2.0; binary_focal needs a number in \[0, 1\]"),
        (lambda: Dice(0.0), OptionError, "smooth is 0.0; dice needs a finite number above 0"),
        (lambda: Dice(activation="tanh"), OptionError, "activation is 'tanh'; dice takes 'softmax' or 'sigmoid'"),
        (lambda: Triplet(0.0), OptionError, "margin is 0.0; triplet needs a finite number above 0"),
        (lambda: Triplet(mining="some"), OptionError, "mining is 'some'; triplet takes 'hard' or 'all'"),
        (lambda: InfoNCE(0.0), OptionError, "temperature is 0.0; info_nce needs a finite number above 0"),
        (lambda: CTC(time_axis=2), OptionError, r"time_axis is 2; ctc takes 1 for scores \[N, T, C\]"),
        (lambda: CTC(blank=-1), OptionError, "blank is -1; ctc needs the number of a class"),
        (lambda: Distillation("t.onnx", mix=2.0), OptionError, r"mix is 2.0; distillation needs a number in \[0, 1\]"),
        (lambda: Distillation("t.onnx", 0.0), OptionError, "temperature is 0.0; distillation needs a finite number"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def recognizing(loss):
    return onnxtrain.Trainer(recognizer(), loss=loss)


def perceptron(loss, sizes=(4, 3)):
    return onnxtrain.Trainer(examples.mlp(sizes), loss=loss)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: perceptron(CTC()), OptionError, r"ctc needs scores \[N, T, C\] of examples, steps and classes"),
        (
            lambda: recognizing(CTC(blank=5)),
            OptionError,
            "blank is 5, but there are 5 classes",
        ),
        (
            lambda: recognizing(CTC(input_lengths="steps")),
            OptionError,
            "input_lengths is 'steps', but the model has no value of that name; its inputs are x",
        ),
        (
            lambda: recognizing(CTC()).train_step(normal(1, 9, 3), np.array([[1, -1, 2]])),
            DataError,
            "has a label after padding at example 0; pad rows at their end only, with -1 or the blank, 0",
        ),
        (
            lambda: recognizing(CTC()).train_step(normal(1, 9, 3), np.array([[1, 7]])),
            DataError,
            "has label 7 at example 0, but labels must be below 5, and -1 for padding",
        ),
        (
            lambda: perceptron(Triplet()).fit(normal(4, 4), np.arange(4), sample_weight=np.ones(4)),
            OptionError,
            "sample_weight is given, but the loss triplet compares examples with each other",
        ),
        (lambda: recognizing(InfoNCE()), OptionError, "info_nce needs embeddings of shape"),
        (lambda: perceptron("dice").train_step(normal(2, 4), np.array([0, 1])), OptionError, "dice compares positions"),
        (lambda: perceptron("distillation(teacher=no.onnx)"), Exception, "no.onnx"),
    ],
)
def test_mismatches_are_refused(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_teachers_of_other_models(tmp_path):
    onnx.save(examples.mlp((4, 5)), tmp_path / "five.onnx")
    with raises_sentence("teacher_classes", what=tmp_path / "five.onnx", got=("N", 5), wanted=("N", 3)):
        perceptron(Distillation(tmp_path / "five.onnx"))
    other = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n,4] a, float[n,3] b) => (float[n,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}>
        { h = MatMul(a, w) y = Add(h, b) }""")
    onnx.save(other, tmp_path / "other.onnx")
    with raises_sentence("teacher_inputs", what=tmp_path / "other.onnx", got=["a", "b"], own="input"):
        perceptron(Distillation(tmp_path / "other.onnx"))
