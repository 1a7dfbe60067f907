"""Scales of quantized files: trained as logarithms with qat=True, else constants; what is not trained is counted."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

import onnxtrain
from onnxtrain.errors import OptionError, TrainingHint

RNG = np.random.default_rng(0)
IDS, Y = RNG.integers(0, 100, 64), RNG.normal(size=(64, 16)).astype(np.float32)


def network() -> onnx.ModelProto:
    """An embedding, two linear layers, and a bias."""
    rng = np.random.default_rng(1)
    arrays = {"emb": (100, 32), "fc1": (32, 64), "fc2": (64, 16), "bias": (16,)}
    nodes = [("Gather", ["emb", "ids"], "e"), ("MatMul", ["e", "fc1"], "h"), ("Relu", ["h"], "r")]
    nodes += [("MatMul", ["r", "fc2"], "p"), ("Add", ["p", "bias"], "y")]
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, [output]) for operator, inputs, output in nodes],
        "network",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(rng.normal(size=s).astype(np.float32) / 4, n) for n, s in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Calibration(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"ids": np.arange(100)}])

    def get_next(self):
        return next(self.batches, None)


def quantized(kind, folder) -> str:
    """The network as a tool of ONNX Runtime quantizes it."""
    source, path = str(folder / "float.onnx"), str(folder / f"{kind}.onnx")
    onnx.save(network(), source)
    if kind == "dynamic":
        quantize_dynamic(source, path)
    elif kind.startswith("int4"):
        form = QuantFormat.QDQ if kind.endswith("qdq") else QuantFormat.QOperator
        operators = ("MatMul",) if kind.endswith("qdq") else ("MatMul", "Gather")
        config = DefaultWeightOnlyQuantConfig(
            block_size=32, is_symmetric=True, quant_format=form, op_types_to_quantize=operators
        )
        quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(path)
    else:
        quantize_static(source, path, Calibration(), quant_format=QuantFormat[kind])
    return path


def scales(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if "scale" in t.name}


KINDS = ("dynamic", "QDQ", "QOperator", "int4", "int4_qdq")


@pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")
@pytest.mark.parametrize("options", [{}, {"straight_through": True}, {"qat": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_scale_is_trained_as_a_plain_number(kind, options, tmp_path):
    path = quantized(kind, tmp_path)
    before = scales(onnx.load(path))
    if kind[0] == "Q" and not options.get("qat"):  # nothing else is trainable there
        with pytest.raises(OptionError, match="qat=True"):
            onnxtrain.Trainer(path, loss="mse", optimizer="adam(lr=0.05)", **options)
        return
    made = onnxtrain.Trainer(path, loss="mse", optimizer="adam(lr=0.05)", seed=0, **options)
    losses = [made.train_step(IDS, Y) for _ in range(40)]
    assert losses[-1] < losses[0]
    assert not set(before) & set(made.parameters)
    after = scales(made.model())
    for name, array in before.items():
        np.testing.assert_array_equal(np.sign(after[name]), np.sign(array))
        assert options.get("qat") or np.array_equal(after[name], array)


@pytest.mark.parametrize(
    ("kind", "left", "trained"),
    [
        ("dynamic", 6272, 16),
        ("QDQ", 6288, 0),
        ("QOperator", 6288, 0),
        ("int4", 6272, 16),
        ("int4_qdq", 3072, 3216),
    ],
)
def test_what_stays_as_it_is_is_counted(kind, left, trained, tmp_path):
    path = quantized(kind, tmp_path)
    if not trained:
        with pytest.raises(OptionError, match=f"{left:,} elements .*qat=True"):
            onnxtrain.Trainer(path, loss="mse", optimizer="sgd", straight_through=True)
        return
    with pytest.warns(TrainingHint, match=f"{left:,} of {left + trained:,} elements .*qat=True"):
        onnxtrain.Trainer(path, loss="mse", optimizer="sgd")


@pytest.mark.parametrize("kind", ["dynamic", "QDQ", "QOperator", "int4_qdq"])
def test_embeddings_and_layers_of_integers_train_and_the_file_computes_so(kind, tmp_path):
    made = onnxtrain.Trainer(quantized(kind, tmp_path), loss="mse", optimizer="adam(lr=3e-3)", qat=True, seed=0)
    first = made.evaluate((IDS, Y))["loss"]
    trained = {name.partition("_")[0].partition(".")[0] for name in made.parameters if not name.endswith(".log")}
    assert {"emb", "fc1", "fc2", "bias"} - ({"emb"} if kind == "int4_qdq" else set()) <= trained
    assert not made.hints
    for _ in range(80):
        made.train_step(IDS, Y)
    loss = made.evaluate((IDS, Y))["loss"]
    assert loss < 0.7 * first
    made.save(tmp_path / "tuned.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", options, providers=["CPUExecutionProvider"])
    assert np.mean((session.run(None, {"ids": IDS})[0] - Y) ** 2) == pytest.approx(loss, rel=2e-3)


def test_biases_of_operators_on_integers_train(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(48, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 48)
    onnx.save(onnxtrain.examples.digits_cnn(), tmp_path / "float.onnx")
    batches = Calibration()
    batches.batches = iter([{"image": images}])
    quantize_static(tmp_path / "float.onnx", tmp_path / "q.onnx", batches, quant_format=QuantFormat.QOperator)
    made = onnxtrain.Trainer(tmp_path / "q.onnx", loss="cross_entropy", optimizer="adam(lr=3e-3)", qat=True, seed=0)
    biases = [name for name in made.parameters if "bias" in name and not name.endswith(".log")]
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "q.onnx").graph.initializer}
    assert {before[name].dtype for name in biases} == {np.dtype(np.int32)}
    losses = [made.train_step(images, labels) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.3
    made.save(tmp_path / "tuned.onnx")
    after = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "tuned.onnx").graph.initializer}
    assert all(not np.array_equal(before[name], after[name]) for name in biases)
    found = onnxtrain.evaluate(tmp_path / "tuned.onnx", (images, labels), loss="cross_entropy")["loss"]
    assert found == pytest.approx(made.evaluate((images, labels))["loss"], rel=3e-2)


def test_a_scale_named_by_train_is_refused(tmp_path):
    path = quantized("int4", tmp_path)
    name = next(iter(scales(onnx.load(path))))
    with pytest.raises(OptionError, match="qat=True trains its logarithm"):
        onnxtrain.Trainer(path, loss="mse", optimizer="sgd", train=[name])


FORMS = {
    "by channel": "c = Cast <to: int = 1> (w)  d = Sub(c, zero)  f = Mul(d, step)  h = MatMul(x, f)",
    "divided": "c = Cast <to: int = 1> (w)  f = Div(c, step)  h = MatMul(x, f)",
    "behind the matmul": "c = Cast <to: int = 1> (w)  m = MatMul(x, c)  h = Mul(m, step)",
    "of packed integers": "o = BitwiseAnd(w, mask)  c = Cast <to: int = 1> (o)  f = Mul(c, step)  h = MatMul(x, f)",
    "rounded": "q = Div(u, step)  r = Round(q)  f = Mul(r, step)  h = MatMul(x, f)",
    "rounded down": "q = Div(u, step)  p = Add(q, half)  r = Floor(p)  f = Mul(r, step)  h = MatMul(x, f)",
    "inverse": "q = Mul(u, inverse)  r = Round(q)  f = Mul(r, step)  h = MatMul(x, f)",
}


@pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")
@pytest.mark.parametrize("form", FORMS)
def test_scales_in_standard_operators_are_scales(form):
    rng = np.random.default_rng(2)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    net (float[n,8] x) => (float[n,4] y) {{ {FORMS[form]}  y = Add(h, bias) }}"""
    model = onnx.parser.parse_model(text)
    arrays = {
        "w": rng.integers(0, 200, (8, 4)).astype(np.uint8),
        "u": rng.normal(size=(8, 4)).astype(np.float32),
        "mask": np.array([15], np.uint8),
        "half": np.array(0.5, np.float32),
    }
    arrays |= {name: rng.uniform(0.01, 0.02, 4).astype(np.float32) for name in ("zero", "step", "inverse", "bias")}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, n) for n, array in arrays.items() if n in read)
    made = onnxtrain.Trainer(model, loss="mse", optimizer="sgd", straight_through=True)
    assert set(made.parameters) == {"bias", "u"} & read
    trained = set(onnxtrain.Trainer(model, loss="mse", optimizer="sgd", qat=True).parameters)
    assert trained == ({"bias", "u"} & read) | {f"{name}.log" for name in {"step", "inverse"} & read}


def test_a_weight_under_a_mask_of_bytes_is_no_scale():
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[n,4] x) => (float[n,4] y) <uint8[4,4] mask = {1,0,1,1, 0,1,1,0, 1,1,0,1, 1,0,0,1}> {
        m = Cast <to: int = 1> (mask)  w = Mul(weight, m)  h = MatMul(x, w)  y = Mul(h, gate) }"""
    model = onnx.parser.parse_model(text)
    for name, size in (("weight", (4, 4)), ("gate", (4,))):
        values = np.random.default_rng(2).uniform(0.1, 0.3, size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    assert {row.name for row in onnxtrain.inspect(model).initializers if row.trainable} == {"weight", "gate"}
