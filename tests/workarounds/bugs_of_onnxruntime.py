"""Reproductions of bugs of ONNX Runtime and of its providers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, parser

import onnxtrain
from onnxtrain.graph.upstream import sessions
from workarounds.shown import fails, model, run_python, session, shows


@shows("extension types")
def extension_types() -> bool:
    content = model("g (bfloat16[3] x) => (bfloat16[3] y) { y = Identity(x) }")
    session = onnxruntime.InferenceSession(content.SerializeToString(), providers=["CPUExecutionProvider"])
    try:
        session.io_binding().bind_cpu_input("x", np.zeros(3, ir.DataType.BFLOAT16.numpy()))
    except RuntimeError:
        return True
    return False


@shows("quantized biases")
def quantized_biases() -> bool:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "onnxtrain": 1]> f (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <float s = {0.1}, uint8 z = {7}, int8[1,1,1,1] w = {3}, int8 zw = {0}, float[1] b = {0.5}> {
            q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  v = DequantizeLinear(w, s, zw)
            c = onnxtrain.Conv
                <kernel_shape = [1, 1], pads = [0, 0, 0, 0], strides = [1, 1], dilations = [1, 1]> (d, v, b)
            o = QuantizeLinear(c, s, z)  y = DequantizeLinear(o, s, z) }"""
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return "onnxtrain:Mul" in str(error)
    return False


@shows("statistics on CUDA")
def statistics_on_cuda() -> bool:
    training = model("""g (float[4,3,5,5] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[4,3,5,5] y)
        { y, mean, variance = BatchNormalization <training_mode = 1> (x, s, b, m, v) }""")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():  # in the test only
        pytest.skip("needs a GPU")  # in the test only
    try:
        onnxruntime.InferenceSession(training.SerializeToString(), providers=["CUDAExecutionProvider"])
    except Exception as error:
        return "Training mode does not support BN opset 14" in str(error)
    return False


@shows("rows of two bits")
def rows_of_two_bits() -> bool:
    integers = np.random.default_rng(0).integers(-2, 2, (64, 30))
    weight = onnx.helper.make_tensor("w", TensorProto.INT2, [64, 30], integers.flatten().tolist())
    product = model(
        "g (float[3, 64] x) => (float[3, 30] y) <float s = {1}> { d = DequantizeLinear(w, s)  y = MatMul(x, d) }", 25
    )
    product.graph.initializer.append(weight)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    _check_rows_of_two_bits(product, x, x @ integers)  # the workaround works
    return bool(np.abs(session(product).run(None, {"x": x})[0] - x @ integers).max() > 1)


def _check_rows_of_two_bits(product: ModelProto, x: np.ndarray, expected: np.ndarray) -> None:
    assert sessions.mixed_two_bits(ir.from_proto(product).graph) == ["w"]
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # as the hint says
    told = onnxruntime.InferenceSession(product.SerializeToString(), options, providers=["CPUExecutionProvider"])
    avoided = session(product, disabled_optimizers=list(sessions.DISABLED_WITH_TWO_BITS))
    for one in (told, avoided):
        np.testing.assert_allclose(one.run(None, {"x": x})[0], expected, atol=1e-4)


@shows("eliminated dropout")
def eliminated_dropout() -> bool:
    dropping = model("""g (float[100] x) => (float[100] y) <float r = {0.5}, bool t = {1}>
        { a = Abs(x)  b = Dropout(a, r, t)  y = Neg(b) }""")
    feeds = {"x": np.ones(100, np.float32)}
    avoided = session(dropping, disabled_optimizers=list(sessions.DISABLED_OPTIMIZERS))  # the workaround works
    assert (avoided.run(None, feeds)[0] == 0).any()  # the workaround works
    return bool((session(dropping).run(None, feeds)[0] == -1).all())


