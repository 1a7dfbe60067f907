"""Random calls of the native kernels: sizes and attributes that are ordinary, at the edges, or absurd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import attention_reference
import bfloat16_reference
import few_bits_reference
import gradient_reference
import numpy as np
from convolution_reference import Convolution
from recurrent_reference import Recurrent
from rounding_reference import BFLOAT16

EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, 2**31 + 1, 2**60, 2**62, 2**63 - 1, -(2**63))
"""Numbers at which products and sums of sizes wrap."""

MOST = 100_000
"""Elements of an array up to which results are compared with a reference."""


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        operator: Its name.
        feeds: Its inputs by name, in order; ``None`` for one that is left out.
        attributes: Its attributes.
        outputs: How many it has.
        expected: What it must compute, where that is known; an extreme attribute may be refused all the same.
        domain: Its domain.
        types: The element types of its outputs, where they are not all that of the last floating input.
    """

    operator: str
    feeds: dict[str, np.ndarray | None]
    attributes: dict[str, Any]
    outputs: int = 1
    expected: Callable[[], list[np.ndarray]] | None = None
    domain: str = "onnxtrain"
    types: tuple[Any, ...] | None = None


def pick(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def some(rng: np.random.Generator, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(low, high + 1, count))


def floating(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype) if 0 in shape else np.asarray(rng.standard_normal(shape), dtype)


def _element_type(rng: np.random.Generator) -> Any:
    return pick(rng, np.float32, np.float64)


def _replaced(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def _with_extremes(rng: np.random.Generator, case: Convolution) -> Convolution:
    """An extreme number in one list, or, so that there are windows all the same, in several that fit each other."""
    rank, way = len(case.size), int(rng.integers(4))
    axis, number = int(rng.integers(rank)), pick(rng, *EXTREMES)
    if way == 0:
        name = pick(rng, "strides", "dilations", "pads", "kernel")
        return replace(case, **{name: _replaced(getattr(case, name), axis, number)})
    if way == 1:
        return replace(case, strides=tuple(pick(rng, number, s) for s in case.strides))
    if way == 2:  # elements of the kernel far beside x
        far = pick(rng, 2**20, 2**28, 2**31 - 9, 2**31, 2**60, 2**62)
        kernel = _replaced(case.kernel, axis, 2)
        pads = _replaced(case.pads, pick(rng, axis, rank + axis), far)
        return replace(case, kernel=kernel, dilations=_replaced(case.dilations, axis, far), pads=pads)
    group = pick(rng, number, 2**20)
    return replace(
        case, group=group, inputs=0 if group > 64 else case.inputs, outputs=0 if group > 64 else case.outputs
    )


def _convolution(rng: np.random.Generator) -> Convolution:
    rank = pick(rng, 1, 2, 2, 2, 3)
    group = pick(rng, 1, 1, 2, 4, 8, 16, 17)
    few = 3 if group > 1 else 20
    case = Convolution(
        batch=pick(rng, 0, 1, 1, 2, 3),
        group=group,
        inputs=pick(rng, 0, *range(1, few + 1)),
        outputs=pick(rng, 0, *range(1, few + 1)),
        size=some(rng, 0, 9, rank) if rng.random() < 0.3 else some(rng, 1, 12, rank),
        kernel=pick(rng, (1,) * rank, (3,) * rank, some(rng, 1, 4, rank)),
        strides=pick(rng, (1,) * rank, some(rng, 1, 3, rank)),
        dilations=pick(rng, (1,) * rank, some(rng, 1, 3, rank)),
        pads=pick(rng, (0,) * (2 * rank), (1,) * (2 * rank), some(rng, 0, 3, 2 * rank)),
        bias=bool(rng.integers(2)),
    )
    return _with_extremes(rng, case) if rng.random() < 0.5 else case


def _fits(*shapes: tuple[int, ...]) -> bool:
    """Whether arrays of these shapes can be made."""
    return all(
        all(0 <= n < 2**62 for n in shape) and math.prod(n for n in shape if n) < 2**60 and (math.prod(shape) <= MOST)
        for shape in shapes
    )


def convolution(rng: np.random.Generator) -> Case:
    operator, dtype, case = pick(rng, "Conv", "ConvInputGradient", "ConvWeightGradient"), _element_type(rng), None
    while case is None or not _fits(case.x_shape, case.w_shape, case.y_shape):
        case = _convolution(rng)
        legal = min(*case.strides, *case.kernel, *case.dilations, case.group) >= 1 and min(case.pads) >= 0
        if not legal:  # shapes that would fit if the attributes were
            plain = replace(
                case, kernel=(1,) * len(case.size), strides=(1,) * len(case.size), group=1, inputs=2, outputs=2
            )
            plain = replace(plain, dilations=plain.kernel, pads=(0,) * (2 * len(case.size)))
            feeds = plain.feeds(operator, *plain.draw(dtype))
            return Case(operator, feeds, case.attributes)
    feeds = case.feeds(operator, *case.draw(dtype))
    padded = [n + case.pads[i] + case.pads[len(case.size) + i] for i, n in enumerate(case.size)]
    small = math.prod(max(n, 1) for n in padded) <= MOST and math.prod(case.kernel) <= MOST and case.group <= 64
    expected = None
    if small:
        drawn = case.draw(dtype)

        def expected() -> list[np.ndarray]:
            return [case.expected(operator, *drawn)]

    return Case(operator, feeds, case.attributes, expected=expected)


def max_pool(rng: np.random.Generator) -> Case:
    rank, dtype = pick(rng, 1, 2, 2, 3), _element_type(rng)
    size, kernel = some(rng, 0 if rng.random() < 0.2 else 1, 9, rank), pick(rng, (2,) * rank, some(rng, 1, 4, rank))
    strides, dilations = pick(rng, kernel, some(rng, 1, 3, rank)), pick(rng, (1,) * rank, some(rng, 1, 2, rank))
    pads = pick(rng, (0,) * (2 * rank), some(rng, 0, 2, 2 * rank))
    axis, extreme = int(rng.integers(rank)), rng.random() < 0.5
    if extreme:
        number, way = pick(rng, *EXTREMES), int(rng.integers(3))
        if way == 0:
            strides = _replaced(strides, axis, number)
        elif way == 1:
            far = pick(rng, 2**28, 2**31 - 9, 2**60)
            kernel, dilations = _replaced(kernel, axis, 2), _replaced(dilations, axis, far)
            pads = _replaced(pads, axis, far)
        else:  # a window over everything
            kernel, dilations = _replaced(kernel, axis, number), _replaced(dilations, axis, pick(rng, 1, number))
            pads = _replaced(pads, axis, max(0, number) // 2)
            pads = _replaced(pads, rank + axis, max(0, number) // 2)
    legal = min(*strides, *kernel, *dilations) >= 1 and min(pads) >= 0
    ceil = bool(rng.integers(2))
    images, windows = some(rng, 0 if rng.random() < 0.1 else 1, 3, 2), (1,) * rank
    if legal:
        windows = tuple(
            max(0, gradient_reference.windows(*sizes, ceil=ceil))
            for sizes in zip(size, kernel, strides, dilations, pads[:rank], pads[rank:], strict=True)
        )
    if math.prod(windows) > MOST:
        windows = (1,) * rank
    x, dy = floating(rng, (*images, *size), dtype), floating(rng, (*images, *windows), dtype)
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    small = legal and math.prod(kernel) <= 100 and 0 not in size and 0 not in windows

    def expected() -> list[np.ndarray]:
        lists = {name: list(numbers) for name, numbers in attributes.items()}
        return gradient_reference.max_pool(dy, x, **lists)

    return Case("MaxPoolGradient", {"dy": dy, "x": x}, attributes, expected=expected if small else None)


def max_pool_same(rng: np.random.Generator) -> Case:
    """Padding that the kernel works out itself."""
    size, kernel, stride = int(rng.integers(0, 9)), pick(rng, 1, 2, 3, *EXTREMES), pick(rng, 1, 2, *EXTREMES)
    windows = -(-size // stride) if stride >= 1 else 1
    x, dy = floating(rng, (1, 2, size)), floating(rng, (1, 2, windows))
    attributes = {"kernel_shape": [kernel], "strides": [stride], "dilations": [pick(rng, 1, 2, *EXTREMES)]}
    attributes["auto_pad"] = pick(rng, "SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET", "SAME")
    return Case("MaxPoolGradient", {"dy": dy, "x": x}, attributes)


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    """Of a few elements, or of none but with huge axes."""
    if rng.random() < 0.2:
        sizes = [0, pick(rng, 2**31, 2**40, 2**58), 1, 2][: int(rng.integers(2, 5))]
        return tuple(int(n) for n in rng.permutation(sizes))
    return some(rng, 0 if rng.random() < 0.2 else 1, 40, int(rng.integers(1, 4)))


def gather(rng: np.random.Generator) -> Case:
    shape, indices_shape, dtype = (
        some(rng, 0, 6, int(rng.integers(1, 4))),
        some(rng, 0, 5, int(rng.integers(0, 3))),
        _element_type(rng),
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
    expected = (lambda: gradient_reference.gather(dy, indices, shape, axis)) if legal else None
    feeds = {"dy": dy, "indices": np.asarray(indices, np.int64), "shape": given}
    return Case("GatherGradient", feeds, {"axis": axis}, expected=expected)


def softmax(rng: np.random.Generator) -> Case:
    operator, shape, dtype = pick(rng, "SoftmaxGradient", "LogSoftmaxGradient"), _shape(rng), _element_type(rng)
    axis = pick(rng, int(rng.integers(-len(shape), len(shape))), pick(rng, *EXTREMES))
    legal = -len(shape) <= axis < len(shape) and max(shape) < 100
    dy, y = floating(rng, shape, dtype), -abs(floating(rng, shape, dtype))
    rule = gradient_reference.softmax if operator == "SoftmaxGradient" else gradient_reference.log_softmax
    expected = (lambda: rule(dy, y, axis)) if legal else None
    return Case(operator, {"dy": dy, "y": y}, {"axis": axis}, expected=expected)


def cross_entropy(rng: np.random.Generator) -> Case:
    shape, dtype = some(rng, 0 if rng.random() < 0.2 else 1, 9, int(rng.integers(2, 4))), _element_type(rng)
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
    operator, shape, dtype = pick(rng, "ReluGradient", "ClipGradient", "GeluGradient"), _shape(rng), _element_type(rng)
    dy, x = floating(rng, shape, dtype), floating(rng, shape, dtype)
    if operator == "ReluGradient":
        return Case(operator, {"dy": dy, "y": x}, {}, expected=lambda: gradient_reference.relu(dy, x))
    if operator == "GeluGradient":
        approximate = pick(rng, "none", "tanh")
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
        _shape(rng),
        _element_type(rng),
    )
    axis = pick(rng, int(rng.integers(-len(shape), len(shape))), pick(rng, *EXTREMES))
    legal = -len(shape) <= axis < len(shape) and 0 not in shape
    inner = shape[axis % len(shape) :]
    dy, x = floating(rng, shape, dtype), floating(rng, shape, dtype)
    scale = floating(rng, inner if math.prod(inner) <= MOST else (1,), dtype)
    rule, outputs = gradient_reference.layer_normalization, 3
    if operator.startswith("RMS"):
        rule, outputs = gradient_reference.rms_normalization, 2
    few = math.prod(inner) < 4  # a variance of next to nothing magnifies every rounding
    expected = (lambda: list(rule(dy, x, scale, axis))) if legal and not few else None
    return Case(operator, {"dy": dy, "x": x, "scale": scale}, {"axis": axis}, outputs, expected)


def batch_normalization(rng: np.random.Generator) -> Case:
    shape, dtype = _shape(rng), _element_type(rng)
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


def attention(rng: np.random.Generator) -> Case:
    bias = pick(rng, None, (1, 1, -2, -1), (1, 1, 1, -1), (-4, -3, -2, -1))
    sizes = some(rng, 0 if rng.random() < 0.2 else 1, 40, 6)
    case = attention_reference.Attention(min(sizes[0], 2), min(sizes[1], 3), *sizes[2:])
    if bias is not None:
        full = (case.batch, case.heads, case.queries, case.keys)
        case = replace(case, bias=tuple(full[n] if n < 0 else n for n in bias))
    feeds = case.draw(_element_type(rng))
    names = attention_reference.INPUTS["Attention"]
    legal = 0 not in sizes

    def expected() -> list[np.ndarray]:
        values, _ = case.expected(feeds)
        return [values["y"], values["log_sum"]]

    given = {name: feeds.get(name) for name in names}
    return Case("Attention", given, case.attributes, 2, expected if legal else None)


def attention_gradient(rng: np.random.Generator) -> Case:
    """Any y and log_sum, so that there is nothing to compare with; some shapes do not fit."""
    sizes = some(rng, 0 if rng.random() < 0.3 else 1, 30, 6)
    case = attention_reference.Attention(min(sizes[0], 2), min(sizes[1], 3), *sizes[2:])
    feeds = case.draw(_element_type(rng))
    dtype = feeds["q"].dtype
    feeds["y"] = np.zeros(feeds["dy"].shape, dtype)
    feeds["log_sum"] = np.zeros((case.batch, case.heads, case.queries), dtype)
    if rng.random() < 0.2:
        name = pick(rng, *feeds)
        feeds[name] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 5))), dtype)
    names = attention_reference.INPUTS["AttentionGradient"]
    return Case("AttentionGradient", {name: feeds.get(name) for name in names}, case.attributes, 3)


def wide_attention(rng: np.random.Generator) -> Case:
    """Keys that take no memory, because they have no size."""
    keys, dtype = pick(rng, 2**31, 2**40, 2**58), _element_type(rng)
    shapes = [(1, pick(rng, 0, 1), 1, 0), (1, keys, 1, 0), (1, keys, 1, 0)]
    feeds = {name: np.zeros(shape, dtype) for name, shape in zip("qkv", shapes, strict=True)}
    return Case("Attention", {**feeds, "bias": None}, {"scale": 1.0, "zero_empty_rows": 0}, 2)


def _compute(rng: np.random.Generator, dtype: Any) -> tuple[dict[str, str], Callable[[np.ndarray], np.ndarray]]:
    """The attribute that says how a product is computed, and what becomes of its factors."""
    if dtype != np.float32 or rng.random() < 0.6:
        return {}, lambda array: array.astype(np.float64)
    return {"compute": "bfloat16"}, lambda array: bfloat16_reference.rounded(array).astype(np.float64)


def linear(rng: np.random.Generator) -> Case:
    dtype = _element_type(rng)
    compute, taken = _compute(rng, dtype)
    rows, inputs, outputs = some(rng, 0 if rng.random() < 0.2 else 1, 70, 3)
    huge = rng.random() < 0.15
    if huge:
        rows, inputs, outputs = pick(rng, (0, 2**40, 0), (2**58, 0, 0), (0, 0, 2**58), (0, 2**31, 0))
    transposed = int(rng.integers(2))
    attributes = {"transB": transposed, **compute}
    x, w = floating(rng, (rows, inputs), dtype), floating(rng, (inputs, outputs), dtype)
    b = pick(rng, None, floating(rng, (outputs if outputs <= MOST else 1,), dtype))
    if rng.random() < 0.5:
        dy = floating(rng, (rows, outputs), dtype)
        outputs_wanted = pick(rng, 1, 2)

        def gradients() -> list[np.ndarray]:
            dw = taken(x).T @ taken(dy)
            return [dw.T if transposed else dw, dy.astype(np.float64).sum(0)][:outputs_wanted]

        return Case(
            "LinearWeightGradient",
            {"dy": dy, "x": x},
            attributes,
            outputs_wanted,
            None if huge else gradients,
        )
    given = np.ascontiguousarray(w.T) if transposed else w

    def expected() -> list[np.ndarray]:
        y = taken(x) @ taken(w)
        return [y if b is None else y + b]

    feeds = {"x": x, "w": given, "b": b}
    if dtype == np.float32 and rng.random() < 0.5:
        w, stored = w.astype(kind := pick(rng, np.float16, BFLOAT16)), given.astype(kind)
        return Case("Linear", feeds | {"w": stored}, attributes, 1, None if huge else expected, types=(dtype,))
    if rng.random() < 0.1:
        feeds["w"] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 4))), dtype)
        return Case("Linear", feeds, attributes)
    return Case("Linear", feeds, attributes, expected=None if huge else expected)


