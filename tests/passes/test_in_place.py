"""The proof that a state may be updated in place, on safe and on unsafe graphs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.lowering.memory.in_place import in_place_states
from onnxtrain.runtime.session import TrainingSession

HEADER = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1, "local": 1, "onnxtrain": 1]>'


def proved(text: str, **states: str) -> set[str]:
    return in_place_states(ir.from_proto(parser.parse_model(f"{HEADER} {text}")).graph, states)


SAFE = {
    "written by the only reader": "g (float[2] w, float[2] d) => (float[2] n) { n = Sub(w, d) }",
    "readers are ancestors": "g (float[2] w) => (float[2] n) { a = Exp(w)  n = Sub(w, a) }",
    "nothing reads it": "g (float[2] x) => (float[2] n) { n = Exp(x) }",
    "reader through a view, before": """g (float[2] w) => (float[2] n) <int64[1] s = {2}>
        { v = Reshape(w, s)  e = Exp(v)  n = Add(w, e) }""",
    "optimizer node after all readers": """g (float r, int64 t, float[2] w, float[2] v) => (float[2] n, float[2] m)
        { g = Exp(w)  n, m = ai.onnx.preview.training.Momentum<alpha = 0.9, beta = 1.0, mode = "standard",
          norm_coefficient = 0.0>(r, t, w, g, v) }""",
    "reader through a view, element by element": """g (float[2,2] w, float[2,2] d) => (float[2,2] n)
        <int64[2] s = {2, 2}> { v = Reshape(w, s)  n = Sub(v, d) }""",
    "scaled on the way": """g (float[2] w, float[2] d) => (float[2] n) <float c = {0.9}>
        { a = Mul(w, c)  e = Mul(d, d)  n = Add(a, e) }""",
    "in another type on the way": """g (float[2] w, double[2] d) => (float[2] n)
        { a = Cast<to = 11>(w)  b = Sub(a, d)  n = Cast<to = 1>(b) }""",
    "a sum over all elements": """g (float[2] w) => (float[2] n)
        { q = Mul(w, w)  s = ReduceSum(q)  a = Div(w, s)  n = Sub(w, a) }""",
    "a product that is read by a product": """g (float[2,2] w, float[2,2] x) => (float[2,2] n)
        { y = MatMul(x, w)  t = Transpose(x)  d = MatMul(t, y)  n = Sub(w, d) }""",
    "in a loop whose result is computed": """g (float[2] w, int64 k, bool c, float[2] x) => (float[2] n)
        { y = Loop(k, c, x) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] r)
          { on = Identity(go)  r = Mul(s, w) }>  q = Mul(y, y)  n = Sub(w, q) }""",
    "an operand of a chain": """g (float[2] w, float[2] d) => (float[2] n)
        { n = onnxtrain.Elementwise<program = "Mul x0 x0;Add x1 s0">(d, w) }""",
    "the other term of an embedding's gradient": """g (float[2] w, float[3] d, int64[3] i, int64[1] s) => (float[2] n)
        { n = onnxtrain.GatherGradient<axis = 0>(d, i, s, w) }""",
}
UNSAFE = {
    "a number in a chain": """g (float[1] w, float[2] d) => (float[2] n)
        { n = onnxtrain.Elementwise<program = "Add x0 x1">(d, w) }""",
    "rows of an embedding's gradient": """g (float[2] w, int64[2] i, int64[1] s, float[2] o) => (float[2] n)
        { n = onnxtrain.GatherGradient<axis = 0>(w, i, s, o) }""",
    "a reader that may run later": "g (float[2] w) => (float[2] n, float[2] o) { n = Neg(w)  o = Exp(w) }",
    "a view that is read later": """g (float[2] w) => (float[2] n, float[2] o) <int64[1] s = {2}>
        { v = Reshape(w, s)  n = Neg(w)  o = Exp(v) }""",
    "a writer that reads across elements": "g (float[2,2] w) => (float[2,2] n) { n = MatMul(w, w) }",
    "a writer that broadcasts it": "g (float[1] w, float[2] x) => (float[2] n) { n = Add(w, x) }",
    "a subgraph that may run later": """g (float[2] w, bool c) => (float[2] n, float[2] o) { n = Neg(w)
        o = If(c) <then_branch = t () => (float[2] a) { a = Exp(w) },
        else_branch = e () => (float[2] b) { b = Neg(w) }> }""",
    "a transposition that a product takes in": """g (float[2,2] w, float[2,2] x) => (float[2,2] n, float[2,2] o)
        { v = Transpose(w)  s = ReduceSum(v)  n = Sub(w, s)  o = MatMul(x, v) }""",
    "a factor that a product takes in": """g (float[2,2] w, float[2,2] x) => (float[2,2] n, float[2,2] o)
        <float c = {0.5}> { v = Mul(w, c)  s = ReduceSum(v)  n = Sub(w, s)  o = MatMul(x, v) }""",
    "a part that is read later": """g (float[2] w) => (float[2] n, float[1] o) <int64[1] a = {0}, int64[1] b = {1}>
        { v = Slice(w, a, b)  s = ReduceSum(v)  n = Sub(w, s)  o = Exp(v) }""",
    "a view that is an output": "g (float[2] w) => (float[2] n, float[2] v) { v = Identity(w) n = Sub(w, v) }",
    "its new value is read in place of a factor": """g (float[2,2] w, float[2,2] x) => (float[2,2] n, float[2,2] o)
        <float c = {0.5}> { n = Mul(w, c)  o = MatMul(x, n) }""",
    "a product and a sum that become one": """g (float[2,2] w, float[2,2] x) => (float[2,2] n)
        { y = MatMul(x, w)  n = Add(y, w) }""",
    "a product that is scaled": """g (float[2,2] w, float[2,2] x) => (float[2,2] n) <float c = {0.5}>
        { y = MatMul(x, w)  n = Mul(y, c) }""",
    "a product behind a view": """g (float[2,2] w) => (float[2,2] n) <int64[2] s = {2, 2}>
        { y = MatMul(w, w)  n = Reshape(y, s) }""",
    "its own transposition": "g (float[2,2] w) => (float[2,2] n) { v = Transpose(w)  n = Add(w, v) }",
    "written transposed": """g (float[2,2] w, float[2,2] x) => (float[2,2] n)
        { y = Sub(w, x)  n = Transpose(y) }""",
    "the third of a sum": "g (float[2] w, float[2] a, float[2] b) => (float[2] n) { n = Sum(a, b, w) }",
    "handed through": "g (float[2] w) => (float[2] n) { n = Identity(w) }",
    "handed through by a loop": """g (float[2] w, int64 k, bool c) => (float[2] n, float[2] o)
        { v = Loop(k, c, w) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] r)
          { on = Identity(go)  r = Exp(s) }>  s = ReduceSum(v)  n = Sub(w, s)  o = Exp(v) }""",
    "handed through by a branch": """g (float[2] w, bool c) => (float[2] n, float[2] o)
        { v = If(c) <then_branch = t () => (float[2] a) { a = Identity(w) },
          else_branch = e () => (float[2] b) { b = Exp(w) }>  s = ReduceSum(v)  n = Sub(w, s)  o = Exp(v) }""",
    "in a function": """g (float[2] w) => (float[2] n, float[2] o) { v = local.f(w)  s = ReduceSum(v)
        n = Sub(w, s)  o = Exp(v) }""",
    "in a list": """g (float[2] w) => (float[2] n, float[2] o) <int64 i = {0}>
        { l = SequenceConstruct(w)  v = SequenceAt(l, i)  s = ReduceSum(v)  n = Sub(w, s)  o = Exp(v) }""",
}


@pytest.mark.parametrize("name", SAFE)
def test_proved_safe(name: str) -> None:
    assert "w" in proved(SAFE[name], w="n")


@pytest.mark.parametrize("name", UNSAFE)
def test_not_proved(name: str) -> None:
    assert "w" not in proved(UNSAFE[name], w="n")


def test_swapped_states_are_not_proved_both() -> None:
    text = "g (float[2] a, float[2] b) => (float[2] x, float[2] y) { x = Identity(b)  y = Identity(a) }"
    assert proved(text, a="x", b="y") == set()


@pytest.mark.parametrize("kernels", [None, False])
@pytest.mark.parametrize("build", ["mlp", "lenet5", "small_transformer"])
def test_proof_holds_on_the_graph_that_onnxruntime_runs(build: str, kernels: bool | None, tmp_path) -> None:
    model = onnxtrain.examples.mlp((6, 8, 4)) if build == "mlp" else getattr(onnxtrain.examples, build)()
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    session = TrainingSession(training, runtime=options)
    step = session._steps[0]
    settings = options.session_options(kernels=options.uses_kernels())
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    proto = ir.to_proto(step.step.model)
    onnxruntime.InferenceSession(proto.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    written = {name: new for name, new in step.step.states.items() if new is not None}
    in_place = set(written) - set(step.second_buffers)
    optimized = ir.load(tmp_path / "optimized.onnx").graph
    assert in_place <= in_place_states(optimized, written)


def test_second_buffers_give_the_same_weights_as_fresh_sessions() -> None:
    """Compare bodies, which update tensor by tensor and need second buffers, with pure functions."""
    model = onnxtrain.examples.mlp((5, 7, 6, 3))
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    session = TrainingSession(training, runtime=onnxtrain.RuntimeOptions(kernels=False))
    assert session._steps[0].second_buffers
    step_graph = onnxtrain.lower(training)
    assert_steps_equal(session, step_graph, model)


def assert_steps_equal(session: TrainingSession, step_graph: onnx.ModelProto, model: onnx.ModelProto) -> None:
    bare = onnxruntime.InferenceSession(step_graph.SerializeToString(), providers=["CPUExecutionProvider"])
    states = {name: np.array(value) for name, value in session.state.items()}
    rng = np.random.default_rng(0)
    outputs = [value.name for value in step_graph.graph.output]
    for _ in range(6):
        feeds = {
            model.graph.input[0].name: rng.normal(size=(4, 5)).astype(np.float32),
            "target": rng.integers(0, 3, 4),
            "learning_rate": np.asarray(0.1, np.float32),
        }
        results = dict(zip(outputs, bare.run(outputs, {**feeds, **states}), strict=True))
        states = {name: results[f"{name}_new"] for name in states}
        assert session.step(feeds)["loss"] == results["loss"]
        for name, value in states.items():
            np.testing.assert_array_equal(session.state[name], value, err_msg=name)
