"""If, Loop and Scan with captured values, nesting and unknown trip counts."""

import numpy as np
from onnx import parser

from autodiff.case import Case, normal

TEXT = '<ir_version: 10, opset_import: ["" : 21]>\n'


# ONNX Runtime's Scan, which carries gradients back through steps, needs the ranks of what it gives.
RANKS = ("static", "dynamic")


def model(name, text, *inputs, wrt=None, shapes=RANKS):
    """A model in ONNX's textual form."""
    return Case(name, parser.parse_model(TEXT + text), inputs, 21, wrt, shapes)


SCAN = """
agraph (float[2,3] s, float[4,2,3] x, float[3,3] w) => (float[2,3] last, float[4,2,3] y)
{{
    last, y = Scan <num_scan_inputs = 1{attributes}, body = step (float[2,3] before, float[2,3] item)
        => (float[2,3] after, float[2,3] out) {{
        product = MatMul (before, w)
        sum = Add (product, item)
        after = Tanh (sum)
        out = Mul (after, item)
    }}> (s, x)
}}
"""

LOOP = """
agraph (int64 count, bool go, float[2,3] s, float[3,3] w) => (float[2,3] last, float[n,2,3] y)
{
    limit = Constant <value = float {-100.0}> ()
    last, y = Loop <body = step (int64 number, bool condition, float[2,3] before)
        => (bool again, float[2,3] after, float[2,3] out) {
        product = MatMul (before, w)
        shift = CastLike (number, product)
        sum = Add (product, shift)
        after = Tanh (sum)
        out = Mul (before, after)
        total = ReduceSum <keepdims = 0> (after)
        again = Greater (total, limit)
    }> (count, go, s)
}
"""

IF = """
agraph (float[2,3] x, float[3] w, float threshold) => (float[2,3] y, float[2,3] z)
{
    sum = ReduceSum <keepdims = 0> (x)
    condition = Greater (sum, threshold)
    scaled = Mul (x, w)
    y, z = If (condition) <
        then_branch = yes () => (float[2,3] one, float[2,3] other) { one = Exp (scaled)  other = Identity (x) },
        else_branch = no () => (float[2,3] first, float[2,3] second) {
            first = Sin (x)
            half = Constant <value = float {0.5}> ()
            second = Mul (scaled, half)
        }
    >
}
"""

NESTED = """
agraph (float[2] s, float[5,2] x, float[2] w) => (float[2] last)
{
    last = Scan <num_scan_inputs = 1, body = step (float[2] before, float[2] item) => (float[2] after) {
        total = ReduceSum <keepdims = 0> (item)
        zero = Constant <value = float {0.0}> ()
        positive = Greater (total, zero)
        factor = If (positive) <
            then_branch = yes () => (float[2] one) { one = Mul (before, w) },
            else_branch = no () => (float[2] other) { other = Add (before, item) }
        >
        after = Sin (factor)
    }> (s, x)
}
"""

WHILE = """
agraph (float[2] s, float[2] w) => (float[2] last)
{
    last = Loop <body = step (int64 number, bool condition, float[2] before) => (bool again, float[2] after) {
        after = Mul (before, w)
        total = ReduceSum <keepdims = 0> (after)
        limit = Constant <value = float {9.0}> ()
        again = Less (total, limit)
    }> (, , s)
}
"""

ADDING = """
agraph (int64 count, float[2] s, float[2] w) => (float[2] last)
{
    last = Loop <body = step (int64 number, bool condition, float[2] before) => (bool again, float[2] after) {
        again = Identity (condition)
        after = Add (before, w)
    }> (count, , s)
}
"""

STATE = normal(2, 3, scale=0.5)
WEIGHT = normal(3, 3, seed=1, scale=0.5)
ITEMS = normal(4, 2, 3, seed=2)
COUNT = np.array(3)

CASES = [
    model("Scan-forward", SCAN.format(attributes=""), STATE, ITEMS, WEIGHT),
    model(
        "Scan-reverse",
        SCAN.format(attributes=", scan_input_directions = [1], scan_output_directions = [1]"),
        STATE,
        ITEMS,
        WEIGHT,
    ),
    model("Scan-mixed", SCAN.format(attributes=", scan_input_directions = [1]"), STATE, ITEMS, WEIGHT),
    model(
        "Scan-axis",
        SCAN.format(attributes=", scan_input_axes = [1], scan_output_axes = [-1]")
        .replace("float[4,2,3] x", "float[2,4,3] x")
        .replace("float[4,2,3] y", "float[2,3,4] y"),
        STATE,
        ITEMS.transpose(1, 0, 2),
        WEIGHT,
    ),
    model("Loop-for", LOOP, COUNT, np.array(True), STATE, WEIGHT, wrt=["s", "w"], shapes=(*RANKS, "unknown")),
    model("Loop-while", WHILE, np.full(2, 0.5), np.array([1.5, 1.2]), shapes=(*RANKS, "unknown")),
    model("Loop-adding", ADDING, COUNT, normal(2), normal(2, seed=1), wrt=["s", "w"], shapes=(*RANKS, "unknown")),
    model("If-then", IF, STATE, normal(3), np.array(-100.0), wrt=["x", "w"], shapes=(*RANKS, "unknown")),
    model("If-else", IF, STATE, normal(3), np.array(100.0), wrt=["x", "w"]),
    model("Scan-nested-If", NESTED, normal(2), normal(5, 2, seed=1), normal(2, seed=2)),
]
