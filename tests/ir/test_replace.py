"""Many values replaced at once: the same result as one by one, in time linear in their number."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.graph.passes import clean
from onnxtrain.graph.replace import remove_nodes, replace_values, set_inputs, substitute


def values(prefix: str, count: int) -> list[ir.Value]:
    return [
        ir.Value(name=f"{prefix}{index}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [3, 100])
def test_inputs_of_narrow_and_wide_nodes(count: int) -> None:
    old, new = values("a", count), values("b", count)
    node = ir.Node("", "Sum", old)
    inputs = [new[index] if index % 2 else old[index] for index in range(count)]
    inputs[0] = None
    set_inputs(node, inputs)
    assert list(node.inputs) == inputs
    for index in range(count):
        assert [tuple(use) for use in new[index].uses()] == ([(node, index)] if index % 2 else [])
        assert [tuple(use) for use in old[index].uses()] == ([] if index % 2 or not index else [(node, index)])
    node.replace_input_with(1, None)  # onnx-ir's own bookkeeping agrees
    assert not new[1].uses()


@pytest.mark.parametrize("count", [3, 100])
def test_graph_outputs_and_names(count: int) -> None:
    inputs = values("x", count)
    nodes = [ir.Node("", "Neg", [value], name=f"n{index}") for index, value in enumerate(inputs)]
    new = [ir.Node("", "Abs", [value]) for value in inputs]
    for index, node in enumerate(nodes):
        node.outputs[0].name = f"y{index}"
    wide = ir.Node("", "Sum", [node.outputs[0] for node in nodes])
    outputs = [wide.outputs[0], *(node.outputs[0] for node in nodes)]
    graph = ir.Graph(inputs, outputs, nodes=[*nodes, wide, *new], opset_imports={"": 18}, name="g")
    replace_values(graph, [(old.outputs[0], made.outputs[0]) for old, made in zip(nodes, new, strict=True)])
    remove_nodes(graph, nodes)
    graph.sort()
    clean(ir.Model(graph, ir_version=8))
    assert [value.name for value in graph.outputs[1:]] == [f"y{index}" for index in range(count)]
    assert {node.op_type for node in graph} == {"Abs", "Sum"}
    assert [value.producer().op_type for value in wide.inputs] == ["Abs"] * count


def test_nodes_that_are_read_are_not_removed() -> None:
    (x,) = values("x", 1)
    first = ir.Node("", "Neg", [x])
    second = ir.Node("", "Neg", [first.outputs[0]])
    graph = ir.Graph([x], [second.outputs[0]], nodes=[first, second], opset_imports={"": 18})
    with pytest.raises(AssertionError):
        remove_nodes(graph, [first])


def test_readers_in_bodies_are_updated() -> None:
    old, new = values("v", 2)
    inner = ir.Node("", "Neg", [old])
    body = ir.Graph([], [inner.outputs[0]], nodes=[inner], name="body")
    condition = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL))
    branches = [ir.AttrGraph("then_branch", body)]
    outer = ir.Node("", "If", [condition], branches)
    graph = ir.Graph([condition, old, new], outer.outputs, nodes=[outer], opset_imports={"": 18})
    substitute(graph, {old: new})
    assert inner.inputs[0] is new
