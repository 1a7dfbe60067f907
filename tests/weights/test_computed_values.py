"""Values that an exporter computed from parameters and stored: a hint names those that are trained instead."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import TrainingHint

RNG = np.random.default_rng(0)

FORMULAS = {"mul": "Mul(h, @)", "add": "Add(h, @)", "matmul": "MatMul(h, @)", "pow": "Pow(p, @)"}


def inspected(name, how, value):
    text = (
        '<ir_version: 10, opset_import: ["": 18]> f (float[N, 4] x) => (float[N, 3] y) '
        "{ h = MatMul(x, w) p = Exp(h) a = @ y = MatMul(a, v) }"
    )
    model = onnx.parser.parse_model(text.replace("@", FORMULAS[how]).replace("@", "c"))
    arrays = {"w": RNG.normal(size=(4, 4)), "v": RNG.normal(size=(4, 3)), name: value}
    for array_name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), array_name))
    for node in model.graph.node:
        node.input[:] = [name if each == "c" else each for each in node.input]
    result = onnxtrain.inspect(model)
    row = next(row for row in result.initializers if row.name == name)
    return model, row, [hint for hint in result.hints if name in hint]


VECTOR, MATRIX = RNG.normal(size=4), RNG.normal(size=(4, 4))

COMPUTED = {
    "Paddle's exponential": ("p2o.pd_op.exp.0.0", "mul", VECTOR),
    "Paddle's difference": ("p2o.pd_op.scale.0.0", "mul", VECTOR),
    "Paddle's weight norm": ("eager_tmp_1", "matmul", MATRIX),
    "TensorFlow's sigmoid": ("functional_1/gate_1/Sigmoid:0", "mul", VECTOR),
    "TensorFlow's difference": ("functional_1/mix_1/sub_2:0", "mul", VECTOR),
    "TensorFlow's norm": ("functional_1/dense_1/l2_normalize_1:0", "matmul", MATRIX),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_computed_value_is_named(case):
    name, how, value = COMPUTED[case]
    model, row, hints = inspected(name, how, value)
    assert row.trainable
    assert f"The exporter computed {name} from other tensors of the program and stored the result." in hints[0]
    with pytest.warns(TrainingHint, match="A training changes it directly"):
        onnxtrain.Trainer(model, loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxtrain.Trainer(model, loss="mse", freeze=name)


LAYOUTS = {
    "Paddle's parameter": ("linear_0.w_0", "matmul", MATRIX),
    "Paddle's reshaped bias": ("p2o.pd_op.reshape.0.0", "add", VECTOR),
    "TensorFlow's variable": ("functional_1/dense_1/Cast/ReadVariableOp:0", "matmul", MATRIX),
    "TensorFlow's variable that is added": ("functional_1/dense_1/Add/ReadVariableOp:0", "add", VECTOR),
    "TensorFlow's reshaped kernel": ("functional_1/query_1/Reshape:0", "matmul", MATRIX),
    "tf2onnx's transposed kernel": ("const_fold_opt__12", "matmul", MATRIX),
    "an author's": ("gate.exp", "mul", VECTOR),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_names_get_no_hint(case):
    name, how, value = LAYOUTS[case]
    _, row, hints = inspected(name, how, value)
    assert (row.trainable, hints) == (True, [])


@pytest.mark.parametrize("how", ["mul", "add", "matmul"])
def test_tensors_made_of_numbers_are_constants(how):
    """PaddlePaddle's to_tensor, as for a buffer; parameters have the names of their layers."""
    _, row, hints = inspected("generated_tensor_1", how, MATRIX if how == "matmul" else VECTOR)
    assert (row.trainable, row.reason, hints) == (False, "a tensor that was made of numbers, by its name", [])


@pytest.mark.parametrize(("name", "how"), [("eager_tmp_0", "mul"), ("eager_tmp_0", "add"), ("const_7", "pow")])
def test_what_stays_open_is_not_trained_with_a_hint(name, how):
    """A buffer that Paddle's program computes, and an exponent of several values in a file that names no parameter."""
    _, row, hints = inspected(name, how, np.abs(VECTOR))
    assert not row.trainable
    assert "is not trained: neither use nor name shows that it is learned" in hints[0]


@pytest.mark.parametrize("name", ["unit_float_tensor", "negate1", "unity2", "minus_one", "n_classes_minus_one"])
def test_scalars_of_skl2onnx_are_constants(name):
    _, row, hints = inspected(name, "mul", np.array(-1.0))
    assert (row.trainable, hints) == (False, [])
