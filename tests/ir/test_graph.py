"""The builder, the passes, and inference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from onnxtrain.graph import Builder
from onnxtrain.graph.inference import broadcast_shapes
from onnxtrain.graph.passes import clean
from onnxtrain.graph.shapes import infer_shapes

HEADER = '<ir_version: 8, opset_import: ["": 18]>'


def model(text: str) -> ir.Model:
    return ir.from_proto(parser.parse_model(f"{HEADER} {text}"))


def fresh(**shapes: tuple[int | str, ...]) -> tuple[ir.Graph, Builder, list]:
    kind = ir.TensorType(ir.DataType.FLOAT)
    values = [ir.Value(name=name, type=kind, shape=ir.Shape(shape)) for name, shape in shapes.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph, 18)
    return graph, op, [op.wrap(value) for value in values]


def run(graph: ir.Graph, outputs: list, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    for index, value in enumerate(outputs):
        identity = ir.Node("", "Identity", [value.ir], num_outputs=1)
        graph.append(identity)
        identity.outputs[0].name = f"out{index}"
        identity.outputs[0].type = value.ir.type
        graph.outputs.append(identity.outputs[0])
    proto = ir.to_proto(ir.Model(graph, ir_version=8))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_the_same_operator_on_the_same_inputs_is_emitted_once() -> None:
    graph, op, (x,) = fresh(x=("N", 3))
    assert op.Exp(x).ir is op.Exp(x).ir
    assert (x * 2.0).ir is (x * 2.0).ir
    assert op.Exp(x).ir is not op.Log(x).ir
    assert len(list(graph)) == 3


def test_random_operators_are_not_shared() -> None:
    _, op, (x,) = fresh(x=(3,))
    assert op.RandomNormalLike(x).ir is not op.RandomNormalLike(x).ir


def test_neutral_numbers_emit_nothing() -> None:
    graph, _, (x,) = fresh(x=(3,))
    for value in (x + 0, 0 + x, x - 0, x * 1, 1 * x, x / 1):
        assert value.ir is x.ir
    assert len(list(graph)) == 0


def test_numbers_take_the_type_of_the_other_side() -> None:
    _, op, (x,) = fresh(x=(3,))
    double = op.cast(x, ir.DataType.DOUBLE)
    assert (double * 2).dtype == ir.DataType.DOUBLE
    assert (1 - x).dtype == ir.DataType.FLOAT


_dims = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(_dims, st.data())
def test_reduce_to_is_the_adjoint_of_broadcasting(shape: tuple[int, ...], data: st.DataObject) -> None:
    keep = [data.draw(st.booleans()) for _ in shape]
    start = data.draw(st.integers(0, len(shape)))
    target = tuple(size if kept else 1 for size, kept in zip(shape, keep, strict=True))[start:]
    symbolic = data.draw(st.booleans())
    named = tuple(f"d{axis}" for axis in range(len(target))) if symbolic else target
    source = tuple(f"s{axis}" for axis in range(len(shape))) if symbolic else shape
    graph, op, (value, like) = fresh(value=source, like=named)
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (found,) = run(graph, [op.reduce_to(value, like)], {"value": array, "like": np.zeros(target, np.float32)})
    axes = tuple(range(start)) + tuple(
        axis for axis in range(start, len(shape)) if target[axis - start] == 1 and shape[axis] != 1
    )
    expected = array.sum(axis=axes, keepdims=True).reshape(target)
    assert found.shape == target
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=200, deadline=None)
@given(_dims, _dims)
def test_broadcast_shapes_agrees_with_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(left, right)
    except ValueError:
        return
    assert broadcast_shapes(left, right) == expected


def test_symbols_that_differ_leave_an_axis_unknown() -> None:
    assert broadcast_shapes(("a", 3), ("a", 1)) == ("a", 3)
    assert broadcast_shapes(("a",), ("b",)) == (None,)
    assert broadcast_shapes(("a",), (4,)) == (4,)
    assert broadcast_shapes(None, (4,)) is None


def test_clean_merges_and_keeps_the_names_of_outputs() -> None:
    working = model(
        """g (float[2] x) => (float[2] a, float[2] b, float[2] c) { a = Exp(x)  b = Exp(x)  i = Identity(x)
        c = Neg(i)  dead = Log(x) }"""
    )
    clean(working)
    assert [value.name for value in working.graph.outputs] == ["a", "b", "c"]
    assert sorted(node.op_type for node in working.graph) == ["Exp", "Identity", "Neg"]
    onnx.checker.check_model(ir.to_proto(working), full_check=True)


def test_clean_does_not_merge_what_is_random() -> None:
    working = model("g (float[2] x) => (float[2] a, float[2] b) { a = Bernoulli(x)  b = Bernoulli(x) }")
    clean(working)
    assert [node.op_type for node in working.graph] == ["Bernoulli", "Bernoulli"]


def test_an_input_that_is_an_output_keeps_its_identity() -> None:
    working = model("g (float[2] x) => (float[2] y) { y = Identity(x) }")
    clean(working)
    assert [node.op_type for node in working.graph] == ["Identity"]


def test_bounds_that_are_computed_do_not_mislead_inference() -> None:
    """ONNX reads the unknown start as 0, and so the whole shape as the slice."""
    working = infer_shapes(
        model(
            """g (float[2,3,4] x, int64[1] k) => (float[a,b] y) <int64[1] end = {100}>
            { s = Shape(x)  t = Slice(s, k, end)  r = Reshape(x, t)  y = Neg(r) }"""
        )
    )
    shapes = {output.name: output.shape for node in working.graph for output in node.outputs}
    assert shapes["r"] is None or all(not isinstance(size, int) for size in shapes["r"])
    sliced = infer_shapes(
        model(
            """g (float[8,16] x, int64[1] k) => (float[n,16] y) <int64[1] start = {0}>
            { c = Concat<axis = 1>(x, x)  t = Slice(c, start, k)  y = Neg(t) }"""
        )
    )
    assert {output.name: output.shape for node in sliced.graph for output in node.outputs}["t"].rank() == 2


def test_big_initializers_stay_out_of_inference_and_come_back() -> None:
    working = model("g (float[N,600] x) => (float[N,700] y) { y = MatMul(x, w) }")
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((600, 700), np.float32), name="w"))
    working.graph.register_initializer(weight)
    working.graph.node(0).replace_input_with(1, weight)
    infer_shapes(working)
    assert weight.const_value is not None
    assert [value.name for value in working.graph.inputs] == ["x"]


def test_builder_refuses_attributes_that_are_no_operators() -> None:
    _, op, _ = fresh(x=(2,))
    with pytest.raises(AttributeError, match="Builder has no attribute 'relu'"):
        _ = op.relu


@pytest.mark.parametrize("known", [True, False])
def test_pad_gets_pads_for_every_axis_where_the_rank_is_known(known: bool) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="pads")
    op = Builder(graph, 18)
    x = op.constant(np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    pads = op.ints(1, 2) if known else op.Identity(op.ints(1, 2))
    y = op.Pad(x, pads, None, op.ints(-1))
    y.ir.name = "y"
    graph.outputs.append(y.ir)
    (pad,) = [node for node in graph if node.op_type == "Pad"]
    assert len([value for value in pad.inputs if value is not None]) == 2
    y.ir.dtype = ir.DataType.FLOAT
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {})[0], np.pad(x.constant(), ((0, 0), (0, 0), (1, 2))))


def test_builders_before_several_nodes_give_different_names() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    nodes = [ir.Node("", operator, [x]) for operator in ("Neg", "Abs")]  # without names, as layers of other tools
    graph = ir.Graph([x], [], nodes=nodes, opset_imports={"": 18})
    op = Builder(graph)
    for node in nodes:
        own = op.before(node)
        own.scope = "rule"
        own.Relu(own.wrap(x))
    names = [node.name for node in graph if node.op_type == "Relu"]
    assert len(names) == len(set(names)) == 2
