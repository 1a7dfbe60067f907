"""A physics-informed network solves Burgers' equation, u_t + u u_x = 0.01 / pi u_xx, with the Gradient operator.

The model computes its own derivatives by `Gradient` nodes of the standard (ai.onnx.preview.training). Its output
`loss`, the mean squared residual at random points, is minimized: by Adam, then by the self-scaled Broyden method in
float64 (J. Urbán et al., "Unveiling the optimization process of physics informed neural networks", 2025). It gets new
points every thousand steps, half of them where the residual is large (C. Wu et al., "A comprehensive study of
non-adaptive and residual-based adaptive sampling", 2023). The form of u has the start, u(x, 0) = -sin(pi x), and the
edges, u(-1, t) = u(1, t) = 0. The result is compared with the analytic solution. Source: Raissi, Perdikaris,
Karniadakis, "Physics-informed neural networks", 2019.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx

import onnxtrain
from network import Network

VISCOSITY = 0.01 / np.pi
WIDTH, LAYERS = 20, 4
ADAM_STEPS, ADAM_POINTS, RATE = 2_000, 500, 5e-3
ROUNDS, STEPS, POINTS, CANDIDATES = 2, 1_000, 2_500, 20_000


def network(seed: int) -> onnx.ModelProto:
    """`x`, `t` [N, 1] to `u` and `residual` [N, 1], and `loss`: u = t (1 - x^2) y - sin(pi x), y a perceptron."""
    net = Network(seed, np.float64)
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
    return net.model({"x": ("N", 1), "t": ("N", 1)}, {"u": ("N", 1), "residual": ("N", 1), "loss": ()})


def solution(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The analytic solution (Cole and Hopf), by Gauss-Hermite quadrature, for t > 0."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    y = np.pi * (x - 2 * np.sqrt(VISCOSITY * t) * z)
    share = weights * np.exp(-np.cos(y) / (2 * np.pi * VISCOSITY))
    return -(np.sin(y) * share).sum(axis=-1) / share.sum(axis=-1)


def predicted(trainer: onnxtrain.Trainer, name: str, points: dict[str, np.ndarray]) -> np.ndarray:
    """Return a value [N] of the network at points."""
    return onnxtrain.predict(onnxtrain.cut(trainer.model(), at=name), points)[:, 0]


def train(options, seed: int) -> dict[str, float]:
    """Train, and return the error relative to the analytic solution on a grid."""
    warm, rounds, steps = (300, 1, 30) if options.quick else (ADAM_STEPS, ROUNDS, STEPS)
    rng = np.random.default_rng(seed)
    trainer = onnxtrain.Trainer(
        network(seed), loss="output:loss", optimizer=onnxtrain.Adam(RATE), train="layer*", seed=seed, threads=1
    )

    def random_points(count: int) -> dict[str, np.ndarray]:
        return {"x": rng.uniform(-1, 1, (count, 1)), "t": rng.uniform(0, 1, (count, 1))}

    def points() -> dict[str, np.ndarray]:
        spread, candidates = random_points(POINTS // 2), random_points(CANDIDATES)
        wrong = np.abs(predicted(trainer, "residual", candidates))
        chosen = rng.choice(CANDIDATES, POINTS // 2, replace=False, p=wrong / wrong.sum())
        return {name: np.concatenate([spread[name], candidates[name][chosen]]) for name in spread}

    for step in range(warm):
        trainer.learning_rate = RATE * 0.5 * (1 + np.cos(np.pi * step / warm))
        trainer.train_step(random_points(ADAM_POINTS))
    for _ in range(rounds):
        onnxtrain.lbfgs.minimize(trainer, points(), steps=steps, history=None)

    grid_x, grid_t = (array.ravel() for array in np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0.01, 1, 99)))
    exact = solution(grid_x[:, None], grid_t[:, None])
    found = predicted(trainer, "u", {"x": grid_x[:, None], "t": grid_t[:, None]})
    return {"relative L2 error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}
