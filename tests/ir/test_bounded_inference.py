"""Huge declared sizes cost no memory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import GradientError
from onnxtrain.graph import limits
from onnxtrain.graph.bounded_inference import infer_within_bounds
from sentences import raises_sentence

HUGE = 2**40
MODELS = {
    "sum of a vector": f"g (float[{HUGE}] x) => (float y) {{ z = Add(x, x) y = ReduceSum<keepdims=0>(z) }}",
    "a batch": f"g (float[{HUGE}, 4] x) => (float y) <float[4] w = {{1, 2, 3, 4}}>"
    "{ q = Mul(x, w) r = ReduceSum(q, axes) s = Squeeze(r, axes) t = Mul(s, s) y = ReduceSum<keepdims=0>(t) }".replace(
        "{ q", "{ axes = Constant<value_ints = [1]>() q", 1
    ),
    "slice": f"g (float[{HUGE}] x) => (float y) <int64[1] start = {{1}}, int64[1] end = {{-1}}>"
    "{ z = Slice(x, start, end) y = ReduceSum<keepdims=0>(z) }",
    "concatenation": f"g (float[{HUGE}] x) => (float y) <float[4] w = {{1, 2, 3, 4}}>"
    "{ z = Concat<axis=0>(x, w) y = ReduceSum<keepdims=0>(z) }",
    "indices": f"g (int64[{HUGE}] i, float[4] x) => (float y)"
    "{ j = Cast<to=7>(i) k = Add(j, j) h = Gather(x, k) y = ReduceSum<keepdims=0>(h) }",
    "constant of a shape": f"g (float[4] x) => (float y) <int64[1] n = {{{HUGE}}}>"
    "{ m = ReduceSum<keepdims=0>(x) z = ConstantOfShape(n) q = Mul(z, m) y = ReduceSum<keepdims=0>(q) }",
    "range": f"g (float[4] x) => (float y) <int64 a = {{0}}, int64 n = {{{HUGE}}}, int64 d = {{1}}>"
    "{ z = Range(a, n, d) f = Cast<to=1>(z) m = ReduceSum<keepdims=0>(x) q = Mul(f, m) y = ReduceSum<keepdims=0>(q) }",
    "padding": f"g (float[4] x) => (float y) <int64[2] pads = {{0, {HUGE}}}>"
    "{ z = Pad(x, pads) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }",
    "expansion": f"g (float[1] x) => (float y) <int64[1] n = {{{HUGE}}}>"
    "{ z = Expand(x, n) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }",
    "tile": f"g (float[4] x) => (float y) <int64[1] n = {{{HUGE}}}>"
    "{ z = Tile(x, n) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }",
    "random numbers": f"g (float[1] x) => (float y) {{ r = RandomNormal<shape = [{HUGE}]>() z = Mul(r, x)"
    " y = ReduceSum<keepdims=0>(z) }",
    "range of floats": f"g (float[1] x) => (float y) <float a = {{0}}, float n = {{{HUGE}}}, float d = {{1}}>"
    "{ r = Range(a, n, d) z = Mul(r, x) y = ReduceSum<keepdims=0>(z) }",
    "scales": f"g (float[4] x) => (float y) <float[1] n = {{{HUGE}}}>"
    "{ z = Resize(x, , n) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }",
    "scales of a function": f"g (float[4] x) => (float y) <float[1] n = {{{HUGE}}}>"
    "{ z = own.stretch(x, n) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }"
    ' <domain: "own", opset_import: ["" : 18]> stretch (a, s) => (b) { b = Resize(a, , s) }',
    "constant floats": f"g (float[4] x) => (float y) {{ n = Constant<value_floats = [{HUGE}.0]>()"
    " z = Resize(x, , n) q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }",
    "computed expansion": "g (float[1] x) => (float y) <int64[1] c = {1000000}>"
    "{ n = Mul(c, c) i = Cast<to=7>(x) e = Expand(i, n) f = Cast<to=1>(e) z = Mul(f, f) y = ReduceSum<keepdims=0>(z) }",
    "computed constant of a shape": "g (float[1] x) => (float y) <int64[1] c = {1000000}>"
    "{ n = Mul(c, c) e = ConstantOfShape(n) z = Mul(e, x) y = ReduceSum<keepdims=0>(z) }",
    "computed by sums in a branch": "g (float[1] x, bool c) => (float y) <int64[1] n0 = {1000000}> {"
    + " ".join(f"n{i + 1} = Add(n{i}, n{i})" for i in range(20))
    + " z = If(c) <then_branch = t () => (float[k] a) { a = Expand(x, n20) },"
    " else_branch = e () => (float[k] b) { b = Identity(x) }> y = ReduceSum<keepdims=0>(z) }",
    "doublings": "g (float[4] x) => (float y) { x0 = Identity(x) "
    + " ".join(f"x{i + 1} = Concat<axis=0>(x{i}, x{i})" for i in range(40))
    + " y = ReduceSum<keepdims=0>(x40) }",
    "branch": f"g (float[{HUGE}] x, bool c) => (float y) {{ z = If(c) <then_branch = t () => (float[n] a)"
    " { a = Add(x, x) }, else_branch = e () => (float[n] b) { b = Identity(x) }> y = ReduceSum<keepdims=0>(z) }",
}
PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import onnx.parser, onnxtrain
for name, text in json.load(sys.stdin).items():
    print(name, flush=True)
    onnxtrain.gradient(onnx.parser.parse_model(text), "y", ["x"])
"""
HEAD = '<ir_version: 10, opset_import: ["" : 18, "own" : 1]>'


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(f"{HEAD} {text}")