DEEP_SCAN = """
g (float[3,2,2] x, float[2,2] h, float[2,2] a) => (float[2,2] y) <bool c = {1}> {
    t = If (c) <then_branch = t0 () => (float[2,2] t1) {
        t1 = If (c) <then_branch = t2 () => (float[2,2] t3) {
            s, ys = Scan <num_scan_inputs = 1, body = b (float[2,2] i, float[2,2] e) => (float[2,2] j, float[2,2] o) {
                m = MatMul(i, a)  j = Add(m, e)  o = Identity(j) }> (h, x)
            t3 = MatMul(s, a)
        }, else_branch = e2 () => (float[2,2] f3) { f3 = Relu(h) }>
    }, else_branch = e0 () => (float[2,2] f1) { f1 = Relu(h) }>
    y = Relu(t) }"""


@shows("branches that move twice")
def branches_that_move_twice() -> bool:
    code = f"""
import onnxruntime
from onnx import parser
model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]>' + {DEEP_SCAN!r})
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""
    return run_python(code).returncode < 0


@shows("ellipses of different ranks")
def ellipses_of_different_ranks() -> bool:
    code = """
import onnxruntime
from onnx import parser
model = parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
    g (float[2,3,4] x, float[4] w) => (float[2,3] y) { y = Einsum<equation = "...ij,...j->...i">(x, w) }''')
try:
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
except Exception:
    pass
"""
    return run_python(code).returncode < 0


@shows("transposed padding")
def transposed_padding() -> bool:
    padded = model("""g (float[2,3,4,5] x) => (float[a,b,c,d] y) <int64[2] p = {1, 1}, int64[1] a = {3}>
        { t = Transpose<perm = [0, 2, 3, 1]>(x)  q = Pad(t, p, , a)  y = Transpose<perm = [0, 3, 1, 2]>(q) }""")
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    try:
        y = session(padded).run(None, {"x": x})[0]
    except Exception:
        return True
    return not np.array_equal(y, np.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)]))


@shows("padded weights")
def padded_weights() -> bool:
    return fails(
        model("""g (float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,a,b] y) <int64[8] p = {0, 0, 0, 0, 0, 0, 1, 1}>
        { q = Pad(w, p)  y = Conv(x, q) }""")
    )


@shows("races of ScatterND")
def races_of_scatter() -> bool:
    if os.cpu_count() == 1:  # in the test only
        pytest.skip("threads do not meet on one processor")  # in the test only
    adding = model("""g (float[4] x, int64[N,1] i, float[N] u) => (float[4] y)
        { y = ScatterND<reduction = "add">(x, i, u) }""")
    count = 2_000_000
    feeds = {"x": np.zeros(4, np.float32), "i": np.zeros((count, 1), np.int64), "u": np.ones(count, np.float32)}
    made = session(adding, threads=4)
    return any(made.run(None, feeds)[0][0] != count for _ in range(20))


@shows("types of OneHot")
def types_of_one_hot() -> bool:
    def one_hot(indices: str, values: str) -> ModelProto:
        return model(f"g ({indices}[N] i, int64 d, {values}[2] v) => ({values}[N,k] y) {{ y = OneHot(i, d, v) }}")

    assert not fails(one_hot("int64", "float"))
    return any(fails(one_hot(indices, values)) for indices in ("int32", "int64") for values in ("double", "bool"))


@shows("sizes of Resize")
def sizes_of_resize() -> bool:
    return fails(
        model('g (float[4,4] x, int64[k] s) => (float[a,b] y) { y = Resize<mode = "linear">(x, , , s) }')
    ) and not fails(
        model("""g (float[4,4] x, int64[k] s) => (float[a,b] y) <int64[1] two = {2}>
            { t = Reshape(s, two)  y = Resize<mode = "linear">(x, , , t) }""")
    )


@shows("shapes of bound outputs")
def shapes_of_bound_outputs() -> bool:
    made = session(model("g (float[N] x) => (float[N] y) { y = Abs(x) }"))
    binding = made.io_binding()
    binding.bind_output("y", "cpu")
    binding.bind_cpu_input("x", np.ones(3, np.float32))
    made.run_with_iobinding(binding)
    binding.bind_cpu_input("x", np.ones(5, np.float32))
    try:
        made.run_with_iobinding(binding)
    except Exception:
        return True
    return binding.get_outputs()[0].numpy().shape != (5,)


@shows("optional inputs of custom operators")
def optional_inputs_of_custom_operators() -> bool:
    code = """
import onnxruntime, onnxtrain
from onnx import parser
model = parser.parse_model('''<ir_version: 8, opset_import: ["": 18, "onnxtrain": 1]>
    g (float[3] dy, float[3] x, float h) => (float[3] dx) { dx = onnxtrain.ClipGradient(dy, x, , h) }''')
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
"""
    from onnxtrain.runtime.native import kernels_available

    if not kernels_available():
        pytest.skip("there are no custom operators")
    return run_python(code).returncode < 0


@shows("opsets without kernels")
def opsets_without_kernels() -> bool:
    def opens(text: str, opset: int) -> bool:
        return opset <= onnx.defs.onnx_opset_version() and not fails(model(text, opset))

    plain = "g (float[1] x) => (float[1] y) { y = Identity(x) }"
    quantized = """g (float[1] x) => (float[1] y) <float s = {1}, int8 z = {0}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"""
    return any(opens(plain, opset) and not opens(quantized, opset) for opset in range(21, 40))


COPIES = """
import re, sys
from pathlib import Path
import numpy as np, onnxruntime
from onnx import TensorProto, parser
import onnx_ir  # in the test only
from onnxtrain.graph.upstream.sessions import share_initializers  # in the test only

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

table = np.ones((400_000, 64), np.uint32)
model = parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
    g (int64[N] i) => (float[N,64] y) { y = Gather(table, i) }''')
