"""The bugs of others that the book lists: each is shown in the installed version, and missed when it is gone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser
from onnx_ir.passes import common

import onnxtrain
from onnxtrain import workarounds
from onnxtrain.errors import StepError
from onnxtrain.graph.nesting import has_body_in_branches
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session
from onnxtrain.workarounds import BOOK, Workaround

SOURCES = Path(onnxtrain.__file__).parent
SHOWN: dict[str, Callable[[], bool]] = {}


def shows(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """A function that shows a bug: true where it is there."""

    def decorate(function: Callable[[], bool]) -> Callable[[], bool]:
        SHOWN[name] = function
        return function

    return decorate


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def installed(package: str) -> tuple[int, ...] | None:
    if package == "onnxruntime":  # also where it comes from a distribution of another name
        return version(onnxruntime.__version__)
    try:
        return version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def verdict(entry: Workaround, found: tuple[int, ...], present: bool) -> str:
    """What is to be done about an entry; nothing where all is as the book says."""
    oldest, newest = map(version, entry.seen)
    if entry.gone is not None and found >= version(entry.gone):
        return f"{entry.name!r} is back in {entry.package} {found}: say so in `seen`, and take `gone` away." * present
    if present or found < oldest or (entry.gone is not None and found > newest):
        return ""
    return (
        f"{entry.name!r} is gone in {entry.package} {found}: say so in `gone`, and remove the workaround in "
        f"{', '.join(entry.where)} when no supported version has it any more."
    )


@pytest.mark.parametrize(
    "entry", [entry for entry in BOOK if entry.package != "onnxruntime-web"], ids=lambda entry: entry.name
)
def test_the_bug_is_there(entry: Workaround) -> None:
    found = installed(entry.package)
    if found is None:
        pytest.skip(f"{entry.package} is not installed")
    assert not (problem := verdict(entry, found, SHOWN[entry.name]())), problem


def test_the_bell_rings() -> None:
    entry = Workaround("a bug", "onnx", ("1.20.0", "1.22.0"), "Wrong.", "Done.", ("graph/shapes.py",))
    gone = Workaround("a bug", "onnx", ("1.20.0", "1.22.0"), "Wrong.", "Done.", ("graph/shapes.py",), gone="1.24.0")
    assert re.search(r"'a bug' is gone in onnx \(1, 25, 0\): .* in graph/shapes.py", verdict(entry, (1, 25, 0), False))
    assert "is gone" in verdict(entry, (1, 21, 0), False)
    assert "is gone" in verdict(gone, (1, 21, 0), False)
    assert "is back in onnx (1, 25, 0)" in verdict(gone, (1, 25, 0), True)
    for book, found, present in [
        (entry, (1, 25, 0), True),
        (entry, (1, 19, 0), False),
        (gone, (1, 21, 0), True),
        (gone, (1, 23, 0), False),  # nobody looked
        (gone, (1, 25, 0), False),
    ]:
        assert verdict(book, found, present) == ""


def test_the_book_is_complete() -> None:
    names = [entry.name for entry in BOOK]
    in_browsers = {entry.name for entry in BOOK if entry.package == "onnxruntime-web"}  # shown in languages/
    assert set(SHOWN) == set(names) - in_browsers
    assert len(names) == len(set(names))
    for entry in BOOK:
        for text in (entry.wrong, entry.done):
            assert text[0].isupper()
            assert text.endswith(".")
        for file in entry.where:
            text = (SOURCES / file).read_text(encoding="utf-8")
            assert "workarounds" in text, f"{file} does not name the book"
    for file in SOURCES.rglob("*.py"):
        for name in re.findall(r"\(workarounds: ([^).]+)\)", " ".join(file.read_text(encoding="utf-8").split())):
            for one in name.split(", "):
                assert one in names, f"{file} names {one!r}, which is not in the book"


# ONNX Runtime


def session(model: ModelProto | bytes, *, threads: int = 1, **arguments: object) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"], **arguments)


def model(text: str, opset: int = 18) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')


def fails(content: ModelProto) -> bool:
    try:
        session(content)
    except Exception:
        return True
    return False


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@shows("types of others")
def types_of_others() -> bool:
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


@shows("eliminated dropout")
def eliminated_dropout() -> bool:
    dropping = model("""g (float[100] x) => (float[100] y) <float r = {0.5}, bool t = {1}>
        { a = Abs(x)  b = Dropout(a, r, t)  y = Neg(b) }""")
    feeds = {"x": np.ones(100, np.float32)}
    kept = session(dropping, disabled_optimizers=list(workarounds.DISABLED_OPTIMIZERS)).run(None, feeds)[0]
    assert (kept == 0).any()  # the workaround works
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


@shows("races of ScatterND")
def races_of_scatter() -> bool:
    if os.cpu_count() == 1:
        pytest.skip("threads do not meet on one processor")
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
from onnxtrain.workarounds import hand_over
import onnx_ir

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
else:
    kept = hand_over(options, {"table": table}, {"table": onnx_ir.DataType.FLOAT})
before = anonymous()
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
print((anonymous() - before) / table.nbytes)
"""


