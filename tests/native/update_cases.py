"""Random calls of optimizers and of their grouping: options, all states, and arrays that do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from kernel_case import EXTREMES, Case, any_shape, element_type, floating, pick, some
from rounding_reference import BFLOAT16


def optimizer(rng: np.random.Generator) -> Case:
    """Nothing to compare with: tests/native does."""
    name, dtype = pick(rng, "Adagrad", "Adam", "Momentum", "SSGD"), element_type(rng)
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
    shapes = [any_shape(rng) for _ in range(count)]
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
    others = [np.zeros(any_shape(rng), pick(rng, *kinds)) for _ in range(int(rng.integers(1, 6)))]
    feeds = {"number": number, **{f"other{index}": array for index, array in enumerate(others)}}
    expected = (lambda: [number]) if number.size == 1 else None
    return Case("After", feeds, {}, expected=expected, types=(np.float32,))
