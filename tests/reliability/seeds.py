"""Small valid models for mutation; together they contain every kind of field of a model file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

import onnxtrain
from onnxtrain import examples

CROSS_ENTROPY, SQUARED = "softmax_cross_entropy", "mean_squared_error"


@dataclass(frozen=True)
class Seed:
    """A model, and the loss that it is trained with."""

    build: Callable[[], onnx.ModelProto]
    loss: str = SQUARED


SEEDS: dict[str, Seed] = {}


def _text(name: str, graph: str, *, loss: str = SQUARED, head: str = 'ir_version: 8, opset_import: ["": 18]') -> None:
    SEEDS[name] = Seed(lambda: _weights(parser.parse_model(f"<{head}>\n{graph}")), loss)


def _weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fill initializers, zeros in the text form, with small distinct numbers."""
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f" and array.ndim and not array.any():
            values = generator.normal(size=array.shape).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


def _zeros(*shape: int) -> str:
    """Return zeros for the text form; `_weights` replaces them."""
    return "{" + ", ".join(["0"] * int(np.prod(shape))) + "}"


SEEDS["perceptron"] = Seed(lambda: examples.mlp((4, 8, 3)), CROSS_ENTROPY)
SEEDS["old perceptron"] = Seed(lambda: examples.mlp((4, 8, 3), opset=7), CROSS_ENTROPY)
SEEDS["gelu perceptron"] = Seed(lambda: examples.mlp((4, 8, 3), "gelu", opset=20), CROSS_ENTROPY)
SEEDS["residual network"] = Seed(lambda: examples.small_resnet(2, (1,), 3), CROSS_ENTROPY)
SEEDS["transformer"] = Seed(lambda: examples.small_transformer(10, 8, 1, 2, 3, 8), CROSS_ENTROPY)


DATA_FILE = "weights.bin"


def _external() -> onnx.ModelProto:
    model = examples.mlp((4, 8, 3))
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, DATA_FILE)
    return model


