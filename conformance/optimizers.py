"""Ten steps of every optimizer, against the pseudo-code of its page in Python's floats."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import operator_cases
import operator_pages
from onnx import helper

from conformance.subject import Made, Subject, file_name
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.schema import OptimizerSchema

STEPS = 10
SHAPES = {"a": (3, 2), "b": (4,)}
"""Two variables of one node, of different shapes."""

WHOLE = ("LAMB", "SSGD")
"""Optimizers whose step depends on the whole tensor."""


def subjects() -> Iterator[Subject]:
    """Every row of attributes of every optimizer."""
    for label, (name, attributes) in zip(operator_cases.IDS, operator_cases.CASES, strict=True):
        yield Subject("optimizer", file_name(label), frozenset([name]), functools.partial(_made, name, attributes))


def updated(
    schema: OptimizerSchema, R: float, T: int, tensors: list[np.ndarray], attributes: dict[str, Any]
) -> list[np.ndarray]:
    """One variable after one step: X, G and the states in, X_new and the new states out, in float64."""
    page = getattr(operator_pages, schema.name.lower())
    lists = [[float(item) for item in tensor.ravel()] for tensor in tensors]
    if schema.name == "LAMB":
        new = page(R, T, *lists, **attributes)
    elif schema.name == "SSGD":
        given, gradient, *states = lists
        found = page(R, given, gradient, states[0] if states else [0.0] * len(given), **attributes)
        new = found[: 1 + len(states)]
    else:
        new = zip(*(page(R, T, *column, **attributes) for column in zip(*lists, strict=True)), strict=True)
    shape = tensors[0].shape
    return [np.array([float(item) for item in column]).reshape(shape) for column in new]


def complete(schema: OptimizerSchema, attributes: dict[str, Any]) -> dict[str, Any]:
    """All attributes as a file stores them: numbers in single precision."""
    found = schema.complete(attributes)
    return {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in found.items()}


def _made(name: str, attributes: dict[str, Any]) -> Made:
    schema = OPTIMIZERS[name].schema
    full = complete(schema, attributes)
    states = [state.name for state in schema.used_states(schema.complete(attributes))]
    rng = np.random.default_rng(5)
    values = {v: [rng.normal(size=shape).astype(np.float32).astype(np.float64)] for v, shape in SHAPES.items()}
    for v, shape in SHAPES.items():
        for _ in states:
            values[v].append(np.zeros(shape))
    steps = []
    for T in range(STEPS):
        R = float(np.float32(0.1 / (1 + T)))
        gradients = {v: rng.normal(size=shape).astype(np.float32) for v, shape in SHAPES.items()}
        feeds: dict[str, np.ndarray] = {"R": np.array(R, np.float32), "T": np.array(T, np.int64)}
        feeds |= {f"X_{v}": values[v][0] for v in SHAPES}
        feeds |= {f"G_{v}": gradients[v] for v in SHAPES}
        feeds |= {f"{state}_{v}": values[v][1 + index] for index, state in enumerate(states) for v in SHAPES}
        feeds = {key: array.astype(np.float32) if array.dtype == np.float64 else array for key, array in feeds.items()}
        for v, (x, *old) in values.items():
            values[v] = updated(schema, R, T, [x, gradients[v].astype(np.float64), *old], full)
        expected = {
            f"{letter}_{v}_new": values[v][index] for index, letter in enumerate(["X", *states]) for v in SHAPES
        }
        steps.append((feeds, expected))
    feedback = {output: output.removesuffix("_new") for output in steps[0][1]}
    source = "the pseudo-code of the operator's page in Python's floats, element by element, over ten steps"
    return Made(_model(schema, attributes, *steps[0]), steps, source, feedback)


def _model(
    schema: OptimizerSchema, attributes: dict[str, Any], feeds: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> onnx.ModelProto:
    given = {key: value for key, value in schema.complete(attributes).items() if value != ()}  # empty by default
    node = helper.make_node(schema.name, list(feeds), list(expected), domain=schema.domain, **given)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, a.shape) for name, a in expected.items()]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(schema.domain, 1)]
    return helper.make_model(
        helper.make_graph([node], "optimizer", inputs, outputs), opset_imports=imports, ir_version=8
    )
