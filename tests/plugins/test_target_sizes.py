"""Targets have the sizes that the prediction gives them, also along axes that no input names: each loss refuses others.

Smaller targets would broadcast, or be compared with the first scores only, and a number would come out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import onnxtrain
from losses.loss_rows import LOSS_ROWS
from onnxtrain.errors import DataError
from onnxtrain.graph import Builder
from onnxtrain.losses import LOSSES
from onnxtrain.runtime.failures import require_shape
from onnxtrain.training.trainer import Trainer
from plugins.detection import detectors
from plugins.test_losses_by_batch import ELSEWHERE, made
from plugins.text.test_group_losses import CASES as GROUPS
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)
N, C, H, W = 4, 4, 3, 5

FREE = {"ctc": 1, "transducer": 1, "yolo": 1, "detr": 1}
"""Axes of targets that have any size: labels and boxes, with padding."""


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            axis.ClearField("dim_param")
    return model


def anonymous(text: str, hidden: str) -> onnx.ModelProto:
    """A model whose axes have no names, and whose output declares no sizes but those of its fixed axes."""
    weights = "float[4, 1, 2, 2] k = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9, 0.1, 0.2, 0.3, 0.4}"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 1, h, w] x) => ({text}) <{weights}> {{ {hidden} }}""")
    return without_names(model)


def image() -> onnx.ModelProto:
    return anonymous("float[n, 4, p, q] y", "y = Conv<strides=[2, 2]>(x, k)")


def words() -> onnx.ModelProto:
    return anonymous(
        "float[n, t, 4] y",
        "z = Conv<strides=[2, 2]>(x, k)  s = Constant<value_ints=[0, 4, -1]>()  r = Reshape(z, s)  "
        "y = Transpose<perm=[0, 2, 1]>(r)",
    )


def pairs() -> onnx.ModelProto:
    return anonymous("float[n, t, u, 4] y", "z = Conv<strides=[2, 2]>(x, k)  y = Transpose<perm=[0, 2, 3, 1]>(z)")


WEIGHTS = "<float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}, float ten = {10}>"


def rows() -> onnx.ModelProto:
    return without_names(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
            f (float[n, 3] x) => (float[n, 4] y) {WEIGHTS} {{ y = MatMul(x, w) }}""")
    )


def cosines() -> onnx.ModelProto:
    return without_names(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
            f (float[n, 3] x) => (float[n, 4] y) {WEIGHTS} {{ h = MatMul(x, w)  y = Div(h, ten) }}""")
    )


