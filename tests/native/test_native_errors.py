"""Every error message with which the operators refuse a model or its inputs."""

import numpy as np
import pytest
from onnx import TensorProto
from optimizer_sessions import GROUPS, node, run, session

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
R, T = np.float32(0.1), np.int64(1)
ONES = np.ones(3, np.float32)


def load(name, inputs, outputs, **attributes):
    """Create a session over one node of float vectors."""
    values = [(letter, TensorProto.FLOAT, [3]) for letter in inputs]
    return session(
        PATH,
        [node(name, ["R", "T", *inputs], outputs, **attributes)],
        [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), *values],
        [(out, TensorProto.FLOAT, None) for out in outputs if out],
    )


@pytest.mark.parametrize(
    ("name", "inputs", "sentence"),
    [
        ("Adagrad", "ABCD", r"Adagrad: 4 tensors follow R and T, and they come in groups of equal length "
         r"\(X\.\.\., G\.\.\., H\.\.\.\): their number must be a multiple of 3\."),
        ("Adam", "ABC", r"Adam: 3 tensors .* multiple of 4\."),
        ("Momentum", "AB", r"Momentum: 2 tensors .* multiple of 3\."),
        ("SSGD", "ABC", r"SSGD: 3 tensors .* \(X\.\.\., G\.\.\.\).* multiple of 2\."),
    ],
)  # fmt: skip
def test_the_number_of_tensors_must_be_divisible(name, inputs, sentence):
    with pytest.raises(Exception, match=sentence):
        load(name, inputs, [*"uvw"][: len(GROUPS[name][1])])


def test_ssgd_with_momentum_has_three_tensors_a_variable():
    with pytest.raises(Exception, match=r"SSGD: 2 tensors .* \(X\.\.\., G\.\.\., V\.\.\.\).* multiple of 3\."):
        load("SSGD", "AB", ["u"], alpha=0.9)


@pytest.mark.parametrize("outputs", [["u", "v"], ["u", "v", "w", "x", "y"], ["u", "v", "w", "x", ""]])
def test_the_number_of_outputs_must_fit(outputs):
    with pytest.raises(Exception, match=rf"has {len(outputs)} outputs, and 2 variables have 4 \(X\.\.\., H\.\.\.\)"):
        load("Adagrad", "ABCDEF", outputs)


@pytest.mark.parametrize("inputs", [["X", "", "H"], ["", "G", "H"], ["X", "G", ""]])
def test_no_input_may_be_left_out(inputs):
    values = [(letter, TensorProto.FLOAT, [3]) for letter in "XGH"]
    with pytest.raises(Exception, match="Input2 is absent, but not optional"):  # ONNX Runtime's own sentence
        session(
            PATH,
            [node("Adagrad", ["R", "T", *inputs], ["u", "v"])],
            [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), *values],
            [(out, TensorProto.FLOAT, None) for out in "uv"],
        )


def test_fewer_outputs_than_one_variable_has_are_refused():
    with pytest.raises(Exception, match=r"Adam.*output"):
        load("Adam", "XGVH", ["u", "v"])


@pytest.mark.parametrize("missing", ["alpha", "beta", "norm_coefficient", "mode"])
def test_momentum_requires_its_attributes(missing):
    made = node("Momentum", ["R", "T", *"XGV"], ["u", "v"])
    kept = [attribute for attribute in made.attribute if attribute.name != missing]
    del made.attribute[:]
    made.attribute.extend(kept)
    values = [(letter, TensorProto.FLOAT, [3]) for letter in "XGV"]
    kind = "string" if missing == "mode" else "float"
    with pytest.raises(
        Exception, match=f"Momentum: attribute '{missing}' is missing: it is required and must be a {kind}"
    ):
        session(
            PATH,
            [made],
            [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), *values],
            [(out, TensorProto.FLOAT, None) for out in "uv"],
        )


