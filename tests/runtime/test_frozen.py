"""Frozen tensors: large, external, of all types, in subgraphs and functions, above 2 GiB."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxtrain
from onnxtrain.runtime.frozen import FrozenTensors
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.inference.forward import predict_all as predict
from sentences import raises_sentence

HEADER = '<ir_version: 10, opset_import: ["": 21, "local": 1]>'
LARGE, SMALL = 70_000, 40
RANDOM = np.random.default_rng(0)


def test_the_head_of_a_model_of_real_size_is_trained() -> None:
    model = onnxtrain.examples.mlp((1024, 1024, 4))
    x, y = RANDOM.standard_normal((8, 1024)).astype(np.float32), np.arange(8) % 4
    head = onnxtrain.Trainer(model, loss="softmax_cross_entropy", train="layer2.*", optimizer=onnxtrain.Adam(0.01))
    assert sorted(head.parameters) == ["layer2.bias", "layer2.weight"]
    first, second = head.train_step(x, y), head.train_step(x, y)
    assert first == pytest.approx(evaluate(model, (x, y), loss="softmax_cross_entropy")["loss"], rel=1e-5)
    assert head.evaluate((x, y))["loss"] < second < first
    bare = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = predict(model, x).values()
    np.testing.assert_allclose(output, bare.run(None, {bare.get_inputs()[0].name: x})[0], rtol=1e-5, atol=1e-6)


TYPES = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 UINT8 INT16 INT32 INT64 BOOL FLOAT8E4M3FN FLOAT8E5M2 INT4 UINT4"
QUANTIZED = ("FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4")


def reader_of(tensor: ir.TensorProtocol) -> ir.Model:
    """Return a model that multiplies x by a tensor, cast to float32."""
    dtype = tensor.dtype
    initializers = [value_of("w", tensor)]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    if dtype.name in QUANTIZED:
        initializers.append(value_of("scale", ir.tensor(np.float32(1), name="scale")))
        node = ir.Node("", "DequantizeLinear", initializers)
    else:
        node = ir.Node("", "Cast", initializers, [ir.AttrInt64("to", ir.DataType.FLOAT)])
    product = ir.Node("", "Mul", [node.outputs[0], x])
    (y,) = product.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(tensor.shape.numpy())
    graph = ir.Graph([x], [y], nodes=[node, product], initializers=initializers, opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10)


def value_of(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)


@pytest.mark.parametrize("shape", [(300_001,), (7, 100_003)], ids=str)
@pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
@pytest.mark.parametrize("kind", TYPES.split())
def test_every_element_type(kind: str, external: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = ir.DataType[kind]
    array = RANDOM.integers(0, 2 if kind == "BOOL" else 8, shape).astype(dtype.numpy())
    tensor: ir.TensorProtocol = ir.tensor(array, dtype=dtype, name="w")
    if external:  # at an offset of one byte, so that the values are not aligned
        (tmp_path / "data").write_bytes(b"#" + tensor.tobytes())
        tensor = ir.ExternalTensor("data", 1, tensor.nbytes, dtype, shape=tensor.shape, name="w", base_dir=tmp_path)
    model = reader_of(tensor)
    session = create_session(model, RuntimeOptions(threads=1))
    np.testing.assert_array_equal(session.run(None, {"x": np.array(2, np.float32)})[0], 2 * array.astype(np.float32))
    assert model.graph.initializers["w"].const_value is tensor


def test_memory_stays_as_long_as_the_session() -> None:
    array = RANDOM.standard_normal(LARGE).astype(np.float32)
    session = create_session(reader_of(ir.tensor(array.copy(), name="w")), RuntimeOptions(threads=1))
    run, binding = session.run, session.io_binding()
    del session
    gc.collect()
    junk = [np.full(LARGE, 7, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(run(None, {"x": np.array(1, np.float32)})[0], array)
    del junk, binding


PLACES: dict[str, Callable[[np.ndarray], onnx.ModelProto]] = {}


def place(build: Callable[[np.ndarray], str]) -> Callable[[np.ndarray], str]:
    """Return the text of a model of x [N, size] and the weight w [size]; FROZEN is the frozen vector."""

    def make(frozen: np.ndarray) -> onnx.ModelProto:
        model = parser.parse_model(HEADER + build(frozen).replace("SIZE", str(frozen.size)))
        for holder in (model.graph, *model.functions):
            _fill(holder, frozen)
        return model

    PLACES[build.__name__] = make
    return build


def _fill(holder: onnx.GraphProto | onnx.FunctionProto, frozen: np.ndarray) -> None:
    for tensor in getattr(holder, "initializer", ()):
        if tensor.name.startswith("frozen"):
            tensor.CopyFrom(numpy_helper.from_array(frozen, tensor.name))
        elif tensor.name == "w":
            tensor.CopyFrom(numpy_helper.from_array(np.ones_like(frozen), "w"))
    for node in holder.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and node.op_type == "Constant" and attribute.t.dims == [1]:
                attribute.t.CopyFrom(numpy_helper.from_array(frozen, node.output[0]))
            if attribute.HasField("g"):
                _fill(attribute.g, frozen)


@place
def initializer(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}, float[1] frozen = {1}>
        { a = Mul(x, w)  y = Add(a, frozen) }"""


