"""Loops that carry or read sequences or growing tensors, and SequenceMap, which is such a loop."""

import numpy as np
from onnx import parser

from autodiff.case import Case, normal


def model(name, inputs, body, *arrays, wrt=None, opset=21, result="float[n,m] y", shapes=("static", "unknown")):
    text = f'<ir_version: 10, opset_import: ["" : {opset}]>\nagraph ({inputs}) => ({result})\n{{\n{body}\n}}'
    return Case(name, parser.parse_model(text), arrays, opset, wrt, shapes)


def loop(name, step, *, end="y = ConcatFromSequence <axis = 0> (all)", begin="empty = SequenceEmpty ()", **options):
    """A loop of four steps that turn the sequence ``before`` into ``after``; ``x`` has a row per step."""
    text = f"""
        {begin}
        zero = Constant <value = int64 {{0}}> ()
        one = Constant <value = int64 {{1}}> ()
        last = Constant <value = int64 {{-1}}> ()
        all = Loop <body = step (int64 number, bool condition, seq(float[n,m]) before)
            => (bool again, seq(float[n,m]) after) {{
            again = Identity (condition)
            row = Gather (x, number)
            item = Unsqueeze (row, axis)
            {step}
        }}> (count, , empty)
        {end}
    """
    inputs = "int64 count, int64[1] axis, float[4,3] x, float[1,3] w"
    arrays = np.array(4), np.array([0]), normal(4, 3), normal(1, 3, seed=1)
    return model(name, inputs, text, *arrays, wrt=["x", "w"], **options)


TWO = "empty = SequenceConstruct (w, w)"
SQUARE = "product = Mul (item, w)"
STACK = "y = ConcatFromSequence <axis = 1, new_axis = 1> (all)"

# As scripted recurrent networks are exported: the rows of x are a sequence, from which each step takes one.
SCRIPTED = """
    rows = SplitToSequence <axis = 0, keepdims = 0> (x)
    count = SequenceLength (rows)
    empty = SequenceEmpty ()
    all, final = Loop <body = step (int64 number, bool condition, seq(float[m]) before, float[3] state)
        => (bool again, seq(float[m]) after, float[3] next) {
        again = Identity (condition)
        row = SequenceAt (rows, number)
        product = MatMul (state, w)
        sum = Add (product, row)
        next = Tanh (sum)
        after = SequenceInsert (before, next)
    }> (count, , empty, s)
    y = ConcatFromSequence <axis = 0, new_axis = 1> (all)
"""

# A tensor that each step reads and makes longer.
LONGER = """
    last = Loop <body = step (int64 number, bool condition, float[n,3] before) => (bool again, float[m,3] after) {
        again = Identity (condition)
        row = Gather (x, number)
        mean = ReduceMean <keepdims = 0> (before, axis)
        product = Mul (mean, row)
        item = Unsqueeze (product, axis)
        longer = Concat <axis = 0> (before, item)
        after = Tanh (longer)
    }> (count, , w)
    y = Mul (last, last)
"""

SHORTER = """
    one = Constant <value = int64[1] {1}> ()
    end = Constant <value = int64[1] {100}> ()
    last, y = Loop <body = step (int64 number, bool condition, float[n,3] before)
        => (bool again, float[m,3] after, float[3] out) {
        again = Identity (condition)
        square = Mul (before, before)
        out = ReduceSum <keepdims = 0> (square, axis)
        after = Slice (before, one, end, axis)
    }> (count, , x)
"""

# Parts of different sizes, as tensors are split at sizes that are computed.
GROWING = """
    one = Constant <value = int64 {1}> ()
    zero = Constant <value = int64[1] {0}> ()
    empty = SequenceEmpty ()
    all = Loop <body = step (int64 number, bool condition, seq(float[n,m]) before)
        => (bool again, seq(float[n,m]) after) {
        again = Identity (condition)
        next = Add (number, one)
        end = Unsqueeze (next, zero)
        part = Slice (x, zero, end, zero)
        square = Mul (part, part)
        after = SequenceInsert (before, square)
    }> (count, , empty)
    y = ConcatFromSequence <axis = 0> (all)
"""

NESTED = """
    empty = SequenceEmpty ()
    all = Loop <body = outer_step (int64 number, bool condition, seq(float[n,m]) before)
        => (bool again, seq(float[n,m]) after) {
        again = Identity (condition)
        after = Loop <body = inner_step (int64 place, bool going, seq(float[n,m]) inner_before)
            => (bool once_more, seq(float[n,m]) inner_after) {
            once_more = Identity (going)
            factor = CastLike (number, x)
            scaled = Mul (x, factor)
            inner_after = SequenceInsert (inner_before, scaled)
        }> (count, , before)
    }> (count, , empty)
    y = ConcatFromSequence <axis = 0> (all)
"""

MAPPED = """
    s = SplitToSequence <axis = 0> (x, sizes)
    t = SequenceMap <body = item (float[n,m] part, float[k] other) => (float[n,m] made) {
        product = Mul (part, other)
        shifted = Add (product, w)
        made = Tanh (shifted)
    }> (s, v)
    y = ConcatFromSequence <axis = 0> (t)
"""