@shows("copies of external initializers")
def copies_of_external_initializers() -> bool:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads resident memory from /proc")
    grown = {}
    for way in ("bare", "handed over"):
        done = subprocess.run([sys.executable, "-c", COPIES, way], capture_output=True, text=True, check=True)
        grown[way] = float(done.stdout)
    assert grown["handed over"] < 0.5  # the workaround works
    return grown["bare"] > 0.5


@shows("packed elements")
def packed_elements() -> bool:
    shape = (3, 5)
    raw = np.arange(8, dtype=np.uint8)
    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    assert tuple(make(workarounds.packed(raw, shape), TensorProto.INT4).shape()) == shape  # the workaround works
    return tuple(make(raw, TensorProto.INT4).shape()) == raw.shape


# onnx


@shows("computed bounds")
def computed_bounds() -> bool:
    sliced = model("""g (float[2,3,4] x, int64[1] k) => (float[a,b] y) <int64[1] end = {100}>
        { s = Shape(x)  t = Slice(s, k, end)  r = Reshape(x, t)  y = Neg(r) }""")

    def sizes(inferred: ModelProto) -> list[int]:
        (info,) = [info for info in inferred.graph.value_info if info.name == "r"]
        return [dim.dim_value for dim in info.type.tensor_type.shape.dim if dim.HasField("dim_value")]

    present = bool(sizes(onnx.shape_inference.infer_shapes(sliced, data_prop=True)))
    workarounds.hide_computed_slices(sliced.graph)
    assert not sizes(onnx.shape_inference.infer_shapes(sliced, data_prop=True))  # the workaround works
    return present


@shows("the matrix of Attention")
def the_matrix_of_attention() -> bool:
    attentive = model("g (float[] q, float[] k, float[] v) => (float[] y) { y, p, r, w = Attention(q, k, v) }", 23)
    for info in (*attentive.graph.input, *attentive.graph.output):
        info.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(attentive)
    types = [info.type.tensor_type for info in inferred.graph.value_info if info.name == "w"]
    return any(found.HasField("shape") and not found.shape.dim for found in types)


