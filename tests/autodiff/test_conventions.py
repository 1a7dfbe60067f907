"""Every handwritten row of the tables in ``docs/conventions.md``, operator by operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_quantized
import test_special_elementwise as elementwise
from onnx import parser
from test_special_elementwise import gradients

import onnxtrain
from operators_page import BEGIN

DOCUMENT = Path(__file__).parents[2] / "docs" / "conventions.md"
INF, NAN = np.inf, np.nan


@dataclass(frozen=True)
class Row:
    """Gradients of one node; the fields are arguments of ``gradients``, and its expected result."""

    section: str
    operator: str
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def kink(operator: str, x: Any, dx: Any, *more: Any, **options: Any) -> Row:
    return Row("Kinks", operator, (x, *more), (dx,), options)


def tie(operator: str, inputs: tuple[Any, ...], *expected: Any, **options: Any) -> Row:
    return Row("Ties", operator, inputs, expected, options)


def border(operator: str, inputs: tuple[Any, ...], *expected: Any, **options: Any) -> Row:
    return Row("Borders and interpolation", operator, inputs, expected, options)


def constant(operator: str, inputs: tuple[Any, ...], *expected: Any, **options: Any) -> Row:
    return Row("Constants", operator, inputs, expected, options)


NOTHING = np.zeros(0, np.float32)
WINDOWS = {"kernel_shape": [2], "strides": [2]}
PLANE = [[[[2.0, 2.0], [2.0, 2.0]]]]
REGION = [[0.0, 0.0, 1.0, 1.0]]

ROWS = [
    kink("Relu", [-1.0, 0.0, 1.0], [0, 0, 1]),
    kink("LeakyRelu", [0.0], [0.25], alpha=0.25),
    kink("PRelu", [0.0], [0.25], [0.25]),
    kink("Elu", [0.0], [2], alpha=2.0),
    kink("Selu", [0.0], [6], alpha=2.0, gamma=3.0),
    kink("Celu", [0.0], [1], alpha=2.0),
    kink("Abs", [-2.0, 0.0, 2.0], [-1, 0, 1]),
    kink("ReduceL1", [-2.0, 0.0, 2.0], [-1, 0, 1]),
    kink("ReduceL2", [0.0, 0.0], [0, 0]),
    kink("LpPool", [[[0.0, 0.0, 3.0, 4.0]]], [[[0, 0, 0.6, 0.8]]], **WINDOWS),
    kink("GlobalLpPool", [[[0.0, 0.0], [3.0, 4.0]]], [[[0, 0], [0.6, 0.8]]]),
    kink("LpNormalization", [[0.0, 0.0], [3.0, 4.0]], [[0, 0], [0.128, -0.096]], dy=[[1, 2], [1, 0]]),
    Row("Kinks", "Clip", ([-1.0, 0.0, 3.0, 6.0, 8.0], 0.0, 6.0), ([0, 1, 1, 1, 0], 1, 1), {"wrt": (0, 1, 2)}),
    kink("HardSigmoid", [-2.5, 2.5], [0, 0]),
    kink("HardSwish", [-3.0, 3.0], [0, 1]),
    kink("ThresholdedRelu", [1.0], [0], alpha=1.0),
    kink("Shrink", [-0.5, 0.5], [0, 0], lambd=0.5),
    Row("Kinks", "Mod", ([4.0, -6.0], [2.0, 2.0]), ([1, 1], [-2, 3]), {"wrt": (0, 1), "fmod": 1}),
    Row("Kinks", "Pow", ([0.0, 0.0, 0.0], [0.0, 1.0, 2.0]), ([0, 1, 0], [0, 0, 0]), {"wrt": (0, 1)}),
    kink("Sqrt", [0.0], [INF]),
    kink("Log", [0.0], [INF]),
    tie("Max", ([1.0, 2.0], [2.0, 2.0]), [0, 0.5], [1, 0.5], wrt=(0, 1)),
    tie("Min", ([1.0, 2.0], [2.0, 2.0]), [1, 0.5], [0, 0.5], wrt=(0, 1)),
    tie("ReduceMax", ([1.0, 3.0, 3.0],), [0, 0.5, 0.5]),
    tie("ReduceMin", ([1.0, 1.0, 3.0],), [0.5, 0.5, 0]),
    *(
        tie(operator, ([sign * 2.0, 0.0], place, [sign * 2.0]), [0.5, 1], [0.5], wrt=(0, 2), reduction=reduction)
        for operator, place in (("ScatterElements", np.array([0])), ("ScatterND", np.array([[0]])))
        for sign, reduction in ((1, "max"), (-1, "min"))
    ),
    tie("MaxPool", ([[[2.0, 2.0, 1.0, 1.0]]],), [[[1, 0, 1, 0]]], **WINDOWS),
    tie("GlobalMaxPool", ([[[1.0, 2.0, 2.0]]],), [[[0, 1, 0]]]),
    tie("MaxRoiPool", (PLANE, [[0.0, *REGION[0]]]), [[[[1, 0], [0, 0]]]], pooled_shape=[1, 1]),
    tie("TopK", ([1.0, 3.0, 3.0, 3.0], np.array([2])), [0, 1, 1, 0], outputs=("y", "places")),
    tie("ReduceProd", ([2.0, 0.0, 4.0],), [0, 8, 0]),
    tie("CumProd", ([2.0, 0.0, 3.0], np.array(0)), [1, 2 * (1 + 3), 0], opset=26),
    # The places are the second of three pixels, where a cell begins that rises by 2, and one beyond the last.
    border(
        *("GridSample", ([[[[1.0, 2.0, 4.0]]]], [[[[0.0, -1.0], [2.0, -1.0]]]]), [[[[0, 1, 1]]]]),
        [[[[2, 0], [0, 0]]]],
        **{"wrt": (0, 1), "opset": 20, "mode": "linear", "padding_mode": "border", "align_corners": 1},
    ),
    border("Resize", ([[1.0, 2.0]], NOTHING, [1.0, 2.0]), [[0.75, 0.25]], dy=[[0, 1, 0, 0]], mode="linear"),
    # What falls before the first element counts as the first, or not at all.
    *(
        border(
            *("Resize", ([[1.0, 2.0, 3.0, 4.0]], NOTHING, [1.0, 0.5]), [dx]),
            **{"dy": [[1, 0]], "mode": "linear", "antialias": 1, "exclude_outside": excluded},
        )
        for excluded, dx in ((0, [0.5, 0.375, 0.125, 0]), (1, [3 / 7, 3 / 7, 1 / 7, 0]))
    ),
    border("Resize", ([[1.0, 2.0]], NOTHING, [1.0, 2.0]), [[2, 2]], [0, 0], wrt=(0, 2), mode="linear"),
    border("Upsample", ([[[1.0, 2.0]]], [1.0, 1.0, 2.0]), [[[2, 2]]], opset=9),
    border(
        *("RoiAlign", (PLANE, REGION, np.array([0])), [[[[0.25, 0.25], [0.25, 0.25]]]], [[0, 0, 0, 0]]),
        **{"wrt": (0, 1), "coordinate_transformation_mode": "output_half_pixel"},
    ),
    border(
        *("MaxRoiPool", (PLANE, [[0.0, *REGION[0]]]), [[[[1, 0], [0, 0]]]], [[0, 0, 0, 0, 0]]),
        **{"wrt": (0, 1), "pooled_shape": [1, 1]},
    ),
    *(
        border("Pad", ([1.0, 2.0, 3.0], np.array([1, 1])), dx, opset=19, mode=mode, dy=[1, 2, 4, 8, 16])
        for mode, dx in (("reflect", [2, 21, 8]), ("edge", [3, 4, 24]), ("wrap", [18, 4, 9]))
    ),
    *(
        border("AveragePool", ([[[1.0, 2.0]]],), [[dx]], kernel_shape=[2], pads=[1, 0], count_include_pad=included)
        for included, dx in ((0, [1.5, 0.5]), (1, [1, 0.5]))
    ),
    border("AveragePool", ([[[1.0, 2.0, 3.0]]],), [[[0.5, 0.5, 1]]], ceil_mode=1, **WINDOWS),
    # The normal form of two numbers is 1 and -1 whatever they are.
    constant(
        *("BatchNormalization", ([[1.0], [3.0]], [1.0], [0.0], [5.0], [7.0]), [[0], [0]], [0], [0]),
        **{"wrt": (0, 3, 4), "outputs": ("y", "mean", "var"), "dy": [[1], [0]], "training_mode": 1, "epsilon": 0.0},
    ),
    constant("Softmax", ([[-INF, -INF]],), [[NAN, NAN]]),
    constant("Range", (0.0, 2.5, 1.0), 3, 0, 3, wrt=(0, 1, 2)),
    constant("OneHot", ([1.0], 3.0, [0.0, 1.0]), [0], 0, [2, 1], wrt=(0, 1, 2)),
    constant(
        *("MaxUnpool", ([[[[7.0]]]], np.array([[[[5]]]]), np.array([1, 1, 3, 3])), [[[[5]]]]),
        **{"dy": [[np.arange(9.0).reshape(3, 3)]], "kernel_shape": [2, 2], "strides": [2, 2]},
    ),
]


def test_what_y_does_not_depend_on_gets_zeros() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2] x, float[3] other) => (float y)'
        "{ y = ReduceSum<keepdims = 0>(x) }"
    )
    built = onnxtrain.gradient(model, "y", ["x", "other"])
    feeds = {"x": np.ones(2, np.float32), "other": np.ones(3, np.float32)}
    np.testing.assert_array_equal(elementwise._run(built, feeds)["other_grad"], [0, 0, 0])


ELSEWHERE: dict[tuple[str, str], Callable[..., None]] = {
    (
        "Kinks",
        "a root of a sum or mean of squares",
    ): elementwise.test_norms_and_deviations_have_no_gradient_at_zero,
    ("Constants", "Cast"): test_quantized.test_casts_to_integers_are_steps,
    (
        "Constants",
        "DynamicQuantizeLinear",
    ): test_quantized.test_a_dynamically_quantized_product_has_the_gradient_of_the_dequantized_one,
    ("Constants", "Dropout"): elementwise.test_dropout_in_training_scales_what_it_kept,
    ("Constants", "Attention"): elementwise.test_softmax_of_a_row_that_is_masked_altogether,
    ("Constants", "an x that y does not depend on"): test_what_y_does_not_depend_on_gets_zeros,
}
"""Rows that are more than a node and values."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.operator}-{i}") for i, row in enumerate(ROWS)])
def test_gradient_is_as_documented(row: Row) -> None:
    found = gradients(row.operator, *row.inputs, **row.options)
    assert len(found) == len(row.expected)
    for gradient, expected in zip(found, row.expected, strict=True):
        assert gradient.shape == np.shape(expected)
        np.testing.assert_allclose(gradient, np.asarray(expected, np.float32), rtol=1e-5, atol=1e-6)


def documented() -> set[tuple[str, str]]:
    """(section, operator) of the rows of all tables but the generated one; a row without operators unchanged."""
    found = set()
    section = ""
    for line in DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[0].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| operator "):
            first = line.split("|")[1].strip()
            operators = re.findall(r"`([A-Z]\w+)`", first)
            found |= {(section, operator) for operator in operators or [first]}
    return found


def test_every_row_of_the_document_is_tested() -> None:
    tested = {(row.section, row.operator) for row in ROWS} | set(ELSEWHERE)
    assert documented() - tested == set()
    assert tested - documented() == {("Constants", "Attention")}  # named in the row of Softmax
