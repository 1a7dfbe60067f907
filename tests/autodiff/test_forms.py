"""Emitted nodes suit any runtime: no missing attribute with differing defaults, no huge constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper, parser
from test_recurrent import FORMS, inputs
from test_recurrent import model as recurrent
from test_rules import CASES

import onnxtrain
from autodiff.case import Case
from autodiff.microsoft_rows import ROWS as MICROSOFT
from onnxtrain.errors import ModelError
from onnxtrain.runtime.testing import _node_model

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
BEYOND_REASON = 1e30
"""Constants of this size overflow in intermediate results, where some hardware deviates from IEEE."""


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes(attribute.g)


def doubtful(model: onnx.ModelProto, given: onnx.ModelProto | None = None) -> list[str]:
    """Attributes of 0 where 0 is not the default, which OpenVINO's provider reads as the default; huge constants."""
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    immense = {name for name, array in constants.items() if array.dtype.kind == "f" and is_immense(array)}
    found: list[str] = []
    for node in nodes(model.graph):
        if node.domain or not defs.has(node.op_type, ""):
            continue
        found += [f"{node.op_type} by {name}" for name in node.input if name in immense and node.op_type == "Mul"]
        defaults = defs.get_schema(node.op_type, opset).attributes
        for attribute in node.attribute:
            number, default = attribute.f, defaults[attribute.name].default_value.f
            if attribute.type == AttributeProto.FLOAT and ((number == 0 != default) or is_immense(number)):
                found.append(f"{node.op_type} {attribute.name}={number}")
    own = doubtful(given) if given is not None else []
    return [item for item in found if item not in own]


def is_immense(numbers: np.ndarray | float) -> bool:
    return bool((np.isfinite(numbers) & (np.abs(numbers) > BEYOND_REASON)).any())


def check(model: onnx.ModelProto, wrt: Sequence[str] | None = None) -> None:
    floats = [info.name for info in model.graph.input if info.type.tensor_type.elem_type in FLOATS]
    outputs = [info.name for info in model.graph.output if info.type.tensor_type.elem_type in FLOATS]
    if not floats or not outputs:
        pytest.skip("no tensor to differentiate, or by which")
    try:
        built = onnxtrain.gradient(model, outputs[0], [name for name in floats if wrt is None or name in wrt])
    except ModelError as error:
        pytest.skip(str(error))  # an operator that ONNX withdrew
    assert not doubtful(built, model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rules(case: Case) -> None:
    model = case.node
    if not isinstance(model, onnx.ModelProto):
        model = _node_model(case.node, case.inputs, case.opset, "float")
    check(model, case.wrt)


@pytest.mark.parametrize(("operator", "given", "attributes"), FORMS)
def test_recurrent_rules(operator: str, given: set[str], attributes: dict[str, object]) -> None:
    feeds = inputs(operator, given, 2 if attributes.get("direction") == "bidirectional" else 1)
    check(recurrent(operator, feeds, ["y"], **attributes))


@pytest.mark.parametrize(("operator", "arrays", "outputs", "domain", "attributes"), MICROSOFT)
def test_rules_of_the_runtime(operator, arrays, outputs, domain, attributes) -> None:
    names = ["" if array is None else f"x{index}" for index, array in enumerate(arrays)]
    node = helper.make_node(operator, names, outputs, domain=domain, **attributes)
    check(_node_model(node, arrays, 18, "float"))


def test_what_is_doubtful_is_found() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) <float c = {3e38}>
        { a = HardSigmoid<alpha = 3e38, beta = 0.0>(x)  b = Mul(a, c)  y = LeakyRelu<alpha = 0.5>(b) }"""
    found = doubtful(parser.parse_model(text))
    assert [item[:18] for item in found] == ["HardSigmoid alpha=", "HardSigmoid beta=0", "Mul by c"]


def test_relu_is_read_alike_by_every_runtime() -> None:
    """OpenVINO's provider takes HardSigmoid's beta 0.0 for 0.5; the emitted nodes have no such attributes."""
    model = onnxtrain.examples.lenet5()
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
    step = onnxtrain.lower(training)
    operators = {node.op_type for node in nodes(step.graph)}
    assert "HardSigmoid" not in operators
    assert {"Relu", "Where"} <= operators
