"""Tied weights that are stored twice, and separate weights that are stored once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import TrainingHint
from sentences import raises_sentence, warns_sentence
from zoo.arrays import copied

pytestmark = pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")

RNG = np.random.default_rng(0)


def tied(*, transposed: bool = True, rank: int = 2) -> onnx.ModelProto:
    """Build a model whose output projection is a copy of its embedding."""
    table = np.random.default_rng(3).normal(size=(12, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["wte.weight", "ids"], ["h"]),
        helper.make_node("MatMul", ["h", "mix"], ["g"]),
        helper.make_node("MatMul", ["g", "lm_head"], ["y"])
        if transposed
        else helper.make_node("Einsum", ["g", "lm_head"], ["y"], equation="nsd,vd->nsv"),
    ]
    mix = np.eye(8, dtype=np.float32) + 0.1 * np.random.default_rng(4).normal(size=(8, 8)).astype(np.float32)
    arrays = {"wte.weight": table, "mix": mix, "lm_head": table.T.copy() if transposed else table}
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "S"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "S", 12])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


IDS = np.random.default_rng(0).integers(0, 12, (4, 5))
NEXT = np.random.default_rng(1).integers(0, 12, (4, 5))
LM = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.Momentum(0.5)}


@pytest.mark.parametrize("transposed", [True, False])
def test_a_tied_weight_that_is_stored_twice_gets_a_hint(transposed):
    how = ", transposed," if transposed else ","
    sentence = (
        f"lm_head holds the same values as wte.weight{how} and they are trained separately; if the model ties them, "
    )
    with pytest.warns(TrainingHint, match=sentence) as caught:
        trainer = onnxtrain.Trainer(tied(transposed=transposed), **LM)
    assert [warning.filename for warning in caught] == [__file__]
    assert any(sentence in hint for hint in trainer.hints)
    assert any(sentence in hint for hint in onnxtrain.inspect(tied(transposed=transposed)).hints)


def test_hints_are_shown_once(recwarn):
    trainer = onnxtrain.Trainer(tied(), **LM)
    trainer.train_step(IDS, NEXT)
    trainer.set_masks({"mix": np.ones((8, 8), bool)})
    trainer.predict(IDS)
    trainer.evaluate((IDS, NEXT))
    _ = trainer.hints
    assert len([warning for warning in recwarn if warning.category is TrainingHint]) <= 1


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("tie", [True, "lm_head", ["wte.*"]])
def test_tie_trains_both_as_one(transposed, tie, tmp_path):
    model = tied(transposed=transposed)
    trainer = onnxtrain.Trainer(model, tie=tie, **LM)
    assert list(trainer.parameters) == ["wte.weight", "mix"]
    assert {row.name: row.reason for row in trainer.objective.table}["lm_head"] == "tied to wte.weight"
    assert trainer.hints == []
    apart = onnxtrain.Trainer(model, **LM)
    before = copied(apart.parameters)
    assert trainer.train_step(IDS, NEXT) == apart.train_step(IDS, NEXT)
    moved = {name: apart.parameters[name] - before[name] for name in before}
    both = moved["wte.weight"] + (moved["lm_head"].T if transposed else moved["lm_head"])
    np.testing.assert_allclose(trainer.parameters["wte.weight"] - before["wte.weight"], both, rtol=1e-4, atol=1e-6)
    prediction = trainer.predict(IDS)
    trainer.save(tmp_path / "saved.onnx")
    saved = onnx.load(tmp_path / "saved.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in saved.graph.initializer}
    head = values["lm_head"].T if transposed else values["lm_head"]
    np.testing.assert_array_equal(head, values["wte.weight"])
    np.testing.assert_allclose(onnxtrain.Trainer(saved, **LM).predict(IDS), prediction, rtol=1e-5, atol=1e-6)
    assert [node.SerializeToString() for node in saved.graph.node] == [
        node.SerializeToString() for node in model.graph.node
    ]


def test_tie_of_a_file_with_external_data(tmp_path):
    model = tied()
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", tie=True, **LM)
    trainer.train_step(IDS, NEXT)
    (tmp_path / "out").mkdir()
    trainer.save(tmp_path / "out" / "model.onnx")
    saved = onnx.load(tmp_path / "out" / "model.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in saved.graph.initializer}
    np.testing.assert_array_equal(values["lm_head"].T, values["wte.weight"])


def test_tie_needs_a_copy():
    with raises_sentence(
        "no_match",
        option="tie",
        pattern="'mix'",
        kind="initializer that holds the values of",
        names="lm_head of wte.weight.",
    ):
        onnxtrain.Trainer(tied(), tie="mix", **LM)


def test_a_training_model_is_tied_too():
    settings = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.Momentum(0.5)}
    with pytest.warns(TrainingHint, match="trained separately"):
        onnxtrain.training_model(tied(), **settings)
    model = onnxtrain.training_model(tied(), tie=True, **settings)
    bound = {entry.key for entry in model.training_info[0].update_binding}
    assert "wte.weight" in bound
    assert "lm_head" not in bound


def alike(first: np.ndarray, second: np.ndarray) -> list[str]:
    model = tied(transposed=False)
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("MatMul", ["h", "b"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info(name, 1, ["N", None]) for name in "xy"]
    weights = [
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in zip("ab", (first, second), strict=True)
    ]
    model.graph.CopyFrom(helper.make_graph(nodes, "alike", infos[:1], infos[1:], weights))
    return [hint for hint in onnxtrain.inspect(model).hints if "same values" in hint]


def test_tensors_equal_by_chance_are_not_copies():
    square = np.random.default_rng(0).normal(size=(6, 6))
    other = np.random.default_rng(1).normal(size=(6, 6))
    np.fill_diagonal(other, np.diagonal(square))
    assert alike(square, other) == []
    assert alike(np.ones((6, 6)), np.ones((6, 6))) == []
    assert alike(np.eye(6), np.eye(6)) == []
    assert len(alike(square, square)) == 1
    assert len(alike(square, square.T)) == 1


def test_only_similar_tensors_are_read(monkeypatch):
    """Distinguishing tensors reads a few elements of each; the test counts bytes."""
    from onnxtrain.parameters import ties

    compared = []
    original = ties._are_equal
    monkeypatch.setattr(ties, "_are_equal", lambda one, other: compared.append(one.shape) or original(one, other))
    onnxtrain.inspect(tied())
    assert compared == [(12, 8), (12, 8)]
    compared.clear()
    onnxtrain.inspect(onnxtrain.examples.mlp((8, 8, 8, 8, 8)))
    assert compared == []


def merged(operator: str = "BatchNormalization") -> onnx.ModelProto:
    """Build one layer whose scale is also its running variance, by Identity, and whose bias is its mean."""
    nodes = [
        helper.make_node("Identity", ["one"], ["var"]),
        helper.make_node("Identity", ["var"], ["var_again"]),
        helper.make_node("Identity", ["zero"], ["mean"]),
        helper.make_node("BatchNormalization", ["x", "one", "zero", "mean", "var_again"], ["y"], "norm"),
    ]
    arrays = {"one": np.ones(3, np.float32), "zero": np.zeros(3, np.float32)}
    infos = [helper.make_tensor_value_info(name, 1, ["N", 3]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "merged", infos[:1], infos[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_scale_that_is_also_the_variance():
    options = {"loss": "mean_squared_error", "optimizer": onnxtrain.Momentum(0.1)}
    shared = "one is shared by 2 inputs of norm (scale, running variance), zero is "
    with warns_sentence("shared_values", shared=shared, statistics="A running statistic of batch normalization"):
        onnxtrain.Trainer(merged(), **options)
    with raises_sentence("shared_statistics", statistics="'zero'"):
        onnxtrain.Trainer(merged(), batch_norm="train", **options)
    subject = onnxtrain.Trainer(merged(), batch_norm="train", untie=True, **options)
    assert (list(subject.parameters), list(subject.objective.statistics)) == (["one", "zero"], ["zero_2", "one_2"])
    x = RNG.normal(size=(64, 3)).astype(np.float32) + 2
    subject.train_step(x, x)
    np.testing.assert_allclose(subject.executor.session.state["zero_2"], 0.1 * x.mean(0), rtol=1e-4)
    frozen = onnxtrain.Trainer(merged(), untie=True, **options)
    frozen.train_step(x, x)
    assert set(frozen.executor.session.state) >= {"one", "zero"}
    assert "one_2" not in frozen.executor.session.state
    assert not [hint for hint in frozen.hints if "shared" in hint]


def test_a_matmul_of_a_tensor_with_itself_stays_tied():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (float[N,2] x) => (float[N,2] y)
        <float[2] w = {1, 2}> { s = Mul(w, w)  y = Mul(x, s) }""")
    subject = onnxtrain.Trainer(model, loss="mean_squared_error", untie=True)
    assert list(subject.parameters) == ["w"]
    assert subject.hints == []


