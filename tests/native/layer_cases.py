"""Random calls of whole layers and their gradients: attention, linear layers, recurrent operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attention_reference
import bfloat16_reference
import low_bit_reference
import numpy as np
from kernel_case import EXTREMES, MOST, Case, element_type, floating, pick, some
from recurrent_reference import Recurrent
from rounding_reference import BFLOAT16


def attention(rng: np.random.Generator) -> Case:
    bias = pick(rng, None, (1, 1, -2, -1), (1, 1, 1, -1), (-4, -3, -2, -1))
    sizes = some(rng, 0 if rng.random() < 0.2 else 1, pick(rng, 40, 70), 6)
    case = attention_reference.Attention(min(sizes[0], 2), min(sizes[1], 3), *sizes[2:])
    if bias is not None:
        full = (case.batch, case.heads, case.queries, case.keys)
        case = replace(case, bias=tuple(full[n] if n < 0 else n for n in bias))
    feeds = case.draw(element_type(rng))
    compute = _compute(rng, feeds["q"].dtype)[0]
    if rng.random() < 0.3:  # packed; shapes that differ do not fit
        width = min(feeds["v"].shape[-1], case.size)
        rows = [feeds[name][:, : min(case.queries, case.keys), :, :width] for name in "qkv"]
        packed = {"qkv": np.stack(rows, axis=2), "bias": feeds.get("bias")}
        return Case("PackedAttention", packed, case.attributes | compute, 2)
    names = attention_reference.INPUTS["Attention"]
    legal = 0 not in sizes and not compute

    def expected() -> list[np.ndarray]:
        values, _ = case.expected(feeds)
        return [values["y"], values["log_sum"]]

    given = {name: feeds.get(name) for name in names}
    return Case("Attention", given, case.attributes | compute, 2, expected if legal else None)


def attention_gradient(rng: np.random.Generator) -> Case:
    """Any y and log_sum, so that there is nothing to compare with; some shapes do not fit."""
    sizes = some(rng, 0 if rng.random() < 0.3 else 1, pick(rng, 30, 70), 6)
    case = attention_reference.Attention(min(sizes[0], 2), min(sizes[1], 3), *sizes[2:])
    bias = pick(rng, None, (1, 1, -2, -1), (1, -3, -2, -1), (1, 1, 1, 1), (-4, -3, -2, -1))
    if bias is not None:
        full = (case.batch, case.heads, case.queries, case.keys)
        case = replace(case, bias=tuple(full[n] if n < 0 else n for n in bias))
    feeds = case.draw(element_type(rng))
    dtype = feeds["q"].dtype
    feeds["y"] = np.zeros(feeds["dy"].shape, dtype)
    feeds["log_sum"] = np.zeros((case.batch, case.heads, case.queries), dtype)
    if rng.random() < 0.2:
        name = pick(rng, *feeds)
        feeds[name] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 5))), dtype)
    names = attention_reference.INPUTS["AttentionGradient"]
    outputs = 4 if rng.random() < 0.5 else 3  # the gradient of a bias, which may be missing
    attributes = case.attributes | _compute(rng, dtype)[0]
    return Case("AttentionGradient", {name: feeds.get(name) for name in names}, attributes, outputs)


def wide_attention(rng: np.random.Generator) -> Case:
    """Keys that take no memory, because they have no size."""
    keys, dtype = pick(rng, 2**31, 2**40, 2**58), element_type(rng)
    shapes = [(1, pick(rng, 0, 1), 1, 0), (1, keys, 1, 0), (1, keys, 1, 0)]
    feeds = {name: np.zeros(shape, dtype) for name, shape in zip("qkv", shapes, strict=True)}
    return Case("Attention", {**feeds, "bias": None}, {"scale": 1.0, "zero_empty_rows": 0}, 2)


def _compute(rng: np.random.Generator, dtype: Any) -> tuple[dict[str, str], Callable[[np.ndarray], np.ndarray]]:
    """Return the attribute for the arithmetic of a matmul, and the function that rounds its operands."""
    if dtype != np.float32 or rng.random() < 0.6:
        return {}, lambda array: array.astype(np.float64)
    return {"compute": "bfloat16"}, lambda array: bfloat16_reference.rounded(array).astype(np.float64)


def linear(rng: np.random.Generator) -> Case:
    dtype = element_type(rng)
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

    relu = rng.random() < 0.4
    if relu:
        attributes["activation"] = "Relu"

    def expected() -> list[np.ndarray]:
        y = taken(x) @ taken(w) + (0 if b is None else b)
        return [np.maximum(y, 0) if relu else y]

    feeds = {"x": x, "w": given, "b": b}
    if dtype == np.float32 and rng.random() < 0.5:
        w, stored = w.astype(kind := pick(rng, np.float16, BFLOAT16)), given.astype(kind)
        return Case("Linear", feeds | {"w": stored}, attributes, 1, None if huge else expected, types=(dtype,))
    if rng.random() < 0.1:
        feeds["w"] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 4))), dtype)
        return Case("Linear", feeds, attributes)
    return Case("Linear", feeds, attributes, expected=None if huge else expected)


def linear_gradient(rng: np.random.Generator) -> Case:
    """All gradients of a linear layer in one call; some shapes do not fit."""
    dtype = element_type(rng)
    compute, taken = _compute(rng, dtype)
    rows, inputs, outputs = some(rng, 0 if rng.random() < 0.2 else 1, 70, 3)
    huge = rng.random() < 0.15
    if huge:  # but not a db that is
        rows, inputs, outputs = pick(rng, (0, 2**40, 0), (2**58, 0, 0), (0, 2**31, 0))
    transposed, relu, wanted = int(rng.integers(2)), rng.random() < 0.7, pick(rng, 1, 2, 3)
    dy, x = floating(rng, (rows, outputs), dtype), np.maximum(floating(rng, (rows, inputs), dtype), 0)
    w = floating(rng, (inputs, outputs), dtype)
    if dtype == np.float32 and rng.random() < 0.5:
        w = w.astype(pick(rng, np.float16, BFLOAT16))

    def expected() -> list[np.ndarray]:
        dx, dw = taken(dy) @ taken(w).T, taken(x).T @ taken(dy)
        db = dy.astype(np.float64).sum(0)
        return [dx * (x > 0) if relu else dx, dw.T if transposed else dw, db][:wanted]

    feeds = {"dy": dy, "w": np.ascontiguousarray(w.T) if transposed else w, "x": x}
    attributes = {"transB": transposed, **({"activation": "Relu"} if relu else {}), **compute}
    known = not huge
    if rng.random() < 0.1:
        feeds[pick(rng, *feeds)] = floating(rng, some(rng, 0, 4, int(rng.integers(0, 4))), dtype)
        known = False
    kinds = (dtype,) * wanted
    return Case("LinearGradient", feeds, attributes, wanted, expected if known else None, types=kinds)


def low_bit(rng: np.random.Generator) -> Case:
    """A matmul with a low-bit weight, or its gradient; some attributes do not fit."""
    operator, left = pick(rng, ("MatMulNBits", "x"), ("MatMulNBitsGradient", "dy"))
    dtype, bits, block = element_type(rng), pick(rng, 2, 4, 8), pick(rng, 16, 32, 64)
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
        points = low_bit_reference.unpacked(zeros, bits)[:, :blocks]
    elif kind == "numbers":
        points = floating(rng, (outputs, blocks), dtype)
        feeds |= {"packed_zeros": None, "zeros": points}
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
    if rng.random() < 0.2:
        attributes[pick(rng, *attributes)] = pick(rng, *EXTREMES)
        return Case(operator, feeds, attributes | compute)

    def expected() -> list[np.ndarray]:
        w = taken(low_bit_reference.weight(integers, scales, points, bits, inputs))
        return [taken(x) @ (w.T if left == "x" else w)]

    return Case(operator, feeds, attributes | compute, expected=expected)


def recurrent(rng: np.random.Generator) -> Case:
    """A recurrent operator or its gradient; some shapes, lengths and attributes do not fit."""
    operator, dtype = pick(rng, "LSTM", "GRU", "RNN"), element_type(rng)
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
        feeds |= {name: np.nan_to_num(wanted[name]).astype(dtype) for name in ("Y", *call.checkpoint_names)}
    node = f"{operator}Gradient" if backward else operator
    if backward and (operator != "GRU" or call.keeps_linear) and rng.random() < 0.3:
        spaces = ["dgates"] + ["dlinear"] * call.keeps_linear
        node, names = "RecurrentProductsGradient", ["X", "W", "sequence_lens", "initial_h", "Y", *spaces]
        feeds |= {name: np.nan_to_num(wanted[name]).astype(dtype) for name in spaces}
        outputs, attributes = ["dX", "dW", "dR", "dB"], {"direction": attributes["direction"]}
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
    return Case(node, given, attributes, len(outputs), expected)