@pytest.mark.parametrize(
    ("name", "attributes", "sentence"),
    [
        ("Momentum", {"mode": "Nesterov"}, "Momentum: mode is 'Nesterov': it must be 'standard' or 'nesterov'"),
        ("Momentum", {"mode": 1.0}, "Momentum: attribute 'mode' must be a string"),
        ("Adam", {"alpha": 1}, "Adam: attribute 'alpha' must be a float, and is of another type"),
        ("Adagrad", {"epsilon": "small"}, "Adagrad: attribute 'epsilon' must be a float"),
        ("SSGD", {"measure": "scad"}, "SSGD: measure is 'scad': it must be 'log-sum', 'p-norm', 'arctan', 'geman"),
        ("SSGD", {"reweighting": "l3"}, "SSGD: reweighting is 'l3': it must be 'l1' or 'l2'"),
        ("SSGD", {"epsilon": 0.0}, "SSGD: epsilon is 0: it must be above 0 and finite"),
        ("SSGD", {"epsilon": float("inf")}, "SSGD: epsilon is inf: it must be above 0 and finite"),
        ("SSGD", {"measure": "p-norm", "p": 2.5}, "SSGD: p is 2.5: with reweighting 'l2' .* at most 2"),
        ("SSGD", {"measure": "p-norm", "p": 0.0}, "SSGD: p is 0: with reweighting 'l2' it must be above 0"),
        ("SSGD", {"measure": "p-norm", "reweighting": "l1", "p": 1.5}, "SSGD: p is 1.5: with .*'l1' .* at most 1"),
        ("SSGD", {"regularization": -1.0}, "SSGD: regularization is -1: it must be 0 or more"),
        ("SSGD", {"alpha": -0.5}, "SSGD: alpha is -0.5: it must be 0 .* or more"),
        ("SSGD", {"max_scale": float("nan")}, "SSGD: max_scale is nan: it must be 0 .* or more"),
    ],
)
def test_attributes_are_checked_when_the_model_is_loaded(name, attributes, sentence):
    inputs, outputs = GROUPS[name]
    with pytest.raises(Exception, match=sentence):
        load(name, inputs, [f"{out}_new" for out in outputs], **attributes)


@pytest.mark.parametrize(
    ("R", "T", "sentence"),
    [
        (np.ones(2, np.float32), T, r"Adam: R, the learning rate, has shape \[2\], and must have exactly one element"),
        (np.ones(0, np.float32), T, r"R, the learning rate, has shape \[0\]"),
        (np.float16(1), T, "Adam: R, the learning rate, has type float16, and must be float or double"),
        (R, np.ones((1, 2), np.int64), r"Adam: T, the update count, has shape \[1, 2\], and must have exactly one"),
    ],
)
def test_learning_rate_and_update_count(R, T, sentence):
    with pytest.raises(Exception, match=sentence):
        run(PATH, "Adam", R, T, [[ONES] * 4])


def test_an_update_count_that_is_not_int64():
    with pytest.raises(Exception, match=r"tensor\(int32\)"):  # ONNX Runtime's own sentence, at loading
        run(PATH, "Adam", R, np.int32(1), [[ONES] * 4])


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            [[ONES, ONES, ONES, ONES.astype(np.float64)]],
            "Adam: H of variable 1 of 1 has type double and X has type float: .* one type",
        ),
        ([[ONES] * 4, [ONES.astype(np.float64), ONES, ONES, ONES]], "G of variable 2 of 2 has type float and X has"),
        ([[ONES.astype(bool)] * 4], "Adam: X of variable 1 of 1 has type bool, and must be"),
        ([[ONES.astype(np.int64)] * 4], "Adam: X of variable 1 of 1 has type int64, and must be float or double"),
        (
            [[ONES[:1], ONES, ONES[:1], ONES[:1]]],
            r"G of variable 1 of 1 has shape \[3\] and X has shape \[1\]: a gradient may broadcast to X, never beyond",
        ),
        ([[ONES, ONES[:2], ONES, ONES]], r"G of variable 1 of 1 has shape \[2\] and X has shape \[3\]"),
        ([[ONES, ONES.reshape(1, 3), ONES, ONES]], r"G of variable 1 of 1 has shape \[1, 3\]"),
        (
            [[ONES, ONES, ONES[:1], ONES]],
            r"Adam: V of variable 1 of 1 has shape \[1\] and X has shape \[3\]: a state must have the shape of X",
        ),
        ([[ONES, ONES, ONES, ONES.reshape(3, 1)]], r"H of variable 1 of 1 has shape \[3, 1\] and X has shape \[3\]"),
    ],
)  # fmt: skip
def test_types_and_shapes_of_a_variable(variables, sentence):
    with pytest.raises(Exception, match=sentence):
        run(PATH, "Adam", R, T, variables, wanted=["X0_new"])


@pytest.mark.parametrize("count", [-10, -11])
def test_adagrad_refuses_a_decay_that_turns_the_step(count):
    with pytest.raises(Exception, match=rf"Adagrad: 1 \+ T \* decay_factor is .* at T = {count} and .* above 0"):
        run(PATH, "Adagrad", R, np.int64(count), [[ONES] * 3], decay_factor=0.125)


def test_adagrad_takes_a_negative_count_that_does_not():
    assert run(PATH, "Adagrad", R, np.int64(-7), [[ONES] * 3], decay_factor=0.125)[0][0] < 1


def test_a_session_works_on_after_an_error():
    from optimizer_sessions import optimizer_session

    made, feeds = optimizer_session(PATH, "Momentum", R, T, [[ONES] * 3])
    with pytest.raises(Exception, match="V of variable 1"):
        made.run(None, {**feeds, "V0": np.ones(4, np.float32)})
    assert made.run(None, feeds)[0].shape == (3,)
