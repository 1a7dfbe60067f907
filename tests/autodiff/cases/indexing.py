"""Gathering and scattering."""

import numpy as np

from autodiff.case import apart, case, fixed, normal

# The rank says along which axis of the update a step lies, and whether another term or its placeholder is given.
RANKS = ("static", "dynamic")


def gather(shape, indices, axis=0, dtype=np.int64):
    array = np.array(indices, dtype=dtype)
    label = f"{shape}-{indices if array.ndim == 0 else array.shape}-axis{axis}-{array.dtype}"
    return case("Gather", normal(*shape), array, label=label, wrt=["a"], axis=axis)


def added_rows(shape, indices, axis, other=False, taken=None):
    array, at = np.array(indices, np.int64), axis % len(shape)
    rows = normal(*shape[:at], *(array.shape if taken is None else (3,)), *shape[at + 1 :])
    label = f"rows-{shape}-{array.shape}-axis{axis}{'-other' if other else ''}{'' if taken is None else '-taken'}"
    given = {"domain": "onnxtrain", "label": label, "wrt": ["a", "d"] if other else ["a"]}
    inputs = [rows, array, np.array(shape, np.int64)]
    if other or taken is not None:
        inputs.append(normal(*shape) if other else np.zeros(0))
    if taken is not None:
        inputs.append(np.array(taken, np.int64))
        given["shapes"] = RANKS
    return case("GatherGradient", *inputs, axis=axis, **given)


def gather_nd(shape, indices, batch_dims=0):
    array = np.array(indices, dtype=np.int64)
    label = f"{shape}-{array.shape}-batch{batch_dims}"
    return case("GatherND", normal(*shape), array, label=label, wrt=["a"], batch_dims=batch_dims)


def scatter(operator, reduction, x, indices, updates, opset=18, label="", **more):
    label = f"{reduction}-{label or updates.shape}-{opset}"
    attributes = {"reduction": reduction, **more}
    return case(operator, x, np.array(indices), updates, label=label, wrt=["a", "c"], opset=opset, **attributes)


INDICES = np.array([[0, 2, 1], [-1, 1, 0]])  # along axis 0 of [3, 3]; every column names a row at most once
REPEATED = np.array([[0, 2, 1], [0, -1, 1], [1, 2, 1]])
TUPLES = [[[0, 1], [2, 0]], [[-1, 2], [1, -1]]]

