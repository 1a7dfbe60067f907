"""A physics-informed network solves Burgers' equation, u_t + u u_x = 0.01 / pi u_xx, with the Gradient operator.

The model computes its own derivatives by `Gradient` nodes of the standard (ai.onnx.preview.training). Its output
`loss`, the mean squared residual at random points, is minimized. The form of u has the start, u(x, 0) = -sin(pi x), and
the edges, u(-1, t) = u(1, t) = 0. The result is compared with the analytic solution. Source: Raissi, Perdikaris,
Karniadakis, "Physics-informed neural networks", 2019.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx

import onnxtrain
from network import Network

VISCOSITY = 0.01 / np.pi
STEPS, POINTS, RATE, WIDTH, LAYERS = 15_000, 500, 5e-3, 20, 4


def network(seed: int) -> onnx.ModelProto:
    """`x`, `t` [N, 1] to `u` [N, 1] and the scalar `loss`: u = t (1 - x^2) y - sin(pi x), with y of a perceptron."""
    net = Network(seed)
    sizes = [2, *[WIDTH] * LAYERS, 1]
    value = net.node("Concat", "x", "t", output="point", axis=1)
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        weight = net.normal(f"layer{layer}.weight", (2 / (inputs + outputs)) ** 0.5, inputs, outputs)
        value = net.node("Gemm", value, weight, net.zeros(f"layer{layer}.bias", outputs), output=f"layer{layer}")
        if layer < LAYERS:
            value = net.node("Tanh", value, output=f"{value}.tanh")
    for name, number in (("one", 1), ("pi", np.pi), ("viscosity", VISCOSITY)):
        net.constant(name, number)
    inside = net.node("Sub", "one", net.node("Mul", "x", "x", output="x.square"), output="inside")
    factor = net.node("Mul", "t", inside, output="factor")
    start = net.node("Sin", net.node("Mul", "pi", "x", output="angle"), output="start")
    net.node("Sub", net.node("Mul", factor, value, output="change"), start, output="u")

    net.gradient("u", "x", "t")
    net.gradient("u_x", "x")
    net.node("Mul", "u", "u_x", output="advection")
    net.node("Mul", "viscosity", "u_x_x", output="diffusion")
    net.node("Sub", net.node("Add", "u_t", "advection", output="left"), "diffusion", output="residual")
    net.node("ReduceMean", net.node("Mul", "residual", "residual", output="square"), output="loss", keepdims=0)
    return net.model({"x": ("N", 1), "t": ("N", 1)}, {"u": ("N", 1), "loss": ()})


def solution(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The analytic solution (Cole and Hopf), by Gauss-Hermite quadrature, for t > 0."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    y = np.pi * (x - 2 * np.sqrt(VISCOSITY * t) * z)
    share = weights * np.exp(-np.cos(y) / (2 * np.pi * VISCOSITY))
    return -(np.sin(y) * share).sum(axis=-1) / share.sum(axis=-1)


def train(options, seed: int) -> dict[str, float]:
    """Train, and return the error relative to the analytic solution on a grid."""
    steps = 300 if options.quick else STEPS
    rng = np.random.default_rng(seed)

    def column(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32)[:, None]

    trainer = onnxtrain.Trainer(
        network(seed), loss="output:loss", optimizer=onnxtrain.Adam(RATE), train="layer*", seed=seed, threads=1
    )
    for step in range(steps):
        trainer.learning_rate = RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
        trainer.train_step({"x": column(rng.uniform(-1, 1, POINTS)), "t": column(rng.uniform(0, 1, POINTS))})

    grid_x, grid_t = (array.ravel() for array in np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0.01, 1, 99)))
    exact = solution(grid_x[:, None], grid_t[:, None])
    found = onnxtrain.predict(onnxtrain.cut(trainer.model(), at="u"), {"x": column(grid_x), "t": column(grid_t)})[:, 0]
    return {"relative L2 error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}
