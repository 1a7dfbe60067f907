"""A mel spectrogram in front of a model: its values, its place, and what training does with it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.errors import OptionError

RNG = np.random.default_rng(3)
AUDIO = RNG.uniform(-0.5, 0.5, (2, 4000)).astype(np.float32)
AUDIO[1, 1500:2500] = 0  # silence


def identity(shape="n, 1, mels, frames", opset=18, kind="float"):
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> f ({kind}[{shape}] mel) => ({kind}[{shape}] y) '
        "{ y = Identity(mel) }"
    )


def hertz(mel, scale):
    """The frequency of a value of the mel scale, searched for by bisection in the scale's own definition."""

    def mel_of(f):
        if scale == "htk":
            return 2595 * np.log10(1 + f / 700)
        return 3 * f / 200 if f < 1000 else 15 + 27 * np.log(f / 1000) / np.log(6.4)

    if callable(mel):
        return mel(mel_of)
    below, above = 0.0, 1e6
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if mel_of(middle) < mel else (below, middle)
    return below


def reference(x, *, rate=16000, window=400, hop=160, fft=512, mels=40, low=0.0, high=None, scale="htk",
              area_norm=False, power=2, compression="log", floor=1e-10, center=False):  # fmt: skip
    """The spectrogram [N, mels, frames] in float64, frame by frame with NumPy's FFT."""
    x = x.astype(np.float64)
    if center:
        x = np.pad(x, ((0, 0), (fft // 2, fft // 2)))
    hann = np.zeros(fft)
    start = (fft - window) // 2
    hann[start : start + window] = np.hanning(window + 1)[:-1]
    frames = [x[:, at : at + fft] for at in range(0, x.shape[1] - fft + 1, hop)]
    energy = np.stack([np.abs(np.fft.rfft(frame * hann)) ** power for frame in frames], axis=1)  # [N, frames, bins]
    ends = [hertz(lambda of, f=f: of(f), scale) for f in (low, high or rate / 2)]
    points = [hertz(m, scale) for m in np.linspace(*ends, mels + 2)]
    found = np.zeros((len(x), mels, len(frames)))
    for filter, (left, top, right) in enumerate(zip(points, points[1:], points[2:], strict=False)):
        weights = np.interp(np.fft.rfftfreq(fft, 1 / rate), [left, top, right], [0, 1, 0])
        found[:, filter] = energy @ weights * (2 / (right - left) if area_norm else 1)
    if compression == "log":
        return np.log(np.maximum(found, floor))
    if compression == "db":
        return 10 * np.log10(np.maximum(found, floor))
    if compression == "pcen":
        frames_in_time = 0.4 * rate / hop
        b = (np.sqrt(1 + 4 * frames_in_time**2) - 1) / (2 * frames_in_time**2)
        smooth, result = np.ones(found.shape[:2]), []
        for step in range(found.shape[2]):
            smooth = (1 - b) * smooth + b * found[:, :, step]
            result.append((found[:, :, step] / (1e-6 + smooth) ** 0.98 + 2) ** 0.5 - 2**0.5)
        return np.stack(result, axis=2)
    return found


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


SETTINGS = [
    {},
    {"scale": "slaney", "area_norm": True},
    {"scale": "slaney", "low": 60.0, "high": 7600.0, "compression": "db", "power": 2},
    {"power": 1, "compression": "none"},
    {"compression": "pcen"},
    {"center": True, "hop": 100, "window": 320},
    {"window": 256, "fft": 256, "hop": 128, "mels": 20, "high": 4000.0, "floor": 1e-3},
    {"rate": 8000, "window": 200, "hop": 80, "fft": 255, "mels": 16},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_are_the_definition(settings):
    given = {"mels": 40, **{("sample_rate" if key == "rate" else key): value for key, value in settings.items()}}
    model = onnxtrain.prepend_mel(identity(), **given)
    onnx.checker.check_model(model, full_check=True)
    expected = reference(AUDIO, **settings)
    found = run(model, AUDIO)
    assert found.shape == (2, 1, *expected.shape[1:])
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("opset", [11, 12, 13, 18, 21])
@pytest.mark.parametrize("compression", ["log", "pcen"])
def test_models_of_old_and_new_opsets(opset, compression):
    model = onnxtrain.prepend_mel(identity(opset=opset), mels=40, compression=compression)
    assert model.opset_import[0].version == opset
    np.testing.assert_allclose(run(model, AUDIO)[:, 0], reference(AUDIO, compression=compression), atol=2e-3)


@pytest.mark.parametrize(("kind", "dtype", "error"), [("double", np.float64, 1e-4), ("float16", np.float16, 2e-2)])
def test_the_audio_is_float32_whatever_the_spectrogram_is(kind, dtype, error):
    found = run(onnxtrain.prepend_mel(identity(kind=kind), mels=40), AUDIO)
    assert found.dtype == dtype
    np.testing.assert_allclose(found[:, 0], reference(AUDIO), atol=error)


@pytest.mark.parametrize(
    ("shape", "options", "axes", "samples"),
    [
        ("n, 1, 40, 22", {}, (0, None, 1, 2), 512 + 21 * 160),
        ("1, 40, 22", {"mels": 40}, (0, 1, 2), 512 + 21 * 160),
        ("n, 22, 40", {}, (0, 2, 1), 512 + 21 * 160),
        ("n, 1, 22, 40", {"mels": 40}, (0, None, 2, 1), 512 + 21 * 160),
        ("n, 40, t", {"mel_axis": -2}, (0, 1, 2), "samples"),
        ("n, 26, 40", {"center": True}, (0, 2, 1), 25 * 160),
    ],
)
def test_layouts(shape, options, axes, samples):
    model = onnxtrain.prepend_mel(identity(shape), **options)
    (audio,) = model.graph.input
    dims = [d.dim_value or d.dim_param for d in audio.type.tensor_type.shape.dim]
    assert audio.name == "audio"
    assert dims == [1 if shape[0] == "1" else "n", samples]
    x = AUDIO[: 1 if shape[0] == "1" else 2, : samples if isinstance(samples, int) else 3000]
    expected = np.transpose(reference(x, center=options.get("center", False)), [a for a in axes if a is not None])
    if None in axes:
        expected = expected[:, None]
    np.testing.assert_allclose(run(model, x), expected, atol=2e-3)


def detector(frames=22):
    """A wake word model on spectrograms [N, 1, 40, frames]."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 1, 40, {frames}] mel) => (float[n, 2] y)
        {{ c = Conv<strides = [2, 2]>(mel, conv_weight) r = Relu(c) g = GlobalAveragePool(r) h = Flatten(g)
          y = Gemm<transB = 1>(h, out_weight, out_bias) }}""")
    for name, shape in (("conv_weight", (8, 1, 5, 5)), ("out_weight", (2, 8)), ("out_bias", (2,))):
        values = np.random.default_rng(0).normal(0, 0.2, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def test_the_constants_are_no_weights_and_no_training_changes_them(tmp_path):
    inner = detector()
    model = onnxtrain.prepend_mel(inner)
    assert 1.0e6 < model.ByteSize() - inner.ByteSize() < 1.2e6
    assert [t.name for t in model.graph.initializer] == [t.name for t in inner.graph.initializer]
    table = onnxtrain.inspect(model).initializers
    assert {row.name for row in table if row.trainable} == {"conv_weight", "out_weight", "out_bias"}
    x, y = RNG.normal(size=(8, 3872)).astype(np.float32), np.arange(8) % 2
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)")
    assert not trainer.hints
    assert set(trainer.parameters) == {"conv_weight", "out_weight", "out_bias"}
    # The steps are those of the model without the front end on spectrograms.
    plain = onnxtrain.Trainer(inner, loss="cross_entropy", optimizer="adam(lr=0.01)")
    spectrogram = run(onnxtrain.cut(model, at="mel"), x)
    for _ in range(5):
        assert trainer.train_step(x, y) == pytest.approx(plain.train_step(spectrogram, y), rel=1e-4)
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")

    def constants(proto):
        return [node.SerializeToString() for node in proto.graph.node if node.op_type == "Constant"]

    assert constants(saved) == constants(model)
    np.testing.assert_allclose(run(saved, x), trainer.predict(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "trained"),
    [("stft.wsin", False), ("spec.mel_basis", False), ("mel_filterbank_1", False), ("dft_kernel", False),
     ("mel_proj.weight", True), ("draft", True)],
)  # fmt: skip
def test_matrices_that_exporters_write_are_told_by_their_names(name, trained):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4] x) => (float[n, 3] y) { h = MatMul(x, w) y = MatMul(h, v) }""")
    model.graph.node[0].input[1] = name
    for weight, shape in ((name, (4, 3)), ("v", (3, 3))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), weight))
    rows = {row.name: row.trainable for row in onnxtrain.inspect(model).initializers}
    assert rows == {name: trained, "v": True}


@pytest.mark.parametrize(("kind", "trained"), [("PARAMETER", True), ("BUFFER", False), (None, False)])
def test_a_filter_bank_that_pytorch_calls_a_parameter_is_trained(kind, trained):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, mel_filters) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "mel_filters"))
    if kind is not None:  # as torch.onnx.export(dynamo=True) writes it
        info = onnx.helper.make_tensor_value_info("mel_filters", onnx.TensorProto.FLOAT, (4, 3))
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        model.graph.value_info.append(info)
    (row,) = onnxtrain.inspect(model).initializers
    assert row.trainable == trained


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_training_an_old_model_leaves_the_constants(opset):
    inner = detector()
    inner.opset_import[0].version = opset
    model = onnxtrain.prepend_mel(inner, power=1)
    assert model.opset_import[0].version == opset
    trainer = onnxtrain.Trainer(model, loss="cross_entropy")
    assert set(trainer.parameters) == {"conv_weight", "out_weight", "out_bias"}


@pytest.mark.parametrize(
    "settings", [{}, {"power": 1, "compression": "none"}, {"compression": "pcen"}, {"compression": "db"}], ids=str
)
def test_gradients_reach_the_audio_where_asked(settings):
    frames = {"mels": 6, "window": 32, "hop": 16, "fft": 32}
    model = onnxtrain.prepend_mel(identity(), 800, **frames, **settings)
    graph = onnxtrain.gradient(onnxtrain.append(model, Mean()), "output", ["audio"])
    x = RNG.normal(size=(1, 80)).astype(np.float32)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["audio_grad"], {"audio": x})

    def mean(at):
        return reference(at, rate=800, **frames, **settings).mean()

    for at in range(0, 80, 7):
        step = np.zeros((1, 80))
        step[0, at] = 1e-6
        slope = (mean(x + step) - mean(x - step)) / 2e-6
        assert found[0, at] == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_silence_has_a_finite_gradient():
    for power in (1, 2):
        model = onnxtrain.prepend_mel(detector(), power=power)
        graph = onnxtrain.gradient(onnxtrain.append(model, Mean()), "output", ["audio"])
        session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
        found = session.run(["audio_grad"], {"audio": np.zeros((1, 3872), np.float32)})[0]
        assert np.isfinite(found).all()


class Mean(onnxtrain.layers.Layer):
    """The mean of all elements."""

    def build(self, op, x, weights, random):
        return op.ReduceMean(x, keepdims=0)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (detector(), {"window": 600}, "window is 600 samples, longer than the frames of fft=512"),
        (detector(), {"hop": 0}, "hop is 0; it must be an integer of at least 1"),
        (detector(), {"high": 9000.0}, "low is 0.0 and high 9000.0; .* from 0 to half the sample rate, 8000 Hz"),
        (detector(), {"scale": "bark"}, "scale is 'bark'; it is one of htk, slaney"),
        (detector(), {"compression": "cube"}, "compression is 'cube'; it is one of log, db, pcen"),
        (detector(), {"power": 3}, "power is 3; it is 1 for magnitudes or 2 for power"),
        (detector(), {"floor": 0.0}, "floor is 0.0; it must be a finite number above 0"),
        (detector(), {"mels": 64}, "mels is 64, but the input 'mel' .* has 40 on its mel axis"),
        (identity(), {}, "has no fixed size; give mels= or the other mel_axis="),
        (identity(), {"mels": 0}, "mels is 0; it must be an integer of at least 1"),
        (identity(), {"mels": 300}, "mels is 300, but filter 0 .* contains no frequency"),
        (identity(), {"mels": 40, "mel_axis": 1}, "mel_axis is 1; the filters are on axis -2 or -1"),
        (identity("n, 40"), {}, "has shape .*; a spectrogram is"),
        (identity("n, 3, 40, 20"), {}, "has shape .*; a spectrogram is"),
        (identity(), {"mels": 40, "input": "z"}, "has no floating input 'z' .*; its inputs are 'mel'"),
        (identity(), {"mels": 40, "name": ""}, "name is empty; the new input needs a name"),
        (identity(opset=10), {"mels": 40}, "prepend_mel needs opset 11, the model has 10; upgrade it"),
        (identity(kind="int64"), {"mels": 40}, "has no floating input that could be a spectrogram"),
    ],
)
def test_mistakes_are_sentences(model, given, message):
    with pytest.raises(OptionError, match=message):
        onnxtrain.prepend_mel(model, **given)