@place
def constant(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}>
        { frozen = Constant<value = float[1] {1}>()  a = Mul(x, w)  y = Add(a, frozen) }"""


@place
def initializer_of_a_branch(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}>
        { n = Size(x)  zero = Constant<value_int = 0>()  c = Greater(n, zero)  a = Mul(x, w)  y = If(c) <
            then_branch = t () => (float[N,SIZE] b) <float[1] frozen = {1}> { b = Add(a, frozen) },
            else_branch = e () => (float[N,SIZE] d) <float[1] frozen_ = {1}> { d = Sub(a, frozen_) }> }"""


@place
def constant_of_a_branch(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}>
        { n = Size(x)  zero = Constant<value_int = 0>()  c = Greater(n, zero)  a = Mul(x, w)  y = If(c) <
            then_branch = t () => (float[N,SIZE] b) { k = Constant<value = float[1] {1}>()  b = Add(a, k) },
            else_branch = e () => (float[SIZE] d) { d = Constant<value = float[1] {1}>() }> }"""


@place
def initializer_of_a_loop(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}>
        { n = Constant<value_int = 3>()  yes = Constant<value = bool {1}>()  a = Mul(x, w)  y = Loop(n, yes, a) <
            body = l (int64 i, bool go, float[N,SIZE] s) => (bool on, float[N,SIZE] r) <float[1] frozen = {1}>
            { on = Identity(go)  r = Add(s, frozen) }> }"""