def changes_results(content: ModelProto, *shape: int) -> bool:
    """Whether a model computes something else after ONNX's conversion to opset 18, or cannot be converted."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    before = session(content).run(None, {"x": x})[0]
    try:
        converted = onnx.version_converter.convert_version(content, 18)
        return not np.allclose(session(converted).run(None, {"x": x})[0], before)
    except Exception:
        return True


@shows("converted Hardmax")
def converted_hardmax() -> bool:
    return changes_results(model("g (float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax<axis = 1>(x) }", 11), 2, 3, 4)


@shows("converted Resize")
def converted_resize() -> bool:
    text = """g (float[1,1,4,4] x) => (float[1,1,6,6] y) <float[4] s = {1, 1, 1.5, 1.5}>
        { y = Resize<mode = "linear">(x, s) }"""
    return changes_results(model(text, 10), 1, 1, 4, 4)


@shows("converted BatchNormalization")
def converted_batch_normalization() -> bool:
    training = model(
        """g (float[2,3] x, float[3] s, float[3] b, float[3] m, float[3] v)
        => (float[2,3] y, float[3] a, float[3] c, float[3] d, float[3] e)
        { y, a, c, d, e = BatchNormalization(x, s, b, m, v) }""",
        9,
    )
    try:
        onnx.version_converter.convert_version(training, 18)
    except Exception:
        return True
    return False


@shows("functions and metadata of converted models")
def functions_and_metadata_of_converted_models() -> bool:
    rich = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "local": 1], metadata_props: ["key": "value"]>
        g (float[2] x) => (float[2] y) { y = local.f(x) }
        <domain: "local", opset_import: ["": 17]> f (a) => (b) { b = Abs(a) }""")
    try:
        converted = onnx.version_converter.convert_version(rich, 18)
    except Exception:
        return True
    return not converted.functions or not converted.metadata_props


# onnx-ir


@shows("dropped training_info")
def dropped_training_info() -> bool:
    content = model("g (float[2] x) => (float[2] y) { y = Abs(x) }")
    content.training_info.add().algorithm.name = "step"
    return not ir.to_proto(ir.from_proto(content)).training_info


@shows("dropped sparse initializers")
def dropped_sparse_initializers() -> bool:
    content = model("g (float[3] x) => (float[3] y) { y = Add(x, s) }")
    sparse = content.graph.sparse_initializer.add(dims=[3])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1])))
    try:
        return not ir.to_proto(ir.from_proto(content)).graph.sparse_initializer
    except Exception:
        return True


@shows("merged random nodes")
def merged_random_nodes() -> bool:
    working = ir.from_proto(
        model("""g (float[9] x) => (float[9] y) <float r = {0.5}, bool t = {1}>
            { a = Dropout(x, r, t)  b = Dropout(x, r, t)  y = Sub(a, b) }""")
    )
    common.CommonSubexpressionEliminationPass()(working)
    return sum(node.op_type == "Dropout" for node in working.graph) == 1


@shows("merged outputs")
def merged_outputs() -> bool:
    text = "g (float[2] x) => (float[2] y, float[2] z) { a = Abs(x)  y = Identity(a)  z = Identity(a) }"
    working = ir.from_proto(model(text))
    common.IdentityEliminationPass()(working)
    return [value.name for value in working.graph.outputs] != ["y", "z"]


@shows("sympy at every start")
def sympy_at_every_start() -> bool:
    return run_python("import sys, onnx_ir; sys.exit('sympy.core' in sys.modules)").returncode == 1


@shows("numbers of recurrent activations")
def numbers_of_recurrent_activations() -> bool:
    numbers = {"Affine": "activation_beta = [0.5]", "ScaledTanh": "activation_beta = [0.5]", "ThresholdedRelu": ""}
    x, one = np.asarray([-0.5, 0.5], np.float32).reshape(1, 2, 1), np.ones((1, 1, 1), np.float32)
    expected = {"Affine": x + 0.5, "ScaledTanh": np.tanh(0.5 * x), "ThresholdedRelu": np.zeros_like(x)}
    wrong = []
    for name, given in numbers.items():
        attributes = ", ".join(filter(None, ("hidden_size = 1", f'activations = ["{name}"]', given)))
        inputs = "float[1,2,1] x, float[1,1,1] w, float[1,1,1] r"
        content = model(f"g ({inputs}) => (float[1,1,2,1] y) {{ y = RNN<{attributes}>(x, w, r) }}")
        found = session(content).run(None, {"x": x, "w": one, "r": np.zeros_like(one)})[0]
        wrong.append(not np.allclose(found.reshape(x.shape), expected[name], rtol=1e-6))
    return all(wrong)


