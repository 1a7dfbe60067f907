"""A small convolutional network of layers wide enough for bfloat16."""

import numpy as np
import onnx
from onnx import numpy_helper


def model():
    """Return three convolutions, one of them strided, with Relu between, and a linear layer over the means."""
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,16,28,28] x) => (float[n,5] y) {
        a = Conv<pads=[1,1,1,1]>(x, w0, b0) h = Relu(a) b = Conv<pads=[1,1,1,1], strides=[2,2]>(h, w1)
        i = Relu(b) c = Conv(i, w2) j = Relu(c) m = GlobalAveragePool(j) f = Flatten(m) y = MatMul(f, w3) }""")
    random = np.random.default_rng(3)
    shapes = {"w0": (64, 16, 3, 3), "b0": (64,), "w1": (64, 64, 3, 3), "w2": (96, 64, 1, 1), "w3": (96, 5)}
    for name, shape in shapes.items():
        scale = (2 / max(1, int(np.prod(shape[1:])))) ** 0.5 if name != "w3" else 0.1
        array = (scale * random.standard_normal(shape)).astype(np.float32) * (name != "b0")
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made