def few_bits(rng: np.random.Generator) -> Case:
    """A product with a weight of a few bits, or its gradient; some attributes do not fit."""
    operator, left = pick(rng, ("MatMulNBits", "x"), ("MatMulNBitsGradient", "dy"))
    dtype, bits, block = _element_type(rng), pick(rng, 2, 4, 8), pick(rng, 16, 32, 64)
    compute, taken = _compute(rng, dtype)
    rows, inputs, outputs = some(rng, 0 if rng.random() < 0.2 else 1, 70, 3)
    blocks = -(-inputs // block)
    integers = rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8)
    x, scales = (
        floating(rng, (rows, inputs if left == "x" else outputs), dtype),
        floating(rng, (outputs, blocks), dtype),
    )
    feeds: dict[str, np.ndarray | None] = {left: x, "integers": integers, "scales": scales}
    kind = pick(rng, "middle", "packed", "numbers")
    points = np.full((outputs, blocks), 2.0 ** (bits - 1))
    if kind == "packed":
        zeros = rng.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
        feeds["packed_zeros"] = zeros
        points = few_bits_reference.unpacked(zeros, bits)[:, :blocks]
    elif kind == "numbers":
        points = floating(rng, (outputs, blocks), dtype)
        feeds |= {"packed_zeros": None, "zeros": points}
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
    if rng.random() < 0.2:
        attributes[pick(rng, *attributes)] = pick(rng, *EXTREMES)
        return Case(operator, feeds, attributes | compute)

    def expected() -> list[np.ndarray]:
        w = taken(few_bits_reference.weight(integers, scales, points, bits, inputs))
        return [taken(x) @ (w.T if left == "x" else w)]

    return Case(operator, feeds, attributes | compute, expected=expected)