MAPPED_PAIRS = """
    s = SplitToSequence <axis = 0> (x, sizes)
    t = SplitToSequence <axis = 0> (v, sizes)
    a, b = SequenceMap <body = item (float[n,m] first, float[n,m] second) => (float[n,m] made, float[n,m] sum) {
        made = Mul (first, second)
        sum = Add (first, made)
    }> (s, t)
    y = ConcatFromSequence <axis = 0> (a)
    z = ConcatFromSequence <axis = 1> (b)
"""

SIZES = np.array([1, 1, 1])

CASES = [
    loop("Loop-append", f"{SQUARE}\nafter = SequenceInsert (before, product)"),
    loop(
        "Loop-append-stack", f"{SQUARE}\nafter = SequenceInsert (before, product)", end=STACK, result="float[n,k,m] y"
    ),
    loop(
        "Loop-append-twice", f"{SQUARE}\nmiddle = SequenceInsert (before, product)\nafter = SequenceInsert (middle, w)"
    ),
    loop("Loop-prepend", f"{SQUARE}\nafter = SequenceInsert (before, product, zero)", begin=TWO),
    loop("Loop-insert-before-last", f"{SQUARE}\nafter = SequenceInsert (before, product, last)", begin=TWO),
    loop(
        "Loop-append-to-last",
        "previous = SequenceAt (before, last)\nproduct = Mul (previous, item)\n"
        "after = SequenceInsert (before, product)",
        begin=TWO,
    ),
    loop(
        "Loop-prepend-and-read",
        "previous = SequenceAt (before, zero)\nproduct = Mul (previous, item)\n"
        "after = SequenceInsert (before, product, zero)",
        begin=TWO,
    ),
    loop(
        "Loop-insert-and-read",
        "previous = SequenceAt (before, last)\nproduct = Mul (previous, item)\n"
        "after = SequenceInsert (before, product, last)",
        begin=TWO,
    ),
    loop(
        "Loop-insert-anywhere",
        "previous = SequenceAt (before, number)\nproduct = Mul (previous, item)\n"
        "after = SequenceInsert (before, product, number)",
        begin=TWO,
    ),
    loop(
        "Loop-set-item",
        "old = SequenceAt (before, one)\nproduct = Mul (old, item)\nother = SequenceAt (before, zero)\n"
        "new = Add (product, other)\nrest = SequenceErase (before, one)\nafter = SequenceInsert (rest, new, one)",
        begin=TWO,
    ),
    loop(
        "Loop-queue",
        "first = SequenceAt (before, zero)\nproduct = Mul (first, item)\nshorter = SequenceErase (before, zero)\n"
        "after = SequenceInsert (shorter, product)",
        begin=TWO,
    ),
    loop(
        "Loop-append-sometimes",
        """
        two = Constant <value = int64 {2}> ()
        odd = Mod (number, two)
        condition_of = Cast <to = 9> (odd)
        after = If (condition_of) <
            then_branch = yes () => (seq(float[n,m]) longer) {
                previous = SequenceAt (before, last)
                product = Mul (previous, item)
                longer = SequenceInsert (before, product)
            },
            else_branch = no () => (seq(float[n,m]) same) { same = Identity (before) }
        >
        """,
        begin=TWO,
    ),
    model(
        "Loop-scripted",
        "float[4,3] x, float[3,3] w, float[3] s",
        SCRIPTED,
        normal(4, 3),
        normal(3, 3, seed=1, scale=0.5),
        normal(3, seed=2),
    ),
    model(
        "Loop-longer",
        "int64 count, int64[1] axis, float[4,3] x, float[1,3] w",
        LONGER,
        *(np.array(3), np.array([0]), normal(4, 3), normal(1, 3, seed=1)),
        wrt=["x", "w"],
    ),
    model(
        "Loop-shorter",
        "int64 count, int64[1] axis, float[4,3] x",
        SHORTER,
        *(np.array(3), np.array([0]), normal(4, 3)),
        wrt=["x"],
    ),
    model("Loop-growing", "int64 count, float[4,3] x", GROWING, np.array(4), normal(4, 3), wrt=["x"]),
    model("Loop-nested-sequence", "int64 count, float[2,3] x", NESTED, np.array(2), normal(2, 3), wrt=["x"]),
    model(
        "SequenceMap-tensor",
        "float[3,3] x, int64[3] sizes, float[3] v, float[1] w",
        MAPPED,
        *(normal(3, 3), SIZES, normal(3, seed=1), normal(1, seed=2)),
        wrt=["x", "v", "w"],
    ),
    model(
        "SequenceMap-pairs",
        "float[3,3] x, int64[3] sizes, float[3,3] v",
        MAPPED_PAIRS,
        *(normal(3, 3), SIZES, normal(3, 3, seed=1)),
        wrt=["x", "v"],
        result="float[n,m] y, float[n,m] z",
    ),
]
