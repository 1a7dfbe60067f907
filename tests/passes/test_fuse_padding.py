"""Zeros added before a convolution become its own padding, with the same values and gradients; other Pads stay."""

import numpy as np
import pytest
from onnx import numpy_helper, parser
from ways import assert_same_results, operators, operators_of_step, passed, trained_both_ways

from onnxtrain.lowering.rules.convolutions import fuse_padding

RANDOM = np.random.default_rng(0)
TENSORS = {
    "w": RANDOM.normal(0, 0.3, (4, 4, 3, 3)),
    "d": RANDOM.normal(0, 0.3, (4, 1, 3, 3)),
    "b": RANDOM.normal(size=4),
    "g": np.array([1.0, 0.5, -1.0, 2.0]).reshape(4, 1, 1),
}
CONSTANTS = (
    "int64[8] causal = {0, 0, 2, 0, 0, 0, 0, 1}, int64[8] wide = {0, 0, 5, 4, 0, 0, 4, 6}, int64[2] last = {3, 1}, "
    "int64[8] cut = {0, 0, -1, 0, 0, 0, 1, 1}, int64[8] channels = {0, 1, 0, 0, 0, -1, 0, 0}, int64[1] four = {4}, "
    "int64[8] rows = {1, 0, 0, 0, 0, 0, 0, 0}, int64[4] front = {1, 0, 2, 1}, int64[2] pairs = {-1, 2}, "
    "int64[1] minus = {-1}, int64[1] least = {-9223372036854775807}, int64[1] zero = {0}, float nothing = {0}, "
    "float one = {1}, int64[1] width = {3}"
)
# The way of PyTorch's exporter: pairs from the last axis on, with zeros behind them, are turned around.
COMPUTED = (
    "zeros = ConstantOfShape <value = int64[1] {0}> (four) listed = Concat <axis = 0> (front, zeros) "
    "table = Reshape(listed, pairs) turned = Slice(table, minus, least, zero, minus) "
    "sides = Transpose <perm = [1, 0]> (turned) flat = Reshape(sides, minus) pads = Cast <to = 7> (flat) "
)
CONV = "y = Conv <{}> (p, w, b)"
FUSED = {
    "causal": "p = Pad(h, causal) " + CONV.format("kernel_shape = [3, 3]"),
    "zero": "p = Pad(h, causal, nothing) " + CONV.format("kernel_shape = [3, 3]"),
    "more": "p = Pad(h, causal) " + CONV.format("pads = [1, 2, 0, 1]"),
    "strides": "p = Pad(h, wide) " + CONV.format("strides = [2, 3], dilations = [2, 1]"),
    "wider than the kernel": "p = Pad(h, wide) " + CONV.format("pads = [0, 0, 1, 0]"),
    "depthwise": "p = Pad(h, causal) y = Conv <group = 4, dilations = [2, 1]> (p, d, b)",
    "an axis": "p = Pad(h, last, , width) " + CONV.format("pads = [0, 0, 0, 0]"),
    "computed": COMPUTED + "p = Pad(h, pads) " + CONV.format("kernel_shape = [3, 3]"),
    "two": "p = Pad(h, causal) one_of = Conv(p, w, b) other = Conv(p, w) y = Add(one_of, other)",
}
STAY = {
    "something else reads it": "p = Pad(h, causal) c = Conv(p, w, b) m = ReduceMean(p) y = Add(c, m)",
    "ones": "p = Pad(h, causal, one) " + CONV.format("kernel_shape = [3, 3]"),
    "a mirror": 'p = Pad <mode = "reflect"> (h, causal) ' + CONV.format("kernel_shape = [3, 3]"),
    "it cuts": "p = Pad(h, cut) " + CONV.format("kernel_shape = [3, 3]"),
    "channels": "p = Pad(h, channels) " + CONV.format("kernel_shape = [3, 3]"),
    "rows": "p = Pad(h, rows) " + CONV.format("kernel_shape = [3, 3]"),
    "automatic": "p = Pad(h, causal) " + CONV.format('auto_pad = "SAME_UPPER"'),
}


def model(nodes):
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[n, 4, 7, 8] x) => (float[n, 4, i, j] out) '
        f"<{CONSTANTS}> {{ h = Mul(x, g) {nodes} out = Tanh(y) }}"
    )
    proto.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in TENSORS.items()
    )
    return proto


X = RANDOM.normal(size=(3, 4, 7, 8)).astype(np.float32)


@pytest.mark.parametrize("nodes", FUSED.values(), ids=FUSED)
def test_the_convolution_pads_its_input(nodes):
    given = model(nodes)
    found = passed(given, fuse_padding)
    assert "Pad" not in operators(found)
    assert_same_results(given, found, {"x": X})


@pytest.mark.parametrize("nodes", STAY.values(), ids=STAY)
def test_others_stay(nodes):
    given = model(nodes)
    assert "Pad" in operators(passed(given, fuse_padding))


def test_a_padded_weight_stays():
    given = model("p = Pad(w, causal) y = Conv <pads = [2, 2, 2, 2]> (h, p, b)")
    assert "Pad" in operators(passed(given, fuse_padding))


@pytest.mark.parametrize("nodes", FUSED.values(), ids=FUSED)
def test_training_is_as_without_kernels(nodes):
    shape = passed(model(nodes), fuse_padding).graph.output[0].type.tensor_type.shape.dim
    target = np.ones((3, *(dimension.dim_value for dimension in shape[1:])), np.float32)
    (plain_losses, plain), (losses, trainer) = trained_both_ways(model(nodes), ["g", "w", "d", "b"], X, target)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert "Pad" in operators_of_step(plain)
    assert not {"Pad", "Slice"} & set(operators_of_step(trainer))
