"""Split cross-entropy: the same results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.lower import lower_graph
from onnxtrain.lowering.rules.kernels import LEAST_CLASSES
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session

RNG = np.random.default_rng(0)
ROWS = 6
LOGITS = RNG.standard_normal((ROWS, LEAST_CLASSES)).astype(np.float32)
WEIGHTS = RNG.random(LEAST_CLASSES).astype(np.float32)
LABELS = np.asarray([0, LEAST_CLASSES - 1, 7, -100, 5, 5])


def lowered(*arguments, **settings):
    return lower_graph(ir.from_proto(loss_model(*arguments, **settings)), kernels=True)


def loss_model(shape=("N", LEAST_CLASSES), *, weighted=False, both=True, dtype=np.float32, **attributes):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [("x", kind, shape), ("t", 7, None)] + [("w", kind, [LEAST_CLASSES])] * weighted
    outputs = ["loss", "log_p"] if both else ["loss"]
    node = helper.make_node("SoftmaxCrossEntropyLoss", [name for name, *_ in inputs], outputs, **attributes)
    graph = helper.make_graph(
        [node],
        "loss",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def operators(model):
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_it_has_the_numbers_of_the_loss(reduction, weighted, dtype, both):
    model = lowered(weighted=weighted, both=both, dtype=dtype, reduction=reduction, ignore_index=-100)
    assert operators(model) == {"LogSoftmax": 1, "NegativeLogLikelihoodLoss": 1}
    x, w = LOGITS.astype(dtype), WEIGHTS.astype(dtype)
    feeds = {"x": x, "t": LABELS} | ({"w": w} if weighted else {})
    loss, *rest = create_session(model, RuntimeOptions(1)).run(None, feeds)
    log_p = x - np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True))
    counted = LABELS != -100
    weight = np.where(counted, w[LABELS] if weighted else 1.0, 0.0)
    terms = -weight * np.where(counted, log_p[np.arange(ROWS), LABELS], 0.0)
    wanted = {"none": terms, "sum": terms.sum(), "mean": terms.sum() / weight.sum()}[reduction]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-5)
    for found in rest:
        np.testing.assert_allclose(found, log_p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 3, 10, 1000, LEAST_CLASSES])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_without_weights_it_has_the_bits_of_the_runtime_and_no_function(reduction, dtype, classes):
    x = (5 * RNG.standard_normal((33, classes))).astype(dtype)
    feeds = {"x": x, "t": RNG.integers(0, classes, 33)}
    whole = loss_model(("N", "classes"), dtype=dtype, reduction=reduction)
    model = lower_graph(ir.from_proto(whole), kernels=True)
    assert not operators(model) & Counter(SoftmaxCrossEntropyLoss=1, NegativeLogLikelihoodLoss=1)
    found = create_session(model, RuntimeOptions(1)).run(None, feeds)
    wanted = onnxruntime.InferenceSession(whole.SerializeToString()).run(None, feeds)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        (("N", LEAST_CLASSES - 1), {"ignore_index": 0}),
        (("N", "classes"), {"ignore_index": 0}),
        (None, {}),
    ],
)
def test_few_classes_and_other_attributes_keep_the_operator(shape, attributes):
    assert operators(lowered(shape, **attributes)) == {"SoftmaxCrossEntropyLoss": 1}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_classes_of_every_pixel(reduction, ignored):
    x, labels = RNG.standard_normal((3, 7, 4, 9)).astype(np.float32), RNG.integers(0, 7, (3, 4, 9))
    attributes = {"reduction": reduction} | ({"ignore_index": 2} if ignored else {})
    whole = loss_model(("N", 7, 4, 9), **attributes)
    model = lower_graph(ir.from_proto(whole), kernels=True)
    assert [node.domain for node in model.graph if node.op_type == "LogSoftmax"] == ["onnxtrain"]
    found = create_session(model, RuntimeOptions(1), kernels=True).run(None, {"x": x, "t": labels})
    wanted = onnxruntime.InferenceSession(whole.SerializeToString()).run(None, {"x": x, "t": labels})
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_training_over_many_classes_is_that_of_standard_operators():
    x, y = RNG.standard_normal((16, 4)).astype(np.float32), RNG.integers(0, LEAST_CLASSES, 16)
    losses = []
    for kernels in (True, False):
        learner = onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, LEAST_CLASSES)),
            loss="softmax_cross_entropy",
            optimizer="adam(lr=0.01)",
            runtime=RuntimeOptions(1, kernels=kernels),
        )
        losses.append([learner.train_step(x, y) for _ in range(4)])
        found = Counter(n.op_type for n in onnxtrain.lower(learner.training_model(), kernels=kernels).graph.node)
        assert (found["LogSoftmax"], found["SoftmaxCrossEntropyLoss"]) == ((1, 0) if kernels else (0, 1))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_an_invalid_class_label_is_refused():
    learner = onnxtrain.Trainer(onnxtrain.examples.mlp((4, LEAST_CLASSES)), loss="softmax_cross_entropy", threads=1)
    session = onnxtrain.TrainingSession(learner.training_model())
    feeds = {"input": np.ones((1, 4), np.float32), "learning_rate": np.float32(0.1)}
    for label in (LEAST_CLASSES, -1):
        with pytest.raises(OnnxTrainError):
            session.step({**feeds, "target": np.asarray([label])})
