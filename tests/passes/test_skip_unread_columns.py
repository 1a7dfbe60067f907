"""Of a gradient that is split, a layer computes the part that is read."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser
from ways import operators_of_step, trained_both_ways

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.lowering.rules.linear import skip_unread_columns
from onnxtrain.runtime.native import custom_ops_library

ROWS, DEPTH, SIZES = 40, 24, (13, 70, 5)


def model(*, transposed=0, attributes="", read="b", outputs="", rows=ROWS, bias=""):
    width = sum(SIZES)
    weight = [width, DEPTH] if transposed else [DEPTH, width]
    size = SIZES["abc".index(read)]
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> '
        f"f (float[{rows}, {DEPTH}] x, float{weight} w, float[{width}] bias) => (float[{rows}, {size}] y{outputs}) "
        f"<int64[3] sizes = {{{', '.join(map(str, SIZES))}}}, float[{rows}, {width}] t, float[{rows}, {SIZES[0]}] a, "
        f"float[{rows}, {SIZES[1]}] b, float[{rows}, {SIZES[2]}] c> "
        f"{{ t = {ONNXTRAIN_DOMAIN}.Linear<transB={transposed}{attributes}>(x, w{bias}) "
        f"a, b, c = Split<axis=-1>(t, sizes) y = Neg({read}) }}"
    )
    return parser.parse_model(text)


def narrowed(proto: onnx.ModelProto) -> onnx.ModelProto:
    working = ir.from_proto(proto)
    skip_unread_columns(working)
    result = ir.to_proto(working)
    onnx.checker.check_model(result)
    return result


def run(proto: onnx.ModelProto, transposed: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    width = sum(SIZES)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    feeds = {
        "x": rng.normal(size=(ROWS, DEPTH)),
        "w": rng.normal(size=(width, DEPTH) if transposed else (DEPTH, width)),
    }
    given = {value.name for value in session.get_inputs()}
    feeds["bias"] = rng.normal(size=width)
    return session.run(None, {name: feeds[name].astype(np.float32) for name in given})[0]


@pytest.mark.parametrize("read", "abc")
@pytest.mark.parametrize("transposed", [0, 1])
def test_the_part_that_is_read_has_the_same_bits(transposed, read):
    given = model(transposed=transposed, read=read)
    found = narrowed(given)
    assert [node.op_type for node in found.graph.node] == ["Slice", "Linear", "Neg"]
    np.testing.assert_array_equal(run(found, transposed), run(given, transposed))


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": f", float[{ROWS}, {SIZES[0]}] a"},
        {"outputs": f", float[{ROWS}, {sum(SIZES)}] t"},
        {"attributes": ', activation="Relu"'},
        {"bias": ", bias"},
        {"rows": DEPTH - 1},
    ],
    ids=["two parts read", "the whole read", "an activation", "a bias", "fewer rows than the weight has"],
)
def test_others_stay(change):
    assert [node.op_type for node in narrowed(model(**change)).graph.node] == ["Linear", "Split", "Neg"]


def test_a_layer_of_numbers_beside_computed_values_trains_the_same():
    rng = np.random.default_rng(2)
    first, second = (", ".join(map(str, rng.normal(size=size))) for size in (24, 30))
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[n, 6] x) => (float[n, 3] y) '
        f"<float[6, 4] first = {{{first}}}, float[10, 3] second = {{{second}}}> "
        "{ h = MatMul(x, first) t = Tanh(h) j = Concat<axis=1>(x, t) y = MatMul(j, second) }"
    )
    x, y = (rng.normal(size=(8, size)).astype(np.float32) for size in (6, 3))
    (standard, _), (fused, trainer) = trained_both_ways(proto, ["first", "second"], x, y)
    np.testing.assert_allclose(fused, standard, rtol=1e-5)
    assert "Split" not in operators_of_step(trainer)
