"""The fused gradient operators in NumPy's float64, and one-node models of them on ONNX Runtime."""

from __future__ import annotations

import itertools
import math

import numpy as np
from onnx import helper
from optimizer_sessions import element_type, session

EPSILON = float(np.float32(1e-5))  # attributes are single precision
MOMENTUM = float(np.float32(0.9))  # attributes are of single precision

INPUTS = {
    "BatchNormalizationGradient": ("dy", "x", "scale", "mean", "variance", "bias", "other"),
    "ClipGradient": ("dy", "x", "min", "max"),
    "CountedDropout": ("x", "ratio", "count"),
    "DetGradient": ("dy", "x"),
    "Elementwise": ("x0", "x1", "x2"),
    "Fourier": ("x",),
    "GatherGradient": ("dy", "indices", "shape", "other", "taken"),
    "GeluGradient": ("dy", "x", "factor"),
    "GridSample": ("x", "grid"),
    "GridSampleGradient": ("dy", "x", "grid"),
    "LayerNormalizationGradient": ("dy", "x", "scale", "bias"),
    "LogSoftmax": ("x",),
    "LogSoftmaxGradient": ("dy", "y"),
    "MatMulNBits": ("x", "integers", "scales", "packed_zeros", "zeros"),
    "MatMulNBitsGradient": ("dy", "integers", "scales", "packed_zeros", "zeros"),
    "MaxPoolGradient": ("dy", "x"),
    "RMSNormalizationGradient": ("dy", "x", "scale"),
    "ReluGradient": ("dy", "y"),
    "ResizeByMatrices": ("x", "rows", "columns"),
    "SoftmaxCrossEntropyGradient": ("dy", "log_probability", "labels"),
    "SoftmaxGradient": ("dy", "y"),
}
OUTPUTS = {
    "BatchNormalizationGradient": 3,
    "ClipGradient": 2,
    "GeluGradient": 2,
    "GridSampleGradient": 2,
    "LayerNormalizationGradient": 4,
    "RMSNormalizationGradient": 3,
}


def run(path, operator, *inputs, threads=1, wanted=None, **attributes):
    """The outputs of one node; inputs that are None are left out, as are outputs that are not wanted."""
    names = [name if array is not None else "" for name, array in zip(INPUTS[operator], inputs, strict=False)]
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    every = [f"output{index}" for index in range(OUTPUTS.get(operator, 1))]
    kept = every if wanted is None else [every[index] for index in wanted]
    node = helper.make_node(
        operator, names, [name if name in kept else "" for name in every], domain="onnxtrain", **attributes
    )
    kind = element_type([array for array in inputs if array is not None and array.dtype.kind == "f"][-1])
    made = session(
        path,
        [node],
        [(name, element_type(array), None) for name, array in feeds.items()],
        [(name, kind, None) for name in kept],
        threads,
    )
    return made.run(None, feeds)


def wide(*arrays):
    return [None if array is None else np.asarray(array, np.float64) for array in arrays]


STEPS = {
    "Abs": np.abs,
    "Add": np.add,
    "Cast": np.positive,
    "Div": np.divide,
    "Greater": np.greater,
    "Less": np.less,
    "Mul": np.multiply,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Log": np.log,
    "Min": np.minimum,
    "Mod": np.fmod,
    "Pow": np.power,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Tan": np.tan,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sub": np.subtract,
    "Where": lambda condition, a, b: np.where(condition != 0, a, b),
}


def elementwise(*inputs, program):
    """y: the last step of a chain."""
    values = {f"x{place}": array for place, array in enumerate(wide(*inputs))}
    for place, step in enumerate(program.split(";")):
        name, *operands = step.split()
        values[f"s{place}"] = np.asarray(STEPS[name](*(values[each] for each in operands)), np.float64)
    return [values[f"s{place}"]]


def normalized_gradient(dy, x, scale, axes, epsilon, centred=True):
    """dx, and dy x̂, for statistics over the axes and a scale that broadcasts."""
    d = x - x.mean(axes, keepdims=True) if centred else x
    r = 1 / np.sqrt((d * d).mean(axes, keepdims=True) + epsilon)
    g = dy * scale
    mean = g.mean(axes, keepdims=True) if centred else 0
    return r * (g - mean - d * r * r * (g * d).mean(axes, keepdims=True)), dy * d * r


