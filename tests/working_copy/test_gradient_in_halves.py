"""Gradients of float16 and bfloat16 models: computed in float32, returned in the types of the file."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain

BODY = {
    "pooled": "c = Conv(x, w)  p = MaxPool<kernel_shape=[2, 2], strides=[1, 1]>(c)  y = ReduceMean<keepdims=0>(p)",
    "gathered": "i = Constant<value_ints=[0, 0, 1]>()  c = Gather(w, i)  s = Conv(x, c)  y = ReduceMean<keepdims=0>(s)",
}


def _models(body: str, dtype: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    weight = np.random.default_rng(0).normal(size=(2, 1, 3, 3)).astype(np.float16)
    found = []
    for kind in (dtype, "float"):
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 20]> g ({kind}[n, 1, 6, 6] x) => ({kind} y) {{ {BODY[body]} }}'
        )
        element = ir.DataType[{"float": "FLOAT"}.get(kind, kind.upper())]
        narrow = weight.astype(ir.DataType[dtype.upper()].numpy()).astype(element.numpy())
        model.graph.initializer.append(ir.to_proto(ir.Tensor(narrow, dtype=element, name="w")))
        found.append(model)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("body", BODY)
def test_a_model_in_half_precision_has_the_gradients_of_its_copy_in_single_precision(body: str, dtype: str) -> None:
    half, single = _models(body, dtype)
    element = ir.DataType[dtype.upper()]
    derivative = onnxtrain.gradient(half)
    types = {output.name: output.type.tensor_type.elem_type for output in derivative.graph.output}
    assert types == {"y": element, "w_grad": element}
    assert [tensor.data_type for tensor in derivative.graph.initializer if tensor.name == "w"] == [element]
    x = np.random.default_rng(1).normal(size=(2, 1, 6, 6)).astype(element.numpy())
    feed = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(np.uint16), int(element))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(derivative.SerializeToString(), options)
    found = session.run_with_ort_values(["y", "w_grad"], {"x": feed})
    wide = onnxruntime.InferenceSession(onnxtrain.gradient(single).SerializeToString(), options)
    expected = wide.run(["y", "w_grad"], {"x": x.astype(np.float32)})
    for value, want in zip(found, expected, strict=True):
        bits = _array(value, element)
        np.testing.assert_allclose(bits, want, rtol=1e-2, atol=1e-3)


def _array(value: onnxruntime.OrtValue, element: ir.DataType) -> np.ndarray:
    found = value.numpy() if element is ir.DataType.FLOAT16 else _bfloat16(value)
    return np.asarray(found, np.float32)


def _bfloat16(value: onnxruntime.OrtValue) -> np.ndarray:
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Cast", ["a"], ["b"], to=onnx.TensorProto.FLOAT)],
            "wide",
            [onnx.helper.make_tensor_value_info("a", onnx.TensorProto.BFLOAT16, value.shape())],
            [onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, value.shape())],
        ),
        ir_version=10,
        opset_imports=[onnx.helper.make_opsetid("", 20)],
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (wide,) = session.run_with_ort_values(["b"], {"a": value})
    found: np.ndarray = wide.numpy()
    return found
