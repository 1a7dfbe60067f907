"""Random calls of the gradients of single operators: of rows, of elements, of normalizations."""

from __future__ import annotations

import functools
import math

import gradient_reference
import numpy as np
from kernel_case import EXTREMES, MOST, Case, any_shape, element_type, floating, pick, some


def gather(rng: np.random.Generator) -> Case:
    shape, indices_shape, dtype = (
        some(rng, 0, 6, int(rng.integers(1, 4))),
        some(rng, 0, 5, int(rng.integers(0, 3))),
        element_type(rng),
    )
    axis = int(rng.integers(-len(shape), len(shape)))
    at = axis % len(shape)
    size = shape[at]
    indices = rng.integers(-size, max(size, 1), indices_shape) if size else np.zeros((0,), np.int64)
    dy = floating(rng, (*shape[:at], *indices.shape, *shape[at + 1 :]), dtype)
    given = np.array(shape, np.int64)
    legal = True
    if rng.random() < 0.4:
        way, number = int(rng.integers(3)), pick(rng, *EXTREMES)
        legal = False
        if way == 0:
            given[int(rng.integers(len(shape)))] = number
        elif way == 1 and indices.size:
            indices.flat[0] = number
        else:
            axis = number
    feeds = {"dy": dy, "indices": np.asarray(indices, np.int64), "shape": given}
    if rng.random() < 0.4:
        feeds["other"] = floating(rng, shape if legal or rng.random() < 0.5 else (*shape, 1), dtype)
    if rng.random() < 0.3:
        feeds.setdefault("other", np.zeros(0, dtype))
        rows = int(rng.integers(0, 5))
        feeds["dy"] = dy = floating(rng, (*shape[:at], rows, *shape[at + 1 :]), dtype)
        wrong = rng.random() < 0.3
        feeds["taken"] = (
            rng.integers(-rows - wrong, rows + wrong, indices.shape) if rows else np.zeros(indices.shape, int)
        )
        legal = legal and bool(((feeds["taken"] >= -rows) & (feeds["taken"] < rows)).all())
    other, taken = feeds.get("other"), feeds.get("taken")
    expected = (lambda: gradient_reference.gather(dy, indices, shape, other, taken, axis)) if legal else None
    return Case("GatherGradient", feeds, {"axis": axis}, expected=expected)


def gather_concat(rng: np.random.Generator) -> Case:
    (rows, width, count, each, own), dtype = some(rng, 0, 6, 5), element_type(rng)
    wrong = rng.random() < 0.3
    indices = rng.integers(-rows - wrong, rows + wrong, (count, each)) if rows else np.zeros((count, each), np.int64)
    feeds = {"data": floating(rng, (rows, width), dtype), "indices": indices, "x": floating(rng, (count, own), dtype)}
    legal = bool(((indices >= -rows) & (indices < rows)).all())
    if rng.random() < 0.2:
        name = pick(rng, "data", "x")
        feeds[name], legal = floating(rng, some(rng, 1, 4, int(rng.integers(0, 4))), dtype), False
    before = pick(rng, 0, 1)
    expected = (lambda: [gradient_reference.gather_concat(*feeds.values(), before)]) if legal else None
    return Case("GatherConcat", feeds, {"before": before}, expected=expected)


def softmax(rng: np.random.Generator) -> Case:
    operator, shape, dtype = pick(rng, "SoftmaxGradient", "LogSoftmaxGradient"), any_shape(rng), element_type(rng)
    axis = pick(rng, int(rng.integers(-len(shape), len(shape))), pick(rng, *EXTREMES))
    legal = -len(shape) <= axis < len(shape) and max(shape) < 100
    dy, y = floating(rng, shape, dtype), -abs(floating(rng, shape, dtype))
    rule = gradient_reference.softmax if operator == "SoftmaxGradient" else gradient_reference.log_softmax
    expected = (lambda: rule(dy, y, axis)) if legal else None
    return Case(operator, {"dy": dy, "y": y}, {"axis": axis}, expected=expected)


def log_softmax(rng: np.random.Generator) -> Case:
    shape, dtype = any_shape(rng), element_type(rng)
    axis = pick(rng, int(rng.integers(-len(shape), len(shape))), pick(rng, *EXTREMES))
    legal = -len(shape) <= axis < len(shape) and max(shape) < 100 and 0 not in shape
    x = floating(rng, shape, dtype)
    expected = (lambda: gradient_reference.log_softmax_forward(x, axis)) if legal else None
    return Case("LogSoftmax", {"x": x}, {"axis": axis}, expected=expected)