def mixed(h):
    """lowbias32 over uint32."""
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def counted_dropout(x, ratio, count, seed):
    def word(number):
        return np.full(1, int(number) & 0xFFFFFFFF, np.uint32)

    key = mixed(mixed(mixed(word(seed)) ^ word(seed >> 32)) ^ word(count.item()))
    h = np.arange(x.size, dtype=np.uint32) * np.uint32(0x9E3779B1) + key
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = (h ^ h >> np.uint32(15) ^ mixed(key ^ np.uint32(0x85EBCA6B))) * np.uint32(0x846CA68B)
    kept = (h >> np.uint32(1)).reshape(x.shape) >= int(np.float64(ratio) * 2**31)
    return [np.where(kept, np.float64(x) / (1 - np.float64(ratio)), 0)]


def batch_normalization(dy, x, scale, mean=None, variance=None, epsilon=EPSILON):
    dy, x, scale, mean, variance = wide(dy, x, scale, mean, variance)
    axes = (0, *range(2, x.ndim))
    column = (-1, *[1] * (x.ndim - 2))
    if mean is None:
        dx, products = normalized_gradient(dy, x, scale.reshape(column), axes, epsilon)
    else:
        r = 1 / np.sqrt(variance.reshape(column) + epsilon)
        dx, products = dy * scale.reshape(column) * r, dy * (x - mean.reshape(column)) * r
    return dx, products.sum(axes), dy.sum(axes)


def activated(n, activation="", low=0.0, high=1.5):
    """An activation and its slope, in float64."""
    if activation == "Relu":
        return np.maximum(n, 0), (n > 0).astype(float)
    if activation == "Clip":
        return np.clip(n, low, high), ((n >= low) & (n <= high)).astype(float)
    if activation == "HardSwish":
        return n * np.clip(n / 6 + 0.5, 0, 1), np.where(abs(n) < 3, n / 3 + 0.5, n > 0)
    return n, np.ones_like(n)


def batch_normalization_forward(x, scale, bias, mean, variance, addend=None, activation="", momentum=MOMENTUM):
    """y, the running statistics, and those of the batch."""
    x, scale, bias, mean, variance, addend = wide(x, scale, bias, mean, variance, addend)
    axes, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    own_mean, own_variance = x.mean(axes), x.var(axes)
    y = (x - own_mean.reshape(column)) / np.sqrt(own_variance.reshape(column) + EPSILON)
    y = y * scale.reshape(column) + bias.reshape(column) + (0 if addend is None else addend)
    running = [momentum * old + (1 - momentum) * own for old, own in ((mean, own_mean), (variance, own_variance))]
    kept = [np.stack([own, np.zeros_like(own)]) for own in (own_mean, own_variance)]
    return [activated(y, activation)[0], *running, *kept]


def layer_normalization(dy, x, scale, bias=0.0, axis=-1, epsilon=EPSILON):
    dy, x, scale = wide(dy, x, scale)
    axis %= x.ndim
    axes, outer = tuple(range(axis, x.ndim)), tuple(range(axis))
    dx, products = normalized_gradient(dy, x, scale, axes, epsilon)
    centred = x - x.mean(axes, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon) * scale + bias
    return dx, products.sum(outer), dy.sum(outer), y


def rms_normalization(dy, x, scale, axis=-1, epsilon=EPSILON):
    dy, x, scale = wide(dy, x, scale)
    axis %= x.ndim
    axes = tuple(range(axis, x.ndim))
    dx, products = normalized_gradient(dy, x, scale, axes, epsilon, centred=False)
    return dx, products.sum(tuple(range(axis))), x / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon) * scale


def band(size, count, taps, dtype, seed=0):
    """A matrix [size, count] whose columns have at most so many elements side by side that are not zero."""
    rng = np.random.default_rng(seed)
    matrix = np.zeros((size, count), dtype)
    for column in range(count):
        first = int(rng.integers(0, max(size - taps, 0) + 1))
        matrix[first : first + taps, column] = rng.standard_normal(min(taps, size))
    return matrix


