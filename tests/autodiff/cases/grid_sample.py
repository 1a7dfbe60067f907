"""GridSample in every mode, and AffineGrid through its body."""

import numpy as np

from autodiff.case import case, fixed, normal

# The rank says how many axes are sampled.
RANKS = ("static", "dynamic")
PADDINGS = ("zeros", "border", "reflection")


def sample(mode, padding, align, x, places_shape, seed=0, opset=20, **more):
    label = f"{mode}-{padding}-{align}-{x.ndim - 2}d-{opset}"
    grid = places(x.shape[2:], places_shape, align, seed)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    # The reference evaluator computes places in float32 whatever the input is.
    return case("GridSample", x, grid, label=label, opset=opset, shapes=RANKS, precision="float", **attributes, **more)


def places(sizes, shape, align, seed):
    """Points in and around an image, at least a tenth of a pixel from whole and half pixels: no kinks."""
    rng = np.random.default_rng(seed)
    result = np.empty((*shape, len(sizes)))
    for axis, size in enumerate(sizes):
        whole = rng.integers(-size, 2 * size, size=shape)
        fraction = rng.choice([rng.uniform(0.1, 0.4), rng.uniform(0.6, 0.9)], size=shape)
        pixel = whole + fraction
        result[..., len(sizes) - 1 - axis] = 2 * pixel / (size - 1) - 1 if align else (2 * pixel + 1) / size - 1
    return result


IMAGE = normal(2, 3, 4, 5)
VOLUME = normal(1, 2, 3, 2, 4)

CASES = [
    *(
        sample(mode, padding, align, IMAGE, (2, 3, 2))
        for mode in ("nearest", "linear", "cubic")
        for padding in PADDINGS
        for align in (0, 1)
    ),
    # The reference evaluator does not know the names "bilinear" and "bicubic" of opset 16.
    sample("nearest", "zeros", 0, IMAGE, (2, 3, 2), opset=16),
    *(
        sample(mode, padding, align, VOLUME, (1, 2, 2, 1), opset=22)
        for mode in ("nearest", "linear")
        for padding in PADDINGS
        for align in (0, 1)
    ),
    # ONNX Runtime has no cubic kernel for volumes.
    sample("cubic", "zeros", 0, VOLUME, (1, 2, 1, 1), runtime=False),
    *(
        fixed(case("AffineGrid", normal(*shape), np.array(size), label=f"{size}-{align}", **more))
        for shape, size in (((2, 2, 3), (2, 1, 3, 4)), ((1, 3, 4), (1, 2, 2, 3, 2)))
        for align in (0, 1)
        for more in ({"align_corners": align, "wrt": ["a"], "opset": 20, "precision": "float"},)
    ),
]