def write_seed(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> None:
    """Write a seed, with the data file of one that has external data."""
    if any(tensor.HasField("raw_data") and tensor.external_data for tensor in model.graph.initializer):
        full = onnx.ModelProto()
        full.CopyFrom(model)
        with open(folder / DATA_FILE, "wb") as file:
            for tensor in full.graph.initializer:
                offset, data = file.tell(), tensor.raw_data
                file.write(data)
                onnx.external_data_helper.set_external_data(tensor, DATA_FILE, offset, len(data))
                tensor.ClearField("raw_data")
        model = full
    (folder / name).write_bytes(model.SerializeToString())


SEEDS["external data"] = Seed(_external, CROSS_ENTROPY)


def _sparse() -> onnx.ModelProto:
    model = examples.mlp((4, 8, 3))
    dense = model.graph.initializer[0]
    values = numpy_helper.from_array(np.array([1, -2, 3], np.float32), dense.name)
    indices = numpy_helper.from_array(np.array([0, 5, 9], np.int64), "indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, list(dense.dims)))
    del model.graph.initializer[0]
    return model


SEEDS["sparse"] = Seed(_sparse, CROSS_ENTROPY)
SEEDS["training model"] = Seed(
    lambda: onnxtrain.training_model(examples.mlp((4, 8, 3)), loss=CROSS_ENTROPY, optimizer=onnxtrain.Adam()),
    CROSS_ENTROPY,
)


def _initializers_as_inputs() -> onnx.ModelProto:
    model = examples.mlp((4, 8, 3), opset=8)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return model


SEEDS["initializers as inputs"] = Seed(_initializers_as_inputs, CROSS_ENTROPY)

_text(
    "if",
    f"""f (float[N, 4] x, bool flag) => (float[N, 3] y)
    <float[4, 3] w = {_zeros(4, 3)}, float[4, 3] v = {_zeros(4, 3)}> {{
        h = MatMul(x, w)
        y = If (flag) <
            then_branch = a () => (float[N, 3] p) {{ p = Relu(h) }},
            else_branch = b () => (float[N, 3] q) {{ t = MatMul(x, v)  q = Add(t, h) }}>
    }}""",
)
_text(
    "loop",
    f"""f (float[N, 3] x) => (float[N, 3] y) <float[3, 3] w = {_zeros(3, 3)}, int64 count = {{3}}, bool yes = {{1}}> {{
        y, all = Loop (count, yes, x) <
            body = b (int64 i, bool c, float[N, 3] s) => (bool d, float[N, 3] n, float[N, 3] o) {{
                d = Identity(c)  m = MatMul(s, w)  n = Tanh(m)  o = Identity(n) }}>
    }}""",
)
_text(
    "scan",
    f"""f (float[5, 3] x) => (float[3] y, float[5, 3] all) <float[3] start = {_zeros(3)}, float[3] w = {_zeros(3)}> {{
        y, all = Scan (start, x) <num_scan_inputs = 1,
            body = b (float[3] s, float[3] e) => (float[3] n, float[3] o) {{
                p = Mul(e, w)  n = Add(s, p)  o = Sigmoid(n) }}>
    }}""",
)
_text(
    "functions",
    f"""f (float[N, 4] x) => (float[N, 3] y) <float[4, 4] w = {_zeros(4, 4)}, float[4, 3] v = {_zeros(4, 3)}> {{
        h = own.Block <slope = 0.1> (x, w)
        y = own.Layer (h, v)
    }}
    <domain: "own", opset_import: ["": 18, "own": 1]>
    Layer (a, b) => (c) {{ c = MatMul(a, b) }}
    <domain: "own", opset_import: ["": 18, "own": 1]>
    Block <slope> (a, b) => (c) {{ m = own.Layer(a, b)  c = LeakyRelu <alpha: float = @slope> (m) }}""",
    head='ir_version: 8, opset_import: ["": 18, "own": 1]',
)
_text(
    "quantized",
    f"""f (float[N, 4] x) => (float[N, 3] y)
    <float[4, 3] w = {_zeros(4, 3)}, float scale = {{0.1}}, uint8 zero = {{128}}, int8[4, 3] q = {_zeros(4, 3)},
     float small = {{0.01}}, int8 none = {{0}}> {{
        a = QuantizeLinear(x, scale, zero)
        b = DequantizeLinear(a, scale, zero)
        c = DequantizeLinear(q, small, none)
        d = Add(c, w)
        y = MatMul(b, d)
    }}""",
)
_text(
    "dynamic quantization",
    f"""f (float[N, 4] x) => (float[N, 3] y)
    <uint8[4, 3] q = {_zeros(4, 3)}, uint8 none = {{0}}, float scale = {{0.1}}, float[3] bias = {_zeros(3)}> {{
        a, s, z = DynamicQuantizeLinear(x)
        b = MatMulInteger(a, q, z, none)
        c = Cast <to = 1> (b)
        t = Mul(s, scale)
        d = Mul(c, t)
        y = Add(d, bias)
    }}""",
)
_text(
    "strings",
    f"""f (float[N, 4] x, string[N] words) => (float[N, 3] y, string[N] out) <float[4, 3] w = {_zeros(4, 3)}> {{
        y = MatMul(x, w)
        out = Identity(words)
    }}""",
)
_text(
    "sequences",
    f"""f (float[N, 4] x) => (float[N, 4] y, seq(float[N, 2]) parts) <float[4] w = {_zeros(4)}, int64 half = {{2}}> {{
        m = Mul(x, w)
        parts = SplitToSequence <axis = 1> (m, half)
        y = ConcatFromSequence <axis = 1> (parts)
    }}""",
)
_text(
    "optional",
    f"""f (float[N, 4] x) => (float[N, 4] y) <float[4] w = {_zeros(4)}> {{
        m = Mul(x, w)
        o = Optional(m)
        y = OptionalGetElement(o)
    }}""",
)
_text(
    "half precision",
    f"""f (float16[N, 4] x) => (float16[N, 3] y) <float16[4, 3] w = {_zeros(4, 3)}> {{ y = MatMul(x, w) }}""",
)
_text(
    "double",
    f"""f (double[N, 4] x) => (double[N, 3] y) <double[4, 3] w = {_zeros(4, 3)}> {{ y = MatMul(x, w) }}""",
)
_text(
    "recurrent",
    f"""f (float[5, N, 3] x) => (float[5, 1, N, 2] y)
    <float[1, 8, 3] w = {_zeros(8, 3)}, float[1, 8, 2] r = {_zeros(8, 2)}, float[1, 16] b = {_zeros(16)}> {{
        y, h, c = LSTM <hidden_size = 2> (x, w, r, b)
    }}""",
)
_text(
    "gated recurrent",
    f"""f (float[5, N, 3] x) => (float[1, N, 2] h)
    <float[1, 6, 3] w = {_zeros(6, 3)}, float[1, 6, 2] r = {_zeros(6, 2)}> {{
        y, h = GRU <hidden_size = 2, linear_before_reset = 1> (x, w, r)
    }}""",
)
_text(
    "pictures",
    f"""f (float[N, 2, 8, 8] x) => (float[N, 3] y)
    <float[4, 2, 3, 3] w = {_zeros(4, 2, 3, 3)}, float[4] b = {_zeros(4)}, float[4] scale = {_zeros(4)},
     float[4] bias = {_zeros(4)}, float[4] mean = {_zeros(4)}, float[4] var = {{1, 1, 1, 1}},
     float[4, 2, 2, 2] u = {_zeros(4, 2, 2, 2)}, float[4] sizes = {{1, 1, 2, 2}}, float[8, 3] v = {_zeros(8, 3)}> {{
        c = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (x, w, b)
        n = BatchNormalization(c, scale, bias, mean, var)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (n)
        t = ConvTranspose <strides = [2, 2]> (p, u)
        r = Resize <mode = "linear"> (t, , sizes)
        a = AveragePool <kernel_shape = [8, 8], strides = [8, 8]> (r)
        g = Flatten(a)
        y = MatMul(g, v)
    }}""",
)
_text(
    "shapes",
    f"""f (float[N, 4] x, int64[N] ids) => (float y)
    <float[6, 4] table = {_zeros(6, 4)}, int64[2] flat = {{0, -1}}, int64[2] starts = {{0, 0}},
     int64[2] ends = {{9, 3}}, int64[4] pads = {{0, 1, 0, 1}}, float[5] w = {_zeros(5)}, int64[1] axes = {{1}}> {{
        e = Gather(table, ids)
        s = Add(e, x)
        r = Reshape(s, flat)
        c = Slice(r, starts, ends)
        p = Pad(c, pads)
        k = Concat <axis = 0> (p, p)
        m = Mul(k, w)
        t = Transpose <perm = [1, 0]> (m)
        i = Einsum <equation = "ij,ik->jk"> (t, t)
        u = ReduceSum(i, axes)
        n = LayerNormalization <axis = -1> (m, w)
        l = ReduceMean <keepdims = 0> (n)
        q = ReduceMax <keepdims = 0> (u)
        y = Add(l, q)
    }}""",
    loss="output:y",
)
_text(
    "training modes",
    f"""f (float[N, 4] x) => (float[N, 4] y)
    <float[4] scale = {_zeros(4)}, float[4] bias = {_zeros(4)}, float[4] mean = {_zeros(4)},
     float[4] var = {{1, 1, 1, 1}}, float ratio = {{0.0}}, bool on = {{1}}> {{
        n, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
        y = Dropout(n, ratio, on)
    }}""",
)
_text(
    "constants",
    """f (float[N, 4] x) => (float[N, 4] y) {
        w = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        y = Mul(x, w)
    }""",
)
_text(
    "loss in the model",
    f"""f (float[N, 4] x, int64[N] label) => (float cost) <float[4, 3] w = {_zeros(4, 3)}> {{
        h = MatMul(x, w)
        cost = SoftmaxCrossEntropyLoss(h, label)
    }}""",
    loss="output:cost",
)
_text(
    "shapes that are computed",
    f"""f (float[N, M, 4] x) => (float[?, ?] y) <float[4, 3] w = {_zeros(4, 3)}, int64[1] minus = {{-1}}> {{
        s = Shape <start = 2> (x)
        t = Concat <axis = 0> (minus, s)
        r = Reshape(x, t)
        m = MatMul(r, w)
        c = CumSum(m, zero)
        k, i = TopK <axis = 1> (c, one)
        g = GatherElements <axis = 1> (m, i)
        y = Where(yes, g, k)
    }}""".replace(
        "int64[1] minus = {-1}", "int64[1] minus = {-1}, int64 zero = {0}, int64[1] one = {1}, bool yes = {1}"
    ),
)
