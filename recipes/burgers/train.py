"""A physics-informed network solves Burgers' equation u_t + u u_x = 0.01 / pi u_xx, with the standard's Gradient operator.

The model computes its own derivatives by nodes `Gradient` (ai.onnx.preview.training), and its output `loss` is trained:
the squared residual at points inside, and the squared error at the start, u(x, 0) = -sin(pi x), and at the edges,
u(-1, t) = u(1, t) = 0. The result is compared with the analytic solution. Source: Raissi, Perdikaris, Karniadakis,
"Physics-informed neural networks", 2019.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

VISCOSITY = 0.01 / np.pi
STEPS, INSIDE, GIVEN, WIDTH, LAYERS = 15_000, 2500, 250, 20, 8


def network(seed: int) -> onnx.ModelProto:
    """`x`, `t` [N, 1] to `u` [N, 1] and, with `x0`, `t0`, `u0` [M, 1] of start and edges, the scalar `loss`."""
    rng = np.random.default_rng(seed)
    nodes, initializers = [], []
    sizes = [2, *[WIDTH] * LAYERS, 1]
    for layer, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False)):
        weight = rng.normal(0, (2 / (inputs + outputs)) ** 0.5, (inputs, outputs)).astype(np.float32)
        initializers.append(numpy_helper.from_array(weight, f"layer{layer}.weight"))
        initializers.append(numpy_helper.from_array(np.zeros(outputs, np.float32), f"layer{layer}.bias"))

    def node(operator: str, *inputs: str, output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def apply(x: str, t: str, output: str) -> str:
        value = node("Concat", x, t, output=f"{output}.input", axis=1)
        for layer in range(LAYERS + 1):
            last = layer == LAYERS
            names = value, f"layer{layer}.weight", f"layer{layer}.bias"
            value = node("Gemm", *names, output=output if last else f"{output}.{layer}")
            value = value if last else node("Tanh", value, output=f"{value}.tanh")
        return value

    def gradient(y: str, *xs: str) -> None:
        nodes.append(
            helper.make_node(
                "Gradient", list(xs), [f"{y}_{x}" for x in xs], domain="ai.onnx.preview.training", xs=xs, y=y
            )
        )

    def mean_square(value: str) -> str:
        return node("ReduceMean", node("Mul", value, value, output=f"{value}.square"), output=f"{value}.mean", keepdims=0)

    apply("x", "t", "u")
    gradient("u", "x", "t")
    gradient("u_x", "x")
    initializers.append(numpy_helper.from_array(np.array(VISCOSITY, np.float32), "viscosity"))
    node("Mul", "u", "u_x", output="advection")
    node("Mul", "viscosity", "u_x_x", output="diffusion")
    node("Sub", node("Add", "u_t", "advection", output="left"), "diffusion", output="residual")
    node("Sub", apply("x0", "t0", "v"), "u0", output="error")
    node("Add", mean_square("residual"), mean_square("error"), output="loss")

    def info(name: str, *shape: object) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs = [info("x", "N", 1), info("t", "N", 1), *(info(name, "M", 1) for name in ("x0", "t0", "u0"))]
    graph = helper.make_graph(nodes, "burgers", inputs, [info("u", "N", 1), info("loss")], initializers)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.preview.training", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=8)


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
        network(seed), loss="output:loss", optimizer=onnxtrain.Adam(1e-3), train="layer*", seed=seed, threads=1
    )
    feeds = {"x": x, "t": t, **given}
    for step in range(steps):
        trainer.learning_rate = 2e-3 * (1e-2 ** (step / steps))
        trainer.train_step(feeds)

    grid_x, grid_t = (array.ravel() for array in np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0.01, 1, 99)))
    exact = solution(grid_x[:, None], grid_t[:, None])
    found = onnxtrain.predict(onnxtrain.cut(trainer.model(), at="u"), {"x": column(grid_x), "t": column(grid_t)})[:, 0]
    return {"relative L2 error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}
