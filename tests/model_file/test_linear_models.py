"""Linear models of ai.onnx.ml: their standard operators agree with ONNX Runtime on the original nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(9, 4)).astype(np.float32)
X[3] = 0


def model(*nodes, inputs=TensorProto.FLOAT, opset=18, width=4, labels=TensorProto.INT64):
    """A chain of nodes of ai.onnx.ml; a classifier's label is an output, too."""
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "K"])]
    if any("label" in node.output for node in nodes):
        outputs.insert(0, helper.make_tensor_value_info("label", labels, None))
    graph = helper.make_graph(nodes, "linear", [helper.make_tensor_value_info("x", inputs, ["N", width])], outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def node(operator, x="x", outputs=("y",), **attributes):
    return helper.make_node(operator, [x], list(outputs), domain="ai.onnx.ml", **attributes)


def numbers(*shape):
    return RANDOM.normal(size=shape).astype(np.float32).reshape(-1).tolist()


def classifier(rows, ending, labels=None, **more):
    labels = {"classlabels_ints": [7, 3, 5][: max(rows, 2)]} if labels is None else {"classlabels_strings": labels}
    given = {"coefficients": numbers(rows, 4), "intercepts": numbers(rows)} | more
    return node("LinearClassifier", outputs=("label", "y"), post_transform=ending, **labels, **given)


ONE = numbers(1, 4)
MIRRORED = {"coefficients": [*(-c for c in ONE), *ONE], "intercepts": [-0.5, 0.5]}

CASES = {
    **{
        f"classifier of {rows} rows, {ending}": model(classifier(rows, ending))
        for rows in (1, 2, 3)
        for ending in ("NONE", "LOGISTIC", "SOFTMAX")
    },
    "mirrored classifier": model(classifier(2, "LOGISTIC", **MIRRORED)),
    "labels that are texts": model(classifier(3, "SOFTMAX", ["b", "a", "ä"]), labels=TensorProto.STRING),
    "regressor": model(node("LinearRegressor", coefficients=numbers(4), intercepts=[0.5])),
    "regressor of two targets": model(
        node("LinearRegressor", coefficients=numbers(2, 4), intercepts=numbers(2), targets=2)
    ),
    "regressor without intercepts": model(node("LinearRegressor", coefficients=numbers(2, 4), targets=2)),
    "regressor of one column": model(node("LinearRegressor", coefficients=[2.0], intercepts=[0.5]), width=1),
    "scaler": model(node("Scaler", offset=numbers(4), scale=numbers(4))),
    "scaler of one number": model(node("Scaler", offset=[0.5], scale=[2.0])),
    "scaler of integers": model(node("Scaler", offset=numbers(4), scale=numbers(4)), inputs=TensorProto.INT64),
    **{
        f"{norm} of a scaled regressor, opset {opset}": model(
            node("Scaler", outputs=("a",), offset=[0.0] * 4, scale=numbers(4)),
            node("Normalizer", "a", ("b",), norm=norm),
            node("LinearRegressor", "b", coefficients=numbers(2, 4), intercepts=numbers(2), targets=2),
            opset=opset,
        )
        for norm in ("MAX", "L1", "L2")
        for opset in (12, 17, 18)
    },
}


def run(proto, x):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x}), strict=True))


