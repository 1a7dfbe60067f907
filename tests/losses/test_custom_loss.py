"""User-defined loss functions: arguments, results and targets."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.errors import DataError, OnnxTrainError, OptionError
from onnxtrain.losses import CustomLoss
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence

RNG = np.random.default_rng(5)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 3)).astype(np.float32)


def trainer(loss, **options) -> Trainer:
    return Trainer(onnxtrain.examples.mlp((4, 3)), loss=loss, **options)


P = np.asarray(trainer("mean_squared_error").predict(X), np.float64)
SCALES = np.array([1, 2, 3.0])

FUNCTIONS = {
    "a single element": (lambda op, p, t: op.ReduceMean((p - t) ** 2), np.mean((P - Y) ** 2)),
    "numbers and arrays": (
        lambda op, p, t: 2.0 * op.ReduceMean(op.Where(abs(p - t) > 1.0, SCALES * abs(p - t), (t - p) ** 2)) / 3,
        2 / 3 * np.mean(np.where(np.abs(P - Y) > 1, SCALES * np.abs(P - Y), (P - Y) ** 2)),
    ),
    "slices": (
        lambda op, p, t: op.ReduceMean((p[:, 1:] - t[..., :2][:, ::-1]) ** 2, keepdims=0),
        np.mean((P[:, 1:] - Y[:, 1::-1]) ** 2),
    ),
    "axes as a list": (
        lambda op, p, t: op.ReduceMean(op.ReduceMax(abs(p - t), [1], keepdims=0), keepdims=0),
        np.mean(np.abs(P - Y).max(1)),
    ),
    "another floating type": (
        lambda op, p, t: op.ReduceMean(op.cast(p - t, ir.DataType.DOUBLE) ** 2, keepdims=0),
        np.mean((P - Y) ** 2),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_valid_functions(name):
    function, expected = FUNCTIONS[name]
    subject = trainer(function, optimizer=onnxtrain.Adam(0.05))
    assert subject.train_step(X, Y) == pytest.approx(expected, rel=1e-5)
    assert [subject.train_step(X, Y) for _ in range(20)][-1] < expected


def takes_two(op, prediction):
    return prediction


MISTAKES = {
    "number": (
        lambda op, p, t: 0.5,
        "The loss function '<lambda>' returned a float; it needs to return one value of the",
    ),
    "nothing": (lambda op, p, t: None, "returned None; it needs to return one value"),
    "tuple": (lambda op, p, t: (p, t), "returned a tuple; it needs to return one value"),
    "array": (lambda op, p, t: np.ones(3), "returned a ndarray; it needs to return one value"),
    "no scalar": (lambda op, p, t: p - t, r"a value of shape \('N', 3\), but a loss is one number; reduce it"),
    "no scalar of fixed shape": (lambda op, p, t: op.ReduceMean(p, [0], keepdims=0), r"a value of shape \(3,\), but"),
    "integer": (
        lambda op, p, t: op.ReduceSum(op.cast(p, ir.DataType.INT64), keepdims=0),
        "returned a value of type INT64; a loss is a floating number",
    ),
    "target only": (
        lambda op, p, t: op.ReduceMean(t),
        "does not depend on the prediction, so nothing would be trained",
    ),
    "arguments": (takes_two, r"'takes_two' takes the arguments \(op, prediction\); it is called with three"),
    "unknown operator": (
        lambda op, p, t: op.ReduceMeen(p - t),
        "emits a node that ONNX refuses: No Op registered for R",
    ),
    "unknown attribute": (
        lambda op, p, t: op.ReduceMean(p - t, axes=[0, 1]),
        "ONNX refuses: Unrecognized attribute: axes for operator ReduceMean",
    ),
    "types": (
        lambda op, p, t: op.ReduceMean(p * op.cast(t, ir.DataType.INT64)),
        r"ONNX refuses: .*Mul.*inconsistent type tensor\(int64\)",
    ),
    "shapes": (lambda op, p, t: op.ReduceMean(p[:, :2] * t), "ONNX refuses: .*Mul.*Incompatible dimensions"),
    "equality": (lambda op, p, t: op.ReduceMean(op.Where(t == 1, p, t)), r"input 0 of Where is False.*op\.Equal"),
    "branch": (lambda op, p, t: p if p > t else t, "Python cannot branch on it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_results_are_refused(name):
    function, message = MISTAKES[name]
    with pytest.raises(OnnxTrainError, match=message):
        trainer(function).train_step(X, Y)


def test_errors_of_the_function_propagate():
    error = LookupError("of my own")

    def fails(op, prediction, target):
        raise error

    with pytest.raises(LookupError) as caught:
        trainer(fails)
    assert caught.value is error


# --- targets of another shape or type

IMAGES = RNG.normal(size=(8, 1, 8, 8)).astype(np.float32)
MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]> m (float[N,1,8,8] x) => (float[N,1,8,8] y)
    <float[1,1,3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = Conv<pads = [1, 1, 1, 1]>(x, w) }"""
)
MAPS = np.asarray(Trainer(MODEL, loss="mean_squared_error").predict(IMAGES), np.float64)
AMOUNTS = RNG.normal(size=8)
COUNTS = RNG.integers(0, 5, (8, 3))


def amount(op, prediction, target):
    """A loss on the mean of each image; targets [N]."""
    return op.ReduceMean((op.ReduceMean(prediction, [1, 2, 3], keepdims=0) - target) ** 2)


