"""Sequence operators between tensor inputs and outputs."""

import numpy as np
from onnx import parser

from autodiff.case import Case, normal


def model(name, inputs, body, *arrays, wrt=None, opset=21, runtime=True, result="float[n,m] y"):
    text = f'<ir_version: 10, opset_import: ["" : {opset}]>\nagraph ({inputs}) => ({result})\n{{\n{body}\n}}'
    return Case(name, parser.parse_model(text), arrays, opset, wrt, runtime=runtime)


TWO = "float[2,3] a, float[1,3] b"
PAIR = normal(2, 3), normal(1, 3, seed=1)
X = normal(5, 3)

CASES = [
    model("Sequence-concat", TWO, "s = SequenceConstruct (a, b)\n y = ConcatFromSequence <axis = 0> (s)", *PAIR),
    model(
        "Sequence-concat-negative-axis",
        "float[3,2] a, float[3,1] b",
        "s = SequenceConstruct (a, b)\n y = ConcatFromSequence <axis = -1> (s)",
        normal(3, 2),
        normal(3, 1, seed=1),
    ),
    model(
        "Sequence-stack",
        "float[2,3] a, float[2,3] b",
        "s = SequenceConstruct (a, b)\n y = ConcatFromSequence <axis = 1, new_axis = 1> (s)",
        normal(2, 3),
        normal(2, 3, seed=1),
        result="float[n,k,m] y",
    ),
    model(
        "Sequence-at-twice",
        "float[2,3] a, float[2,3] b",
        """
        s = SequenceConstruct (a, b)
        zero = Constant <value = int64 {0}> ()
        last = Constant <value = int64 {-1}> ()
        first = SequenceAt (s, zero)
        second = SequenceAt (s, last)
        y = Mul (first, second)
        """,
        normal(2, 3),
        normal(2, 3, seed=1),
    ),
    model(
        "Sequence-insert-erase",
        TWO,
        """
        s = SequenceConstruct (a, a)
        one = Constant <value = int64 {1}> ()
        square = Mul (b, b)
        longer = SequenceInsert (s, square, one)
        minus = Constant <value = int64 {-3}> ()
        shorter = SequenceErase (longer, minus)
        again = SequenceInsert (shorter, b)
        last = SequenceErase (again)
        y = ConcatFromSequence <axis = 0> (last)
        """,
        *PAIR,
    ),
    model(
        "Sequence-split-each",
        "float[5,3] x",
        """
        s = SplitToSequence <axis = 0, keepdims = 0> (x)
        place = Constant <value = int64 {3}> ()
        item = SequenceAt (s, place)
        y = Mul (item, item)
        """,
        X,
        result="float[m] y",
    ),
    model(
        "Sequence-split-sizes",
        "float[5,3] x, int64[2] sizes",
        """
        s = SplitToSequence <axis = 0> (x, sizes)
        place = Constant <value = int64 {-1}> ()
        item = SequenceAt (s, place)
        y = Exp (item)
        """,
        X,
        np.array([2, 3]),
        wrt=["x"],
    ),
    model(
        "Sequence-split-chunks",
        "float[5,3] x",
        "s = SplitToSequence <axis = 0> (x, size)\n y = ConcatFromSequence <axis = 0> (s)".replace(
            "s = Split", "size = Constant <value = int64 {2}> ()\n s = Split", 1
        ),
        X,
    ),
    model(
        "Optional-there-and-back",
        "float[5,3] x",
        "o = Optional (x)\n z = OptionalGetElement (o)\n y = Mul (z, z)",
        X,
    ),
]
