"""Quantization-aware training: integer weights train, and are saved as integers."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

import onnxtrain
from onnxtrain.errors import DataError, ModelError, OptionError
from onnxtrain.operators.registry import OPTIMIZERS
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 1, 8, 8)).astype(np.float32), RNG.integers(0, 10, 64)
POINTS = RNG.normal(size=(40, 4)).astype(np.float32)
SINGLE = onnxtrain.examples.digits_cnn()


def trainer(model, **options):
    options = {"optimizer": "adam(lr=3e-3)"} | options
    return onnxtrain.Trainer(model, loss="softmax_cross_entropy", qat=True, **options)


def tensors(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def loss_of_the_runtime(model, x, y):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # no saturation on CPUs without VNNI
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or len(x)
    pieces = [session.run(None, {session.get_inputs()[0].name: x[i : i + size]})[0] for i in range(0, len(x), size)]
    logits = np.concatenate(pieces).astype(np.float64)
    log_sum = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    return float(np.mean(log_sum - logits[np.arange(len(y)), y]))


@pytest.mark.parametrize(("bits", "per_channel"), [(8, True), (8, False), (4, True)])
def test_a_quantized_network_learns_and_stays_quantized(bits, per_channel, tmp_path):
    if bits == 4 and tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 22):
        pytest.skip("the quantizer of this ONNX Runtime has no filters of 4 bits by channel, and says so")
    model = onnxtrain.quantize(SINGLE, X, bits=bits, per_channel=per_channel)
    before = tensors(model)
    made = trainer(model)
    scales = {name.removesuffix(".log") for name in made.parameters if name.endswith(".log")}
    weights = {name for name in made.parameters if not name.endswith(".log")}
    assert {before[name].dtype.name for name in weights} == {f"int{bits}", "int32"}
    assert scales == {name for name in before if name.endswith("scale")} - {f"{name}_scale" for name in weights}
    assert made.evaluate((X, Y))["loss"] == pytest.approx(loss_of_the_runtime(model, X, Y), rel=2e-2)
    losses = [made.train_step(X, Y) for _ in range(25)]
    assert losses[-1] < losses[0] - 0.5
    made.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert list(saved.graph.node) == list(model.graph.node)
    after = tensors(saved)
    for name, array in before.items():
        assert after[name].dtype == array.dtype
        assert after[name].shape == array.shape
        if name.endswith("scale"):
            assert (after[name] > 0).all()
        if name.endswith("zero_point"):
            np.testing.assert_array_equal(after[name], array)
    for name in weights & {name for name in before if before[name].dtype.name == f"int{bits}"}:
        assert not np.array_equal(after[name], before[name]), name
    assert loss_of_the_runtime(saved, X, Y) == pytest.approx(made.evaluate((X, Y))["loss"], rel=2e-2)
    assert trainer(tmp_path / "tuned.onnx").evaluate((X, Y))["loss"] == pytest.approx(
        made.evaluate((X, Y))["loss"], rel=5e-3
    )


def test_a_bias_keeps_the_scale_of_its_product(tmp_path):
    model = onnxtrain.quantize(SINGLE, X)
    made = trainer(model, freeze="*bias*")
    for _ in range(3):
        made.train_step(X, Y)
    after, before = tensors(made.model()), tensors(model)
    bias = "conv1.bias_quantized"
    product = after["image_scale"] * after["conv1.weight_scale"]
    np.testing.assert_allclose(after[f"{bias}_scale"], product, rtol=1e-6)
    assert not np.array_equal(after[f"{bias}_scale"], before[f"{bias}_scale"])
    numbers = [tables[bias] * tables[f"{bias}_scale"].astype(np.float64) for tables in (before, after)]
    np.testing.assert_allclose(numbers[1], numbers[0], atol=1.01 * product.max())


def test_what_is_frozen_keeps_its_integers():
    model = onnxtrain.quantize(SINGLE, X)
    made = trainer(model, freeze=["conv*", "*.log"])
    assert set(made.parameters) == {"classifier.weight_quantized", "classifier.bias_quantized"}
    made.train_step(X, Y)
    after = tensors(made.model())
    changed = {name for name, array in tensors(model).items() if not np.array_equal(array, after[name])}
    assert changed == set(made.parameters)


def test_steps_are_those_of_a_gradient_straight_through():
    """Check one layer, w = round(w / s) s: dw = dy xᵀ without clipping; ds by LSQ for the logarithm of s."""
    integers, s, x = np.array([[3, -128], [60, 127]], np.int8), np.float32(0.02), np.eye(2, dtype=np.float32)
    zero = np.array(0, np.int8)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(a, n) for n, a in (("q", integers), ("s", s), ("z", zero))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    made = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer="sgd(lr=1.0)", qat=True)
    w = integers * s
    np.testing.assert_allclose(made.parameters["q"], w, rtol=1e-6)
    target = np.zeros((2, 2), np.float32)
    made.train_step(x, target)
    dw = 2 * w / 4  # the loss is a mean over four values
    np.testing.assert_allclose(w - made.parameters["q"], dw, rtol=1e-5)
    # d(q s)/ds is q where w is clipped, otherwise q - w / s, which is zero here.
    ends = np.abs(integers.astype(float) + 0.5) > 127
    ds = np.sum(dw * np.where(ends, integers, 0)) / np.sqrt(4 * 127)
    moved = np.log(s) - made.parameters["s.log"]
    assert abs(moved - s * ds) < 1e-4 or ends.sum() == 2


def test_blocks_of_four_bits(tmp_path):
    rng = np.random.default_rng(1)
    integers = rng.integers(-8, 8, (8, 3)).astype(onnx.helper.tensor_dtype_to_np_dtype(TensorProto.INT4))
    scales = rng.uniform(0.05, 0.2, (2, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=4),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(integers, "q"), numpy_helper.from_array(scales, "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    made = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer="adam(lr=0.02)", qat=True)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = x @ rng.normal(size=(8, 3)).astype(np.float32)
    losses = [made.train_step(x, y) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    made.save(tmp_path / "tuned.onnx")
    after = tensors(onnx.load(tmp_path / "tuned.onnx"))
    w = after["q"].astype(np.float64) * np.repeat(after["s"], 4, axis=0)
    assert np.mean((x @ w - y) ** 2) == pytest.approx(made.evaluate((x, y))["loss"], rel=1e-4)
    assert (after["s"] > 0).all()


def test_dynamic_quantization_trains(tmp_path):
    single = onnxtrain.examples.mlp((6, 16, 3))
    onnx.save(single, tmp_path / "single.onnx")
    quantize_dynamic(tmp_path / "single.onnx", tmp_path / "dynamic.onnx", weight_type=QuantType.QInt8)
    model = onnx.load(tmp_path / "dynamic.onnx")
    assert "MatMulInteger" in {node.op_type for node in model.graph.node}
    made = trainer(model, optimizer="adam(lr=1e-2)")
    integers = {name for name, array in tensors(model).items() if array.dtype.kind == "i" and array.ndim == 2}
    assert integers
    assert integers <= set(made.parameters)
    x = np.random.default_rng(3).normal(size=(90, 6)).astype(np.float32)
    y = x[:, :3].argmax(1)
    losses = [made.train_step(x, y) for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]
    saved = made.model()
    assert loss_of_the_runtime(saved, x, y) == pytest.approx(made.evaluate((x, y))["loss"], rel=1e-3)
    for name, array in tensors(saved).items():
        assert array.dtype == tensors(model)[name].dtype
        assert not name.endswith("_scale") or array > 0


def test_models_without_integers_are_refused():
    with raises_sentence("no_integer_weight"):
        trainer(onnxtrain.examples.mlp((4, 3)))


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"bits": 3}, OptionError, "bits is 3; it is 8 or 4"),
        ({"exclude": ["nothing"]}, OptionError, "exclude names 'nothing', but the model has no node of that name"),
    ],
)
def test_what_cannot_be_quantized(options, error, sentence):
    with pytest.raises(error, match=sentence):
        onnxtrain.quantize(onnxtrain.examples.mlp((4, 3)), np.zeros((8, 4), np.float32), **options)


def test_no_examples():
    with pytest.raises(DataError, match="at least one example is needed"):
        onnxtrain.quantize(SINGLE, X[:0])


def _saved(model, path):
    """Outputs of a saved file, computed as the file says: without ONNX Runtime's fusions into integer operators."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, model)[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_an_untrained_model_is_saved_bit_for_bit_and_predictions_are_those_of_the_saved_file(bits, tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(32, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 32)
    onnx.save(onnxtrain.quantize(onnxtrain.examples.lenet5(seed=0), images, bits=bits), tmp_path / "quantized.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "quantized.onnx", loss="cross_entropy", optimizer="adam(lr=1e-3)", qat=True)
    trainer.evaluate((images, labels))
    trainer.save(tmp_path / "saved.onnx")
    assert (tmp_path / "saved.onnx").read_bytes() == (tmp_path / "quantized.onnx").read_bytes()
    for _ in range(10):
        trainer.train_step(images, labels)
    trainer.save(tmp_path / "saved.onnx")
    assert (tmp_path / "saved.onnx").read_bytes() != (tmp_path / "quantized.onnx").read_bytes()
    np.testing.assert_allclose(trainer.predict(images), _saved({"image": images}, tmp_path / "saved.onnx"), atol=1e-5)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("kind", "opset"), [("INT2", 25), ("UINT2", 25), ("INT4", 21), ("UINT4", 21)])
