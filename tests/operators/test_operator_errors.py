"""Errors of the operators, over arrays and as nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from operator_graphs import model_of

from onnxtrain import operators
from onnxtrain.errors import OperatorError
from onnxtrain.lowering.optimizer_bodies import lower_optimizers
from onnxtrain.operators import OPTIMIZERS
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap

X = np.ones(2, np.float32)
MOMENTUM = {"alpha": 0.9, "beta": 1.0, "mode": "standard", "norm_coefficient": 0.0}

# Operator, R, T, tensors after them, attributes, message.
REFUSED = {
    "R of two elements": (
        "Adam",
        np.ones(2, np.float32),
        0,
        [X] * 4,
        {},
        r"Adam: R has shape \(2,\), but must have exactly",
    ),
    "R of no element": ("Adam", np.ones(0, np.float32), 0, [X] * 4, {}, r"Adam: R has shape \(0,\)"),
    "T of two elements": ("Adam", 0.1, np.zeros((1, 2), np.int64), [X] * 4, {}, r"Adam: T has shape \(1, 2\)"),
    "R an integer": ("Adam", np.int64(1), 0, [X] * 4, {}, "Adam: R is of type int64, but must be float32 or"),
    "R half": ("Adam", np.float16(1), 0, [X] * 4, {}, "Adam: R is of type float16"),
    "T floating": ("Adam", 0.1, np.float32(0), [X] * 4, {}, "Adam: T is of type float32, but must be int64"),
    "T int32": ("Adam", 0.1, np.int32(0), [X] * 4, {}, "Adam: T is of type int32"),
    "no tensor": ("Adagrad", 0.1, 0, [], {}, "Adagrad got 0 tensors after R and T, but takes 3 .* multiple of 3"),
    "four for Adagrad": ("Adagrad", 0.1, 0, [X] * 4, {}, "Adagrad got 4 tensors .* all X, all G, all H"),
    "six for Adam": ("Adam", 0.1, 0, [X] * 6, {}, "Adam got 6 tensors .* 4 for each variable, .* all V, all H"),
    "two for Momentum": ("Momentum", 0.1, 0, [X] * 2, MOMENTUM, "Momentum got 2 tensors .* multiple of 3"),
    "three for SSGD": ("SSGD", 0.1, 0, [X] * 3, {}, "SSGD got 3 tensors .* all X, all G: .* multiple of 2"),
    "four for SSGD with V": ("SSGD", 0.1, 0, [X] * 4, {"alpha": 0.5}, "SSGD got 4 tensors .* all V: .* of 3"),
    "mixed types": ("Adam", 0.1, 0, [X, X, np.ones(2), X], {}, "Adam: V of variable 1.* float64, but its X .* float32"),
    "half": ("Adagrad", 0.1, 0, [X.astype(np.float16)] * 3, {}, "Adagrad: X of variable 1.* float16, but must be"),
    "G beyond X": (
        "Adagrad",
        0.1,
        0,
        [X, np.ones((2, 2), np.float32), X],
        {},
        r"G of variable 1.*\(2, 2\).* not broadcast",
    ),
    "G larger": ("Adagrad", 0.1, 0, [X[:1], X, X[:1]], {}, r"G of variable 1.*\(2,\), which does not .*\(1,\) of X"),
    "G of another shape": ("Adagrad", 0.1, 0, [X, np.ones(3, np.float32), X], {}, r"G of variable 1.*\(3,\)"),
    "state broadcasts": (
        "Adagrad",
        0.1,
        0,
        [X, X, X[:1]],
        {},
        r"H of variable 1.*\(1,\), but must have the shape \(2,\)",
    ),
    "state of another rank": ("Adagrad", 0.1, 0, [X, X, X[None]], {}, r"H of variable 1.*\(1, 2\)"),
    "second variable": (
        "Adagrad",
        0.1,
        0,
        [X, X, X, X, X, X[:1]],
        {},
        r"H of variable 2.*\(1,\), but must have the shape",
    ),
    "unknown attribute": ("Adam", 0.1, 0, [X] * 4, {"gamma": 1.0}, "Adam has no attribute 'gamma'; .* alpha, beta"),
    "missing attribute": (
        "Momentum",
        0.1,
        0,
        [X] * 3,
        {k: v for k, v in MOMENTUM.items() if k != "beta"},
        "Momentum: the attribute 'beta' is required, but missing; give a number",
    ),
    "missing mode": (
        "Momentum",
        0.1,
        0,
        [X] * 3,
        {k: v for k, v in MOMENTUM.items() if k != "mode"},
        "'mode' is required, but missing; give one of 'standard', 'nesterov'",
    ),
    "unknown mode": (
        "Momentum",
        0.1,
        0,
        [X] * 3,
        {**MOMENTUM, "mode": "Nesterov"},
        "Momentum: the attribute 'mode' is 'Nesterov', but must be one of 'standard', 'nesterov'",
    ),
    "attribute of the wrong type": (
        "Adam",
        0.1,
        0,
        [X] * 4,
        {"alpha": "big"},
        "'alpha' is 'big', but must be a number",
    ),
    "text that is a number": ("SSGD", 0.1, 0, [X] * 2, {"measure": 2.0}, "'measure' is 2.0, but must be a string"),
    "unknown measure": ("SSGD", 0.1, 0, [X] * 2, {"measure": "l0"}, "no measure 'l0'; there are 'log-sum', 'p-norm'"),
    "unknown reweighting": ("SSGD", 0.1, 0, [X] * 2, {"reweighting": "l0"}, "'reweighting' is 'l0', .* 'l1', 'l2'"),
    "epsilon 0": ("SSGD", 0.1, 0, [X] * 2, {"epsilon": 0.0}, "'log-sum' has epsilon 0, but needs one above 0"),
    "p 0": (
        "SSGD",
        0.1,
        0,
        [X] * 2,
        {"measure": "p-norm", "p": 0.0},
        "has p 0, but .* 'l2' needs one above 0 and at most 2",
    ),
    "p beyond l1": (
        "SSGD",
        0.1,
        0,
        [X] * 2,
        {"measure": "p-norm", "reweighting": "l1", "p": 1.5},
        "'l1' needs one above 0 and at most 1",
    ),
    "negative regularization": (
        "SSGD",
        0.1,
        0,
        [X] * 2,
        {"regularization": -1.0},
        "SSGD: regularization is -1, but must be 0",
    ),
    "negative momentum": ("SSGD", 0.1, 0, [X] * 2, {"alpha": -0.5}, "SSGD: alpha is -0.5, but must be 0 or more"),
    "negative cap": ("SSGD", 0.1, 0, [X] * 2, {"max_scale": -1.0}, "SSGD: max_scale is -1, but must be 0 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays(case):
    name, R, T, tensors, attributes, message = REFUSED[case]
    with pytest.raises(OperatorError, match=message):
        OPTIMIZERS[name].reference(R, T, *tensors, **attributes)


@pytest.mark.parametrize("case", REFUSED)
def test_nodes(case):
    name, R, T, tensors, attributes, message = REFUSED[case]
    inputs = [np.asarray(R), np.asarray(T), *map(np.asarray, tensors)]
    with pytest.raises(OperatorError, match=message):
        lower_optimizers(ir.from_proto(model_of(name, inputs, attributes, outputs=1)))


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_number_of_outputs_must_fit(count):
    model = model_of("Adam", [np.float32(0.1), np.int64(0), X, X, X, X], {}, outputs=count)
    with raises_sentence(
        "optimizer_outputs", what="Adam", got=count, wanted=3, variables=1, order="all X_new, all V_new, all H_new"
    ):
        lower_optimizers(ir.from_proto(model))


def test_another_version_of_the_domain():
    model = model_of("Adagrad", [np.float32(0.1), np.int64(0), X, X, X], {}, outputs=2)
    model.opset_import[0].version = 2
    with raises_sentence("operator_version", what="Adagrad", got=2, wanted=1, domain="'ai.onnx.preview"):
        lower_optimizers(ir.from_proto(model))


@pytest.mark.parametrize(
    ("inputs", "missing"), [(["", "T", "x", "x", "x"], "0"), (["R", "T", "x", "", "x"], "3"), (["R"], "0 and 1")]
)
def test_inputs_cannot_be_left_out(inputs, missing):
    model = model_of("Adagrad", [np.float32(0.1), np.int64(0), X, X, X], {}, outputs=2)
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(inputs)
    with pytest.raises(OperatorError, match=f"Adagrad lacks its input {missing}; it takes R, T, then all X"):
        lower_optimizers(ir.from_proto(model))


def test_an_unknown_type_is_named():
    node = helper.make_node("Mystery", ["x"], ["unknown"], domain="somewhere")
    model = model_of("Adagrad", [np.float32(0.1), np.int64(0), X, X, X], {}, outputs=2)
    model.graph.node.insert(0, node)
    model.graph.node[1].input[3] = "unknown"
    model.opset_import.append(helper.make_opsetid("somewhere", 1))
    with raises_sentence("type_unknown", what="unknown", optimizer="Adagrad"):
        lower_optimizers(ir.from_proto(model))


def test_a_shape_with_symbols_is_shown_with_them():
    model = model_of("Adagrad", [np.float32(0.1), np.int64(0), X, X, X], {}, outputs=2)
    dimensions = model.graph.input[3].type.tensor_type.shape.dim
    dimensions[0].dim_param = "batch"
    dimensions.add().dim_value = 2
    with raises_sentence(
        "gradient_does_not_broadcast", what="Adagrad: G of variable 1 ('i1')", got=("batch", 2), wanted=(2,)
    ):
        lower_optimizers(ir.from_proto(model))


def test_every_error_is_a_value_error():
    with pytest.raises(ValueError, match="takes 4 for each variable"):
        operators.adam(0.1, 0, X)
