"""Losses of object detectors: assignment, values and gradients against NumPy and SciPy, heads of models, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from conformance import detection
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph import Builder
from onnxtrain.losses import DETR, YOLO
from onnxtrain.plugins.detection.boxes import assign
from plugins.detection.detectors import BOXES, CELLS, CROWD, HEAD, LOGITS, SLOTS, C, R, X, model, prediction


def stepped(loss, values, targets, names=None, sample_weight=None):
    """Loss, and its gradient by each output."""
    names = [f"y{index}" for index in range(len(values))] if names is None else names
    trainer = onnxtrain.Trainer(model(values, names), loss=loss, optimizer="sgd(lr=1.0)", train=["*_weight"])
    found = trainer.train_step(X, targets, sample_weight=sample_weight)
    return found, [value - trainer.parameters[f"{name}_weight"] for name, value in zip(names, values, strict=True)]


def difference(function, values, seed=0):
    """Directional derivative by central differences, and the direction."""
    direction = [np.random.default_rng((seed, index)).normal(size=value.shape) for index, value in enumerate(values)]
    ends = [function([v + s * 1e-5 * d for v, d in zip(values, direction, strict=True)]) for s in (1, -1)]
    return (ends[0] - ends[1]) / 2e-5, direction


YOLOS = [
    {},
    {"box_gain": 2.0, "class_gain": 1.5, "dfl_gain": 0.7},
    {"topk": 3},
    {"topk": 100},
    {"alpha": 1.0, "beta": 0.5},
    {"weight": 0.5},
    {"reduction": "sum"},
]


@pytest.mark.parametrize("options", YOLOS, ids=str)
@pytest.mark.parametrize("weights", [None, np.array([0.5, 2, 1], np.float32)])
def test_yolo_is_its_definition(options, weights):
    own = {"beta": 1.0, **options}  # weights near 1 of random boxes
    loss = YOLO(reg_max=R, **own)
    found, gradients = stepped(loss, HEAD, BOXES, sample_weight=weights)
    factors = (loss.box_gain, loss.class_gain, loss.dfl_gain)
    fixed = prediction(HEAD)

    def defined(levels):
        return detection.yolo(prediction(levels), BOXES, R, fixed, factors, loss.topk, loss.alpha, loss.beta, weights)

    wide = [level.astype(np.float64) for level in HEAD]
    scale = loss.weight
    if loss.reduction == "sum":
        unit = fixed[0, 0, -2:]
        w = 0.0
        for rows, truth in zip(fixed, BOXES, strict=True):
            true = [(int(b[0]), detection.edges(*b[1:]) / np.tile(unit, 2)) for b in truth if b[0] >= 0]
            anchors = [detection.decoded(row, R, unit) for row in rows]
            w += sum(own for _, own in detection.aligned(anchors, true, loss.topk, loss.alpha, loss.beta).values())
        scale *= max(1.0, w)
    np.testing.assert_allclose(found, scale * defined(wide), rtol=1e-5)
    slope, direction = difference(defined, wide)
    given = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    np.testing.assert_allclose(given, scale * slope, rtol=1e-3)


DETRS = [
    {},
    {"class_gain": 2.0, "l1_gain": 1.0, "giou_gain": 4.0},
    {"no_object": 0.5},
    {"weight": 0.5},
    {"reduction": "sum"},
]


@pytest.mark.parametrize("options", DETRS, ids=str)
@pytest.mark.parametrize("weights", [None, np.array([0.5, 2, 1], np.float32)])
@pytest.mark.parametrize("boxes", [BOXES, CROWD], ids=["boxes", "more boxes than slots"])
def test_detr_is_its_definition(options, weights, boxes):
    loss = DETR(**options)
    found, gradients = stepped(loss, [LOGITS, SLOTS], boxes, ["logits", "pred_boxes"], weights)

    def joined(values):
        return np.concatenate(values, 2).astype(np.float64)

    def defined(values):
        factors = (loss.class_gain, loss.l1_gain, loss.giou_gain)
        return detection.detr(joined(values), boxes, joined([LOGITS, SLOTS]), factors, loss.no_object, weights)

    scale = loss.weight * (3 if loss.reduction == "sum" else 1)
    wide = [LOGITS.astype(np.float64), SLOTS.astype(np.float64)]
    np.testing.assert_allclose(found, scale * defined(wide), rtol=1e-5)
    slope, direction = difference(defined, wide)
    given = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    np.testing.assert_allclose(given, scale * slope, rtol=1e-3)


def test_every_option_is_tried():
    assert {key for options in YOLOS for key in options} | {"reg_max"} == {f.name for f in dataclasses.fields(YOLO)}
    assert {key for options in DETRS for key in options} | {"boxes"} == {f.name for f in dataclasses.fields(DETR)}


def assigning():
    """A session of the assignment alone."""
    values = [
        ir.Value(name="cost", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(("n", "m", "q"))),
        ir.Value(name="active", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(("n", "m"))),
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="assign")
    op = Builder(graph, 18)
    found = op.Identity(assign(op, *map(op.wrap, values)))
    found.ir.name, found.ir.type, found.ir.shape = "found", ir.TensorType(ir.DataType.INT64), ir.Shape(("n", "q"))
    graph.outputs.append(found.ir)
    proto = ir.to_proto(ir.Model(graph, ir_version=8))
    onnx.checker.check_model(proto)
    return onnxruntime.InferenceSession(proto.SerializeToString())


def test_the_assignment_is_that_of_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    session, random = assigning(), np.random.default_rng(0)
    for trial in range(60):
        images, boxes, slots = random.integers(1, 5), random.integers(1, 9), random.integers(1, 9)
        cost = (3 * random.normal(size=(images, boxes, slots))).astype(np.float32)
        active = random.random((images, boxes)) < random.random()
        (found,) = session.run(None, {"cost": cost, "active": active})
        for own, rows, got in zip(cost, active, found, strict=True):
            expected = np.full(slots, -1)
            if rows.any():
                row, column = optimize.linear_sum_assignment(own[rows])
                expected[column] = np.flatnonzero(rows)[row]
            assert got.tolist() == expected.tolist(), trial


def test_the_assignment_of_ties_and_of_equal_boxes_is_one_to_one():
    session = assigning()
    (found,) = session.run(None, {"cost": np.zeros((1, 3, 5), np.float32), "active": np.ones((1, 3), bool)})
    assert sorted(found[0].tolist()) == [-1, -1, 0, 1, 2]


def decoder(levels, apart):
    """Nodes that flatten, concatenate and decode the head as exported models do; returns them and their output."""
    nodes, shape = [], helper.make_node("Constant", [], ["flat_shape"], value_ints=[0, 0, -1])
    parts = {"sides": (0, 4 * R), "classes": (4 * R, 4 * R + C)} if apart else {"head": (0, 4 * R + C)}
    nodes.append(shape)
    for part, (start, end) in parts.items():
        for level in range(levels):
            nodes += [
                helper.make_node("Constant", [], [f"{part}{level}_start"], value_ints=[start]),
                helper.make_node("Constant", [], [f"{part}{level}_end"], value_ints=[end]),
                helper.make_node("Constant", [], [f"{part}{level}_axis"], value_ints=[1]),
                helper.make_node(
                    "Slice",
                    [f"y{level}", *(f"{part}{level}_{n}" for n in ("start", "end", "axis"))],
                    [f"{part}{level}"],
                ),
                helper.make_node("Reshape", [f"{part}{level}", "flat_shape"], [f"{part}{level}_flat"]),
            ]
        nodes.append(helper.make_node("Concat", [f"{part}{level}_flat" for level in range(levels)], [part], axis=2))
    if apart:
        nodes.append(helper.make_node("Sigmoid", ["classes"], ["scores"]))
        nodes.append(helper.make_node("Concat", ["sides", "scores"], ["out"], axis=1))
    else:
        nodes.append(helper.make_node("Sigmoid", ["head"], ["out"]))
    return nodes


@pytest.mark.parametrize("apart", [False, True])
def test_yolo_finds_the_head_in_front_of_a_decoder(apart):
    info = [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 4 * R + C, len(CELLS)])]
    exported = model(HEAD, outputs=info, extra=decoder(2, apart))
    trainer = onnxtrain.Trainer(exported, loss=YOLO(reg_max=R), optimizer="sgd(lr=1.0)", train=["*_weight"])
    found = trainer.train_step(X, BOXES)
    expected, gradients = stepped(YOLO(reg_max=R), HEAD, BOXES)
    assert found == pytest.approx(expected, rel=1e-6)
    for index, gradient in enumerate(gradients):
        np.testing.assert_allclose(HEAD[index] - trainer.parameters[f"y{index}_weight"], gradient, atol=1e-6)
    assert trainer.predict(X).shape == (3, 4 * R + C, len(CELLS))  # the model's own output


def test_outputs_of_sides_and_classes_may_be_apart():
    expected, _ = stepped(YOLO(reg_max=R), HEAD, BOXES)
    halves = [level[:, 4 * R :] for level in HEAD], [level[:, : 4 * R] for level in HEAD]
    found, _ = stepped(YOLO(reg_max=R), [*halves[0], *halves[1]], BOXES)
    assert found == pytest.approx(expected, rel=1e-6)


def test_detr_takes_probabilities_and_finds_its_outputs_by_name():
    expected, _ = stepped(DETR(), [LOGITS, SLOTS], BOXES, ["logits", "pred_boxes"])
    three = np.concatenate([LOGITS, LOGITS[..., :1]], 2)  # four columns, as boxes have
    with pytest.raises(OptionError, match="name the boxes by boxes="):
        stepped(DETR(), [three, SLOTS], BOXES, ["one", "two"])
    named, _ = stepped(DETR(boxes="two"), [three, SLOTS], BOXES, ["one", "two"])
    assert named == stepped(DETR(), [three, SLOTS], BOXES, ["logits", "pred_boxes"])[0]
    nodes = [helper.make_node("Softmax", ["logits"], ["p"], axis=-1)]
    info = [
        helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 4, C + 1]),
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", 4, 4]),
    ]
    exported = model([LOGITS, SLOTS], ["logits", "boxes"], outputs=info, extra=nodes)
    trainer = onnxtrain.Trainer(exported, loss="detr", optimizer="sgd(lr=1.0)", train=["*_weight"])
    assert trainer.train_step(X, BOXES) == pytest.approx(expected, rel=1e-5)


def detector():
    """A one-layer convolution [N, 3, 8, 8] to a head [N, 18, 4, 4]."""
    weight = (0.5 * np.random.default_rng(1).normal(size=(4 * R + C, 3, 2, 2))).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["image", "w"], ["head"], strides=[2, 2])],
        "detector",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("head", TensorProto.FLOAT, ["n", 4 * R + C, 4, 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


IMAGES = np.random.default_rng(2).normal(size=(6, 3, 8, 8)).astype(np.float32)
MANY = np.concatenate([BOXES, BOXES])


def test_training_and_evaluation():
    for accumulate in (1, 3):
        loss = YOLO(reg_max=R, beta=0.5)
        trainer = onnxtrain.Trainer(detector(), loss=loss, optimizer="adam(lr=0.02)", accumulate=accumulate)
        before = trainer.evaluate(IMAGES, MANY)["loss"]
        trainer.fit(IMAGES, MANY, batch_size=6 // accumulate, epochs=8, progress=False)
        found = trainer.evaluate(IMAGES, MANY)
        assert found["loss"] < before
        assert 0 <= found["map"] <= found["map_50"] <= 1


def test_a_model_of_a_fixed_batch_size_leaves_padding_out():
    proto = detector()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    trainer = onnxtrain.Trainer(proto, loss=YOLO(reg_max=R), optimizer="sgd(lr=0.1)")
    free = onnxtrain.Trainer(detector(), loss=YOLO(reg_max=R), optimizer="sgd(lr=0.1)")
    assert trainer.train_step(IMAGES[:3], BOXES) == pytest.approx(free.train_step(IMAGES[:3], BOXES), rel=1e-5)


def test_an_exported_step_assigns_by_itself(tmp_path):
    stored = onnxtrain.training_model(detector(), loss=YOLO(reg_max=R), optimizer="adam")
    assert "StopGradient" in {node.op_type for node in stored.training_info[0].algorithm.node}
    proto = onnxtrain.lower(stored)
    assert {node.op_type for node in proto.graph.node} >= {"TopK", "ScatterElements"}
    assert {node.domain for node in proto.graph.node} <= {""}
    onnx.checker.check_model(proto)
    model_of_slots = model([LOGITS, SLOTS], ["logits", "boxes"])
    proto = onnxtrain.lower(
        onnxtrain.training_model(model_of_slots, loss="detr", optimizer="sgd(lr=0.1)", train=["*_weight"])
    )
    assert "Loop" in {node.op_type for node in proto.graph.node}
    onnx.checker.check_model(proto)


def with_box(*box):
    targets = BOXES.copy()
    targets[1, 0] = box
    return targets


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (BOXES[0], r"shape \(3, 5\)\), but the model needs rank 3: .*\. Give rows of \(class, x, y, width, height\)"),
        (BOXES[..., :4], r"has shape \(3, 3, 4\), but the model needs .*\. Give rows"),
        (BOXES[:, :0], "yolo needs at least one row of targets per image; pad with a row of class -1"),
        (with_box(2, 0.5, 0.5, 0.2, 0.2), "has a box of class 2 at example 1, but yolo needs classes 0 to 1"),
        (with_box(0.5, 0.5, 0.5, 0.2, 0.2), "has a box of class 0.5 at example 1"),
        (with_box(1, 4, 4, 2, 2), r"has the box \(4, 4, 2, 2\) at example 1, .* divide by its size"),
        (with_box(1, 0.5, 0.5, 0, 0.2), r"has the box \(0.5, 0.5, 0, 0.2\) of no size at example 1; leave it out"),
        (with_box(1, 0.5, np.nan, 0.2, 0.2), "holds nan at example 1"),
        (
            [BOXES[0], BOXES[1, :1]],
            "holds rows of different lengths; pad them to one length. Give rows of",
        ),
    ],
)
def test_targets_are_refused_in_one_sentence(targets, message):
    trainer = onnxtrain.Trainer(detector(), loss=YOLO(reg_max=R))
    with pytest.raises(DataError, match=message):
        trainer.train_step(IMAGES[: len(targets)], targets)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="yolo"),
            r"yolo needs the raw head .* 64 \+ classes",
        ),
        (lambda: onnxtrain.Trainer(detector(), loss="yolo"), "give reg_max= where it is not 16"),
        (lambda: onnxtrain.Trainer(detector(), loss="detr"), "detr needs outputs of logits"),
        (lambda: YOLO(topk=0), "topk is 0; yolo needs 1 or more"),
        (lambda: YOLO(reg_max=1), "reg_max is 1; yolo needs 2 or more"),
        (lambda: YOLO(beta=0), "beta is 0; yolo needs a finite number above 0"),
        (lambda: DETR(no_object=-1), "no_object is -1; detr needs a finite number above 0"),
    ],
)
def test_models_and_settings_are_refused_in_one_sentence(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_yolo_trains_models_of_doubles():
    """ONNX Runtime has no Atan of doubles, which the CIoU needs."""
    losses = []
    for dtype in (np.float32, np.float64):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        kernel = np.random.default_rng(0).normal(size=(3, 4 * R + 2)).astype(dtype)
        shapes = {"x": ["n", 4, 6, 3], "y": ["n", 4 * R + 2, 4, 6]}
        inputs, outputs = ([onnx.helper.make_tensor_value_info(name, kind, shapes[name])] for name in "xy")
        nodes = [
            onnx.helper.make_node("MatMul", ["x", "kernel"], ["h"]),
            onnx.helper.make_node("Transpose", ["h"], ["y"], perm=[0, 3, 1, 2]),
        ]
        weights = [onnx.numpy_helper.from_array(kernel, "kernel")]
        graph = onnx.helper.make_graph(nodes, "head", inputs, outputs, weights)
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
        x = np.random.default_rng(1).normal(size=(len(BOXES), 4, 6, 3)).astype(dtype)
        trainer = onnxtrain.Trainer(proto, loss=YOLO(reg_max=R), optimizer="sgd(lr=0.1)")
        losses.append([trainer.train_step(x, BOXES) for _ in range(2)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
