"""A physics-informed network solves Burgers' equation, u_t + u u_x = 0.01 / pi u_xx, with the Gradient operator.

The model computes its own derivatives by `Gradient` nodes of the standard (ai.onnx.preview.training). Its output
`loss` is minimized: the squared residual at points inside, and the squared error at the start, u(x, 0) = -sin(pi x),
and at the edges, u(-1, t) = u(1, t) = 0. The result is compared with the analytic solution. Source: Raissi, Perdikaris,
Karniadakis, "Physics-informed neural networks", 2019.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx

import onnxtrain
from network import Network

VISCOSITY = 0.01 / np.pi
STEPS, INSIDE, GIVEN, WIDTH, LAYERS = 15_000, 2500, 250, 20, 8


def network(seed: int) -> onnx.ModelProto:
    """`x`, `t` [N, 1] to `u` [N, 1] and, with `x0`, `t0`, `u0` [M, 1] of start and edges, the scalar `loss`."""
    net = Network(seed)
    sizes = [2, *[WIDTH] * LAYERS, 1]
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        net.normal(f"layer{layer}.weight", (2 / (inputs + outputs)) ** 0.5, inputs, outputs)
        net.zeros(f"layer{layer}.bias", outputs)

    def apply(x: str, t: str, output: str) -> str:
        value = net.node("Concat", x, t, output=f"{output}.input", axis=1)
        for layer in range(LAYERS + 1):
            last = layer == LAYERS
            names = value, f"layer{layer}.weight", f"layer{layer}.bias"
            value = net.node("Gemm", *names, output=output if last else f"{output}.{layer}")
            value = value if last else net.node("Tanh", value, output=f"{value}.tanh")
        return value

    def mean_square(value: str) -> str:
        square = net.node("Mul", value, value, output=f"{value}.square")
        return net.node("ReduceMean", square, output=f"{value}.mean", keepdims=0)

    apply("x", "t", "u")
    net.gradient("u", "x", "t")
    net.gradient("u_x", "x")
    net.constant("viscosity", VISCOSITY)
    net.node("Mul", "u", "u_x", output="advection")
    net.node("Mul", "viscosity", "u_x_x", output="diffusion")
    net.node("Sub", net.node("Add", "u_t", "advection", output="left"), "diffusion", output="residual")
    net.node("Sub", apply("x0", "t0", "v"), "u0", output="error")
    net.node("Add", mean_square("residual"), mean_square("error"), output="loss")
    points = {"x": ("N", 1), "t": ("N", 1), "x0": ("M", 1), "t0": ("M", 1), "u0": ("M", 1)}
    return net.model(points, {"u": ("N", 1), "loss": ()})


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

    x, t = column(rng.uniform(-1, 1, INSIDE)), column(rng.uniform(0, 1, INSIDE))
    start = rng.uniform(-1, 1, GIVEN)
    edges = rng.choice([-1.0, 1.0], GIVEN)
    given = {
        "x0": column(np.concatenate([start, edges])),
        "t0": column(np.concatenate([np.zeros(GIVEN), rng.uniform(0, 1, GIVEN)])),
        "u0": column(np.concatenate([-np.sin(np.pi * start), np.zeros(GIVEN)])),
    }
    trainer = onnxtrain.Trainer(
        network(seed), loss="output:loss", optimizer=onnxtrain.Adam(1e-3), freeze="viscosity", seed=seed, threads=1
    )
    feeds = {"x": x, "t": t, **given}
    for step in range(steps):
        trainer.learning_rate = 2e-3 * (1e-2 ** (step / steps))
        trainer.train_step(feeds)

    grid_x, grid_t = (array.ravel() for array in np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0.01, 1, 99)))
    exact = solution(grid_x[:, None], grid_t[:, None])
    found = onnxtrain.predict(onnxtrain.cut(trainer.model(), at="u"), {"x": column(grid_x), "t": column(grid_t)})[:, 0]
    return {"relative L2 error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}