def resize(rng: np.random.Generator) -> Case:
    dtype, transposed = element_type(rng), int(rng.integers(2))
    sizes, taps = some(rng, 0 if rng.random() < 0.1 else 1, 30, 4), some(rng, 0, 4, 2)
    rows, columns = (gradient_reference.band(*sizes[at : at + 2], taps[at // 2], dtype, at) for at in (0, 2))
    shape = (*some(rng, 1, 4, int(rng.integers(0, 3))), rows.shape[transposed], columns.shape[transposed])
    legal = rng.random() < 0.8
    x = floating(rng, shape if legal else pick(rng, shape[1:], (*shape, 1), any_shape(rng)), dtype)
    legal = legal or x.shape == shape
    expected = (lambda: gradient_reference.resize_by_matrices(x, rows, columns, transposed)) if legal else None
    feeds = {"x": x, "rows": rows, "columns": columns}
    return Case("ResizeByMatrices", feeds, {"transposed": transposed}, expected=expected)


def cross_entropy(rng: np.random.Generator) -> Case:
    shape, dtype = some(rng, 0 if rng.random() < 0.2 else 1, 9, int(rng.integers(2, 4))), element_type(rng)
    by_label = (shape[0], 1, *shape[2:])
    labels = rng.integers(0, max(1, shape[1]), by_label)
    wrong = labels.size > 0 and rng.random() < 0.2
    if wrong:
        labels.flat[-1] = pick(rng, -1, shape[1], *EXTREMES[3:])
    log_probability = -abs(floating(rng, shape, dtype))
    dy = floating(rng, pick(rng, (), by_label), dtype)
    legal = not wrong and shape[1] > 0
    expected = (lambda: gradient_reference.softmax_cross_entropy(dy, log_probability, labels)) if legal else None
    feeds = {"dy": dy, "log_probability": log_probability, "labels": labels}
    return Case("SoftmaxCrossEntropyGradient", feeds, {}, expected=expected)


def elementwise(rng: np.random.Generator) -> Case:
    operator, shape, dtype = (
        pick(rng, "ReluGradient", "ClipGradient", "GeluGradient"),
        any_shape(rng),
        element_type(rng),
    )
    dy, x = floating(rng, shape, dtype), floating(rng, shape, dtype)
    if operator == "ReluGradient":
        return Case(operator, {"dy": dy, "y": x}, {}, expected=lambda: gradient_reference.relu(dy, x))
    if operator == "GeluGradient":
        approximate = pick(rng, "none", "tanh", "sigmoid")
        return Case(
            operator,
            {"dy": dy, "x": x},
            {"approximate": approximate},
            2,
            lambda: gradient_reference.gelu(dy, x, approximate),
        )
    low, high = (pick(rng, None, floating(rng, (), dtype)) for _ in range(2))
    feeds = {"dy": dy, "x": x, "min": low, "max": high}
    return Case(operator, feeds, {}, 2, lambda: gradient_reference.clip(dy, x, low, high))


def normalization(rng: np.random.Generator) -> Case:
    operator, shape, dtype = (
        pick(rng, "LayerNormalizationGradient", "RMSNormalizationGradient"),
        any_shape(rng),
        element_type(rng),
    )
    axis = pick(rng, int(rng.integers(-len(shape), len(shape))), pick(rng, *EXTREMES))
    legal = -len(shape) <= axis < len(shape) and 0 not in shape
    inner = shape[axis % len(shape) :]
    dy, x = floating(rng, shape, dtype), floating(rng, shape, dtype)
    scale = floating(rng, inner if math.prod(inner) <= MOST else (1,), dtype)
    feeds, outputs = {"dy": dy, "x": x, "scale": scale}, 3
    rule = functools.partial(gradient_reference.rms_normalization, dy, x, scale)
    if operator.startswith("Layer"):
        feeds["bias"], outputs = pick(rng, None, floating(rng, scale.shape, dtype)), 4
        bias = 0.0 if feeds["bias"] is None else feeds["bias"]
        rule = functools.partial(gradient_reference.layer_normalization, dy, x, scale, bias)
    few = math.prod(inner) < 4  # a variance of next to nothing magnifies every rounding
    expected = (lambda: list(rule(axis=axis))) if legal and not few else None
    return Case(operator, feeds, {"axis": axis}, outputs, expected)


def batch_normalization(rng: np.random.Generator) -> Case:
    shape, dtype = any_shape(rng), element_type(rng)
    channels = (shape[1] if len(shape) > 1 and shape[1] <= MOST else 1,)
    dy, x = floating(rng, shape, dtype), floating(rng, shape, dtype)
    scale, mean = floating(rng, channels, dtype), floating(rng, channels, dtype)
    variance = abs(floating(rng, channels, dtype)) + dtype(1)
    given = rng.random() < 0.5
    feeds = {"dy": dy, "x": x, "scale": scale, "mean": mean if given else None, "variance": variance if given else None}
    legal = len(shape) > 1 and 0 not in shape and (given or math.prod(shape) // shape[1] > 3)

    def expected() -> list[np.ndarray]:
        return list(gradient_reference.batch_normalization(*feeds.values()))

    return Case("BatchNormalizationGradient", feeds, {}, 3, expected if legal else None)


def batch_normalization_with_activation(rng: np.random.Generator) -> Case:
    """Forwards, or the gradient from arbitrary statistics."""
    shape, dtype = any_shape(rng), element_type(rng)
    size = (shape[1] if len(shape) > 1 and shape[1] <= MOST else 1,)
    x, scale, bias, mean = (floating(rng, each, dtype) for each in (shape, size, size, size))
    variance = abs(floating(rng, size, dtype)) + dtype(1)
    activation = pick(rng, "", "Relu", "Clip", "HardSwish")
    attributes = {"activation": activation, **({"low": 0.0, "high": 1.5} if activation == "Clip" else {})}
    if rng.random() < 0.5:
        kept = {"mean": np.stack([mean, mean * dtype(0)]), "variance": np.stack([variance, variance * dtype(0)])}
        feeds = {"dy": floating(rng, shape, dtype), "x": x, "scale": scale, **kept, "bias": bias}
        if rng.random() < 0.4:
            more = 0 if 0 in shape else int(rng.integers(-1, 3))  # other axes may have sizes that no memory holds
            feeds["other"] = floating(
                rng, (*shape[:1], max(0, shape[1] + more), *shape[2:]) if len(shape) > 1 else shape, dtype
            )
        return Case("BatchNormalizationGradient", feeds, {"training_mode": 1, **attributes}, 4)
    addend = pick(rng, None, floating(rng, shape, dtype))
    feeds = {"x": x, "scale": scale, "bias": bias, "mean": mean, "variance": variance, "addend": addend}
    legal = len(shape) > 1 and 0 not in shape and math.prod(shape) // shape[1] > 3

    def expected() -> list[np.ndarray]:
        return gradient_reference.batch_normalization_forward(*feeds.values(), activation)

    return Case("BatchNormalization", feeds, attributes, 5, expected if legal else None)


CHAINED_FUNCTIONS = [
    *("Abs", "Atanh", "Cast", "Cos", "Cosh", "Exp", "Log", "Log1p", "Neg", "Relu", "Sigmoid", "Sign", "Sin", "Sinh"),
    "Tan",
]
CHAINED = [
    *CHAINED_FUNCTIONS,
    *("Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mod", "Mul", "Pow", "Sub", "Where"),
]


def chain(rng: np.random.Generator) -> Case:
    shape, dtype = any_shape(rng), element_type(rng)
    steps: list[str] = []
    for place in range(int(rng.integers(1, 17))):
        names = [f"x{i}" for i in range(3)] + [f"s{i}" for i in range(place)]
        operator = pick(rng, *CHAINED)
        count = {"Where": 3, **dict.fromkeys(CHAINED_FUNCTIONS, 1)}.get(operator, 2)
        steps.append(" ".join([operator, *(pick(rng, *names) for _ in range(count))]))
    if rng.random() < 0.3:
        steps.append(
            pick(rng, "Erf x0", "Add x0", "Neg s99", "Neg x9", "Neg", "", "Neg y0", "Neg x-1", "Neg x99999999999999")
        )
    feeds = {"x0": floating(rng, shape, dtype), "x1": floating(rng, shape, dtype), "x2": floating(rng, (), dtype)}
    # Without a reference: comparisons of nearly equal numbers go either way.
    return Case("Elementwise", feeds, {"program": ";".join(steps)})