def resize_by_matrices(x, rows, columns, transposed=0):
    x, rows, columns = wide(x, rows, columns)
    return [rows @ x @ columns.T if transposed else rows.T @ x @ columns]


def log_softmax_forward(x, axis=-1):
    (x,) = wide(x)
    shifted = x - x.max(axis, keepdims=True)
    return [shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))]


def determinant(dy, x):
    """dy times the cofactors of x."""
    dy, x = wide(dy, x)
    cofactors, size = np.zeros_like(x), x.shape[-1]
    for i, j in itertools.product(range(size), repeat=2):
        minor = np.delete(np.delete(x, i, -2), j, -1)
        cofactors[..., i, j] = (-1) ** (i + j) * np.linalg.det(minor)
    return [dy[..., None, None] * cofactors]


def fourier(x, axis, length, bins, parts, inverse=0, divided=0):
    (x,) = wide(x)
    given = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    found = np.fft.ifft(given, length, axis) * length if inverse else np.fft.fft(given, length, axis)
    found = np.take(found, range(bins), axis) / (length if divided else 1)
    return [np.stack([found.real, found.imag], -1)[..., :parts]]


def axis_taps(points, size, padding_mode, align_corners):
    """Indices, weights and slopes [2, points] of the two pixels near each point, along one axis."""
    low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
    slope = np.full_like(points, (size - 1 if align_corners else size) / 2)
    position = (points + 1) * slope - (0 if align_corners else 0.5)

    def reflected(value):
        span = max(high - low, 1)
        distance, before = np.abs(value - low), value < low
        odd = distance // span % 2 == 1
        return np.where(odd, span - distance % span, distance % span) + low, np.where(odd != before, -1, 1)

    if padding_mode == "reflection":
        position, sign = reflected(position)
        slope = slope * sign
    elif padding_mode == "border":
        slope = np.where((position < low) | (position > high), 0, slope)
        position = np.where((position < low) | (position > high), np.clip(position, 0, size - 1), position)
    first = np.floor(position)
    index = np.stack([first, first + 1])
    weight, change = np.stack([1 - (position - first), position - first]), np.stack([-slope, slope])
    if padding_mode == "zeros":
        inside = (index >= 0) & (index < size)
        weight, change = weight * inside, change * inside
    elif padding_mode == "reflection":
        index = reflected(index)[0]
    return np.clip(index, 0, size - 1).astype(int), weight, change


def grid_sample(x, grid, padding_mode="zeros", align_corners=0):
    return _sampled(x, grid, None, padding_mode, align_corners)[:1]


def grid_sample_gradient(dy, x, grid, padding_mode="zeros", align_corners=0):
    return _sampled(x, grid, dy, padding_mode, align_corners)[1:]


def _sampled(x, grid, dy, padding_mode, align_corners):
    x, grid = wide(x, grid)
    dy = np.zeros((*x.shape[:2], *grid.shape[1:3])) if dy is None else wide(dy)[0]
    y, dx, dgrid = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(grid)
    for n in range(len(x)):
        columns = axis_taps(grid[n, ..., 0], x.shape[3], padding_mode, align_corners)
        rows = axis_taps(grid[n, ..., 1], x.shape[2], padding_mode, align_corners)
        for i, j in itertools.product(range(2), repeat=2):
            at, weight = (rows[0][i], columns[0][j]), rows[1][i] * columns[1][j]
            y[n] += weight * x[n][:, *at]
            for channel in range(x.shape[1]):
                np.add.at(dx[n, channel], at, weight * dy[n, channel])
            pull = (x[n][:, *at] * dy[n]).sum(0)
            dgrid[n] += np.stack([rows[1][i] * columns[2][j] * pull, rows[2][i] * columns[1][j] * pull], -1)
    return [y, dx, dgrid]


def softmax(dy, y, axis=-1):
    dy, y = wide(dy, y)
    return [y * (dy - (dy * y).sum(axis, keepdims=True))]


