"""Shapes of emitted nodes: equal to ONNX's inference, or less specific."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain.autodiff.rules  # noqa: F401 - it registers how StopGradient's type is inferred
from onnxtrain.graph import Builder
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions

CASES = {
    "Split by sizes": lambda op, x: op.several("Split", x, op.ints(1, 3), outputs=2, axis=-1),
    "Split into equals": lambda op, x: op.several("Split", x, outputs=2, axis=2, num_outputs=2),
    "Split of an odd axis": lambda op, x: op.several("Split", x, outputs=2, axis=1, num_outputs=2),
    "Gather of rows": lambda op, x: [op.Gather(x, op.constant([[0, 1]], np.int64), axis=1)],
    "Gather of one": lambda op, x: [op.Gather(x, op.constant(0, np.int64))],
    "Pad": lambda op, x: [op.Pad(x, op.ints(0, 1, 2, 0, 0, -1))],
    "Pad of one axis": lambda op, x: [op.Pad(x, op.ints(1, 1), None, op.ints(2))],
    "Squeeze": lambda op, x: [op.Squeeze(op.dimension(x, 0))],
    "Range of constants": lambda op, x: [op.Range(op.constant(0), op.constant(7), op.constant(1))],
    "Range": lambda op, x: [op.Range(op.constant(0), op.Squeeze(op.dimension(x, 0)), op.constant(1))],
}


@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
def test_the_shape_of_a_node_is_that_of_onnx(made):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", 5, 4]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="graph")
    op = Builder(graph, 21)
    outputs = [value.ir for value in made(op, op.wrap(x))]
    told = [dimensions(value) for value in outputs]
    assert None not in told, "the rank follows from the inputs"
    for index, value in enumerate(outputs):
        value.name, value.shape = f"y{index}", None
        graph.outputs.append(value)
    for shape, found in zip(
        told, map(dimensions, infer_shapes(ir.Model(graph, ir_version=10)).graph.outputs), strict=True
    ):
        assert len(shape) == len(found)
        assert all(own in (None, size) for own, size in zip(shape, found, strict=True))
        assert [own for own in shape if isinstance(own, int)] == [size for size in found if isinstance(size, int)]


def test_a_range_of_floats_has_no_known_size():
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="graph"), 21)
    assert op.Range(op.constant(0.0), op.constant(5.5), op.constant(1.0)).shape == (None,)


def test_stopped_values_have_the_type_and_shape_of_what_they_stop():
    text = """<ir_version: 8, opset_import: ["": 18, "onnxtrain": 1]>
        f (double[n, 3] x) => (y)
        { a = onnxtrain.StopGradient(x) b = Neg(a) c = onnxtrain.StopGradient(b) y = Abs(c) }"""
    model = infer_shapes(ir.serde.deserialize_model(onnx.parser.parse_model(text)))
    for node in model.graph:
        assert node.outputs[0].dtype == ir.DataType.DOUBLE
        assert dimensions(node.outputs[0]) == ("n", 3)
