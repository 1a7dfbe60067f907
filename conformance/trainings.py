"""Ten steps of whole trainings: as TrainingInfoProto, and as step graphs in standard operators.

The expected values come from the model's forward pass in ONNX's reference evaluator in float64, the definition of the
loss, central differences by every parameter, and the pseudo-code of the optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onnxtrain
from conformance import oracle
from conformance.losses import cross_entropy, labels, normal
from conformance.optimizers import STEPS, complete, updated
from conformance.oracle import Arrays
from conformance.subject import Made, Subject
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.runtime.testing import with_float_type


@dataclass(frozen=True)
class Training:
    """A training task.

    Attributes:
        name: Its name.
        graph: The model as text.
        shapes: Shapes of its parameters.
        inputs: Shape of the batch of each step.
        target: Draws the targets of a step.
        loss: Name of the loss.
        definition: The loss in NumPy.
        optimizer: The optimizer.
        options: Further options of the training model.
        constants: Initializers that are not trained.
        statistics: Running statistics: output of the graph ``moving`` by initializer.
        moving: The model in training mode for the oracle, where it is another than ``graph``.
    """

    name: str
    graph: str
    shapes: Mapping[str, tuple[int, ...]]
    inputs: tuple[int, ...]
    target: Callable[[int], np.ndarray]
    loss: str
    definition: Callable[[np.ndarray, np.ndarray], float]
    optimizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    statistics: Mapping[str, str] = field(default_factory=dict)
    moving: str = ""

    def model(self, text: str) -> onnx.ModelProto:
        """The model with its initial values."""
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
        arrays = {
            name: normal(*shape, seed=number, scale=0.6) for number, (name, shape) in enumerate(self.shapes.items())
        }
        for name, array in {**arrays, **self.constants}.items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model


PLAIN = {"measure": "p-norm", "reweighting": "l2", "p": 2.0, "regularization": 0.0, "max_scale": 0.0}
"""SSGD takes plain steps for biases: with these attributes all weights of a tensor have the same scale."""


def _squares(z: np.ndarray, t: np.ndarray) -> float:
    return float(np.mean((z - t) ** 2))


def _classes(count: int, *shape: int) -> Callable[[int], np.ndarray]:
    return lambda step: labels(*shape, classes=count, seed=step)


def _values(*shape: int) -> Callable[[int], np.ndarray]:
    return lambda step: normal(*shape, seed=100 + step)


MLP = "g (float[N,3] x) => (float[N,2] y) { a = Gemm(x, w1, b1) h = Tanh(a) y = Gemm(h, w2, b2) }"
MLP_SHAPES = {"w1": (3, 4), "b1": (4,), "w2": (4, 2), "b2": (2,)}
BATCH_NORM = (
    "g (float[N,3] x) => (float[N,2] y{more}) {{ a = MatMul(x, w1) {n} = BatchNormalization{mode}(a, s, b, m, v) \
h = Tanh(n) y = MatMul(h, w2) }}"
)


def trainings() -> list[Training]:
    """Every optimizer on a small network, and the kinds of layers that devices train."""
    classes = ("softmax_cross_entropy", cross_entropy)
    squares = ("mean_squared_error", _squares)
    found = [
        Training(f"mlp_{name.lower()}", MLP, MLP_SHAPES, (5, 3), _classes(2, 5), *classes, entry.settings(0.05))
        for name, entry in OPTIMIZERS.items()
    ]
    sgd = OPTIMIZERS["SGD"].settings
    regression = ("regression", MLP, MLP_SHAPES, (5, 3), _values(5, 2), *squares)
    return [
        *found,
        Training(*regression, sgd(0.1)),
        Training("clipped", *regression[1:], sgd(0.1), {"clip_norm": 0.5}),
        Training(
            "convolution",
            "g (float[N,1,6,6] x) => (float[N,3] y) { c = Conv(x, w1, b1) r = Softplus(c) "
            "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) f = Flatten(p) y = Gemm(f, w2, b2) }",
            {"w1": (2, 1, 3, 3), "b1": (2,), "w2": (8, 3), "b2": (3,)},
            (3, 1, 6, 6),
            _classes(3, 3),
            *classes,
            sgd(0.1, momentum=0.9),
        ),
        Training(
            "gru",
            "g (float[N,3,2] x) => (float[N,2] y) { t = Transpose<perm = [1, 0, 2]>(x) "
            "s, h = GRU<hidden_size = 3>(t, w, r, b) l = Squeeze(h, axis) y = MatMul(l, head) }",
            {"w": (1, 9, 2), "r": (1, 9, 3), "b": (1, 18), "head": (3, 2)},
            (4, 3, 2),
            _classes(2, 4),
            *classes,
            OPTIMIZERS["Adam"].settings(0.02),
            constants={"axis": np.array([0])},
        ),
        Training(
            "attention",
            "g (float[N,4,3] x) => (float[N,4,3] y) { n = LayerNormalization(x, s, o) q = MatMul(n, wq) "
            "k = MatMul(n, wk) v = MatMul(n, wv) kt = Transpose<perm = [0, 2, 1]>(k) a = MatMul(q, kt) "
            "p = Softmax<axis = -1>(a) z = MatMul(p, v) y = Add(x, z) }",
            {"s": (3,), "o": (3,), "wq": (3, 3), "wk": (3, 3), "wv": (3, 3)},
            (2, 4, 3),
            _values(2, 4, 3),
            *squares,
            OPTIMIZERS["AdamW"].settings(0.02),
        ),
        Training(
            "batch_norm",
            BATCH_NORM.format(more="", n="n", mode=""),
            {"w1": (3, 4), "s": (4,), "b": (4,), "w2": (4, 2)},
            (6, 3),
            _values(6, 2),
            *squares,
            sgd(0.1),
            {"batch_norm": "train"},
            constants={"m": np.zeros(4, np.float32), "v": np.ones(4, np.float32)},
            statistics={"m": "m1", "v": "v1"},
            moving=BATCH_NORM.format(
                more=", float[4] m1, float[4] v1", n="n, m1, v1", mode="<training_mode = 1, momentum = 0.9>"
            ),
        ),
    ]


def subjects() -> Iterator[Subject]:
    """Every training in both forms: with ``training_info``, and as a step graph."""
    for training in trainings():
        covers = frozenset([type(training.optimizer).schema.name])
        yield Subject("training_info", training.name, covers, functools.partial(_as_written, training), ("",))
        yield Subject("step_graph", training.name, covers, functools.partial(_as_graph, training), ("_expanded",))


SOURCE = (
    "the model in ONNX's reference evaluator in float64, the definition of the loss, central differences by every "
    "parameter, and the pseudo-code of the optimizer, over ten steps"
)


@functools.cache
def _trajectory(name: str) -> tuple[Training, onnx.ModelProto, list[tuple[Arrays, Arrays]]]:
    """The training model, and the feeds and results of each step: states before, and loss and states after it."""
    training = next(training for training in trainings() if training.name == name)
    model = training.model(training.graph)
    written = onnxtrain.training_model(model, loss=training.loss, optimizer=training.optimizer, **training.options)
    schema = type(training.optimizer).schema
    attributes = complete(schema, training.optimizer.node_attributes())
    letters = [state.name for state in schema.used_states(attributes)]
    run = evaluator(with_float_type(training.model(training.moving or training.graph), np.dtype(np.float64)))
    initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = {name: initial[name].astype(np.float64) for name in training.shapes}
    statistics = {name: initial[name].astype(np.float64) for name in training.statistics}
    states = {name: [np.zeros(array.shape) for _ in letters] for name, array in values.items()}
    rate = float(np.float32(training.optimizer.learning_rate))
    steps = []
    counts = {tensor.name: tensor for tensor in written.training_info[0].algorithm.initializer}
    first = int(numpy_helper.to_array(counts["T"]))
    for number in range(STEPS):
        T = first + number
        x, target = normal(*training.inputs, seed=number), training.target(number)
        wide_target = target.astype(np.float64) if target.dtype.kind == "f" else target
        before = _states(values, letters, states, statistics) | {"T": np.array(T, np.int64)}

        def forward(at: Arrays, x: np.ndarray = x) -> list[np.ndarray]:
            return list(run.run(None, {**at, "x": x.astype(np.float64)}))

        def objective(at: Arrays, target: np.ndarray = wide_target) -> float:
            return training.definition(forward(at)[0], target)

        at = {**values, **statistics}
        loss = objective(at)
        gradients = {name: oracle.gradient(objective, at, name) for name in values}
        gradients = _clipped(gradients, training.options.get("clip_norm"))
        if training.statistics:
            moved = dict(zip(training.statistics, forward(at)[1:], strict=True))
        for name, array in values.items():
            chosen = attributes | PLAIN if schema.name == "SSGD" and array.ndim < 2 else attributes
            values[name], *states[name] = updated(schema, rate, T, [array, gradients[name], *states[name]], chosen)
        if training.statistics:
            statistics = moved
        after = _states(values, letters, states, statistics) | {"T": np.array(T + 1, np.int64)}
        feeds = {"x": x, "target": target, "learning_rate": np.array(rate, np.float32), **before}
        feeds = {key: a.astype(np.float32) if a.dtype == np.float64 else a for key, a in feeds.items()}
        steps.append((feeds, {"loss": np.array(loss), **{f"{key}_new": a for key, a in after.items()}}))
    return training, written, steps


def _states(
    values: Arrays, letters: list[str], states: Mapping[str, list[np.ndarray]], statistics: Arrays
) -> dict[str, np.ndarray]:
    of_optimizer = {
        f"{name}/{letter}": array
        for name, arrays in states.items()
        for letter, array in zip(letters, arrays, strict=True)
    }
    return {**values, **of_optimizer, **statistics}


def _clipped(gradients: dict[str, np.ndarray], norm: float | None) -> dict[str, np.ndarray]:
    if norm is None:
        return gradients
    length = math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
    return {name: g * min(1.0, norm / length) for name, g in gradients.items()}


def _as_graph(training: Training) -> Made:
    _, written, steps = _trajectory(training.name)
    graph = onnxtrain.lower(written)
    inputs, outputs = {i.name for i in graph.graph.input}, {o.name for o in graph.graph.output}
    kept = [
        ({k: a for k, a in feeds.items() if k in inputs}, {k: a for k, a in expected.items() if k in outputs})
        for feeds, expected in steps
    ]
    feedback = {name: name.removesuffix("_new") for name in kept[0][1] if name.removesuffix("_new") in inputs}
    return Made(graph, kept, SOURCE, feedback, expanded=graph)


def _as_written(training: Training) -> Made:
    """Inputs are those of the training; outputs the loss and the new value of each binding."""
    _, written, steps = _trajectory(training.name)
    entry = written.training_info[0]
    given = [info.name for info in (*written.graph.input, *entry.algorithm.input)]
    bindings = [pair.key for pair in entry.update_binding]
    kept = [
        (
            {name: feeds[name] for name in given if name in feeds},
            {"loss": expected["loss"], **{f"{key}_new": expected[f"{key}_new"] for key in bindings}},
        )
        for feeds, expected in steps
    ]
    return Made(written, kept, SOURCE)