def test_sizes_that_no_machine_has_take_no_memory() -> None:
    """One process of 4 GiB builds the gradients of all models, one after the other."""
    models = json.dumps({name: f"{HEAD} {text}" for name, text in MODELS.items()})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=models, capture_output=True, text=True, timeout=60, check=False
    )
    begun = done.stdout.splitlines()
    assert done.returncode == 0, f"{begun[-1:]}: {done.stderr[-2000:]}"
    assert begun == list(MODELS)


def test_what_long_vectors_give_is_inferred_all_the_same() -> None:
    inferred = infer_within_bounds(model(MODELS["concatenation"]))
    sizes = {
        info.name: [axis.dim_value for axis in info.type.tensor_type.shape.dim] for info in inferred.graph.value_info
    }
    assert sizes["z"] == [HUGE + 4]


def test_sizes_are_followed_beside_long_vectors() -> None:
    text = (
        f"g (float[{HUGE}] x, float[2, 3] w) => (float[k, m, n] y) <int64[1] one = {{1}}, int64[1] two = {{2}}>"
        "{ z = Add(x, x) s = Shape(w) t = Slice(s, one, two) u = Concat<axis=0>(t, one, two) y = ConstantOfShape(u) }"
    )
    inferred = infer_within_bounds(model(text))
    assert [axis.dim_value for axis in inferred.graph.output[0].type.tensor_type.shape.dim] == [3, 1, 2]


TABLES = {
    "regions": (
        f"g (float[1,1,8,8] x, float[1,4] r, int64[1] b) => (float y) {{ z = RoiAlign<output_height={2**32},"
        f" output_width={2**32}>(x, r, b) y = ReduceSum<keepdims=0>(z) }}",
        r"gradient of RoiAlign node .* needs a table of 4294967296 x 1 numbers .*, where 16777216 are the most",
    ),
    "pooled regions": (
        f"g (float[1,1,8,8] x, float[1,5] r) => (float y) {{ z = MaxRoiPool<pooled_shape=[{2**32}, 1]>(x, r)"
        " y = ReduceSum<keepdims=0>(z) }",
        r"gradient of MaxRoiPool node .* needs a table of 4294967296 numbers",
    ),
    "window": (
        f"g (float[1,2,{2**30}] x, float[2,1,{2**29}] w) => (float y)"
        " { z = Conv<group=2>(x, w) y = ReduceSum<keepdims=0>(z) }",
        r"gradient of .*ConvWeightGradient node .* writes out a window of 536870912 positions, where 65536 are the",
    ),
    "pooling": (
        f"g (float[1,1,{2**30},{2**30}] x) => (float y) {{ z = LpPool<kernel_shape=[{2**20}, {2**20}]>(x)"
        " y = ReduceSum<keepdims=0>(z) }",
        r"gradient of LpPool node .* needs a table of 1048576 x 1048576 numbers",
    ),
    "matrix": (
        f'g (float[{HUGE},{HUGE}] x) => (float y) {{ y = Einsum<equation="ii->">(x) }}',
        r"'x' has the shape \[1099511627776,1099511627776\], more elements than a tensor can have",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_too_large_are_one_sentence(name: str) -> None:
    text, message = TABLES[name]
    with pytest.raises(GradientError, match=message):
        onnxtrain.gradient(model(text), "y", ["x"] if name != "window" else ["w"])


LARGE = {
    "diagonal": (
        'g (float[n,n] x) => (float y) { z = Einsum<equation="ii->i">(x) s = Mul(z, z) y = ReduceSum<keepdims=0>(s) }',
        {"x": (5, 5)},
    ),
    "columns": (
        "g (float[1,4,9] x) => (float y) <int64[2] i = {4, 4}, int64[2] k = {2, 2}> { z = Col2Im(x, i, k) s = Mul(z, z)"
        " y = ReduceSum<keepdims=0>(s) }",
        {"x": (1, 4, 9)},
    ),
    "blocks": (
        "g (float[n] x, float[m] s) => (float y) { q = QuantizeLinear<axis=0, block_size=2>(x, s)"
        " d = DequantizeLinear<axis=0, block_size=2>(q, s) z = Mul(d, d) y = ReduceSum<keepdims=0>(z) }",
        {"x": (8,), "s": (4,)},
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tables_are_computed_as_the_model_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that is written into the graph where it is small equals the computed one where it is not."""
    text, shapes = LARGE[name]
    for symbol, size in zip("nm", (shapes["x"][-1], 4), strict=True):
        text = text.replace(f"{symbol},", f"{size},").replace(f"{symbol}]", f"{size}]")
    given = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    generator = np.random.default_rng(0)
    feeds = {key: generator.uniform(0.5, 2, shape).astype(np.float32) for key, shape in shapes.items()}
    found = []
    for most in (limits.LARGEST_TABLE, 1):
        monkeypatch.setattr(limits, "LARGEST_TABLE", most)
        built = onnxtrain.gradient(given, "y", ["x"], straight_through=True)
        session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append((built, session.run(["x_grad"], feeds)[0]))
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5)
    assert len(found[0][0].graph.node) < len(found[1][0].graph.node)


def test_declared_types_that_contradict_are_one_sentence(monkeypatch):
    def fail(*_, **__):
        raise onnx.shape_inference.InferenceError("Inferred shape and existing shape differ in rank: (2) vs (0)")

    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {MODELS["a batch"]}')
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    with raises_sentence("declared_types_contradict"):
        infer_within_bounds(model)