def test_reading_a_shape_is_not_a_use():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (float[N,2] x) => (float[N,2] y)
        <float[2] w = {1, 2}> { v = Identity(w)  s = Shape(v)  f = Cast<to = 1>(s)  h = Mul(x, w)  y = Add(h, f) }""")
    assert onnxtrain.inspect(model).hints == ()
    with raises_sentence(
        "no_match", option="untie", pattern="'w'", kind="initializer that several nodes share", names="none."
    ):
        onnxtrain.Trainer(model, loss="mean_squared_error", untie="w")


def test_trained_tensors_are_shared_on_purpose(recwarn):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (float[N,2] x) => (float[N,2] y)
        <float[2,2] w = {1, 2, 3, 4}> { h = MatMul(x, w)  y = MatMul(h, w) }""")
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error")
    (hint,) = trainer.hints
    assert hint.endswith("training ties them.")
    assert "w is shared by 2 nodes (" in hint
    assert not [warning for warning in recwarn if warning.category is TrainingHint]


def test_merged_scales_of_any_rank_are_untied():
    ones = ", ".join(["1"] * 4)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]> m (float[N,4,3] x) => (float[N,4,3] y)
        <float[1,4,1] w = {{{ones}}}> {{ v = Identity(w)  h = Mul(x, w)  t = Tanh(h)  y = Mul(t, v) }}""")
    with warns_sentence("shared_values", shared="w is shared by 2 nodes"):
        onnxtrain.Trainer(model, loss="mean_squared_error")
    assert list(onnxtrain.Trainer(model, loss="mean_squared_error", untie=True).parameters) == ["w", "w_2"]


def test_constants_stay_shared_and_untrained():
    """As exporters write attention: queries and keys are scaled by one constant."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[N,3,4] x) => (float[N,3,3] y) <float val_81 = {0.7}> {
        q = MatMul (x, w)  k = MatMul (x, v)  a = Mul (q, val_81)  t = Transpose <perm = [0, 2, 1]> (k)
        b = Mul (t, val_81)  y = MatMul (a, b) }"""
    )
    for index, node in enumerate(model.graph.node):
        node.name = f"/blocks.1/attention/node_{index}"
    rng = np.random.default_rng(0)
    for name in "wv":
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), name))
    for untie in (False, True, "*"):
        assert list(onnxtrain.Trainer(model, loss="mse", untie=untie).parameters) == ["w", "v"]
    named = onnxtrain.Trainer(model, loss="mse", untie="val_81", train=["*", "val_81"])
    assert len(named.parameters) == 4