ROWS = [
    added_rows((4, 3), [0, 2, 2, -1, 0], 0),
    added_rows((4, 3), [0, 2, 2, -1, 0], 0, other=True),
    added_rows((4, 3), [0, 2, 2, -1, 0], 0, taken=[1, 0, -1, 1, 1]),
    added_rows((2, 4), [0, 2, 2], 1, other=True, taken=[1, 0, -1]),
    added_rows((2, 4, 3), [[3, 1], [1, -4]], 1),
    added_rows((2, 3), [], 1),
    gather((5, 3), [0, 2, 2, -1]),
    gather((5, 3), [[0, 2], [2, -1]], dtype=np.int32),
    gather((5,), [4, 4]),
    gather((5, 3), 1),
    gather((5, 3), -2),
    gather((5, 3, 2), 2, axis=1),
    gather((5, 3, 2), -1, axis=-1),
    gather((5, 3, 2), [0, 2, 0], axis=1),
    gather((5, 3, 2), [[0, 1], [1, 1]], axis=-1),
    gather((200, 3), [7, 150, 7, -1]),
    gather((2, 200, 3), [[7, 150], [7, -1]], axis=1),
    gather((5, 0), [1, 1]),
    gather((5, 3), np.zeros((0,))),
    case("GatherElements", normal(3, 3), INDICES, label="rows", wrt=["a"]),
    case(
        "GatherElements",
        normal(3, 4),
        np.array([[3, 3, -4]] * 3, np.int32),
        label="repeated",
        wrt=["a"],
        axis=1,
    ),
    case("GatherElements", normal(3, 4), np.zeros((0, 4), int), label="empty", wrt=["a"]),
    gather_nd((3, 4), [[0, 1], [2, 3], [0, 1]]),
    gather_nd((3, 4, 2), [[0, -1], [2, 3]]),
    gather_nd((3, 4, 2), [[1], [1], [-1]]),
    gather_nd((3, 3, 2), TUPLES),
    gather_nd((2, 3, 4), [[1], [2]], batch_dims=1),
    gather_nd((2, 3, 4), [[[1], [1]], [[-1], [0]]], batch_dims=1),
    gather_nd((2, 3, 4), [[[1], [3], [0]], [[-1], [0], [2]]], batch_dims=2),
    gather_nd((20, 20, 2), [[0, -1], [2, 3], [2, 3]]),
    scatter("ScatterElements", "none", normal(3, 3), INDICES, normal(2, 3, seed=1)),
    scatter(
        "ScatterElements",
        "none",
        normal(2, 5),
        [[1, -1], [0, 2]],
        normal(2, 2, seed=1),
        axis=1,
        label="axis1",
    ),
    scatter("ScatterElements", "add", normal(3, 3), REPEATED, normal(3, 3, seed=1)),
    scatter("ScatterElements", "mul", normal(3, 3), REPEATED, normal(3, 3, seed=1)),
    scatter("ScatterElements", "max", apart(3, 3), REPEATED, apart(3, 3, seed=1) + 0.02),
    scatter("ScatterElements", "min", apart(3, 3), REPEATED, apart(3, 3, seed=1) + 0.02),
    scatter("ScatterND", "none", normal(4, 3), [[0], [-2]], normal(2, 3, seed=1)),
    scatter("ScatterND", "none", normal(3, 3), TUPLES, normal(2, 2, seed=1), label="tuples"),
    scatter("ScatterND", "add", normal(4, 3), [[1], [1], [-1]], normal(3, 3, seed=1)),
    scatter("ScatterND", "mul", normal(4, 3), [[1], [1], [3]], normal(3, 3, seed=1)),
    scatter("ScatterND", "max", apart(4, 3), [[1], [1], [3]], apart(3, 3, seed=1) + 0.02),
    scatter("ScatterND", "min", apart(4, 3), [[1], [1], [3]], apart(3, 3, seed=1) + 0.02),
    case("Compress", normal(4, 3), np.array([True, False, True]), label="axis0", wrt=["a"], axis=0),
    case("Compress", normal(4, 3), np.array([False, True, True]), label="axis-1", wrt=["a"], axis=-1),
    case("Compress", normal(3, 3), np.array([True, False, True, True]), label="flat", wrt=["a"]),
    case("Compress", normal(4, 3), np.array([False, False]), label="none", wrt=["a"], axis=0),
    case("TopK", apart(3, 5), np.array([2]), label="last", outputs=2, wrt=["a"]),
    case("TopK", apart(3, 5), np.array([3]), label="smallest", outputs=2, wrt=["a"], axis=0, largest=0),
    case("TopK", apart(3, 5), np.array([2]), label="opset24", outputs=2, wrt=["a"], axis=1, opset=24),
    case("Unique", apart(2, 3), label="elements"),
    # One axis only: the reference evaluator takes flat positions for rows when it keeps the order.
    case("Unique", apart(6), label="unsorted", outputs=["y", "first", "inverse", "counts"], sorted=0),
    case("Unique", apart(2, 3, 2), label="slices", outputs=["y", "first", "inverse", "counts"], axis=1),
    case("Unique", apart(2, 3), label="last axis", axis=-1),
    case("OneHot", np.array([0, 2, -1]), np.array(4), normal(2), label="default", wrt=["c"]),
    case("OneHot", np.array([[0, 9], [1, 1]]), np.array(3), normal(2), label="axis1", wrt=["c"], axis=1),
    *(
        case(
            "TensorScatter",
            normal(2, 3, 4, 2),
            normal(2, 3, 2, 2, seed=1),
            begins,
            label=label,
            wrt=["a", "b"],
            opset=24,
            shapes=RANKS,
            **more,
        )
        for label, begins, more in (
            ("linear", np.array([1, 2]), {}),
            ("circular", np.array([3, 0]), {"mode": "circular"}),
            ("no-indices", None, {}),
        )
    ),
    case(
        "TensorScatter",
        normal(2, 5, 2),
        normal(2, 3, 2, seed=1),
        np.array([1, 2]),
        label="axis1",
        wrt=["a", "b"],
        opset=24,
        axis=1,
        shapes=RANKS,
    ),
]

CASES = [*ROWS, *(fixed(row) for row in ROWS if any(a is not None and a.dtype.kind != "f" for a in row.inputs))]
