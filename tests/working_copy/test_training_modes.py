"""Batch normalization and dropout in training mode."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from sentences import raises_sentence


def normalized(momentum: float = 0.8) -> onnx.ModelProto:
    """Return a model of y = W batchnorm(x), exported for inference."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["h"], "norm", momentum=momentum),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    arrays = {"s": [1.0, 2.0, 0.5], "b": [0.0, 1.0, -1.0], "m": [0.1, 0.2, 0.3], "v": [1.0, 2.0, 3.0]}
    arrays["w"] = rng.normal(size=(3, 2))
    weights = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in arrays.items()]
    infos = [helper.make_tensor_value_info(name, 1, ["N", size]) for name, size in (("x", 3), ("y", 2))]
    graph = helper.make_graph(nodes, "normalized", infos[:1], infos[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def trainer(**options) -> onnxtrain.Trainer:
    return onnxtrain.Trainer(normalized(), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.01), **options)


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 2.0, size=(16, 3)).astype(np.float32), rng.normal(size=(16, 2)).astype(np.float32)


def test_frozen_statistics_stay_and_are_used() -> None:
    subject, (x, y) = trainer(), batch()
    prediction = subject.predict(x)
    assert subject.train_step(x, y) == pytest.approx(np.mean((prediction - y) ** 2), rel=1e-5)
    assert "m" not in subject.executor.session.state
    assert subject.objective.statistics == {}


def test_training_uses_batch_statistics_and_writes_the_running_ones(tmp_path) -> None:
    subject, (x, y) = trainer(batch_norm="train"), batch()
    scale, bias, weight = (np.array(subject.parameters[name]) for name in ("s", "b", "w"))
    loss = subject.train_step(x, y)
    mean, variance = x.mean(axis=0), x.var(axis=0)
    hidden = (x - mean) / np.sqrt(variance + 1e-5) * scale + bias
    assert loss == pytest.approx(np.mean((hidden @ weight - y) ** 2), rel=1e-4)
    assert sorted(subject.objective.statistics) == ["m", "v"]
    # ONNX: running = momentum * running + (1 - momentum) * batch, with the population variance.
    np.testing.assert_allclose(
        subject.executor.session.state["m"], 0.8 * np.array([0.1, 0.2, 0.3]) + 0.2 * mean, rtol=1e-5
    )
    np.testing.assert_allclose(
        subject.executor.session.state["v"], 0.8 * np.array([1, 2, 3]) + 0.2 * variance, rtol=1e-4
    )
    subject.save(tmp_path / "out.onnx")
    saved = onnx.load(tmp_path / "out.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in saved.graph.initializer}
    for name in ("m", "v", "s", "b", "w"):
        np.testing.assert_array_equal(values[name], subject.executor.session.state[name])
    assert saved.graph.node[0] == normalized().graph.node[0]


def test_evaluation_uses_the_running_statistics() -> None:
    subject, (x, y) = trainer(batch_norm="train"), batch()
    for step in range(60):
        subject.train_step(*batch(step))
    state = subject.executor.session.state
    hidden = (x - state["m"]) / np.sqrt(state["v"] + 1e-5) * state["s"] + state["b"]
    np.testing.assert_allclose(subject.predict(x), hidden @ state["w"], rtol=1e-4, atol=1e-5)
    assert subject.evaluate((x, y))["loss"] == pytest.approx(np.mean((hidden @ state["w"] - y) ** 2), rel=1e-4)


def test_statistics_survive_a_resume(tmp_path) -> None:
    x, y = (np.concatenate([batch(seed)[i] for seed in range(4)]) for i in (0, 1))
    whole = trainer(batch_norm="train")
    whole.fit((x, y), epochs=4, batch_size=16)
    trainer(batch_norm="train").fit((x, y), epochs=2, batch_size=16, checkpoint=tmp_path)
    resumed = trainer(batch_norm="train")
    resumed.fit((x, y), epochs=4, batch_size=16, checkpoint=tmp_path, resume=True)
    for name, value in whole.executor.session.state.items():
        np.testing.assert_array_equal(resumed.executor.session.state[name], value, err_msg=name)


def test_statistics_that_are_computed_are_refused() -> None:
    model = normalized()
    model.graph.node.insert(0, helper.make_node("Neg", ["m"], ["negative"]))
    model.graph.node[1].input[3] = "negative"
    with raises_sentence("statistics_computed", kind="mean", node="'norm'"):
        onnxtrain.Trainer(model, loss="mean_squared_error", batch_norm="train")


def dropping(ratio: float = 0.5) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[N,64] x) => (float[N,64] y)
        <float[64] w = {{{", ".join(["1"] * 64)}}}, float r = {{{ratio}}}> {{ d = Dropout(x, r)  y = Mul(d, w) }}"""
    return onnx.parser.parse_model(text)


def _trained(seed: int, **options) -> tuple[list[float], np.ndarray]:
    subject = onnxtrain.Trainer(
        dropping(), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1), seed=seed, **options
    )
    x = np.ones((8, 64), dtype=np.float32)
    return [subject.train_step(x, x) for _ in range(4)], np.array(subject.parameters["w"])


def test_dropout_drops_on_request_only() -> None:
    losses, _ = _trained(0)
    assert losses == [0.0] * 4
    losses, weights = _trained(0, dropout=True)
    assert losses[0] == pytest.approx(1.0, abs=1e-6)  # outputs are 2 or 0, the target is 1
    assert len(np.unique(weights)) > 4


def test_dropout_masks_follow_the_seed() -> None:
    first, again, other = (_trained(seed, dropout=True)[1] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_masks_of_nodes_and_steps_are_independent() -> None:
    """Two nodes, and two steps of a node, drop the same elements as often as independent masks would."""
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[N,64] x) => (float[N,64] y, bool[N,64] p, bool[N,64] q)
        <float r = {0.1}, float[64] w = {%s}>
        { d, p = Dropout(x, r)  e, q = Dropout(x, r)  s = Add(d, e)  y = Mul(s, w) }"""
    x = np.ones((512, 64), dtype=np.float32)
    for seed in range(4):
        subject = onnxtrain.Trainer(
            onnx.parser.parse_model(text % ", ".join(["1"] * 64)), loss="mean_squared_error", output="y",
            dropout=True, seed=seed,
        )  # fmt: skip
        step = onnxtrain.lower(subject.training_model(), kernels=False)
        nodes = [node for node in step.graph.node if node.op_type == "Dropout"]
        masks = [mask for node in nodes for mask in _drawn(node, x)]
        for first, second in itertools.combinations(masks, 2):
            assert np.mean(~first & ~second) == pytest.approx(0.01, abs=0.003)