tensor = model.graph.initializer.add(name="table", dims=table.shape, data_type=TensorProto.FLOAT)
tensor.external_data.add(key="location", value="nowhere")
tensor.data_location = TensorProto.EXTERNAL
options = onnxruntime.SessionOptions()
value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(table, TensorProto.FLOAT)
if sys.argv[1] == "bare":
    options.add_external_initializers(["table"], [value])
else:  # in the test only
    kept = share_initializers(options, {"table": table}, {"table": onnx_ir.DataType.FLOAT})  # in the test only
before = anonymous()
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
print((anonymous() - before) / table.nbytes)
"""


@shows("copies of external initializers")
def copies_of_external_initializers() -> bool:
    if not sys.platform.startswith("linux"):  # in the test only
        pytest.skip("reads resident memory from /proc")  # in the test only
    assert grown("handed over") < 0.5  # the workaround works
    return grown("bare") > 0.5


def grown(way: str) -> float:
    done = subprocess.run([sys.executable, "-c", COPIES, way], capture_output=True, text=True, check=True)
    return float(done.stdout)


@shows("packed elements")
def packed_elements() -> bool:
    shape = (3, 5)
    raw = np.arange(8, dtype=np.uint8)
    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    assert tuple(make(sessions.packed(raw, shape), TensorProto.INT4).shape()) == shape  # the workaround works
    return tuple(make(raw, TensorProto.INT4).shape()) == raw.shape


@shows("attributes of zero")
def attributes_of_zero() -> bool:
    content = model("g (float[3] x) => (float[3] y) { y = HardSigmoid<alpha = 1.0, beta = 0.0>(x) }")
    made = onnxruntime.InferenceSession(content.SerializeToString(), providers=["OpenVINOExecutionProvider"])
    return not np.array_equal(made.run(None, {"x": np.zeros(3, np.float32)})[0], np.zeros(3))


@shows("versions of libraries")
def versions_of_libraries() -> bool:
    operator = parser.parse_model("""<ir_version: 8, opset_import: ["onnxtrain": 1]>
        f (float r, int64 t, float[1] x, float[1] g) => (float[1] y) { y = onnxtrain.SGD(r, t, x, g) }""")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    onnxruntime.InferenceSession(operator.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = os.path.join(folder, "optimized.onnx")
        other = model("g (float[3] x) => (float[3] y) { y = Neg(x) }")
        onnxruntime.InferenceSession(other.SerializeToString(), options, providers=["CPUExecutionProvider"])
        imports = {item.domain: item.version for item in onnx.load(options.optimized_model_filepath).opset_import}
    return imports.get("onnxtrain") == 1000
