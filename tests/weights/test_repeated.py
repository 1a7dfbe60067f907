"""Tokens that an exporter copied for each example of a fixed batch are one parameter; nothing else is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from safetensors.numpy import save_file

import onnxtrain

RNG = np.random.default_rng(0)
B = 3


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def model(body: str, batch: int = B, **weights: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},4,3] x) => (float y)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}"""
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


MATMUL = "y = MatMul (h, w)"
# The body that reads t, the shape of the token, its repetitions, and the shape of t where these are merged.
ONE = {
    "joined": (f"h = Concat <axis = 1> (t, x)  {MATMUL}", (1, 2, 3), (B, 1, 1), ()),
    "added": (f"h = Add (x, t)  {MATMUL}", (1, 4, 3), (B, 1, 1), ()),
    "keys": (f"s = MatMul (x, t)  h = Softmax (s)  {MATMUL}", (1, 3, 3), (B, 1, 1), ()),
    "time first": (
        f"a = Transpose <perm = [1, 0, 2]> (x)  h = Concat <axis = 0> (a, t)  {MATMUL}", (2, 1, 3), (1, B, 1), ()
    ),
    "behind other nodes": (
        f"a = Transpose <perm = [1, 0, 2]> (t)  b = Neg (a)  h = Concat <axis = 1> (b, x)  {MATMUL}",
        (2, 1, 3), (1, B, 1), (),
    ),
    "initial state": (
        f"a = Transpose <perm = [1, 0, 2]> (x)  r, l = RNN <hidden_size = 3> (a, u, u, , , t)  h = Squeeze (r, one)  "
        f"{MATMUL}",
        (1, 1, 3), (1, B, 1), (),
    ),
    "heads": (
        f"s = Constant <value_ints = [12, 1, 3]> ()  a = Reshape (x, s)  h = Concat <axis = 1> (t, a)  {MATMUL}",
        (4, 2, 3), (B, 1, 1), (),
    ),
    "steps and examples": (
        "a = Transpose <perm = [1, 0, 2]> (x)  s = Constant <value_ints = [12, 3]> ()  b = Reshape (a, s)  "
        f"h = Add (b, t)  {MATMUL}",
        (4, 1, 3), (1, B, 1), (12, 3),
    ),
    "in a branch": (
        "q = Constant <value = bool {1}> ()  h = If (q) <then_branch = a () => (float[A,D,C] o) "
        "{ o = Concat <axis = 1> (x, t) }, else_branch = b () => (float[A,D,C] p) { p = Concat <axis = 1> (t, x) }>  "
        f"{MATMUL}",
        (1, 4, 3), (B, 1, 1), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", ["adam(lr=0.1)", "sgd(lr=0.1, momentum=0.9, weight_decay=0.1)"])
@pytest.mark.parametrize("case", ONE)
def test_equal_rows_are_trained_as_the_token_that_they_repeat(case, optimizer, zero):
    body, shape, repetitions, merged = ONE[case]
    weights = {"w": normal(3, 3), "u": normal(1, 3, 3)}
    token = np.zeros(shape, np.float32) if zero else normal(*shape)
    made = np.tile(token, repetitions)
    sizes = {"repetitions": np.array(repetitions), "merged": np.array(merged or made.shape)}
    once = model(
        f"tiled = Tile (token, repetitions)  t = Reshape (tiled, merged)  {body}", token=token, **sizes, **weights
    )
    copied = model(body, t=made.reshape(sizes["merged"]), **weights)
    options = {"loss": "mse", "optimizer": optimizer, "clip_norm": 1.0}
    expected = onnxtrain.Trainer(once, train=["*", "token"], **options)
    trainer = onnxtrain.Trainer(copied, train=["*", "t"], **options)
    assert any("t: equal for each of the 3 examples" in hint for hint in trainer.hints)
    for _ in range(4):
        x = normal(B, 4, 3)
        y = normal(*trainer.predict(x).shape)
        assert trainer.train_step(x, y) == pytest.approx(expected.train_step(x, y), rel=1e-4)
    (found,) = (numpy_helper.to_array(tensor) for tensor in trainer.model().graph.initializer if tensor.name == "t")
    wanted = np.tile(expected.parameters["token"], repetitions).reshape(sizes["merged"])
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert trainer.parameters["t"].size == token.size


APART = {
    "units as many as examples": ("h = MatMul (x, w)  y = Add (h, t)", np.zeros(3, np.float32)),
    "a table": ("i = Cast <to = 7> (x)  h = Gather (t, i)  y = MatMul (h, w)", np.ones((B, 3), np.float32)),
    "a weight": ("h = MatMul (x, t)  y = MatMul (h, w)", np.repeat(normal(1, 3), 3, 0)),
    "steps as many as examples": (
        "h = Slice (x, zero, three, one)  a = Add (h, t)  y = MatMul (a, w)",
        np.repeat(normal(1, 3), B, 0),
    ),
    "filters": (
        "u = Unsqueeze (x, one)  h = Conv (u, t)  y = ReduceMax <keepdims = 0> (h, one)",
        np.repeat(normal(1, 1, 1, 1), B, 0),
    ),
    "rows that differ": ("h = Add (x, t)  y = MatMul (h, w)", normal(B, 4, 3)),
    "an output, too": ("h = Add (x, t)  y = MatMul (h, w)  z = Identity (t)", np.repeat(normal(1, 4, 3), B, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_other_tensors_stay_as_they_are(case):
    body, tensor = APART[case]
    given = model(body, t=tensor, w=normal(3, 3), three=np.array([3]))
    if case == "an output, too":
        given.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    trainer = onnxtrain.Trainer(given, loss="mse", train=["*", "t"], output="y")
    assert trainer.parameters["t"].shape == tensor.shape


def test_one_example_and_a_dynamic_batch_stay_as_they_are():
    for batch in (1, "N"):
        given = model(ONE["joined"][0], batch=batch, t=normal(1, 2, 3), w=normal(3, 3))
        assert onnxtrain.Trainer(given, loss="mse", train=["*", "t"]).parameters["t"].shape == (1, 2, 3)


@pytest.mark.plugins
def test_states_of_a_step_graph_are_written_to_all_rows(tmp_path):
    from onnxtrain.plugins.step_graphs.import_states import import_states

    token = np.tile(normal(4, 2, 3), (B, 1, 1))
    onnx.save(model(ONE["heads"][0], t=token, w=normal(3, 3)), tmp_path / "model.onnx")
    save_file({"t": np.ones((4, 2, 3), np.float32)}, tmp_path / "states.safetensors")
    import_states(tmp_path / "model.onnx", tmp_path / "states.safetensors", tmp_path / "out.onnx")
    (found,) = (t for t in onnx.load(tmp_path / "out.onnx").graph.initializer if t.name == "t")
    np.testing.assert_array_equal(numpy_helper.to_array(found), np.ones((12, 2, 3)))