def _drawn(node: onnx.NodeProto, x: np.ndarray) -> list[np.ndarray]:
    """Return the masks of a Dropout node in two runs."""
    made = helper.make_node("Dropout", ["x", "r", "t"], ["y", "mask"], seed=node.attribute[0].i)
    values = {"r": np.float32(0.1), "t": np.asarray(True)}
    graph = helper.make_graph(
        [made],
        "one",
        [helper.make_tensor_value_info("x", 1, [None, None])],
        [helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, [None, None])],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"], disabled_optimizers=["EliminateDropout"]
    )
    return [session.run(None, {"x": x})[0] for _ in range(2)]


def test_training_with_dropout_resumes_bit_for_bit(tmp_path) -> None:
    x = np.ones((32, 64), dtype=np.float32)

    def run(epochs: int, folder: str, *, resume: bool = False) -> np.ndarray:
        subject = onnxtrain.Trainer(
            dropping(), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1), dropout=True
        )
        subject.fit((x, x), epochs=epochs, batch_size=8, checkpoint=tmp_path / folder, resume=resume)
        return np.array(subject.parameters["w"])

    whole = run(3, "whole")
    run(1, "parts")
    np.testing.assert_array_equal(run(3, "parts", resume=True), whole)


def test_evaluation_does_not_drop() -> None:
    subject = onnxtrain.Trainer(dropping(), loss="mean_squared_error", dropout=True)
    x = np.ones((8, 64), dtype=np.float32)
    np.testing.assert_array_equal(subject.predict(x), x)
    assert subject.evaluate((x, x))["loss"] == 0


def test_computed_statistics_are_no_frozen_ones():
    """PyTorch's layers without running statistics compute the mean of each batch in the graph."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 2] y)'
        " <float[3] s = {1, 2, 0.5}, float[3] b = {0, 1, -1}, int64[1] rows = {0}> {"
        " m = ReduceMean<keepdims = 0>(x, rows) c = Sub(x, m) d = Mul(c, c) v = ReduceMean<keepdims = 0>(d, rows)"
        " h = BatchNormalization<training_mode = 1>(x, s, b, m, v) y = MatMul(h, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    made = onnxtrain.Trainer(model, loss="mean_squared_error")
    assert not [hint for hint in made.hints if "BatchNormalization" in hint]
    x, _ = batch()
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * [1, 2, 0.5] + [0, 1, -1]
    np.testing.assert_allclose(made.predict(x), np.repeat(expected.sum(1, keepdims=True), 2, 1), atol=1e-4)