@place
def constant_of_a_scan(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}>
        { a = Mul(x, w)  y = Scan(a) < num_scan_inputs = 1, body = s (float[SIZE] row) => (float[SIZE] r)
            { k = Constant<value = float[1] {1}>()  r = Add(row, k) }> }"""


@place
def constant_of_a_function(frozen: np.ndarray) -> str:
    return """g (float[N,SIZE] x) => (float[N,SIZE] y) <float[1] w = {1}> { a = Mul(x, w)  y = local.shift(a) }
        <domain: "local", opset_import: ["": 21]> shift (a) => (b)
        { k = Constant<value = float[1] {1}>()  b = Add(a, k) }"""


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def frozen(request: pytest.FixtureRequest) -> np.ndarray:
    return RANDOM.standard_normal(request.param).astype(np.float32)


def externalised(model: onnx.ModelProto, folder: Path) -> Path:
    """Save the model in a folder, with the data of all tensors in one external file."""
    from onnxtrain.model_file.proto import all_tensors

    folder.mkdir()
    data = bytearray(b"#")
    for tensor in all_tensors(model):
        if tensor.dims and tensor.data_type == TensorProto.FLOAT:
            raw = numpy_helper.to_array(tensor).tobytes()
            for key, number in (("offset", len(data)), ("length", len(raw))):
                tensor.external_data.add(key=key, value=str(number))
            tensor.external_data.add(key="location", value="weights.bin")
            tensor.data_location = TensorProto.EXTERNAL
            for field in ("raw_data", "float_data"):
                tensor.ClearField(field)
            data += raw
    assert len(data) > 1
    (folder / "weights.bin").write_bytes(data)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.sampled("frozen")
@pytest.mark.parametrize("name", PLACES)
def test_external_data_of_another_folder(
    name: str, frozen: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime receives the data itself, so that the working folder does not matter."""
    inside = PLACES[name](frozen)
    path = externalised(PLACES[name](frozen), tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    x = RANDOM.standard_normal((2, frozen.size)).astype(np.float32)
    y = np.zeros_like(x)
    results = []
    for model in (inside, path):
        trainer = onnxtrain.Trainer(model, loss="mean_squared_error", train="w", optimizer=onnxtrain.Adam(0.1))
        losses = [trainer.train_step(x, y), trainer.train_step(x, y), trainer.evaluate((x, y))["loss"]]
        before = predict(model, x)["y"]
        gradient = onnxtrain.gradient(model, "y", ["w"])
        derivative = session_of(gradient).run(["w_grad"], {"x": x})[0]
        training = onnxtrain.training_model(model, loss="mean_squared_error", train="w", optimizer=onnxtrain.Adam(0.1))
        again = onnxtrain.TrainingSession(training)
        feeds = {"x": x, "target": y, "learning_rate": np.array(0.1, np.float32)}
        first = float(again.step(feeds)["loss"])
        step = session_of(onnxtrain.lower(training))
        states = onnxtrain.TrainingSession(training).state
        outputs = [output.name for output in step.get_outputs()]
        stepped = dict(zip(outputs, step.run(None, {**feeds, **states}), strict=True))
        trainer.save_training_model("training.onnx")
        resumed = onnxtrain.TrainingSession("training.onnx").step(feeds)["loss"]
        expected = trainer.train_step(x, y)
        assert [first, stepped["loss"], resumed] == pytest.approx([losses[0], losses[0], expected], rel=1e-6)
        results.append((*losses, before, trainer.predict(x), derivative))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert results[1][1] < results[1][0]


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_names_of_what_moves_out_of_subgraphs_stay_apart() -> None:
    """Two branches and the outer graph may use the same name for their constants."""
    text = f"""{HEADER} g (float[{LARGE}] x, bool c) => (float[{LARGE}] y, float k_)
        {{ k_ = Constant<value_float = 1.0>()  y = If(c) <
            then_branch = t () => (float[{LARGE}] b) {{ k = Constant<value = float[1] {{1}}>() b = Add(x, k) }},
            else_branch = e () => (float[{LARGE}] d) {{ k = Constant<value = float[1] {{1}}>() d = Sub(x, k) }}> }}"""
    model = parser.parse_model(text)
    arrays = [np.full(LARGE, number, np.float32) for number in (2, 3)]
    for attribute, array in zip(model.graph.node[1].attribute, arrays, strict=True):
        attribute.g.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(array))
    session = create_session(ir.from_proto(model), RuntimeOptions(threads=1))
    x = np.zeros(LARGE, np.float32)
    assert session.run(["y"], {"x": x, "c": np.array(True)})[0][0] == 2
    assert session.run(["y"], {"x": x, "c": np.array(False)})[0][0] == -3


def test_external_sizes_of_an_initialization_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum()
    )
    (entry,) = model.training_info
    for node in entry.initialization.node:
        for attribute in node.attribute:
            if node.op_type == "Constant":
                raw = numpy_helper.to_array(attribute.t).tobytes()
                (tmp_path / node.output[0].replace("/", "_")).write_bytes(raw)
                attribute.t.ClearField("raw_data")
                attribute.t.external_data.add(key="location", value=node.output[0].replace("/", "_"))
                attribute.t.data_location = TensorProto.EXTERNAL
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    session = onnxtrain.TrainingSession(tmp_path / "model.onnx")
    momentum = next(name for name in session.state if name.endswith("/V"))
    session.state[momentum] = np.ones_like(session.state[momentum])
    session.initialize()
    assert not np.asarray(session.state[momentum]).any()