def risk() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 1] y) <float[3, 1] w = {0.5, -1, 0.3}> { y = MatMul(x, w) }""")


def detector(outputs: list[np.ndarray], names: list[str]) -> Callable[[], onnx.ModelProto]:
    return lambda: without_names(detectors.model(outputs, names))


def group(make: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    return lambda: without_names(make())


X = RANDOM.normal(size=(N, 1, 2 * H, 2 * W)).astype(np.float32)
SCORES = RANDOM.random((N, C, H, W)).astype(np.float32)
SHARES = SCORES / SCORES.sum(1, keepdims=True)
CLASSES = RANDOM.integers(0, C, (N, H, W))
LABELS = np.array([0, 1, 0, 1])
TIMES = np.array([[2.0, 1], [1.0, 0], [3.0, 1], [2.0, 1]], np.float32)
TEXTS = np.array([[1, 2], [3, -1], [2, 1], [1, 3]])

DATA: dict[str, tuple[Callable[[], onnx.ModelProto], Any, tuple[np.ndarray, ...]]] = {
    **dict.fromkeys(
        ("mean_squared_error", "mean_absolute_error", "huber", "binary_cross_entropy", "binary_focal"),
        (image, X, (SCORES,)),
    ),
    **dict.fromkeys(("softmax_cross_entropy", "focal", "dice"), (image, X, (CLASSES, SHARES))),
    "distillation": (rows, X.reshape(N, -1)[:, :3], (LABELS, SHARES[:, :, 0, 0])),
    "next_token": (words, X, (CLASSES.reshape(N, -1),)),
    "ctc": (words, X, (TEXTS,)),
    "transducer": (pairs, X, (TEXTS,)),
    **dict.fromkeys(("triplet", "info_nce", "circle"), (rows, X.reshape(N, -1)[:, :3], (LABELS,))),
    **dict.fromkeys(("arcface", "cosface"), (cosines, X.reshape(N, -1)[:, :3], (LABELS,))),
    "cox": (lambda: without_names(risk()), X.reshape(N, -1)[:, :3], (TIMES,)),
    "yolo": (detector(detectors.HEAD, ["y0", "y1"]), detectors.X, (detectors.BOXES,)),
    "detr": (detector([detectors.LOGITS, detectors.SLOTS], ["logits", "boxes"]), detectors.X, (detectors.BOXES,)),
    **{name: (group(make), inputs, (targets,)) for name, (make, (inputs, targets), *_) in GROUPS.items()},
}
DATA |= {
    name: (group(row.model), row.x, row.targets[:1]) for name, row in LOSS_ROWS.items() if name in LOSSES.keys() - DATA
}

WAYS: dict[str, Callable[[Trainer, Any, np.ndarray], object]] = {
    "step": lambda trainer, x, y: trainer.train_step(x, y),
    "fit": lambda trainer, x, y: trainer.fit((x, y), progress=False),
    "evaluate": lambda trainer, x, y: trainer.evaluate((x, y)),
}


def test_every_loss_that_compares_examples_is_covered() -> None:
    missing = [name for name, loss in LOSSES.items() if issubclass(loss, ELSEWHERE) and name not in DATA]
    assert missing == [], "each needs data in this file"


@pytest.mark.parametrize(("name", "index"), [(name, index) for name in DATA for index in range(len(DATA[name][2]))])
def test_targets_of_another_size_are_refused(tmp_path: Path, name: str, index: int) -> None:
    make, inputs, targets = DATA[name]
    good = targets[index]
    options = {"reg_max": detectors.R} if name == "yolo" else {}
    trainer = Trainer(make(), loss=made(name, options, tmp_path), targets="values" if index else None)
    for run in WAYS.values():
        run(trainer, inputs, good)
    for axis in range(good.ndim):
        for size in {1, good.shape[axis] - 1}:
            wrong = np.take(good, range(size), axis)
            for way, run in WAYS.items():
                if FREE.get(name) == axis:
                    run(trainer, inputs, wrong)
                    continue
                with pytest.raises(DataError):
                    pytest.fail(f"{way} of targets {wrong.shape}, not {good.shape}: {run(trainer, inputs, wrong)}")


@pytest.mark.parametrize("loss", ["mse", "huber", "bce", "softmax_cross_entropy"])
def test_the_error_names_both_shapes(loss: str) -> None:
    trainer = Trainer(image(), loss=loss)
    good = CLASSES if loss == "softmax_cross_entropy" else SCORES
    # As many elements, in other places, would pass a mere Reshape.
    for wrong in (good[..., :1], good[..., :2, :], np.concatenate([good, good], -1), good.swapaxes(-1, -2)):
        message = (
            f"'target' does not have the sizes of the prediction 'y'. It has the shape {wrong.shape}, and needs "
            f"{good.shape}."
        )
        for run in (*WAYS.values(), lambda _, x, y: onnxtrain.evaluate(image(), (x, y), loss=loss)):
            with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
                run(trainer, X, wrong)
        with pytest.raises(DataError, match=re.escape(message)):  # one example of the shape comes first
            trainer.evaluate(lambda: iter([(X, good), (X, wrong)]))  # noqa: B023


@pytest.mark.parametrize("loss", ["mse", "softmax_cross_entropy"])
def test_partial_batches_of_a_fixed_size_are_compared(loss: str) -> None:
    model = image()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = N
    targets = CLASSES if loss == "softmax_cross_entropy" else SCORES
    trainer, alone = Trainer(model, loss=loss), Trainer(image(), loss=loss)
    assert trainer.evaluate((X[:3], targets[:3]))["loss"] == pytest.approx(
        alone.evaluate((X[:3], targets[:3]))["loss"], rel=1e-5
    )
    with raises_sentence("sizes_of_prediction", target="'target'", needed="3, 5)"):
        trainer.evaluate((X[:3], targets[:3, ..., :1]))


def halves(logits: str) -> onnx.ModelProto:
    """A language model of every second token, whose number has no name."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] input_ids) => ({logits}) {{
            zero = Constant<value_ints=[0]>()  end = Constant<value_ints=[1000]>()
            one = Constant<value_ints=[1]>()  two = Constant<value_ints=[2]>()
            half = Slice(input_ids, zero, end, one, two)
            hidden = Gather(table, half)  logits = MatMul(hidden, head) }}""")
    for name, shape in (("table", (9, 4)), ("head", (4, 7))):
        value = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


@pytest.mark.parametrize("length", [2, 6])
@pytest.mark.parametrize("loss", ["next_token", "softmax_cross_entropy(axis=-1)"])
def test_labels_are_compared_where_logits_are_computed_in_chunks(loss: str, length: int) -> None:
    ids, labels = RANDOM.integers(0, 9, (3, 8)), RANDOM.integers(0, 7, (3, 6))
    found = []
    for chunk in ("", "(chunk=2)" if "(" not in loss else ", chunk=2)"):
        trainer = Trainer(halves("float[N, H, 7] logits"), loss=loss.removesuffix(")" if chunk else "") + chunk)
        found.append(trainer.train_step(ids, labels[:, :4]))
        for run in WAYS.values():
            with pytest.raises(DataError, match=rf"It has the shape \(3, {length}\), and needs \(3, 4\)"):
                run(trainer, ids, labels[:, :length])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto", "dpo(chunk=2)"])
def test_labels_of_answers_are_compared(loss: str, length: int) -> None:
    ids, labels = RANDOM.integers(0, 9, (3, 2, 8)), RANDOM.integers(0, 7, (3, 2, 4))
    columns = {"dpo": 2, "orpo": 3, "kto": 3}[loss.partition("(")[0]]
    targets = np.ones((3, columns), np.float32)

    def data(size: int) -> dict[str, np.ndarray]:
        more = np.pad(labels, ((0, 0), (0, 0), (0, 2)))[..., :size]
        return {"input_ids": ids, "labels": more} | ({"chosen_labels": more[:, 0]} if loss == "orpo" else {})

    trainer = Trainer(halves("float[N, H, 7] logits"), loss=loss)
    trainer.train_step(data(4), targets)
    for run in WAYS.values():
        with raises_sentence("tokens_of_prediction", prediction="'logits'"):
            run(trainer, data(length), targets)


@pytest.mark.parametrize(("shape", "fits"), [((2, 3), True), ((2, 1), False), ((3, 2), False), ((4, 6), False)])
def test_the_comparison_is_standard_onnx(shape: tuple[int, int], fits: bool) -> None:
    """It fails in other runtimes, too."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="sizes")
    for name in ("x", "needed"):
        kind, size = (ir.DataType.FLOAT, (None, None)) if name == "x" else (ir.DataType.INT64, (2,))
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(size)))
    op = Builder(graph, 18)
    found = require_shape(*map(op.wrap, graph.inputs), "Other sizes.", may_differ=2)
    found.ir.name = "y"
    graph.outputs.append(found.ir)
    proto = ir.to_proto(ir.Model(graph, ir_version=8))
    onnx.checker.check_model(proto, full_check=True)
    given = {"x": RANDOM.random((2, 3), np.float32), "needed": np.array(shape, np.int64)}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for run in (lambda: session.run(None, given), lambda: ReferenceEvaluator(proto).run(None, given)):
        if fits:
            np.testing.assert_array_equal(run()[0], given["x"])
            continue
        with pytest.raises(Exception, match=r"cannot (be )?reshape"):
            run()


def test_sizes_of_names_that_inputs_have_cost_no_nodes() -> None:
    named = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, h, 2] x) => (float[n, h, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }""")
    for model, compared in ((named, False), (image(), True)):
        made = onnxtrain.training_model(model, loss="mse", optimizer="sgd")
        onnx.checker.check_model(made)
        assert any(node.op_type == "Reshape" for node in made.training_info[0].algorithm.node) is compared
