"""If, Loop and Scan beyond the tables of cases: no steps at all, saved states, errors."""

import numpy as np
import onnxruntime
from onnx import parser

import onnxtrain
from autodiff.cases.control_flow import ADDING, LOOP, TEXT
from sentences import raises_sentence

RANDOM = """
agraph (float[2,3] s, float[4,2,3] x) => (float[2,3] last)
{
    last = Scan <num_scan_inputs = 1, body = step (float[2,3] before, float[2,3] item) => (float[2,3] after) {
        noise = RandomNormalLike (item)
        after = Mul (before, noise)
    }> (s, x)
}
"""

SEQUENCE = """
agraph (int64 count, float[2] x) => (float[n] y)
{
    empty = SequenceEmpty ()
    all = Loop <body = step (int64 number, bool condition, seq(float[2]) before)
        => (bool again, seq(float[2]) after) {
        again = Identity (condition)
        after = SequenceInsert (before, x)
    }> (count, , empty)
    y = ConcatFromSequence <axis = 0> (all)
}
"""

OPTIONAL = """
agraph (int64 count, float[2] x) => (float[2] y)
{
    first = Optional (x)
    last = Loop <body = step (int64 number, bool condition, optional(float[2]) before)
        => (bool again, optional(float[2]) after) {
        again = Identity (condition)
        value = OptionalGetElement (before)
        twice = Add (value, value)
        after = Optional (twice)
    }> (count, , first)
    y = OptionalGetElement (last)
}
"""

UNKNOWN = """
agraph (float[2] s, float[5,2] x) => (float[2] last)
{
    last = Scan <num_scan_inputs = 1, body = step (float[2] before, float[2] item) => (float[2] after) {
        other = my.domain.Strange (before)
        after = Add (other, item)
    }> (s, x)
}
"""


def model(text):
    return parser.parse_model(TEXT + text)


def run(built, feeds, *names):
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names), feeds)


def test_loop_without_any_step_hands_the_gradient_through():
    built = onnxtrain.gradient(model(ADDING), "last", ["s", "w"])
    feeds = {"count": np.array(0), "s": np.ones(2, np.float32), "w": np.ones(2, np.float32)}
    ds, dw = run(built, feeds, "s_grad", "w_grad")
    np.testing.assert_array_equal(ds, np.ones(2))
    np.testing.assert_array_equal(dw, np.zeros(2))


def test_forward_outputs_stay_what_they_were():
    feeds = {
        "count": np.array(3),
        "go": np.array(True),
        "s": np.full((2, 3), 0.5, np.float32),
        "w": np.full((3, 3), 0.1, np.float32),
    }
    before = run(model(LOOP), feeds, "last", "y")
    after = run(onnxtrain.gradient(model(LOOP), "last", ["w"]), feeds, "last", "y")
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)


def test_random_numbers_in_a_body_are_refused():
    with raises_sentence("random_in_body", what="RandomNormalLike node (output 'noise')"):
        onnxtrain.gradient(model(RANDOM), "last", ["s"])


def test_sequence_as_state_of_an_untyped_body() -> None:
    untyped = model(SEQUENCE)
    loop = next(node for node in untyped.graph.node if node.op_type == "Loop")
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    for value in body.input[2:]:
        value.ClearField("type")
    built = onnxtrain.gradient(untyped, "y", ["x"])
    (dx,) = run(built, {"count": np.array(3), "x": np.ones(2, np.float32)}, "x_grad")
    np.testing.assert_array_equal(dx, [3, 3])


def test_no_step_leaves_the_first_sequence_alone() -> None:
    text = SEQUENCE.replace("SequenceEmpty ()", "SequenceConstruct (x)")
    built = onnxtrain.gradient(model(text), "y", ["x"])
    (dx,) = run(built, {"count": np.array(0), "x": np.ones(2, np.float32)}, "x_grad")
    np.testing.assert_array_equal(dx, [1, 1])


def test_a_loop_that_only_appends_keeps_no_sequence_of_any_step() -> None:
    built = onnxtrain.gradient(model(SEQUENCE), "y", ["x"])
    assert sum(node.op_type == "Loop" for node in built.graph.node) == 2
    backward = [node for node in built.graph.node if node.op_type == "Loop"][-1]
    body = next(attribute.g for attribute in backward.attribute if attribute.name == "body")
    assert sum(info.type.HasField("sequence_type") for info in body.input) == 1


def test_optional_value_as_state_is_refused() -> None:
    with raises_sentence("optional_state", what="before", node="Loop node"):
        onnxtrain.gradient(model(OPTIONAL), "y", ["x"])


def test_missing_rules_in_bodies_are_reported():
    text = UNKNOWN
    given = parser.parse_model('<ir_version: 10, opset_import: ["" : 21, "my.domain" : 1]>\n' + text)
    with raises_sentence("no_gradient_rule", number="1 operator", operators="my.domain::Strange"):
        onnxtrain.gradient(given, "last", ["s"])
