"""The batch axis is followed through the nodes, also where other axes have its size."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.graph.batch_axis import ONE, BatchAxes
from onnxtrain.graph.shapes import infer_shapes

# The input is x [N, 3, 3]; w is [3, 3], h [1, 3, 3] and c [3, 3, 3].
CASES = {
    "transposed": ("y = Transpose <perm = [1, 0, 2]> (x)", 1),
    "time first and back": ("t = Transpose <perm = [2, 0, 1]> (x)  y = Transpose <perm = [1, 2, 0]> (t)", 0),
    "linear": ("y = MatMul (x, w)", 0),
    "linear in front": ("t = Transpose <perm = [1, 0, 2]> (x)  y = MatMul (w, t)", None),
    "examples as columns": ("s = ReduceSum <keepdims = 0> (x, one)  t = Transpose (s)  y = MatMul (w, t)", 1),
    "sum over examples": ("s = ReduceSum <keepdims = 0> (x, one)  t = Transpose (s)  y = MatMul (t, s)", None),
    "turned rows": ("s = ReduceSum <keepdims = 0> (x, one)  t = Transpose (s)  y = Gemm <transA = 1> (t, w)", 0),
    "scores": ("t = Transpose <perm = [0, 2, 1]> (x)  y = MatMul (x, t)", 0),
    "reduced": ("t = Transpose <perm = [1, 0, 2]> (x)  y = ReduceMean <keepdims = 0> (t, zero)", 0),
    "reduced away": ("y = ReduceMean <keepdims = 0> (x, zero)", None),
    "squeezed": ("u = Unsqueeze (x, zero)  y = Squeeze (u, zero)", 0),
    "a new first axis": ("y = Unsqueeze (x, zero)", 1),
    "broadcast": ("u = Unsqueeze (c, zero)  y = Add (u, x)", 1),
    "rows": ("i = Constant <value_ints = [0, 2]> ()  y = Gather <axis = 1> (x, i)", 0),
    "one row": ("i = Constant <value_int = 1> ()  y = Gather <axis = 1> (x, i)", 0),
    "joined": ("y = Concat <axis = 1> (x, x)", 0),
    "joined with others": ("y = Concat <axis = 0> (x, c)", None),
    "cut": ("y = Slice (x, zero, one, zero)", None),
    "looked up": ("i = Cast <to = 7> (x)  y = Gather (w, i)", 0),
    "one-hot first": ("i = Cast <to = 7> (x)  d = Constant <value_int = 3> ()  "
                      "v = Constant <value_floats = [0.0, 1.0]> ()  y = OneHot <axis = 0> (i, d, v)", 1),
    "einsum": ('y = Einsum <equation = "bij,jk->kbi"> (x, w)', 1),
    "flattened": ("y = Flatten (x)", 0),
    "merged with time": ("t = Transpose <perm = [1, 0, 2]> (x)  s = Constant <value_ints = [-1, 3]> ()  "
                         "r = Reshape (t, s)  m = MatMul (r, w)  k = Constant <value_ints = [3, -1, 3]> ()  "
                         "y = Reshape (m, k)", 1),
    "heads": ("s = Constant <value_ints = [0, 3, 3, 1]> ()  r = Reshape (x, s)  "
              "y = Transpose <perm = [2, 0, 1, 3]> (r)", 1),
    "a first axis of one": ("s = Constant <value_ints = [1, -1, 9]> ()  y = Reshape (x, s)", 1),
    "states": ("t = Transpose <perm = [1, 0, 2]> (x)  y, z = RNN <hidden_size = 3> (t, h, h)", 2),
    "last state": ("t = Transpose <perm = [1, 0, 2]> (x)  , y = RNN <hidden_size = 3> (t, h, h)", 1),
    "branches": ("q = Constant <value = bool {1}> ()  "
                 "y = If (q) <then_branch = a () => (float[A,B,C] o) { o = Relu (x) }, "
                 "else_branch = b () => (float[A,B,C] p) { p = Neg (x) }>", 0),
    "loop": ("n = Constant <value_int = 2> ()  q = Constant <value = bool {1}> ()  y = Loop (n, q, x) <body = l "
             "(int64 i, bool g, float[A,B,C] s) => (bool e, float[A,B,C] o) "
             "{ e = Identity (g)  o = MatMul (s, w) }>", 0),
    "scan over time": ("t = Transpose <perm = [1, 0, 2]> (x)  "
                       "y = Scan <num_scan_inputs = 1, body = l (float[A,B] s) => (float[A,B] o) "
                       "{ o = MatMul (s, w) }> (t)", 1),
    "no input": ("y = Relu (c)", None),
}  # fmt: skip


@pytest.mark.parametrize("size", [3, "N"])
@pytest.mark.parametrize("case", CASES)
def test_axes_are_followed(case, size):
    body, expected = CASES[case]
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> m (float[{size},3,3] x) => (float y)
        <float[3,3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[1,3,3] h = {{1, 2, 3, 4, 5, 6, 7, 8, 9}},
        float[3,3,3] c = {{{", ".join(map(str, range(27)))}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}>
        {{ {body} }}"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = infer_shapes(ir.from_proto(model)).graph
    axes = BatchAxes.of_inputs(graph, size if isinstance(size, int) else None).follow(graph)
    found = axes.get(graph.outputs[0])
    assert (None if found is None else found.axis) == expected
    assert found is None or found.before == ONE
