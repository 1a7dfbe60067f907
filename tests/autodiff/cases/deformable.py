"""Col2Im and deformable convolution."""

import numpy as np

from autodiff.case import Case, case, normal


def deformable(label: str, *shapes: tuple[int, ...] | None, opset: int = 19, **options) -> Case:
    """Inputs x, weight, offset, bias, mask.

    ONNX's reference evaluator computes points in float32: their differences are noise, and the
    gradient of the offset is checked against PyTorch in test_deformable_torch.py.
    """
    x, weight, offset, *rest = (
        None if shape is None else normal(*shape, seed=seed) for seed, shape in enumerate(shapes)
    )
    options = {"kernel_shape": list(weight.shape[2:]), **options}
    wrt = ["a", "b", *(name for name, array in zip("de", rest, strict=False) if array is not None)]
    return case("DeformConv", x, weight, offset, *rest, label=label, opset=opset, wrt=wrt, **options)


IMAGE = np.array([4, 5])

CASES = [
    case("Col2Im", normal(2, 8, 12), IMAGE, np.array([2, 2]), wrt=["a"], label="plain"),
    case(
        "Col2Im",
        normal(1, 12, 6),
        IMAGE,
        np.array([3, 2]),
        wrt=["a"],
        label="strides-pads",
        strides=[2, 2],
        pads=[1, 0, 0, 1],
    ),
    case("Col2Im", normal(1, 8, 6), IMAGE, np.array([2, 2]), wrt=["a"], label="dilations", dilations=[2, 2]),
    case("Col2Im", normal(1, 2, 4), np.array([5]), np.array([2]), wrt=["a"], label="1d"),
    case("Col2Im", normal(1, 8, 12), np.array([3, 3, 4]), np.array([2, 2, 2]), wrt=["a"], label="3d"),
    deformable("plain", (1, 2, 4, 5), (3, 2, 2, 2), (1, 8, 3, 4)),
    deformable("bias-mask", (2, 2, 4, 4), (3, 2, 2, 3), (2, 12, 3, 2), (3,), (2, 6, 3, 2)),
    deformable("mask", (1, 2, 4, 4), (2, 2, 2, 2), (1, 8, 3, 3), None, (1, 4, 3, 3), opset=22),
    deformable(
        "strides-pads", (1, 1, 5, 6), (2, 1, 3, 2), (1, 12, 3, 3), strides=[2, 3], pads=[1, 1, 1, 2], dilations=[1, 2]
    ),
    deformable("groups", (1, 4, 4, 3), (4, 2, 2, 2), (1, 8, 3, 2), group=2),
    deformable(
        "offset-groups",
        (2, 4, 3, 4),
        (4, 2, 2, 2),
        (2, 16, 2, 3),
        None,
        (2, 8, 2, 3),
        group=2,
        offset_group=2,
    ),
]
