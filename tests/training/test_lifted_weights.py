"""Weights in Constant nodes and bodies train like others, and are written back to their nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.model_file.proto import all_tensors
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)


def parsed(body: str, *, raw: bool = True) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{body}')
    for tensor in all_tensors(model) if raw else ():
        if tensor.float_data:
            array = numpy_helper.to_array(tensor)
            tensor.ClearField("float_data")
            tensor.raw_data = array.tobytes()
    return model


NODES = """f (float[n, 2] x) => (float[n, 3] y) {
  w = Constant <value = float[2, 3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> ()
  shift = Constant <value = float[3] {0.1, 0.2, 0.3}> ()
  scale = Constant <value = float[2] {0.5, 2.0}> ()
  scaled = Mul(x, scale)
  v = Identity(w)
  h = MatMul(scaled, v)
  y = Add(h, shift) }"""

BRANCHES = """f (float[n, 2] x) => (float[n, 3] y) {
  total = ReduceSum <keepdims = 0> (x)
  zero = Constant <value = float {-100.0}> ()
  large = Greater(total, zero)
  y = If (large) <
    then_branch = g () => (float[n, 3] a)
      <float[2, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> {
      shift = Constant <value = float[3] {0.1, 0.2, 0.3}> ()
      b = MatMul(x, w)
      a = Add(b, shift) },
    else_branch = h () => (float[n, 3] c) {
      w = Constant <value = float[2, 3] {1, 2, 3, 4, 5, 6}> ()
      c = MatMul(x, w) }
  > }"""

LOOP = """f (float[n, 3] x) => (float[n, 3] y) {
  times = Constant <value = int64 {2}> ()
  go = Constant <value = bool {1}> ()
  y = Loop (times, go, x) <
    body = g (int64 i, bool c, float[n, 3] s) => (bool d, float[n, 3] t) {
      w = Constant <value = float[3, 3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> ()
      d = Identity(c)
      t = MatMul(s, w) }
  > }"""

CASES = {"nodes": NODES, "branches": BRANCHES, "loop": LOOP}
NAMES = {"nodes": {"w", "shift", "scale"}, "branches": {"w_1", "shift", "w_2"}, "loop": {"w"}}


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_trained_and_written_back(case, raw, tmp_path):
    model = parsed(CASES[case], raw=raw)
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x, y = RANDOM.normal(size=(6, width)).astype(np.float32), RANDOM.normal(size=(6, 3)).astype(np.float32)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    trainer = onnxtrain.Trainer(path, loss="mean_squared_error", optimizer=onnxtrain.Adam(0.05))
    assert set(trainer.parameters) == NAMES[case]
    losses = [trainer.train_step(x, y) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    trainer.save(tmp_path / "tuned.onnx")
    tuned = onnx.load(tmp_path / "tuned.onnx")
    onnx.checker.check_model(tuned, full_check=True)
    np.testing.assert_allclose(run(tuned, x), trainer.predict(x), rtol=1e-5, atol=1e-6)
    changed = 0
    for old, new in zip(all_tensors(model), all_tensors(tuned), strict=True):
        changed += old != new
        for tensor in (old, new):
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    assert changed >= 1
    assert tuned == model


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_initializers(case):
    """Compare with finite differences of the original file."""
    model = parsed(CASES[case])
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.abs(RANDOM.normal(size=(4, width))).astype(np.float32)
    name = min(NAMES[case] - {"shift", "scale"})
    derivative = onnxtrain.gradient(model, y="y", xs=[name])
    got = dict(
        zip(
            [output.name for output in derivative.graph.output],
            onnxruntime.InferenceSession(derivative.SerializeToString()).run(None, {"x": x}),
            strict=True,
        )
    )[f"{name}_grad"]
    (index, *_) = [i for i, t in enumerate(all_tensors(model)) if len(t.dims) == 2]
    for position in np.ndindex(got.shape):
        sums = []
        for step in (1e-2, -1e-2):
            moved = onnx.ModelProto.FromString(model.SerializeToString())
            tensor = list(all_tensors(moved))[index]
            array = numpy_helper.to_array(tensor).copy()
            array[position] += step
            tensor.raw_data = array.tobytes()
            sums.append(run(moved, x).sum(dtype=np.float64))
        assert got[position] == pytest.approx((sums[0] - sums[1]) / 2e-2, rel=2e-3, abs=1e-3)


def test_frozen_ones_stay(tmp_path):
    model = parsed(BRANCHES)
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.Adam(0.1), train="shift")
    assert list(trainer.parameters) == ["shift"]
    x = RANDOM.normal(size=(3, 2)).astype(np.float32)
    trainer.train_step(x, np.ones((3, 3), np.float32))
    trainer.save(tmp_path / "tuned.onnx")
    kept = [tensor for tensor in all_tensors(onnx.load(tmp_path / "tuned.onnx")) if len(tensor.dims) == 2]
    assert kept == [tensor for tensor in all_tensors(model) if len(tensor.dims) == 2]


ELSEWHERE = {
    "list": """f (float[n, 2] x) => (float[n, 2] y) {
      gate = Constant <value_floats = [0.3, 0.7]> () y = Mul(x, gate) }""",
    "scalar": """f (float[n, 2] x) => (float[n, 2] y) {
      gate = Constant <value_float = 0.7> () y = Mul(x, gate) }""",
    "half": """f (float[n, 2] x) => (float[n, 2] y) { gate = Constant <value = float16[2] {1, 2}> ()
      h = Cast <to = 10> (x) g = Add(h, gate) y = Cast <to = 1> (g) }""",
    "body": """f (float[n, 2] x, bool c) => (float[n, 2] y) { y = If (c) <
      then_branch = g () => (float[n, 2] a) <float[2] gate = {0.3, 0.7}> { a = Mul(x, gate) },
      else_branch = h () => (float[n, 2] b) { b = Identity(x) }> }""",
    "output of a body": """f (float[n, 2] x, bool c) => (float[n, 2] y) { e = If (c) <
      then_branch = g () => (float[2] gate) { gate = Constant <value = float[2] {0.3, 0.7}> () },
      else_branch = h () => (float[2] b) <float[2] b = {0.1, 0.2}> { }> y = Mul(x, e) }""",
    "function": """f (float[n, 2] x) => (float[n, 2] y) { h = own.Outer(x) r = Relu(h) y = own.Scale(r) }
      <domain: "own", opset_import: ["": 18, "own": 1]> Outer (a) => (b) { b = own.Scale(a) }
      <domain: "own", opset_import: ["": 18]>
      Scale (a) => (b) { gate = Constant <value_floats = [0.3, 0.7]> () b = Mul(a, gate) }""",
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_every_floating_tensor_is_listed_and_trained_by_name(where, tmp_path):
    text = ELSEWHERE[where]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "own": 1]>\n{text}')
    for tensor in (tensor for tensor in all_tensors(model) if tensor.int32_data):  # the parser's halves
        array = np.array([0.3, 0.7], np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    gates = [row for row in onnxtrain.inspect(tmp_path / "model.onnx").initializers if row.name.startswith("gate")]
    assert len(gates) == 1
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse", train=gates[0].name)
    assert list(trainer.parameters) == [gates[0].name]
    x = {"x": np.abs(RANDOM.normal(size=(4, 2))).astype(np.float32)} | (
        {"c": np.array(True)} if "c" in text[:40] else {}
    )
    inputs = {info.name: x[info.name] for info in model.graph.input}
    before = trainer.predict(inputs)
    trainer.train_step(inputs, before + 1)
    trainer.save(tmp_path / "tuned.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx")
    after = session.run(None, inputs)[0]
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, trainer.predict(inputs), rtol=2e-3)


def test_tensors_that_no_gradient_reaches_are_listed():
    values = {"nodes_values": [0.5, 0.0, 0.0], "nodes_hitrates": [1.0, 1.0, 1.0], "target_weights": [0.1, 0.9]}
    tree = onnx.helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, **values)
    infos = [onnx.helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 2), ("y", 1))]
    graph = onnx.helper.make_graph([tree], "g", infos[:1], infos[1:])
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    rows = onnxtrain.inspect(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)).initializers
    assert {(row.name, row.reason) for row in rows} == {
        (f"y.{name}", "an attribute of TreeEnsembleRegressor") for name in values
    }


@pytest.mark.parametrize("option", ["train", "freeze"])
def test_an_error_says_why_a_pattern_reaches_no_tensor_of_an_attribute(option):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "own": 1]>
    f (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 2}> {
      h = Mul(x, w)
      y = own.Scale <factors = float[2] {0.5, 2.0}> (h) }""")
    with raises_sentence("cannot_be_trained", pattern="'y.*'", name="'y.factors'", reason=": an attribute of Scale"):
        onnxtrain.inspect(model, **{option: "y.*"})


def test_beside_initializers_the_exporter_s_literals_are_none():
    body = """f (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
      c = Constant <value = float[2, 2] {0.1, 0.2, 0.3, 0.4}> ()
      h = MatMul(x, w)
      y = MatMul(h, c) }"""
    model = parsed(body)
    assert set(onnxtrain.Trainer(model, loss="mean_squared_error").parameters) == {"w", "c"}
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = "/Constant_output_0" if name == "c" else name
    assert set(onnxtrain.Trainer(model, loss="mean_squared_error").parameters) == {"w"}
    gone = onnx.ModelProto.FromString(model.SerializeToString())
    gone.graph.node[1].input[1] = "/Constant_output_0"
    del gone.graph.initializer[:]
    assert set(onnxtrain.Trainer(gone, loss="mean_squared_error").parameters) == {"/Constant_output_0"}


def test_resumes_from_checkpoints(tmp_path):
    x, y = RANDOM.normal(size=(8, 2)).astype(np.float32), RANDOM.normal(size=(8, 3)).astype(np.float32)
    model = parsed(BRANCHES)

    def fit(folder, epochs, **options):
        trainer = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.Adam(0.05))
        trainer.fit((x, y), epochs=epochs, batch_size=4, checkpoint=folder, **options)
        return {name: np.array(value) for name, value in trainer.parameters.items()}

    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "parts", 2)
    for name, value in fit(tmp_path / "parts", 4, resume=True).items():
        np.testing.assert_array_equal(value, whole[name])
