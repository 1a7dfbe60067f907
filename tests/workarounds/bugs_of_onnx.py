"""Reproductions of bugs of ONNX's shape inference and version converter, and of onnx-ir."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx import ModelProto, numpy_helper, parser
from onnx_ir.passes import common

from onnxtrain.graph.bounded_inference import hide_computed_slices, infer_within_bounds
from peak_memory import PEAK
from workarounds.shown import model, run_python, session, shows


@shows("computed bounds")
def computed_bounds() -> bool:
    sliced = model("""g (float[2,3,4] x, int64[1] k) => (float[a,b] y) <int64[1] end = {100}>
        { s = Shape(x)  t = Slice(s, k, end)  r = Reshape(x, t)  y = Neg(r) }""")

    def sizes(inferred: ModelProto) -> list[int]:
        (info,) = [info for info in inferred.graph.value_info if info.name == "r"]
        return [dim.dim_value for dim in info.type.tensor_type.shape.dim if dim.HasField("dim_value")]

    present = bool(sizes(onnx.shape_inference.infer_shapes(sliced, data_prop=True)))
    hide_computed_slices(sliced.graph)  # the workaround works
    assert not sizes(onnx.shape_inference.infer_shapes(sliced, data_prop=True))  # the workaround works
    return present


@shows("bins of STFT")
def bins_of_stft() -> bool:
    sound = model(
        """g (float[2,256,1] x) => (float[2,7,33,2] y) <int64 step = {32}, int64 length = {64}>
        { s = STFT(x, step, , length)  y = Neg(s) }""",
        18,
    )

    def bins(inferred: ModelProto) -> int:
        (info,) = [info for info in inferred.graph.value_info if info.name == "s"]
        return info.type.tensor_type.shape.dim[2].dim_value

    assert session(sound).run(None, {"x": np.zeros((2, 256, 1), np.float32)})[0].shape == (2, 7, 33, 2)
    assert bins(infer_within_bounds(sound)) == 33  # the workaround works
    del sound.graph.node[0].attribute[:]  # the workaround works
    return bins(onnx.shape_inference.infer_shapes(sound, data_prop=True)) == 64


@shows("the matrix of Attention")
def the_matrix_of_attention() -> bool:
    attentive = model("g (float[] q, float[] k, float[] v) => (float[] y) { y, p, r, w = Attention(q, k, v) }", 23)
    for info in (*attentive.graph.input, *attentive.graph.output):
        info.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(attentive)
    types = [info.type.tensor_type for info in inferred.graph.value_info if info.name == "w"]
    return any(found.HasField("shape") and not found.shape.dim for found in types)


def changes_results(content: ModelProto, *shape: int) -> bool:
    """Return whether ONNX's conversion to opset 18 fails or changes the results of a model."""
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


@shows("defaults of recurrent activations")
def defaults_of_recurrent_activations() -> bool:
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


@shows("references in converted functions")
def references_in_converted_functions() -> bool:
    graph = model("g (float[2] x) => (float[2] y) { y = LeakyRelu(x) }", 13)
    (node,) = graph.graph.node
    node.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    try:
        (converted,) = onnx.version_converter.convert_version(graph, 18).graph.node
    except Exception:
        return True
    return not any(attribute.ref_attr_name for attribute in converted.attribute)


@shows("two spellings of a domain")
def two_spellings_of_a_domain() -> bool:
    spelled = parser.parse_model("""<ir_version: 8, opset_import: ["ai.onnx": 18]>
        g (float[2] x) => (float[2] y) { y = Abs(x) }""")
    spelled.graph.node[0].domain = "ai.onnx"
    try:
        onnx.checker.check_model(spelled)
    except onnx.checker.ValidationError:
        return True
    return False


@shows("long vectors")
def long_vectors() -> bool:
    done = run_python(f"""{PEAK}
import onnx
from onnx import parser
one = parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
    g (float[1] x) => (float[n] y) <int64[1] n = {{1000000}}>
    {{ a = ConstantOfShape(n)  s = Cast<to = 7>(a)  b = Concat<axis = 0>(s, s)  y = Cast<to = 1>(b) }}''')
before = peak()
onnx.shape_inference.infer_shapes(one, data_prop=True)
print(peak() - before)""")
    assert not done.returncode or done.returncode < 0, done.stderr
    return done.returncode < 0 or int(done.stdout) > 32e6  # the sizes alone take 8e6