def corner(op, prediction, target):
    """A loss on the first pixels as counts; targets [N, 3]."""
    return op.ReduceMean((prediction[:, 0, 0, :3] - op.cast(target, prediction.dtype)) ** 2)


def chosen(op, prediction, target):
    """A loss on the images whose target [N] is true."""
    return op.ReduceMean(op.Where(target[:, None, None, None], prediction**2, 0.0))


CHOSEN = AMOUNTS > 0
OTHERS = {
    "numbers [N]": (amount, AMOUNTS, np.mean((MAPS.mean((1, 2, 3)) - AMOUNTS) ** 2)),
    "integers [N, 3]": (corner, COUNTS, np.mean((MAPS[:, 0, 0, :3] - COUNTS) ** 2)),
    "truth values [N]": (chosen, CHOSEN, np.mean(np.where(CHOSEN[:, None, None, None], MAPS**2, 0))),
    "of the prediction": (lambda op, p, t: op.ReduceMean((p - t) ** 2), IMAGES, np.mean((MAPS - IMAGES) ** 2)),
}
WAYS = {
    "step": lambda t, y: t.train_step(IMAGES, y),
    "fit": lambda t, y: t.fit((IMAGES, y)).rows[0]["loss"],
    "list": lambda t, y: t.fit([(IMAGES, y)]).rows[0]["loss"],
    "evaluate": lambda t, y: t.evaluate((IMAGES, y))["loss"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_targets_have_the_shape_and_type_of_the_data(name, way):
    function, targets, expected = OTHERS[name]
    assert WAYS[way](Trainer(MODEL, loss=function), targets) == pytest.approx(expected, rel=1e-5)


def test_targets_of_changing_sizes_get_a_dynamic_axis():
    builds = []

    def counted(op, prediction, target):
        builds.append(target.shape)
        return op.ReduceMean(prediction, keepdims=0) * op.cast(op.ReduceSum(target, keepdims=0), prediction.dtype)

    subject = Trainer(MODEL, loss=counted)
    for size in (3, 2, 4, 5):
        targets = np.ones((8, size), int)
        expected = float(np.mean(subject.predict(IMAGES), dtype=np.float64)) * 8 * size
        assert subject.train_step(IMAGES, targets) == pytest.approx(expected, rel=1e-4)
    assert ("N", 3) in builds
    assert builds[-1] == ("N", None)


def batches(targets):
    return lambda: iter([(IMAGES, targets)])


def test_targets_of_a_stream_are_declared():
    with raises_sentence("array_rank", hint="Targets of another shape are declared", model_rank=4):
        Trainer(MODEL, loss=lambda op, p, t: op.ReduceMean(p - t)).fit(batches(COUNTS))
    subject = Trainer(MODEL, loss=CustomLoss(corner, shape=("N", 3), dtype="int64"))
    found = subject.fit(batches(COUNTS)).rows[0]["loss"]
    assert found == pytest.approx(OTHERS["integers [N, 3]"][2], rel=1e-5)
    with raises_sentence("array_type", got="float64", wanted="int64"):
        subject.fit(batches(COUNTS / 2))


def test_a_declared_target_is_exported():
    made = onnxtrain.training_model(
        MODEL, loss=CustomLoss(corner, shape=("N", 3), dtype="int64"), optimizer=onnxtrain.Adam()
    )
    target = next(value for value in made.training_info[0].algorithm.input if value.name == "target")
    assert target.type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [axis.dim_value or axis.dim_param for axis in target.type.tensor_type.shape.dim] == ["N", 3]


def test_a_vector_does_not_broadcast_against_a_column():
    subject = Trainer(onnxtrain.examples.mlp((4, 1)), loss=lambda op, p, t: op.ReduceMean((p - t) ** 2))
    for train in (subject.train_step, subject.fit):
        with pytest.raises(DataError, match=r"rank 1 .* needs rank 2: \(batch, 1\)"):
            train((X, Y[:, 0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "labels"}, "kind is 'labels'; it is 'values' or 'indices'"),
        ({"predicts": "yes"}, "predicts is 'yes'; it is 'classes', 'binary' or 'numbers'"),
        ({"dtype": "number"}, "dtype is 'number'; it needs the name of a NumPy type"),
        ({"kind": "indices", "axis": 2}, "axis is 2, but the prediction .* has rank 2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        trainer(CustomLoss(lambda op, p, t: op.ReduceMean(p), **options))


def test_labels_along_the_inferred_axis():
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[N,2,L] x) => (float[N,6,L] y)
        <float[6,2,1] w = {1, 2, 3, 4, 5, 6, -1, -2, -3, 0, 0.5, 7}> { y = Conv(x, w) }"""
    x, labels = RNG.normal(size=(3, 2, 9)).astype(np.float32), RNG.integers(0, 6, (3, 9))
    loss = CustomLoss(lambda op, p, t: op.SoftmaxCrossEntropyLoss(p, t), kind="indices")
    own, built_in = (Trainer(onnx.parser.parse_model(text), loss=each) for each in (loss, "softmax_cross_entropy"))
    assert own.evaluate((x, labels), metrics=["accuracy"]) == pytest.approx(
        built_in.evaluate((x, labels), metrics=["accuracy"]), rel=1e-5
    )
