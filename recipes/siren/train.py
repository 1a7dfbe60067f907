"""SIREN: a network of sines learns an image, brightness as a function of position (scikit-image's camera).

Three hidden layers of 256 units, omega = 30, Adam with the rate 1e-4, all pixels in each step. Source: Sitzmann et al.,
"Implicit neural representations with periodic activation functions", NeurIPS 2020.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from skimage.data import camera
from skimage.transform import resize

import onnxtrain
from network import Network

OMEGA, HIDDEN, WIDTH = 30.0, 3, 256


def siren(width: int, seed: int) -> onnx.ModelProto:
    """`position` [N, 2] in [-1, 1] to `brightness` [N, 1]: y = sin(omega (x W + b)) in every layer but the last."""
    net, value = Network(seed), "position"
    net.constant("omega", OMEGA)
    sizes = [2, *[width] * (HIDDEN + 1), 1]
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        bound = 1 / inputs if layer == 0 else (6 / inputs) ** 0.5 / OMEGA
        weight = net.uniform(f"layer{layer}.weight", bound, inputs, outputs)
        bias = net.uniform(f"layer{layer}.bias", inputs**-0.5, outputs)
        last = layer == HIDDEN + 1
        value = net.node("Gemm", value, weight, bias, output="brightness" if last else f"layer{layer}")
        if not last:
            value = net.node("Sin", net.node("Mul", value, "omega", output=f"{value}.scaled"), output=f"{value}.sine")
    return net.model({"position": ("N", 2)}, {"brightness": ("N", 1)})


def train(options, seed: int) -> dict[str, float]:
    """Train on all pixels of the image, and return how well they are reproduced."""
    side, width, steps = (32, 64, 100) if options.quick else (128, WIDTH, 500)
    picture = 2 * resize(camera().astype(np.float32) / 255, (side, side), anti_aliasing=True) - 1
    axis = np.linspace(-1, 1, side, dtype=np.float32)
    positions = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    pixels = picture.reshape(-1, 1).astype(np.float32)

    trainer = onnxtrain.Trainer(
        siren(width, seed),
        loss="mean_squared_error",
        optimizer=onnxtrain.Adam(1e-4),
        seed=seed,
        threads=1,
    )
    trainer.fit(positions, pixels, epochs=steps, batch_size=len(pixels), progress=False)
    mean_square = float(np.mean((trainer.predict(positions) - pixels) ** 2))
    return {"PSNR, dB": 10 * np.log10(2**2 / mean_square)}