def recurrent(rng: np.random.Generator) -> Case:
    """A recurrent operator or its gradient; some shapes, lengths and attributes do not fit."""
    operator, dtype = pick(rng, "LSTM", "GRU", "RNN"), _element_type(rng)
    functions = {"LSTM": 3, "GRU": 2, "RNN": 1}[operator]
    attributes: dict[str, Any] = {"direction": pick(rng, "forward", "reverse", "bidirectional")}
    directions = 2 if attributes["direction"] == "bidirectional" else 1
    if rng.random() < 0.4:
        names = [pick(rng, "Sigmoid", "Tanh", "HardSigmoid", "Softsign") for _ in range(functions * directions)]
        attributes |= {"activations": " ".join(names), "activation_alpha": [0.3] * len(names)}
        attributes |= {"activation_beta": [0.4] * len(names)}
    if rng.random() < 0.3:
        attributes["clip"] = pick(rng, 0.0, 0.5, 3.0)
    attributes |= {name: int(rng.integers(2)) for name in ("input_forget", "linear_before_reset")}
    sizes = some(rng, 0 if rng.random() < 0.2 else 1, 9, 3)
    letters = "".join(letter for letter in "bhclp" if rng.random() < 0.5)
    call = Recurrent(operator, *sizes, pick(rng, 0, *range(1, 40)), letters, attributes, int(rng.integers(1000)))
    feeds = call.draw(dtype)
    wanted = call.expected(feeds)
    names, outputs = call.input_names, [*call.result_names]
    backward = rng.random() < 0.5
    if backward:
        names, outputs = call.gradient_inputs, [n for n in call.gradient_outputs if n != "dlinear" or call.keeps_linear]
        feeds |= {name: np.nan_to_num(wanted[name]).astype(dtype) for name in ("Y", *call.kept_names)}
    given = call.all_inputs(names, feeds)
    expected = (
        None if backward and operator == "GRU" and not call.keeps_linear else lambda: [wanted[n] for n in outputs]
    )
    way = int(rng.integers(8))
    if way == 0:
        name = pick(rng, *given)
        given[name] = np.asarray(floating(rng, some(rng, 0, 4, int(rng.integers(0, 5)))), given[name].dtype)
        expected = None
    elif way == 1:
        given["sequence_lens"] = np.asarray([pick(rng, *EXTREMES[:4]) % 2**31] * call.batch, np.int32)
        expected = None
    elif way == 2:
        attributes |= pick(rng, {"direction": "x"}, {"activations": "Tanh " * 7}, {"clip": math.nan}, {"clip": -1.0})
        expected = None
    if sizes[0] == 0 and rng.random() < 0.5:  # steps that take no memory
        huge = pick(rng, 2**31, 2**40)
        given |= {"X": np.zeros((huge, 0, 0), dtype), "W": np.zeros((directions, given["W"].shape[1], 0), dtype)}
        expected = None
    return Case(f"{operator}Gradient" if backward else operator, given, attributes, len(outputs), expected)


