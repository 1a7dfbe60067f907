"""SIREN: a network of sines learns a picture, brightness as a function of position (scikit-image's camera).

Three hidden layers of 256 units, omega = 30, Adam with the rate 1e-4, all pixels in each step. Source: Sitzmann et al.,
"Implicit neural representations with periodic activation functions", NeurIPS 2020.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from skimage.data import camera
from skimage.transform import resize

import onnxtrain

OMEGA, HIDDEN, WIDTH = 30.0, 3, 256


def siren(width: int, seed: int) -> onnx.ModelProto:
    """`position` [N, 2] in [-1, 1] to `brightness` [N, 1]: y = sin(omega (x W + b)) in every layer but the last."""
    rng = np.random.default_rng(seed)
    nodes, initializers, value = [], [numpy_helper.from_array(np.array(OMEGA, np.float32), "omega")], "position"
    sizes = [2, *[width] * (HIDDEN + 1), 1]
    for layer, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False)):
        bound = 1 / inputs if layer == 0 else (6 / inputs) ** 0.5 / OMEGA
        weight, bias = f"layer{layer}.weight", f"layer{layer}.bias"
        matrix = rng.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)
        offset = rng.uniform(-(inputs**-0.5), inputs**-0.5, outputs).astype(np.float32)
        initializers += [numpy_helper.from_array(matrix, weight), numpy_helper.from_array(offset, bias)]
        last = layer == HIDDEN + 1
        output = "brightness" if last else f"layer{layer}"
        nodes.append(helper.make_node("Gemm", [value, weight, bias], [output]))
        if not last:
            nodes.append(helper.make_node("Mul", [output, "omega"], [f"{output}.scaled"]))
            nodes.append(helper.make_node("Sin", [f"{output}.scaled"], [f"{output}.sine"]))
            value = f"{output}.sine"
    graph = helper.make_graph(
        nodes,
        "siren",
        [helper.make_tensor_value_info("position", TensorProto.FLOAT, ["N", 2])],
        [helper.make_tensor_value_info("brightness", TensorProto.FLOAT, ["N", 1])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def train(options, seed: int) -> dict[str, float]:
    """Train on all pixels of the picture, and return how well they are reproduced."""
    side, width, steps = (32, 64, 100) if options.quick else (128, WIDTH, 500)
    picture = 2 * resize(camera().astype(np.float32) / 255, (side, side), anti_aliasing=True) - 1
    axis = np.linspace(-1, 1, side, dtype=np.float32)
    positions = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    pixels = picture.reshape(-1, 1).astype(np.float32)

    trainer = onnxtrain.Trainer(
        siren(width, seed), loss="mean_squared_error", optimizer=onnxtrain.Adam(1e-4), train="layer*", seed=seed, threads=1
    )
    trainer.fit(positions, pixels, epochs=steps, batch_size=len(pixels), progress=False)
    mean_square = float(np.mean((trainer.predict(positions) - pixels) ** 2))
    return {"PSNR, dB": 10 * np.log10(2**2 / mean_square)}
