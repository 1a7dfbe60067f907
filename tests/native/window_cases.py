"""Random calls of convolutions and of pooling: windows, strides and paddings of any size."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import gradient_reference
import numpy as np
from bfloat16_reference import rounded
from convolution_reference import Convolution
from kernel_case import EXTREMES, MOST, Case, element_type, floating, pick, replaced, some


def _with_extremes(rng: np.random.Generator, case: Convolution) -> Convolution:
    """An extreme number in one list, or, so that there are windows all the same, in several that fit each other."""
    rank, way = len(case.size), int(rng.integers(4))
    axis, number = int(rng.integers(rank)), pick(rng, *EXTREMES)
    if way == 0:
        name = pick(rng, "strides", "dilations", "pads", "kernel")
        return replace(case, **{name: replaced(getattr(case, name), axis, number)})
    if way == 1:
        return replace(case, strides=tuple(pick(rng, number, s) for s in case.strides))
    if way == 2:  # elements of the kernel far beside x
        far = pick(rng, 2**20, 2**28, 2**31 - 9, 2**31, 2**60, 2**62)
        kernel = replaced(case.kernel, axis, 2)
        pads = replaced(case.pads, pick(rng, axis, rank + axis), far)
        return replace(case, kernel=kernel, dilations=replaced(case.dilations, axis, far), pads=pads)
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
    """Return whether arrays of these shapes fit in memory."""
    return all(
        all(0 <= n < 2**62 for n in shape) and math.prod(n for n in shape if n) < 2**60 and (math.prod(shape) <= MOST)
        for shape in shapes
    )


def convolution(rng: np.random.Generator) -> Case:
    operator, dtype, case = pick(rng, "Conv", "ConvInputGradient", "ConvWeightGradient"), element_type(rng), None
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
    drawn, attributes = case.draw(dtype), case.attributes
    if case.group == 1 and dtype == np.float32 and rng.random() < 0.5:
        drawn = [rounded(array) for array in drawn[:3]] + drawn[3:]
        attributes = attributes | {"compute": "bfloat16"}
    feeds = case.feeds(operator, *drawn)
    padded = [n + case.pads[i] + case.pads[len(case.size) + i] for i, n in enumerate(case.size)]
    small = math.prod(max(n, 1) for n in padded) <= MOST and math.prod(case.kernel) <= MOST and case.group <= 64
    expected = None
    if small:

        def expected() -> list[np.ndarray]:
            return [case.expected(operator, *drawn)]

    return Case(operator, feeds, attributes, expected=expected)


def max_pool(rng: np.random.Generator) -> Case:
    rank, dtype = pick(rng, 1, 2, 2, 3), element_type(rng)
    size, kernel = some(rng, 0 if rng.random() < 0.2 else 1, 9, rank), pick(rng, (2,) * rank, some(rng, 1, 4, rank))
    strides, dilations = pick(rng, kernel, some(rng, 1, 3, rank)), pick(rng, (1,) * rank, some(rng, 1, 2, rank))
    pads = pick(rng, (0,) * (2 * rank), some(rng, 0, 2, 2 * rank))
    axis, extreme = int(rng.integers(rank)), rng.random() < 0.5
    if extreme:
        number, way = pick(rng, *EXTREMES), int(rng.integers(3))
        if way == 0:
            strides = replaced(strides, axis, number)
        elif way == 1:
            far = pick(rng, 2**28, 2**31 - 9, 2**60)
            kernel, dilations = replaced(kernel, axis, 2), replaced(dilations, axis, far)
            pads = replaced(pads, axis, far)
        else:  # a window over everything
            kernel, dilations = replaced(kernel, axis, number), replaced(dilations, axis, pick(rng, 1, number))
            pads = replaced(pads, axis, max(0, number) // 2)
            pads = replaced(pads, rank + axis, max(0, number) // 2)
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
            for changed in (replaced(lists, 0, number), replaced(lists, 1, number), (number,) * len(lists)):
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
