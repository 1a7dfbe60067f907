"""Adapters of quantized weights: the weights stay unchanged while adapters train."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from adapters.base_files import tuned_beside
from onnxtrain import Lora
from onnxtrain.adapters import adaptable_layers, add_slots, merge_adapter
from onnxtrain.adapters.values import packed, unpacked
from onnxtrain.errors import OptionError
from sentences import raises_sentence
from zoo.decoder import parsed

INPUTS, OUTPUTS, BLOCK = 40, 6, 16


def with_weights(model, **arrays):
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name.replace("__", ".")))
    return model


def few_bits(bits, zeros):
    """x W by MatMulNBits, with a partial block; and W."""
    random = np.random.default_rng(bits)
    blocks = -(-INPUTS // BLOCK)
    numbers = random.integers(0, 1 << bits, (OUTPUTS, blocks, BLOCK)).astype(np.uint8)
    scales = (0.5 + random.random((OUTPUTS, blocks))).astype(np.float32) / (1 << bits)
    given = random.integers(0, 1 << bits, (OUTPUTS, blocks)).astype(np.uint8)
    middle = np.full_like(given, 1 << (bits - 1))
    dense = (numbers.astype(np.float32) - (given if zeros else middle)[..., None]) * scales[..., None]
    per = 8 // bits
    filled = np.pad(given, ((0, 0), (0, -blocks % per)))
    third = ", fc__zeros" if zeros else ""
    model = parsed(f"""g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{
        h = Tanh(x) y = com.microsoft.MatMulNBits<K={INPUTS}, N={OUTPUTS}, bits={bits}, block_size={BLOCK}>
            (h, fc__weight, fc__scales{third}) }}""")
    with_weights(model, fc__weight=packed(numbers, bits), fc__scales=scales.reshape(-1))
    if zeros:
        with_weights(model, fc__zeros=packed(filled, bits).reshape(-1))
    return model, dense.reshape(OUTPUTS, -1)[:, :INPUTS].T


def integers(per_column):
    """x W with W from DequantizeLinear; and W."""
    random = np.random.default_rng(0)
    numbers = random.integers(-127, 128, (INPUTS, OUTPUTS)).astype(np.int8)
    scale = (random.random(OUTPUTS if per_column else ()) + 0.5).astype(np.float32) / 200
    model = parsed(f"""g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{
        h = Tanh(x) w = DequantizeLinear<axis=1>(fc__weight, fc__scale) y = MatMul(h, w) }}""")
    with_weights(model, fc__weight=numbers, fc__scale=np.asarray(scale))
    return model, numbers.astype(np.float32) * scale


def blocks():
    """x W with W from DequantizeLinear in blocks with zero points; and W."""
    random = np.random.default_rng(0)
    numbers = random.integers(0, 256, (INPUTS, OUTPUTS)).astype(np.uint8)
    scales = (random.random((INPUTS // 8, OUTPUTS)) + 0.5).astype(np.float32) / 200
    zeros = random.integers(100, 150, scales.shape).astype(np.uint8)
    model = parsed(f"""g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{
        h = Tanh(x) w = DequantizeLinear<axis=0, block_size=8>(fc__weight, fc__scales, fc__zeros)
        y = MatMul(h, w) }}""")
    with_weights(model, fc__weight=numbers, fc__scales=scales, fc__zeros=zeros)
    spread = [np.repeat(each.astype(np.float32), 8, axis=0) for each in (scales, zeros)]
    return model, (numbers - spread[1]) * spread[0]


BASES = {
    "4 bits": lambda: few_bits(4, zeros=False),
    "4 bits, zero points": lambda: few_bits(4, zeros=True),
    "8 bits": lambda: few_bits(8, zeros=True),
    "QDQ": lambda: integers(per_column=False),
    "QDQ by column": lambda: integers(per_column=True),
    "QDQ by block": blocks,
}


@pytest.fixture(params=BASES)
def base(request):
    return BASES[request.param]()


def data():
    random = np.random.default_rng(5)
    x = random.standard_normal((8, INPUTS)).astype(np.float32)
    return x, random.standard_normal((8, OUTPUTS)).astype(np.float32)


def trainer(model, **settings):
    lora = Lora(**{"rank": 3, "alpha": 6, "targets": "fc", **settings})
    return onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.SGD(0.1), lora=lora)


def run(model, x, adapter=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")  # as training and evaluation
    given = str(model) if not isinstance(model, onnx.ModelProto) else model.SerializeToString()
    options_of_run, loaded = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    if adapter is not None:
        loaded.Load(str(adapter))
        options_of_run.add_active_adapter(loaded)
    return onnxruntime.InferenceSession(given, options).run(None, {"x": x}, options_of_run)[0]


def test_predictions_are_those_of_the_dequantized_weights(base):
    """ONNX Runtime rounds activations to 8 bits there, unless a session says otherwise."""
    model, dense = base
    x, y = data()
    learner = trainer(model)
    np.testing.assert_allclose(learner.predict(x), np.tanh(x) @ dense, atol=1e-5)
    assert onnxtrain.evaluate(model, (x, y), loss="mse")["loss"] == pytest.approx(
        np.mean((np.tanh(x) @ dense - y) ** 2), rel=1e-5
    )


@pytest.mark.parametrize("dora", [False, True])
def test_steps_are_those_of_the_dequantized_weights(base, dora):
    """The same adapter on the same weight in float."""
    model, dense = base
    plain = parsed(f"""g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{ h = Tanh(x) y = MatMul(h, fc__weight) }}""")
    with_weights(plain, fc__weight=np.ascontiguousarray(dense))
    x, y = data()
    learner, other = trainer(model, dora=dora), trainer(plain, dora=dora)
    for _ in range(10):
        assert learner.train_step(x, y) == pytest.approx(other.train_step(x, y), abs=2e-5)
    for name, array in other.parameters.items():
        np.testing.assert_allclose(learner.parameters[name], array, atol=2e-5)


def test_the_base_stays_as_it_is_and_runs_with_slots(base, tmp_path):
    model, _ = base
    x, y = data()
    learner = tuned_beside(model, trainer, (x, y), tmp_path)
    add_slots(model, tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    np.testing.assert_array_equal(run(tmp_path / "slots.onnx", x), run(model, x))
    got = run(tmp_path / "slots.onnx", x, tmp_path / "tuned.onnx_adapter")
    np.testing.assert_allclose(got, learner.predict(x), atol=1e-5)


def test_merging_is_refused_or_says_what_it_costs(base, tmp_path):
    model, dense = base
    learner = trainer(model)
    for name, value in learner.parameters.items():
        learner.parameters[name] = np.random.default_rng(1).standard_normal(value.shape).astype(np.float32)
    with raises_sentence("adapter_does_not_fit_bits", what="fc.weight"):
        learner.save(tmp_path / "merged.onnx")
    learner.save(tmp_path / "tuned.onnx_adapter")
    (cost,) = merge_adapter(model, tmp_path / "tuned.onnx_adapter", tmp_path / "merged.onnx", requantize=True)
    a, b = (learner.parameters[f"fc.lora_{matrix}.weight"] for matrix in "AB")
    wanted = dense + 2 * a @ b
    eye = np.arctanh(np.eye(INPUTS, dtype=np.float32) * 0.5)
    got = run(tmp_path / "merged.onnx", eye) * 2
    assert cost.lost == pytest.approx(np.linalg.norm(wanted - got) / np.linalg.norm(2 * a @ b), rel=1e-3)
    changed = {
        one.name
        for one, other in zip(
            onnx.load(tmp_path / "merged.onnx").graph.initializer, model.graph.initializer, strict=True
        )
        if one != other
    }
    assert "fc.weight" in changed <= {"fc.weight", "fc.scale", "fc.scales", "fc.zeros"}


def test_layers_say_their_bits():
    assert [adaptable_layers(make()[0])[0].bits for make in BASES.values()] == [4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_are_quantized_with_what_they_multiply(fused, tmp_path):
    random = np.random.default_rng(0)
    w = random.integers(-127, 128, (INPUTS, OUTPUTS)).astype(np.int8)
    text = """q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, fc__weight, z) f = Cast<to=1>(p)
        t = Mul(s, fc__scale) y = Mul(f, t)"""
    if fused:
        text = "y = com.microsoft.DynamicQuantizeMatMul(x, fc__weight, fc__scale)"
    model = parsed(f"g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{ {text} }}")
    with_weights(model, fc__weight=w, fc__scale=np.asarray([0.01] if fused else 0.01, np.float32))
    x, y = data()
    learner = trainer(model)
    np.testing.assert_allclose(learner.predict(x), run(model, x), atol=1e-6)
    losses = [learner.train_step(x, y) for _ in range(10)]
    assert losses[-1] < losses[0]
    with pytest.raises(OptionError, match="quantized to 8 bits"):
        learner.save(tmp_path / "merged.onnx")
    with raises_sentence("dora_without_columns", what="fc"):
        trainer(model, dora=True)
    learner.save(tmp_path / "tuned.onnx_adapter")
    with raises_sentence("weight_quantized_with_operand"):
        merge_adapter(model, tmp_path / "tuned.onnx_adapter", tmp_path / "merged.onnx", requantize=True)
    add_slots(model, tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    got = run(tmp_path / "slots.onnx", x, tmp_path / "tuned.onnx_adapter")
    np.testing.assert_allclose(got, learner.predict(x), atol=1e-5)


def test_bits_in_bytes():
    for bits in (2, 4, 8):
        numbers = np.random.default_rng(0).integers(0, 1 << bits, (3, 16)).astype(np.uint8)
        found = packed(numbers, bits)
        assert found.shape == (3, 16 * bits // 8)
        np.testing.assert_array_equal(unpacked(found, bits), numbers)


def test_bases_of_16_bits(tmp_path):
    random = np.random.default_rng(0)
    w = random.standard_normal((INPUTS, OUTPUTS)).astype(np.float16)
    model = parsed(f"""g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{
        h = Cast<to=10>(x) p = MatMul(h, fc__weight) y = Cast<to=1>(p) }}""")
    with_weights(model, fc__weight=w)
    x, y = data()
    learner = trainer(model)
    assert {array.dtype for array in learner.parameters.values()} == {np.dtype(np.float32)}
    losses = [learner.train_step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0]
    learner.save(tmp_path / "tuned.onnx_adapter")
    add_slots(model, tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    np.testing.assert_array_equal(run(tmp_path / "slots.onnx", x), run(model, x))
    got = run(tmp_path / "slots.onnx", x, tmp_path / "tuned.onnx_adapter")
    np.testing.assert_allclose(got, learner.predict(x), atol=2e-2)
    learner.save(tmp_path / "merged.onnx")
    np.testing.assert_allclose(run(tmp_path / "merged.onnx", x), learner.predict(x), atol=5e-2)


def test_a_training_beside_quantized_weights_resumes(base, tmp_path):
    """With the same bits; the best epoch is kept as an adapter, since the weights cannot hold it."""
    model, _ = base
    settings = {"batch_size": 4, "progress": False, "validation": data(), "save_best": "val_loss"}

    def trained(folder, *, epochs, resume=False):
        learner = trainer(model, dropout=0.1)
        learner.fit(*data(), epochs=epochs, checkpoint=tmp_path / folder, resume=resume, **settings)
        return learner

    whole = trained("whole", epochs=3)
    trained("parts", epochs=1)
    again = trainer(model, dropout=0.1)
    again.fit(*data(), epochs=3, checkpoint=tmp_path / "parts", resume=True, change="epochs", **settings)
    for name, value in whole.parameters.items():
        assert np.array_equal(again.parameters[name], value)
    best = [tmp_path / folder / "best.onnx_adapter" for folder in ("whole", "parts")]
    assert best[0].read_bytes() == best[1].read_bytes()
    losses = onnxtrain.Trainer(model, loss="mean_squared_error", lora=Lora(adapter=best[0])).evaluate(*data())
    assert losses["loss"] <= whole.evaluate(*data())["loss"] * (1 + 1e-5)
