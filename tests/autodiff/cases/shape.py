"""Operators that move whole tensors: reshaping, transposing, joining, repeating."""

import numpy as np

from autodiff.case import case, fixed, normal


def ints(*numbers):
    return np.array(numbers, dtype=np.int64)


def reshape(x, shape, label, **more):
    return case("Reshape", x, ints(*shape), label=label, wrt=["a"], **more)


def concat(axis, *sizes):
    shape = [2, 3, 4]
    arrays = []
    for index, size in enumerate(sizes):
        shape[axis] = size
        arrays.append(normal(*shape, seed=index))
    return case("Concat", *arrays, label=f"axis{axis}-{sizes}", axis=axis)


def tile(shape, *repeats):
    return case("Tile", normal(*shape), ints(*repeats), label=f"{shape}{repeats}", wrt=["a"])


def expand(shape, *target):
    return case("Expand", normal(*shape), ints(*target), label=f"{shape}{target}", wrt=["a"])


def parts(*sizes):
    return [f"y{i}" for i in range(len(sizes))]


ROWS = [
    reshape(normal(2, 3, 4), (4, 6), "plain"),
    reshape(normal(2, 3, 4), (0, -1), "zero-and-minus-one"),
    reshape(normal(2, 3, 4), (2, 0, 2, 2), "zero-copies-size"),
    reshape(normal(0, 3, 4), (3, 0), "allowzero", allowzero=1),
    reshape(normal(0, 3), (0, 3, 1), "empty"),
    reshape(normal(), (1, 1), "scalar"),
    reshape(normal(1), (), "to-scalar"),
    reshape(normal(2, 3), (3, 2), "opset21", opset=21),
    case("Flatten", normal(2, 3, 4), label="default"),
    case("Flatten", normal(2, 3, 4), label="axis0", axis=0),
    case("Flatten", normal(2, 3, 4), label="axis-1", axis=-1),
    case("Flatten", normal(2, 3, 4), label="axis3", axis=3, opset=24),
    case("Squeeze", normal(1, 3, 1), label="all"),
    case("Squeeze", normal(1, 3, 1), ints(0), label="axes", wrt=["a"]),
    case("Squeeze", normal(1, 3, 1), ints(-1, 0), label="axes-negative", wrt=["a"], opset=23),
    case("Squeeze", normal(1, 1), label="to-scalar"),
    case("Unsqueeze", normal(2, 3), ints(0, 2), label="axes", wrt=["a"]),
    case("Unsqueeze", normal(2, 3), ints(-1), label="negative", wrt=["a"], opset=21),
    case("Unsqueeze", normal(), ints(0), label="scalar", wrt=["a"]),
    case("Transpose", normal(2, 3, 4), label="reversed"),
    case("Transpose", normal(2, 3, 4), label="cycle", perm=[1, 2, 0]),
    case("Transpose", normal(2, 0, 4), label="empty", perm=[2, 0, 1], opset=21),
    case("Transpose", normal(), label="scalar"),
    concat(0, 1, 2),
    concat(1, 2, 1, 3),
    concat(-1, 1, 4),
    concat(2, 3),
    concat(1, 0, 2),
    case("Split", normal(6, 2), outputs=3, label="equal", num_outputs=3),
    case("Split", normal(2, 7), outputs=3, label="uneven", num_outputs=3, axis=-1),
    case("Split", normal(7, 2), ints(2, 4, 1), outputs=3, label="sizes", wrt=["a"]),
    case("Split", normal(3, 2), ints(3, 0), outputs=2, label="empty-part", wrt=["a"], axis=0),
    case("Split", normal(3, 4), ints(4), label="one", wrt=["a"], axis=1),
    tile((2, 3), 2, 3),
    tile((2, 3), 1, 4),
    tile((2, 3), 1, 1),
    tile((1, 3, 2), 2, 1, 3),
    tile((2, 3), 0, 2),
    tile((0, 3), 2, 2),
    expand((3, 1), 2, 3, 4),
    expand((2, 3), 1, 1),
    expand((), 2, 2),
    expand((1, 3), 0, 3),
    expand((1, 1, 2), 3, 1),
    case("DepthToSpace", normal(2, 8, 2, 3), label="dcr", blocksize=2),
    case("DepthToSpace", normal(2, 18, 2, 1), label="crd", blocksize=3, mode="CRD"),
    case("DepthToSpace", normal(1, 4, 0, 2), label="empty", blocksize=2, mode="CRD"),
    case("SpaceToDepth", normal(2, 3, 4, 6), label="plain", blocksize=2),
    case("SpaceToDepth", normal(1, 1, 3, 6), label="three", blocksize=3),
    case("Trilu", normal(3, 4), label="upper"),
    case("Trilu", normal(2, 4, 3), np.array(-1), label="lower", upper=0, wrt=["a"]),
    case("Trilu", normal(3, 3), np.array(5), label="beyond", wrt=["a"]),
    case("Trilu", normal(0, 3), label="empty"),
    case("ReverseSequence", normal(4, 3, 2), ints(1, 4, 2), label="time-major", wrt=["a"]),
    case(
        "ReverseSequence",
        normal(3, 4),
        ints(4, 1, 3),
        label="batch-major",
        wrt=["a"],
        batch_axis=0,
        time_axis=1,
    ),
    case("CenterCropPad", normal(5, 4), ints(3, 6), label="crop-and-pad", wrt=["a"]),
    case("CenterCropPad", normal(2, 5, 4), ints(7), label="axes", axes=[1], wrt=["a"]),
]

CASES = [*ROWS, *(fixed(row) for row in ROWS if any(a is not None and a.dtype.kind != "f" for a in row.inputs))]