def test_weights_of_two_and_four_bits(kind, opset, raw, tmp_path):
    rng, dtype = np.random.default_rng(0), getattr(onnx.TensorProto, kind)
    low = 0 if kind.startswith("U") else -2
    integers, zero = rng.integers(low, low + 4, (8, 3)), np.full(3, low + 2)
    weight = onnx.helper.make_tensor("w", dtype, [8, 3], integers.flatten().tolist())
    zeros = onnx.helper.make_tensor("zero", dtype, [3], zero.tolist())
    if raw:
        elements = onnx.numpy_helper.to_array(weight)
        weight = onnx.numpy_helper.from_array(elements, "w")
    scale = onnx.numpy_helper.from_array(np.full(3, 0.3, np.float32), "s")
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s", "zero"], ["wide"], axis=1),
        onnx.helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 8), ("y", 3)))
    graph = onnx.helper.make_graph(nodes, "main", [x], [y], [weight, scale, zeros])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    model.ir_version = 13 if opset == 25 else 10
    onnx.save(model, tmp_path / "model.onnx")
    points, labels = rng.normal(size=(16, 8)).astype(np.float32), rng.integers(0, 3, 16)
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="cross_entropy", optimizer="adam(lr=0.1)", qat=True)
    assert set(trainer.parameters) == {"w", "s.log"}
    trainer.save(tmp_path / "saved.onnx")
    assert (tmp_path / "saved.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
    np.testing.assert_allclose(trainer.predict(points), points @ ((integers - zero) * np.float32(0.3)), atol=1e-5)
    losses = [trainer.train_step(points, labels) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.2
    trainer.save(tmp_path / "saved.onnx")
    np.testing.assert_allclose(trainer.predict(points), _saved({"x": points}, tmp_path / "saved.onnx"), atol=1e-5)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_qgemm_has_a_scale_for_each_output(per_channel, transposed, tmp_path):
    class Once(CalibrationDataReader):
        rows = iter([{"x": POINTS}])

        def get_next(self):
            return next(self.rows, None)

    weight = np.random.default_rng(1).normal(size=(5, 4)) * [[1], [3], [0.2], [1], [2]]
    arrays = {"w": (weight if transposed else weight.T).astype(np.float32), "b": np.ones(5, np.float32)}
    given = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float[n, 5] y) '
        f"{{ y = Gemm<transB = {int(transposed)}>(x, w, b) }}"
    )
    given.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(given, tmp_path / "given.onnx")
    options = {"quant_format": QuantFormat.QOperator, "per_channel": per_channel, "weight_type": QuantType.QInt8}
    quantize_static(tmp_path / "given.onnx", tmp_path / "small.onnx", Once(), **options)
    assert "QGemm" in {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node}
    trainer = onnxtrain.Trainer(tmp_path / "small.onnx", loss="cross_entropy", optimizer="adam(lr=0.02)", qat=True)
    labels = np.arange(len(POINTS)) % 5
    losses = [trainer.train_step(POINTS, labels) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.2
    trainer.save(tmp_path / "tuned.onnx")
    np.testing.assert_allclose(trainer.predict(POINTS), _saved({"x": POINTS}, tmp_path / "tuned.onnx"), atol=0.1)


@pytest.mark.parametrize("qat", [True, False], ids=["qat", "plain"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_that_the_runtime_writes_beside_this_library_train_without_kernels(name, qat, tmp_path):
    """Every file that ONNX Runtime writes in this process then imports version 1000 of the library's domain."""
    x, y = onnxtrain.examples.points(32)
    given = onnxtrain.examples.mlp((4, 8, 3))
    onnxtrain.Trainer(given, loss="cross_entropy").train_step(x, y)  # registers the library
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "written.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    made = onnxtrain.quantize(given, x) if qat else given
    assert all(item.domain != "onnxtrain" for item in made.opset_import)
    onnxruntime.InferenceSession(made.SerializeToString(), options)
    losses = []
    for kernels in (True, False):
        runtime = onnxtrain.RuntimeOptions(kernels=kernels)
        optimizer = OPTIMIZERS[name].settings()
        arguments = {"loss": "cross_entropy", "qat": qat, "runtime": runtime, "optimizer": optimizer}
        subject = onnxtrain.Trainer(tmp_path / "written.onnx", **arguments)
        losses.append([subject.train_step(x, y) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_a_layout_for_one_kind_of_processor_is_refused_with_the_cure(tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fast.onnx")
    onnxruntime.InferenceSession(onnxtrain.examples.lenet5().SerializeToString(), options)
    cure = "one optimized at the level ORT_ENABLE_EXTENDED"
    with pytest.raises(ModelError, match=cure):
        onnxtrain.quantize(tmp_path / "fast.onnx", np.zeros((8, 1, 28, 28), np.float32))
    with pytest.raises(OptionError, match=cure):
        onnxtrain.Trainer(tmp_path / "fast.onnx", loss="cross_entropy", lora=onnxtrain.Lora())
