"""LSTM, GRU and RNN with all attributes: forward and gradient on ONNX Runtime against the specification in NumPy."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnxtrain
from autodiff.case import normal
from autodiff.recurrent_oracle import recurrent
from onnxtrain.errors import GradientError
from onnxtrain.runtime.testing import projected_gradient
from sentences import raises_sentence

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NAMES = ("x", "w", "r", "b", "lengths", "h0", "c0", "p")
STEPS, BATCH, SIZE, HIDDEN = 5, 3, 2, 4
LENGTHS = np.array([5, 2, 3], dtype=np.int32)


def inputs(operator, given, directions):
    gates = GATES[operator]
    made = {
        "x": normal(STEPS, BATCH, SIZE),
        "w": normal(directions, gates * HIDDEN, SIZE, seed=1, scale=0.5),
        "r": normal(directions, gates * HIDDEN, HIDDEN, seed=2, scale=0.5),
        "b": normal(directions, 2 * gates * HIDDEN, seed=3, scale=0.5),
        "lengths": LENGTHS,
        "h0": normal(directions, BATCH, HIDDEN, seed=4, scale=0.5),
        "c0": normal(directions, BATCH, HIDDEN, seed=5, scale=0.5),
        "p": normal(directions, 3 * HIDDEN, seed=6, scale=0.5),
    }
    return {name: array for name, array in made.items() if name in given}


def model(operator, feeds, outputs, opset=18, **attributes):
    names = [name if name in feeds else "" for name in NAMES]
    if operator != "LSTM":
        names = names[:6]
    while not names[-1]:
        names.pop()
    node = helper.make_node(operator, names, outputs, hidden_size=HIDDEN, **attributes)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, array.shape)
        for name, array in feeds.items()
    ]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name]
    graph = helper.make_graph([node], "recurrent", infos, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run(built, feeds):
    single = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, single), strict=True))


ALL = {"x", "w", "r", "b", "h0", "c0"}
BARE = {"x", "w", "r"}
FORMS = [
    ("LSTM", ALL, {}),
    ("LSTM", BARE, {"direction": "reverse"}),
    ("LSTM", ALL | {"p"}, {"direction": "bidirectional"}),
    ("LSTM", ALL | {"p", "lengths"}, {"direction": "bidirectional"}),
    ("LSTM", ALL | {"lengths"}, {}),
    ("LSTM", ALL | {"p"}, {"clip": 0.3}),
    ("LSTM", ALL, {"input_forget": 1}),
    ("LSTM", ALL, {"activations": ["HardSigmoid", "Softsign", "Elu"], "activation_alpha": [0.3, 0.7]}),
    (
        "LSTM",
        ALL,
        {
            "activations": ["Sigmoid", "ScaledTanh", "Affine"],
            "activation_alpha": [1.2, 0.5],
            "activation_beta": [0.8, 0.1],
        },
    ),
    (
        "LSTM",
        ALL,
        {
            "activations": ["HardSigmoid", "Elu", "LeakyRelu"],
            "activation_alpha": [0.3, 0.0, 0.0],
            "activation_beta": [0.0],
        },
    ),
    ("GRU", ALL - {"c0"}, {}),
    ("GRU", ALL - {"c0"}, {"linear_before_reset": 1}),
    ("GRU", BARE, {"linear_before_reset": 1, "direction": "reverse"}),
    ("GRU", BARE, {"direction": "reverse"}),
    ("GRU", (ALL | {"lengths"}) - {"c0"}, {"direction": "bidirectional"}),
    ("GRU", (ALL | {"lengths"}) - {"c0"}, {"direction": "bidirectional", "linear_before_reset": 1}),
    ("GRU", ALL - {"c0"}, {"clip": 0.3}),
    ("GRU", ALL - {"c0"}, {"clip": 0.3, "linear_before_reset": 1}),
    ("GRU", ALL - {"c0"}, {"activations": ["Sigmoid", "LeakyRelu"], "activation_alpha": [0.2]}),
    ("RNN", ALL - {"c0"}, {}),
    ("RNN", BARE, {"direction": "bidirectional"}),
    ("RNN", (ALL | {"lengths"}) - {"c0"}, {"direction": "reverse"}),
    ("RNN", ALL - {"c0"}, {"clip": 0.4, "activations": ["Relu"]}),
    ("RNN", ALL - {"c0"}, {"activations": ["Softplus"]}),
]


def directional(operator, feeds, projections, attributes, name, direction, h=1e-6):
    def objective(sign):
        moved = {**feeds, name: feeds[name] + sign * h * direction}
        return sum(
            np.sum(y * p)
            for y, p in zip(recurrent(operator, **moved, **attributes), projections, strict=True)
            if p is not None
        )

    return (objective(1) - objective(-1)) / (2 * h)


def check(operator, feeds, attributes, shapes, outputs, runs=True):
    rng = np.random.default_rng(7)
    expected = recurrent(operator, **feeds, **attributes)
    projections = [rng.normal(size=y.shape) if name else None for y, name in zip(expected, outputs, strict=True)]
    wrt = [name for name in feeds if name != "lengths"]
    single = {name: p.astype(np.float32) for name, p in zip(outputs, projections, strict=True) if name}
    built = projected_gradient(model(operator, feeds, outputs, **attributes), wrt, single, shapes)
    if not runs:
        return
    found = run(built, feeds)
    for name, y in zip(outputs, expected, strict=True):
        if name:
            np.testing.assert_allclose(found[name], y, atol=2e-5)
    for name in wrt:
        direction = rng.normal(size=feeds[name].shape)
        measured = directional(operator, feeds, projections, attributes, name, direction)
        gradient = found[f"{name}_grad"]
        assert gradient.shape == feeds[name].shape
        assert np.sum(gradient * direction) == pytest.approx(measured, rel=1e-4, abs=1e-4), name


@pytest.mark.sampled("shapes")
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize(("operator", "given", "attributes"), FORMS)
def test_gradient_equals_that_of_the_specification(operator, given, attributes, shapes):
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    outputs = ["y", "h", "c"] if operator == "LSTM" else ["y", "h"]
    if directions == 2 and "activations" in attributes:
        attributes = {**attributes, "activations": attributes["activations"] * 2}
    check(operator, inputs(operator, given, directions), attributes, shapes, outputs)


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_only_the_last_state_is_given(operator):
    outputs = ["", "h", ""] if operator == "LSTM" else ["", "h"]
    check(operator, inputs(operator, BARE, 1), {}, "static", outputs)
    check(operator, inputs(operator, BARE, 1), {}, "unknown", outputs)


def test_activation_that_does_not_exist():
    feeds = inputs("RNN", BARE, 1)
    given = model("RNN", feeds, ["y"], activations=["Swish"])
    with raises_sentence("activation_unknown", got="Swish", known="Affine, Elu"):
        onnxtrain.gradient(given, "y", ["w"])


def test_size_of_the_state_has_to_be_known():
    feeds = inputs("RNN", BARE, 1)
    given = model("RNN", feeds, ["y"])
    node = given.graph.node[0]
    del node.attribute[:]
    for info in given.graph.input:
        info.type.tensor_type.ClearField("shape")
    with raises_sentence("hidden_size_unknown", what="r"):
        onnxtrain.gradient(given, "y", ["w"])


@pytest.mark.parametrize("state", ["h0", "c0"])
def test_first_states_of_another_size_are_refused(state):
    """PyTorch's exporter writes cells of another size for LSTMs with projections, which ONNX does not have."""
    feeds = inputs("LSTM", BARE | {"h0", "c0"}, 1)
    feeds[state] = np.zeros((1, BATCH, HIDDEN + 5), np.float32)
    given = model("LSTM", feeds, ["y"])
    with pytest.raises(GradientError, match=rf"has hidden_size {HIDDEN}, but '{state}' is for {HIDDEN + 5}; export"):
        onnxtrain.gradient(given, "y", ["w"])