def optimizer(rng: np.random.Generator) -> Case:
    """Nothing to compare with: tests/native does."""
    name, dtype = pick(rng, "Adagrad", "Adam", "Momentum", "SSGD"), _element_type(rng)
    fused = bool(rng.integers(2))
    masked = fused and bool(rng.integers(2))
    letters = {"Adagrad": "XGH", "Adam": "XGVH", "Momentum": "XGV", "SSGD": "XG"}[name]
    numbers = (0.0, 0.5, -1.0, 1e38, math.inf, math.nan)
    attributes: dict[str, Any] = {"norm_coefficient": pick(rng, *numbers)}
    if name == "Momentum":
        attributes |= {
            "alpha": pick(rng, *numbers),
            "beta": pick(rng, *numbers),
            "mode": pick(rng, "standard", "nesterov", "x"),
        }
    elif name == "SSGD":
        momentum = bool(rng.integers(2))
        letters += "V" * momentum
        attributes |= {
            "alpha": 0.9 if momentum else 0.0,
            "epsilon": pick(rng, 0.01, *numbers),
            "p": pick(rng, *numbers),
        }
        attributes |= {"measure": pick(rng, "log-sum", "p-norm", "tanh", ""), "reweighting": pick(rng, "l1", "l2")}
    count = int(rng.integers(1, 4))
    shapes = [_shape(rng) for _ in range(count)]
    groups = {letter: [abs(floating(rng, shape, dtype)) for shape in shapes] for letter in letters}
    if rng.random() < 0.3:
        groups["G"] = [g.reshape(-1)[:1] for g in groups["G"]]
    if rng.random() < 0.2:
        letter = pick(rng, *letters)
        groups[letter][0] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 4))), pick(rng, dtype, np.float64))
    feeds = {"R": np.asarray(pick(rng, 0.1, *numbers), np.float32), "T": np.asarray(pick(rng, 3, *EXTREMES), np.int64)}
    if fused:
        feeds["factor"] = np.asarray(pick(rng, 1.0, *numbers), np.float32)
        attributes["masked"] = int(masked)
    for letter in letters:
        feeds |= {f"{letter}{i}": array for i, array in enumerate(groups[letter])}
        if letter == "G" and masked:
            feeds |= {f"M{i}": np.asarray(rng.integers(0, 2, x.shape), bool) for i, x in enumerate(groups["X"])}
    domain = "ai.onnx.preview.training" if name != "SSGD" and not fused else "onnxtrain"
    outputs, types = count * (len(letters) - 1), None
    if fused and dtype == np.float32 and rng.random() < 0.7:  # states in bfloat16, or in 8 bits with scales
        states = [key for key in feeds if key[0] in letters[2:]]
        seeds = len(states) if rng.random() < 0.9 else int(rng.integers(1, 9))
        attributes["seeds"] = [pick(rng, 1, 77, *EXTREMES) for _ in range(seeds)] or [0]
        if rng.random() < 0.5:
            feeds |= {key: feeds[key].astype(BFLOAT16) for key in states}
            types = (dtype,) * count + (BFLOAT16,) * len(states)
        else:
            kept = {key: _codes(rng, feeds.pop(key)) for key in states}
            feeds |= {f"{key}_scale": _scales(rng, codes) for key, codes in kept.items()} | kept
            attributes["blockwise"] = 1
            outputs += len(states)
            types = (dtype,) * count + (np.uint8,) * len(states) + (dtype,) * len(states)
    return Case(f"Fused{name}" if fused else name, feeds, attributes, outputs, domain=domain, types=types)


