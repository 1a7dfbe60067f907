"""Slice with steps of both signs, Pad in every mode."""

import numpy as np

from autodiff.case import case, fixed, normal

FAR = np.iinfo(np.int64).max


def slice_(shape, starts, ends, axes=None, steps=None, dtype=np.int64, **more):
    arrays = [None if a is None else np.array(a, dtype=dtype) for a in (starts, ends, axes, steps)]
    while arrays[-1] is None:
        arrays.pop()
    label = f"{shape}{starts}{ends}{axes}{steps}{np.dtype(dtype).name}"
    return case("Slice", normal(*shape), *arrays, label=label, wrt=["a"], **more)


def pad(shape, pads, mode="constant", value=None, axes=None, opset=18, **more):
    arrays = [np.array(pads, dtype=np.int64)]
    if value is not None or axes is not None:
        arrays.append(None if value is None else np.array(value))
    if axes is not None:
        arrays.append(np.array(axes, dtype=np.int64))
    label = f"{mode}-{shape}{pads}{value}{axes}-{opset}"
    wrt = ["a"] if value is None else ["a", "c"]
    return case("Pad", normal(*shape), *arrays, label=label, wrt=wrt, mode=mode, opset=opset, **more)


ROWS = [
    slice_((5, 6), (1,), (4,)),
    slice_((5, 6), (1, 0), (FAR, -2), (1, 0)),
    slice_((5, 6), (0,), (FAR,), (1,)),
    slice_((5, 6), (-3,), (-1,), (-1,)),
    slice_((5, 6), (-30,), (30,), (0,)),
    slice_((5, 6), (7,), (9,), (0,)),
    slice_((5, 6), (3,), (3,), (0,)),
    slice_((5, 6), (0,), (5,), (0,), (2,)),
    slice_((5, 7), (1, 1), (5, 7), (0, 1), (2, 3)),
    slice_((5, 7), (-1,), (-FAR,), (0,), (-1,)),
    slice_((5, 7), (20, 0), (-20, 7), (-1, 0), (-2, 1)),
    slice_((5, 7), (4,), (0,), (1,), (-2,)),
    slice_((5, 7), (0,), (4,), (1,), (-2,)),
    slice_((5, 7), (9,), (4,), (1,), (-3,)),
    slice_((5, 7), (1,), (3,), (1,), dtype=np.int32),
    slice_((0, 7), (1,), (3,), (0,)),
    slice_((0, 7), (1,), (3,), (0,), (2,)),
    slice_((2, 3, 8), (0,), (FAR,), (2,), (2,)),
    slice_((2, 3, 8), (1, 1, 1), (2, 3, 7)),
    pad((3, 4), (1, 0, 0, 2)),
    pad((3, 4), (0, 0, 0, 0)),
    pad((3, 4), (1, 2, 3, 4), value=0.5),
    pad((3, 4), (0, 2, 1, 0), value=2.0, axes=(1, 0)),
    pad((3, 4), (2, 1), axes=(-1,)),
    pad((0, 4), (2, 1, 0, 0)),
    pad((2, 1, 5, 4), (0, 0, 1, 2, 0, 0, 3, 1), "reflect"),
    pad((5, 4), (2, 0), "reflect", axes=(-2,)),
    pad((5, 4), (4, 3, 4, 3), "reflect"),
    pad((3, 4), (2, 0, 0, 5), "edge"),
    pad((3, 4), (4, 1, 7, 0), "edge", axes=(0, 1)),
    pad((3, 4), (2, 1, 3, 4), "wrap", opset=19),
    pad((3, 4), (3, 0), "wrap", opset=23, axes=(-1,)),
    pad((3, 4), (1, 1, 1, 1), "edge", opset=21),
]

CASES = [*ROWS, *(fixed(row) for row in ROWS if any(a is not None and a.dtype.kind != "f" for a in row.inputs))]