def test_external_data_that_is_gone_is_named(tmp_path: Path) -> None:
    tensor = ir.ExternalTensor("gone.bin", 0, 40, ir.DataType.FLOAT, shape=ir.Shape([10]), name="w", base_dir=tmp_path)
    with raises_sentence("no_data_file", what="The external data of 'w'", got="gone.bin"):
        create_session(reader_of(tensor), RuntimeOptions())


def test_large_tensors_of_strings() -> None:
    words = np.asarray([f"word {number}" for number in range(30_000)], dtype=object)
    text = f"{HEADER} g (int64[N] i) => (string[N] y) {{ y = Gather(words, i) }}"
    model = parser.parse_model(text)
    model.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [words.size], words))
    np.testing.assert_array_equal(predict(model, np.array([5, 29_999]))["y"], ["word 5", "word 29999"])


def test_large_sparse_tensors() -> None:
    size = 40_000
    text = f"{HEADER} g (float[N,{size}] x) => (float[N] y) {{ a = Mul(x, w)  b = Mul(a, s)  y = ReduceSum(b, one) }}"
    model = parser.parse_model(text.replace("one)", "axis)").replace("ReduceSum(", "ReduceSum<keepdims = 0>("))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(size, np.float32), "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    sparse = model.graph.sparse_initializer.add(dims=[size])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([3, 4], np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([7, 30_000])))
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", train="w", optimizer=onnxtrain.Adam(0.1))
    x = np.ones((2, size), np.float32)
    assert trainer.train_step(x, np.full(2, 8, np.float32)) == pytest.approx(1)
    np.testing.assert_allclose(trainer.predict(x), 7.7, rtol=1e-4)


BEYOND = """
import re, resource, sys
from pathlib import Path
import numpy as np, onnxtrain
from onnxtrain.model_file import external
external.free_memory = lambda: 0  # a file that memory has no room for is mapped
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
trainer = onnxtrain.Trainer(sys.argv[1], loss="softmax_cross_entropy", train="head", threads=1)
x, y = np.array([[1, 2], [3, 9_000_000]]), np.array([0, 2])
losses = [trainer.train_step(x, y) for _ in range(3)]
assert losses[2] < losses[0], losses
assert trainer.predict(x).shape == (2, 3)
anonymous = int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
assert anonymous < 500_000, f"{anonymous} kB are held beside the file"
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs files with holes, and limits on memory")
def test_more_than_two_gib_are_frozen(tmp_path: Path) -> None:
    """A step reads a few rows of tables of 2.4 GB, which stay in their file."""
    rows, width = 9_500_000, 64
    model = parser.parse_model(f"""{HEADER} g (int64[N,2] x) => (float[N,3] y)
        {{ e = Gather(table, x)  axis = Constant<value_ints = [1]>()  m = ReduceMean<keepdims = 0>(e, axis)
           y = MatMul(m, head) }}""")
    table = model.graph.initializer.add(name="table", dims=[rows, width], data_type=TensorProto.FLOAT)
    table.external_data.add(key="location", value="table.bin")
    table.data_location = TensorProto.EXTERNAL
    head = RANDOM.standard_normal((width, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(head, "head"))
    with (tmp_path / "table.bin").open("wb") as file:
        file.write(RANDOM.standard_normal((10, width)).astype(np.float32).tobytes())
        file.truncate(rows * width * 4)
    onnx.save(model, tmp_path / "model.onnx")
    command = [sys.executable, "-c", BEYOND, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("reader", "bound"), [("Cast<to=1>", True), ("Gelu", False)])
def test_a_view_is_bound_where_what_reads_it_may_be(reader: str, bound: bool) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n] x, int64[2] s) => (float[a,b] y) {{ v = Reshape(w, s) u = {reader}(v) y = Mul(u, x) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((256, 256), np.float32), "w"))
    frozen = FrozenTensors(ir.from_proto(model), bind=True)
    frozen.register(onnxruntime.SessionOptions())
    assert list(frozen.inputs) == (["w"] if bound else [])
