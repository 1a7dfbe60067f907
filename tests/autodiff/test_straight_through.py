"""Straight-through gradients of operators that round or quantize."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.autodiff import registry
from onnxtrain.autodiff.options import RECOMPUTE_KEY, STRAIGHT_THROUGH_KEY, GradientOptions
from onnxtrain.autodiff.rules.no_gradient import STEPS

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
MOVING = {
    "Identity": "Identity(q)",
    "Reshape": "Reshape(q, shape)",
    "Flatten": "Flatten(q)",
    "Transpose": "Transpose(q)",
    "Unsqueeze": "Unsqueeze(q, axis)",
    "Squeeze": "Squeeze(column, axis)",
}


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def quantized(zero: int, kind: str = "int8") -> onnx.ModelProto:
    return parser.parse_model(
        f"{HEADER} g (float[n] x, float s, float[n] weight) => (float y) <{kind} zero = {{{zero}}}>"
        "{ q = QuantizeLinear(x, s, zero) d = DequantizeLinear(q, s, zero) w = Mul(d, weight)"
        " y = ReduceSum<keepdims=0>(w) }"
    )


@pytest.mark.parametrize("operator", ["Round", "Floor", "Ceil", "Sign"])
def test_rounding_is_the_identity_on_request_and_zero_else(operator: str) -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[4] x) => (float y) {{ r = {operator}(x) s = Mul(r, r) y = ReduceSum<keepdims=0>(s) }}"
    )
    x = np.array([-1.6, 0.4, 2.5, 7.0], np.float32)
    expected = {"Round": np.round, "Floor": np.floor, "Ceil": np.ceil, "Sign": np.sign}[operator](x)
    passed = run(onnxtrain.gradient(model, xs="x", straight_through=True), x=x)
    np.testing.assert_array_equal(passed["x_grad"], 2 * expected)
    np.testing.assert_array_equal(run(onnxtrain.gradient(model, xs="x"), x=x)["x_grad"], 0)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("zero", "kind", "low", "high"), [(0, "int8", -128, 127), (3, "int8", -128, 127), (7, "uint8", 0, 255)]
)
def test_a_quantized_pair_agrees_with_fake_quantize(zero: int, kind: str, low: int, high: int) -> None:
    torch = pytest.importorskip("torch")
    # Inside, far outside, and on both sides of where rounding crosses the ends of the range.
    steps = np.array([0.3, -5.2, 400, -400, low - zero - 0.7, low - zero - 0.3, high - zero + 0.3, high - zero + 0.7])
    x, weight = (0.1 * steps).astype(np.float32), np.arange(1, 9, dtype=np.float32)
    found = run(
        onnxtrain.gradient(quantized(zero, kind), xs=["x", "s"], straight_through=True),
        x=x,
        s=np.array(0.1, np.float32),
        weight=weight,
    )
    values = torch.tensor(x, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(values, 0.1, zero, low, high).mul(torch.tensor(weight)).sum().backward()
    np.testing.assert_array_equal(found["x_grad"], values.grad.numpy())
    assert 0 < np.count_nonzero(found["x_grad"]) < len(x)

    scale = torch.tensor([0.1], requires_grad=True)
    learnable = torch._fake_quantize_learnable_per_tensor_affine
    y = learnable(torch.tensor(x), scale, torch.tensor([float(zero)]), low, high, 1.0)
    y.mul(torch.tensor(weight)).sum().backward()
    np.testing.assert_allclose(found["s_grad"], scale.grad.numpy()[0], rtol=1e-4)


def test_quantization_has_no_gradient_by_default() -> None:
    gradient = onnxtrain.gradient(quantized(3), xs="x")
    x = np.array([0.2, -0.5], np.float32)
    found = run(gradient, x=x, s=np.array(0.1, np.float32), weight=np.ones(2, np.float32))
    np.testing.assert_array_equal(found["x_grad"], 0)


LAYOUTS = [
    pytest.param((3,), "axis=1", lambda s: s[None, :, None], id="axis"),
    pytest.param((3,), "axis=-2", lambda s: s[None, :, None], id="axis-from-the-end"),
    pytest.param((1,), "axis=1", lambda s: s, id="one-element"),
    pytest.param((2, 2, 4), "axis=1, block_size=2", lambda s: np.repeat(s, 2, axis=1)[:, :3], id="blocks"),
]


@pytest.mark.parametrize("sizes", ["2,3,4", "a,b,c"])
@pytest.mark.parametrize(("shape", "attributes", "laid_out"), LAYOUTS)
def test_scales_in_every_layout(shape, attributes, laid_out, sizes) -> None:
    """Different scales of quantization and dequantization: dx = dy s2 / s1 in range, ds by the chain rule."""
    generator = np.random.default_rng(0)
    dims = ",".join(map(str, shape))
    model = parser.parse_model(
        f"{HEADER} g (float[{sizes}] x, float[{dims}] s, float[{dims}] t, int8[{dims}] z, float[{sizes}] weight)"
        f" => (float y) {{ q = QuantizeLinear<{attributes}>(x, s, z) d = DequantizeLinear<{attributes}>(q, t, z)"
        " w = Mul(d, weight) y = ReduceSum<keepdims=0>(w) }"
    )
    feeds = {
        "x": generator.normal(scale=12, size=(2, 3, 4)).astype(np.float32),
        "s": generator.uniform(0.05, 0.15, shape).astype(np.float32),
        "t": generator.uniform(0.05, 0.15, shape).astype(np.float32),
        "z": generator.integers(-9, 9, shape).astype(np.int8),
        "weight": generator.normal(size=(2, 3, 4)).astype(np.float32),
    }
    found = run(onnxtrain.gradient(model, xs=["x", "s"], straight_through=True), **feeds)
    s, t, z = (laid_out(feeds[name].astype(np.float64)) for name in "stz")
    rounded = np.round(feeds["x"] / s) + z
    inside = (rounded >= -128) & (rounded <= 127)
    assert 0 < inside.sum() < inside.size
    dx = np.where(inside, feeds["weight"] * t / s, 0)
    np.testing.assert_allclose(found["x_grad"], dx, rtol=1e-5)
    terms = -dx * feeds["x"] / s
    if shape == (2, 2, 4):
        expected = np.stack([terms[:, :2].sum(1), terms[:, 2]], 1)
    else:
        expected = terms.sum((0, 2)) if shape == (3,) else terms.sum(keepdims=True).reshape(1)
    np.testing.assert_allclose(found["s_grad"], expected, rtol=1e-4)


@pytest.mark.parametrize("operator", MOVING)
def test_integers_that_are_moved_carry_gradients(operator: str) -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[2, 3] x, float s) => (float y) <int64[1] axis = {{2}}, int64[2] shape = {{3, 2}}>"
        "{ q = QuantizeLinear(x, s) column = Unsqueeze(q, axis)"
        f" m = {MOVING[operator]} d = DequantizeLinear(m, s) w = Mul(d, d) y = ReduceSum<keepdims=0>(w) }}"
    )
    x, s = np.array([[0.2, 1.0, 30.0], [0.7, -5.0, 3.0]], np.float32), np.array(0.1, np.float32)
    found = run(onnxtrain.gradient(model, xs="x", straight_through=True), x=x, s=s)
    np.testing.assert_allclose(found["x_grad"], np.where((x >= 0) & (x < 25.5), 2 * x, 0), rtol=1e-6)


def test_half_precision_reaches_the_ends_of_wide_integers() -> None:
    model = parser.parse_model(
        f"{HEADER} g (float16[3] x, float16 s) => (float16 y) <uint16 zero = {{0}}>"
        "{ q = QuantizeLinear(x, s, zero) d = DequantizeLinear(q, s, zero) y = ReduceSum<keepdims=0>(d) }"
    )
    x = np.array([-1, 1, 60], np.float16)
    found = run(onnxtrain.gradient(model, xs="x", straight_through=True), x=x, s=np.array(0.001, np.float16))
    np.testing.assert_array_equal(found["x_grad"], [0, 1, 1])


def test_every_straight_through_rule_is_tested() -> None:
    tested = {*MOVING, *STEPS, "DequantizeLinear"}
    tested |= {"Cast", "CastLike", "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger"}  # in test_quantized.py
    assert {entry.operator for entry in registry.straight_through_entries()} == tested


def trained() -> onnx.ModelProto:
    """A layer whose weights and inputs are quantized, as in quantization-aware training."""
    generator = np.random.default_rng(0)
    weight = ", ".join(f"{number:.4f}" for number in generator.normal(scale=0.3, size=8 * 3))
    return parser.parse_model(
        f"{HEADER} g (float[n, 8] x) => (float[n, 3] y)"
        f"<float[8, 3] weight = {{{weight}}}, float[3] bias = {{0, 0, 0}}, float a = {{0.02}}, float b = {{0.05}}>"
        "{ xq = QuantizeLinear(x, b, zero) xd = DequantizeLinear(xq, b, zero)"
        " wq = QuantizeLinear(weight, a, zero) wd = DequantizeLinear(wq, a, zero)"
        " m = MatMul(xd, wd) y = Add(m, bias) }".replace("{ xq", "{ zero = Constant<value = int8 {0}>() xq", 1)
    )


def blobs() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    targets = generator.integers(0, 3, 64)
    centres = generator.normal(size=(3, 8))
    return (centres[targets] + 0.3 * generator.normal(size=(64, 8))).astype(np.float32), targets


def test_quantization_aware_training_learns() -> None:
    x, targets = blobs()
    trainer = onnxtrain.Trainer(
        trained(), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.02), straight_through=True, threads=1
    )
    assert set(trainer.parameters) == {"weight", "bias"}
    losses = [trainer.train_step(x, targets) for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    plain = onnxtrain.Trainer(trained(), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.02), threads=1)
    assert set(plain.parameters) == {"bias"}


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_choice_travels_in_the_training_model(tmp_path, accumulate: bool) -> None:
    model = onnxtrain.training_model(
        trained(),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Momentum(0.1),
        straight_through=True,
        recompute=["*"],
        accumulate=accumulate,
    )
    onnx.checker.check_model(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata == {STRAIGHT_THROUGH_KEY: "true", RECOMPUTE_KEY: '["*"]'}
    assert GradientOptions.read(metadata) == GradientOptions(True, ("*",))
    del model.metadata_props[1]
    onnx.save(model, tmp_path / "training.onnx")
    session = onnxtrain.TrainingSession(tmp_path / "training.onnx")
    before = session.state["weight"].copy()
    x, targets = blobs()
    feeds = {"x": x, "target": targets, "learning_rate": np.array(0.1, np.float32)}
    for entry in range(1 + accumulate):
        session.step(feeds, entry=entry)
    assert np.abs(session.state["weight"] - before).max() > 1e-3
    step = onnxtrain.lower(model, entry=0)
    assert not {STRAIGHT_THROUGH_KEY, RECOMPUTE_KEY} & {entry.key for entry in step.metadata_props}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (STRAIGHT_THROUGH_KEY, "yes", "straight_through is 'yes'; it is true or false"),
        (RECOMPUTE_KEY, "*", r"recompute is '\*'; it is a JSON list of patterns"),
        (RECOMPUTE_KEY, "[1]", r"recompute is '\[1\]'; it is a JSON list of patterns"),
    ],
)
def test_metadata_of_other_values_is_refused(key: str, value: str, message: str) -> None:
    model = onnxtrain.training_model(trained(), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    model.metadata_props.add(key=key, value=value)
    with pytest.raises(onnxtrain.errors.GradientError, match=message):
        onnxtrain.lower(model)
