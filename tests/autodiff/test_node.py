"""The view that a rule has of its node."""

import pytest
from onnx import parser

import onnxtrain

PAIR = """
<ir_version: 8, opset_import: ["": 18, "node.test": 1]>
f (float[2] x) => (float y) {{ a, b{more} = node.test.Pair(x) s = {read} y = ReduceSum<keepdims = 0>(s) }}
"""


@pytest.mark.parametrize(
    ("more", "read", "arriving"),
    [
        ("", "Add(a, b)", [True, True, False]),
        ("", "Identity(a)", [True, False, False]),
        ("", "Identity(b)", [False, True, False]),
        (", c", "Mul(b, c)", [False, True, True]),
    ],
)
def test_where_gradients_arrive(more, read, arriving):
    seen = []

    @onnxtrain.register_gradient("Pair", domain="node.test")
    def pair(node, da, db, dc=None):
        seen.append([node.arrives(index) for index in range(3)])
        return da + db

    try:
        model = parser.parse_model(PAIR.format(more=more, read=read))
        for name in "abc"[: 2 + bool(more)]:
            model.graph.value_info.add(name=name).CopyFrom(model.graph.input[0])
            model.graph.value_info[-1].name = name
        onnxtrain.gradient(model, xs="x")
    finally:
        onnxtrain.unregister_gradient("Pair", "node.test")
    assert seen == [arriving]