def _codes(rng: np.random.Generator, state: np.ndarray) -> np.ndarray:
    return np.asarray(rng.integers(0, 256, state.size), np.uint8).reshape(state.shape)


def _scales(rng: np.random.Generator, codes: np.ndarray) -> np.ndarray:
    """One number for each 256 elements, of any kind; now and then too many or too few."""
    right = -(-codes.size // 256)
    return floating(rng, (right if rng.random() < 0.9 else int(rng.integers(0, 4)),), np.float32)


def after(rng: np.random.Generator) -> Case:
    """A number that waits for values of any type and shape; it is refused where it is several."""
    number = floating(rng, pick(rng, (), (), (1,), (1, 1), (0,), (2,)))
    kinds = (np.float32, np.float64, np.int64, bool, BFLOAT16)
    others = [np.zeros(_shape(rng), pick(rng, *kinds)) for _ in range(int(rng.integers(1, 6)))]
    feeds = {"number": number, **{f"other{index}": array for index, array in enumerate(others)}}
    expected = (lambda: [number]) if number.size == 1 else None
    return Case("After", feeds, {}, expected=expected, types=(np.float32,))


DRAWS: tuple[Callable[[np.random.Generator], Case], ...] = (
    convolution, convolution, convolution, max_pool, max_pool_same, gather, softmax, cross_entropy, elementwise,
    normalization, batch_normalization, attention, attention_gradient, wide_attention, linear, few_bits, optimizer,
    recurrent, recurrent, after,
)  # fmt: skip


def draw_case(seed: int, number: int) -> Case:
    """Case ``number`` of a seed: the same on every machine."""
    rng = np.random.default_rng((seed, number))
    return pick(rng, *DRAWS)(rng)


def sweep() -> list[Case]:
    """Every extreme number in every attribute of convolutions and of pooling, one at a time and along all axes."""
    cases = []
    for operator, group, number in itertools.product(
        ("Conv", "ConvInputGradient", "ConvWeightGradient"), (1, 2, 16), EXTREMES
    ):
        plain = Convolution(2, group, 2, 2, (5, 6), (3, 2), (1, 1), (1, 1), (1, 1, 1, 1))
        feeds = plain.feeds(operator, *plain.draw(np.float32))
        for name in ("strides", "dilations", "pads", "kernel"):
            lists = getattr(plain, name)
            for changed in (_replaced(lists, 0, number), _replaced(lists, 1, number), (number,) * len(lists)):
                case = replace(plain, **{name: changed})
                if min(*case.strides, *case.kernel, *case.dilations) >= 1 and _fits(
                    case.x_shape, case.w_shape, case.y_shape
                ):
                    cases.append(Case(operator, case.feeds(operator, *case.draw(np.float32)), case.attributes))
                else:
                    cases.append(Case(operator, feeds, case.attributes))
        cases.append(Case(operator, feeds, plain.attributes | {"group": number}))
    for number in EXTREMES:
        x, dy = np.ones((1, 2, 5, 6), np.float32), np.ones((1, 2, 1, 1), np.float32)
        for name, plain in (("kernel_shape", [2, 2]), ("strides", [9, 9]), ("dilations", [1, 1]), ("pads", [0] * 4)):
            attributes = {"kernel_shape": [2, 2], "strides": [9, 9]}
            cases += [
                Case("MaxPoolGradient", {"dy": dy, "x": x}, attributes | {name: changed})
                for changed in ([number, *plain[1:]], [*plain[:-1], number], [number] * len(plain))
            ]
    return cases