# Providers


@shows("attributes of zero")
def attributes_of_zero() -> bool:
    content = model("g (float[3] x) => (float[3] y) { y = HardSigmoid<alpha = 1.0, beta = 0.0>(x) }")
    made = onnxruntime.InferenceSession(content.SerializeToString(), providers=["OpenVINOExecutionProvider"])
    return not np.array_equal(made.run(None, {"x": np.zeros(3, np.float32)})[0], np.zeros(3))


# Workarounds that are code of the book


@pytest.mark.parametrize("equation", ["...ij,...j->...i", "... i j , ...j -> ...i"])
def test_einsum_with_ellipses_of_different_ranks_is_refused(equation: str) -> None:
    text = f"""g (float[N,3,4] x, float[4] w) => (float[N,3] y) {{ y = Einsum<equation = "{equation}">(x, w) }}"""
    with pytest.raises(StepError, match=r"Einsum node .* has ellipses of 0 and 1 axes, on which ONNX Runtime crashes"):
        workarounds.refuse_what_crashes(ir.from_proto(model(text)).graph)


def test_einsum_with_ellipses_of_one_rank_passes() -> None:
    text = """g (float[N,3,4] x, float[N,4] w) => (float[N,3] y)
        { y = Einsum<equation = "...ij,...j->...i">(x, w) }"""
    workarounds.refuse_what_crashes(ir.from_proto(model(text)).graph)


def test_bodies_deep_in_branches_run() -> None:
    rng = np.random.default_rng(0)
    x, h, a = (np.abs(rng.normal(size=size)).astype(np.float32) for size in ((3, 2, 2), (2, 2), (2, 2)))
    expected = h
    for row in x:
        expected = expected @ a + row
    working = ir.from_proto(model(DEEP_SCAN))
    found = create_session(working, RuntimeOptions(threads=1)).run(None, {"x": x, "h": h, "a": a})[0]
    np.testing.assert_allclose(found, expected @ a, rtol=1e-5)


SCAN = "a = Scan <num_scan_inputs = 1, body = s (float i) => (float j) { j = Neg(i) }> (x)"
IF = "y = If (c) <then_branch = t () => (float[3] a) {{ {} }}, else_branch = e () => (float[3] f) {{ f = Abs(x) }}>"
OWN = '<domain: "own", opset_import: ["": 18, "own": 1]>'


@pytest.mark.parametrize(
    ("nodes", "functions", "deep"),
    [
        (IF.format("a = Neg(x)"), "", False),
        (IF.format(SCAN), "", False),
        (IF.format("g = Neg(x) " + IF.replace("y =", "a =").replace("[3] a", "[3] b").format("b = Neg(x)")), "", False),
        (IF.format(IF.replace("y =", "a =").replace("[3] a", "[3] b").format(SCAN.replace("a =", "b ="))), "", True),
        (IF.format("a = own.f(x, c)"), f"{OWN} f (x, c) => (y) {{ {IF.format(SCAN)} }}", True),
        ("y = own.f(x, c)", f"{OWN} f (x, c) => (y) {{ {IF.format(SCAN)} }}", False),
    ],
    ids=["a branch", "a Scan in one", "two branches", "a Scan in two", "a Scan in a function", "a function alone"],
)
def test_what_lies_deep_in_branches(nodes: str, functions: str, deep: bool) -> None:
    imports = '<ir_version: 10, opset_import: ["": 18, "own": 1]>'
    proto = parser.parse_model(f"{imports} g (float[3] x, bool c) => (float[3] y) {{ {nodes} }} {functions}")
    assert has_body_in_branches(ir.from_proto(proto), 2) == deep
