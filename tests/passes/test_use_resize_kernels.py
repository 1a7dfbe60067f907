"""Bilinear and bicubic Resize on the native kernel: the same values and gradients; other Resizes stay."""

import numpy as np
import pytest
from onnx import parser
from ways import operators, operators_of_step, passed, trained_both_ways

import onnxtrain
from onnxtrain.lowering.rules.kernels import use_kernels

BY_SCALES = 'y = Resize <mode = "{}", coordinate_transformation_mode = "{}"> (h, , {})'
TAKEN = {
    "linear": BY_SCALES.format("linear", "half_pixel", "twice"),
    "cubic": BY_SCALES.format("cubic", "half_pixel", "twice"),
    "corners": BY_SCALES.format("linear", "align_corners", "odd"),
    "smaller": BY_SCALES.format("linear", "pytorch_half_pixel", "half"),
    "sizes": 'y = Resize <mode = "linear", axes = [2, 3]> (h, , , sizes)',
}
STAY = {
    "nearest": 'y = Resize <mode = "nearest"> (h, , twice)',
    "one axis": BY_SCALES.format("linear", "half_pixel", "wide"),
    "channels": BY_SCALES.format("linear", "half_pixel", "all"),
    "from outside": BY_SCALES.format("linear", "tf_crop_and_resize", "twice").replace("h, ,", "h, roi,"),
}
CONSTANTS = (
    "float[4] twice = {1, 1, 2, 2}, float[4] odd = {1, 1, 1.5, 3.2}, float[4] half = {1, 1, 0.5, 0.4}, "
    "int64[2] sizes = {7, 20}, float[4] wide = {1, 1, 1, 2}, float[4] all = {1, 2, 2, 2}, "
    "float[8] roi = {0, 0, 0.1, 0.1, 1, 1, 1.3, 0.8}, float one = {1}"
)
X = np.random.default_rng(0).standard_normal((3, 2, 6, 11)).astype(np.float32)


def model(nodes: str, kind: str = "float", batch: str = "N"):
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 19]> f ({kind}[{batch}, 2, 6, 11] x) => ({kind}[A, B, C, D] y) '
        f"<{kind}[2, 1, 1] w = {{3, -2}}, {CONSTANTS}> {{ h = Mul(x, w) {nodes} }}"
    )


@pytest.mark.parametrize("name", TAKEN)
def test_the_kernel_computes_the_same_forward_and_backward(name):
    proto = model(TAKEN[name])
    changed = passed(proto, use_kernels)
    assert "ResizeByMatrices" in operators(changed)
    y = onnxtrain.Trainer(proto, loss="mean_squared_error", train="w").predict(X)
    target = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    (standard, portable), (native, trainer) = trained_both_ways(proto, "w", X, target)
    np.testing.assert_allclose(native, standard, rtol=1e-5)
    assert operators_of_step(trainer).count("ResizeByMatrices") == 2
    assert "ResizeByMatrices" not in operators_of_step(portable)


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name):
    assert operators(passed(model(STAY[name]), use_kernels)) == ["Mul", "Resize"]


def test_half_precision_stays():
    assert operators(passed(model(TAKEN["linear"], "float16"), use_kernels)) == ["Mul", "Resize"]


def test_unknown_sizes_stay():
    proto = model(TAKEN["linear"])
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
    assert operators(passed(proto, use_kernels)) == ["Mul", "Resize"]