def data(proto):
    (info,) = proto.graph.input
    width = info.type.tensor_type.shape.dim[1].dim_value
    whole = info.type.tensor_type.elem_type == TensorProto.INT64
    return (10 * X[:, :width]).astype(np.int64) if whole else X[:, :width]


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_those_of_the_nodes(case):
    proto = CASES[case]
    found = onnxtrain.predict(proto, {"x": data(proto)})
    for name, expected in run(proto, data(proto)).items():
        array = found[name] if isinstance(found, dict) else found
        if name == "label":
            np.testing.assert_array_equal(array, expected)
        else:
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_trained_and_written_back(case, tmp_path):
    proto = CASES[case]
    onnx.save(proto, tmp_path / "model.onnx")
    names = [row.name for row in onnxtrain.inspect(proto, output="y").initializers if row.uses and row.size]
    options = {"loss": "mse", "output": "y", "optimizer": "adam(lr=0.001)"}
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", train=names, **options)  # scalers too
    before = trainer.get_weights()
    x = np.abs(data(proto)) + 1  # the largest of a row is far from zero
    expected = run(proto, x)["y"]
    targets = RANDOM.normal(size=expected.shape).astype(np.float32)
    losses = [trainer.train_step({"x": x}, targets) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(not np.array_equal(before[name], array) for name, array in trainer.parameters.items())
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert saved.SerializeToString() == trainer.model().SerializeToString()
    found = trainer.predict({"x": x})
    np.testing.assert_allclose(
        found["y"] if isinstance(found, dict) else found, run(saved, x)["y"], rtol=1e-4, atol=1e-5
    )
    for new, old in zip(saved.graph.node, proto.graph.node, strict=True):
        for changed, original in zip(new.attribute, old.attribute, strict=True):
            if len(original.floats):
                assert list(changed.floats) != list(original.floats)
                changed.floats[:] = original.floats
    assert saved.SerializeToString() == proto.SerializeToString()  # and nothing else has changed


def test_gradients_are_those_of_a_linear_model():
    """Mean squared error: dL/dW = 2/(N K) (y - t)^T x, and dL/db its sum."""
    weights, shifts = RANDOM.normal(size=(2, 4)).astype(np.float32), np.array([0.5, -1], np.float32)
    proto = model(
        node("LinearRegressor", coefficients=weights.reshape(-1).tolist(), intercepts=shifts.tolist(), targets=2)
    )
    targets = RANDOM.normal(size=(9, 2)).astype(np.float32)
    trainer = onnxtrain.Trainer(proto, loss="mse", optimizer="sgd(lr=1.0)")
    assert list(trainer.parameters) == ["y.coefficients", "y.intercepts"]
    trainer.train_step({"x": X}, targets)
    error = 2 * (X @ weights.T + shifts - targets) / targets.size
    np.testing.assert_allclose(trainer.parameters["y.coefficients"], weights - error.T @ X, rtol=1e-4)
    np.testing.assert_allclose(trainer.parameters["y.intercepts"], shifts - error.sum(0), rtol=1e-4)


def test_a_mirrored_classifier_has_one_score():
    trainer = onnxtrain.Trainer(CASES["mirrored classifier"], loss="cross_entropy", optimizer="sgd(lr=0.1)")
    assert trainer.parameters["y.coefficients"].shape == (1, 4)
    trainer.train_step({"x": X}, np.arange(9) % 2)
    (saved,) = trainer.model().graph.node
    halves = {a.name: np.array(a.floats).reshape(2, -1) for a in saved.attribute if len(a.floats)}
    for half in halves.values():
        np.testing.assert_array_equal(half[0], -half[1])


@pytest.mark.parametrize("packed", [False, True])
def test_lists_are_replaced_however_they_are_written(packed, tmp_path):
    """Java and .NET pack lists of numbers, C++ and Python do not."""
    proto = CASES["regressor"]
    data = proto.SerializeToString()
    floats = np.array(proto.graph.node[0].attribute[0].floats, "<f4")
    single = b"".join(b"\x3d" + value.tobytes() for value in floats)
    assert data.count(single) == 1
    if packed:
        attribute = proto.graph.node[0].attribute[0].SerializeToString()
        shorter = attribute.replace(single, b"\x3a" + bytes([4 * len(floats)]) + floats.tobytes())
        data = enclosed(data, attribute, shorter, proto)
    (tmp_path / "model.onnx").write_bytes(data)
    file = ModelFile.load(tmp_path / "model.onnx")
    file.save(tmp_path / "same.onnx", {"y.coefficients": file.value("y.coefficients")})
    assert (tmp_path / "same.onnx").read_bytes() == data
    file.save(tmp_path / "new.onnx", {"y.coefficients": np.array([[1, 2, 3, 4]], np.float32)})
    assert list(onnx.load(tmp_path / "new.onnx").graph.node[0].attribute[0].floats) == [1, 2, 3, 4]
    assert len((tmp_path / "new.onnx").read_bytes()) == len(data)


def enclosed(data, attribute, shorter, proto):
    """A model with another encoding of an attribute, and the lengths of the messages around it."""
    node_before = proto.graph.node[0].SerializeToString()
    graph_before = proto.graph.SerializeToString()

    def swap(message, old, new):
        return message.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)

    def length(size):
        return bytes([size]) if size < 128 else bytes([size % 128 + 128, size // 128])

    node_after = swap(node_before, attribute, shorter)
    graph_after = graph_before.replace(length(len(node_before)) + node_before, length(len(node_after)) + node_after)
    return data.replace(length(len(graph_before)) + graph_before, length(len(graph_after)) + graph_after)


def test_weights_of_nodes_with_equal_names_are_distinguished():
    chain = model(
        *(
            helper.make_node("Scaler", [x], [y], name="same", domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
            for x, y in (("x", "a"), ("a", "y"))
        )
    )
    names = {row.name for row in onnxtrain.inspect(chain).initializers}
    assert names == {"same.offset", "same.scale", "same.offset_1", "same.scale_1"}


def test_a_frozen_scaler_stays():
    chain = model(
        node("Scaler", outputs=("a",), offset=numbers(4), scale=numbers(4)),
        node("LinearRegressor", "a", coefficients=numbers(4), intercepts=[0.5]),
    )
    trainer = onnxtrain.Trainer(chain, loss="mse", freeze="a.*")
    trainer.train_step({"x": X}, X[:, :1])
    assert trainer.model().graph.node[0] == chain.graph.node[0]
    assert trainer.model().graph.node[1] != chain.graph.node[1]


def test_copies_and_pickles_have_the_weights():
    import copy
    import pickle

    trainer = onnxtrain.Trainer(CASES["regressor"], loss="mse", optimizer="sgd(lr=0.1)")
    trainer.train_step({"x": X}, X[:, :1])
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert other.model() == trainer.model()


@pytest.mark.parametrize("ending", ["PROBIT", "SOFTMAX_ZERO"])
def test_classifiers_without_a_standard_form_are_reported(ending):
    proto = model(classifier(3, ending))
    with raises_sentence("nothing_trainable", reasons="computes with LinearClassifier, through"):
        onnxtrain.Trainer(proto, loss="mse")


def test_trees_are_named():
    tree = node(
        "TreeEnsembleRegressor", "a", n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0], nodes_values=[0.5, 0.0, 0.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], target_treeids=[0, 0], target_nodeids=[1, 2],
        target_ids=[0, 0], target_weights=[1.0, 2.0],
    )  # fmt: skip
    proto = model(node("Scaler", outputs=("a",), offset=numbers(4), scale=numbers(4)), tree)
    sentence = (
        r"no trainable parameter: 'Scaler.offset': the loss does not depend on it .*; it computes with "
        r"TreeEnsembleRegressor, through which no gradient flows: trees, support vectors and the like are fitted by "
        r"the program that made them\.$"
    )
    with pytest.raises(OptionError, match=sentence.replace("Scaler.offset", r"a\.offset")):
        onnxtrain.Trainer(proto, loss="mse")