def log_softmax(dy, y, axis=-1):
    dy, y = wide(dy, y)
    return [dy - np.exp(y) * dy.sum(axis, keepdims=True)]


def softmax_cross_entropy(dy, log_probability, labels):
    dy, log_probability = wide(dy, log_probability)
    classes = np.arange(log_probability.shape[1]).reshape(1, -1, *[1] * (log_probability.ndim - 2))
    return [(np.exp(log_probability) - (classes == labels)) * dy]


def clip(dy, x, low=None, high=None):
    inside = np.ones(x.shape, bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    raised = x if low is None else np.maximum(x, low)
    return [np.where(inside, dy, 0), raised if high is None else np.minimum(raised, high)]


def relu(dy, y):
    return [dy * (y > 0)]


def gelu(dy, x, approximate="none", alpha=1.0):
    dy, x = wide(dy, x)
    if approximate == "sigmoid":
        alpha = float(np.float32(alpha))
        probability = np.exp(-np.logaddexp(0, -alpha * x))
        return [dy * (probability + alpha * x * probability * np.exp(-np.logaddexp(0, alpha * x))), x * probability]
    if approximate == "tanh":
        factor, cubic = np.sqrt(2 / np.pi), 0.044715
        t = np.tanh(factor * (x + cubic * x**3))
        dx = dy * 0.5 * (1 + t + x * (1 - t * t) * factor * (1 + 3 * cubic * x * x))
        return [dx, 0.5 * x * (1 + t)]
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    probability = 0.5 * np.vectorize(math.erfc, [float])(-x / np.sqrt(2))
    return [dy * (probability + x * density), x * probability]


def gather(dy, indices, shape, other=None, taken=None, axis=0):
    axis %= len(shape)
    table = np.zeros(shape) if other is None or not np.size(other) else np.array(other, np.float64)
    rows = np.moveaxis(table, axis, 0)
    added = np.asarray(dy, np.float64) if taken is None else np.take(np.asarray(dy, np.float64), taken, axis)
    added = added.reshape(*shape[:axis], indices.size, *shape[axis + 1 :])
    np.add.at(rows, indices.reshape(-1), np.moveaxis(added, axis, 0))
    return [table]


def gather_concat(data, indices, x, before=1):
    rows = data[indices].reshape(len(indices), indices.shape[1] * data.shape[1])
    return np.concatenate([x, rows] if before else [rows, x], 1)


def max_pool(dy, x, kernel_shape, strides=None, dilations=None, pads=None, **_):
    """Window by window, element by element."""
    axes = len(kernel_shape)
    strides, dilations = strides or [1] * axes, dilations or [1] * axes
    begin = (pads or [0] * 2 * axes)[:axes]
    dx = np.zeros(x.shape)
    for place in np.ndindex(*dy.shape):
        image, window = place[:2], place[2:]
        best = None
        for position in itertools.product(*map(range, kernel_shape)):
            at = tuple(
                w * s - b + p * d for w, s, b, p, d in zip(window, strides, begin, position, dilations, strict=True)
            )
            if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)) and (
                best is None or x[image + at] > x[image + best]
            ):
                best = at
        if best is not None:
            dx[image + best] += dy[place]
    return [dx]


def windows(size, kernel, stride=1, dilation=1, begin=0, end=0, ceil=False):
    """Number of windows along an axis."""
    room = size + begin + end - dilation * (kernel - 1) - 1
    return (room + (stride - 1 if ceil else 0)) // stride + 1


def draw(shape, dtype, seed, shift=0.0):
    return np.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) + shift, dtype)


def assert_near(found, expected, scale=1.0):
    """Within 1e-6 (float) or 1e-14 (double) of the largest value, times ``scale``."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        limit = scale * (1e-6 if a.dtype == np.float32 else 1e-14)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit * max(1.0, float(np.abs(b).max(initial=0))))


def positive_rows(shape, dtype, seed, axis):
    e = np.exp(np.random.default_rng((seed, *shape)).standard_normal(shape))
    return np.asarray(e / e.sum(axis, keepdims=True), dtype)
