"""Models that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, helper, numpy_helper, parser


def small_model(opset: int = 18) -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {{1,2,3,4,5,6}}, float[2] b = {{0.5,-0.5}}>
        {{ m = MatMul(x, w) y = Add(m, b) }}
        """)


def external_model(folder: Path, rows: int = 300) -> Path:
    """A model with two weights in one data file and one inside."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13]>
        g (float[n,300] x) => (float[n] y) <float scale = {2}>
        { m = MatMul(x, w) a = Add(m, b) s = Mul(a, scale) y = ReduceMean<axes = [1], keepdims = 0>(s) }
        """)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (rows, 4)), ("b", (4,))):
        tensor = numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0, convert_attribute=False)
    return path


def rich_model() -> ModelProto:
    """A model with everything that ONNX's converter forgets."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13, "local": 1, "vendor": 2], producer_name: "p",
         doc_string: "model", metadata_props: ["key": "value"]>
        g (float[2,3] x) => (float[] y) <float[3] w = {1,2,3}>
        {
            [kept] a = Add(x, w)
            b = local.f(a, sparse)
            [changed] c = ReduceMean<axes = [0]>(b)
            d = vendor.Special<strength = 0.5>(c)
            yes = Constant<value = bool {1}>()
            y = If(yes) <
                then_branch = one () => (float[n] p) <float[1] inner = {3}> {
                    q = Add(d, inner)
                    p = ReduceMax<axes = [0]>(q)
                },
                else_branch = two () => (float[m] r) { r = Identity(d) }>
        }
        <domain: "local", opset_import: ["": 13]>
        f (x, w) => (y) { s = Add(x, w) y = ReduceMean<axes = [0], keepdims = 1>(s) }
        """)
    graph = model.graph
    graph.doc_string = "graph"
    graph.metadata_props.add(key="graph", value="1")
    graph.quantization_annotation.add(tensor_name="w")
    graph.value_info.append(helper.make_tensor_value_info("a", 1, ["rows", 3]))
    for node in graph.node:
        node.metadata_props.add(key="scope", value=node.output[0])
        node.doc_string = f"makes {node.output[0]}"
    sparse = graph.sparse_initializer.add(dims=[3])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([5], np.float32), "sparse"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1], np.int64)))
    model.training_info.add().algorithm.name = "step"
    return model


def run_file(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
