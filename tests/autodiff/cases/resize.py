"""Resize in every mode, by scales and by sizes."""

import numpy as np
from onnx import numpy_helper

from autodiff.case import case, fixed, normal


def resize(x, scales=None, sizes=None, roi=None, label="", opset=19, runtime=True, **attributes):
    given = [
        None if roi is None else np.array(roi, dtype=np.float32),
        None if scales is None else np.array(scales, dtype=np.float32),
    ]
    if sizes is not None:
        given.append(np.array(sizes, dtype=np.int64))
    parts = [*attributes.values(), *(scales or ()), *(sizes or ())]
    # Without constants the number of axes comes from the rank; ONNX Runtime refuses sizes of unknown length.
    shapes = ("static", "dynamic") if sizes is None else ("static",)
    name = label or "-".join(str(part) for part in parts)
    more = {"wrt": ["a"], "opset": opset, "runtime": runtime, "shapes": shapes, **attributes}
    return case("Resize", x, *given, label=f"{name}-{opset}", **more)


def with_known_scales(row):
    """Turn scales and region into initializers, as exporters write them."""
    made = fixed(row)
    model = made.node
    feeds = dict(zip([i.name for i in model.graph.input], made.inputs, strict=True))
    known = {name: array for name, array in feeds.items() if name != "a"}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
    for info in [info for info in model.graph.input if info.name != "a"]:
        model.graph.input.remove(info)
    return type(row)(**{**vars(made), "inputs": [feeds["a"]], "shapes": ("static", "dynamic", "unknown")})


def rounded_up(mode, label="", **attributes):
    """Sizes that keep the aspect ratio, one of them rounded up to one element more."""
    return resize(
        X,
        sizes=(8, 11),
        mode=mode,
        axes=[2, 3],
        keep_aspect_ratio_policy="not_smaller",
        label=f"rounded-up-{mode}{label and '-'}{label}",
        **attributes,
    )


X = normal(1, 2, 4, 5)
TRANSFORMATIONS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")

ROWS = [
    *(
        resize(X, (1, 1, 1.75, 0.6), mode=mode, coordinate_transformation_mode=transformation)
        for mode in ("nearest", "linear", "cubic")
        for transformation in TRANSFORMATIONS
    ),
    *(
        resize(X, sizes=(1, 2, 3, 8), mode=mode, coordinate_transformation_mode=transformation)
        for mode in ("nearest", "linear", "cubic")
        for transformation in TRANSFORMATIONS
    ),
    *(
        resize(X, (1, 1, 2, 3), mode="nearest", coordinate_transformation_mode=transformation, nearest_mode=rounding)
        for transformation in ("half_pixel", "asymmetric")
        for rounding in NEAREST
    ),
    resize(X, (1, 1, 0.5, 0.7), mode="linear", antialias=1),
    resize(X, (1, 1, 0.5, 0.7), mode="cubic", antialias=1),
    resize(X, (1, 1, 1.5, 0.7), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
    resize(X, (2.0, 0.5), mode="linear", axes=[2, 3]),
    resize(X, sizes=(3, 7), mode="nearest", axes=[3, 2]),
    resize(normal(6), (2.0,), mode="nearest", label="one-axis"),
    resize(normal(3, 4), (2.0, 1.0), mode="nearest", label="two-axes"),
    resize(normal(1, 2, 3, 2, 2), (1, 1, 2, 1.5, 2), mode="linear"),
    resize(normal(1, 2, 3), (1, 1, 2), mode="nearest", label="pool-1d"),
    resize(normal(1, 2, 3, 2, 2), (1, 1, 2, 3, 2), mode="nearest", label="pool-3d"),
    resize(normal(2, 3, 2, 2), (1, 2, 2, 1), mode="nearest", label="channels"),
    resize(normal(1, 1, 1, 4), (1, 1, 3, 1), mode="linear", label="size-one"),
    resize(
        X,
        (1, 1, 1.5, 2),
        roi=(0, 0, 0.1, 0.2, 1, 1, 0.8, 1.3),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=2.5,
        label="crop-linear",
    ),
    resize(
        X,
        sizes=(1, 2, 3, 6),
        roi=(0, 0, 0.4, -0.1, 1, 1, 0.8, 0.7),
        mode="nearest",
        coordinate_transformation_mode="tf_crop_and_resize",
        label="crop-nearest",
    ),
    resize(X, (1, 1, 2, 2), mode="nearest", label="opset18", opset=18),
    resize(X, (1, 1, 2, 2), mode="linear", label="linear-opset18", opset=18),
]

CASES = [
    *ROWS,
    *(with_known_scales(row) for row in ROWS),
    # Sizes that keep the aspect ratio decide one scale for all axes: they must be known.
    *(
        type(row)(**{**vars(row), "shapes": ("static",)})
        for row in map(
            with_known_scales,
            [
                resize(X, sizes=(8, 20), mode="linear", axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
                resize(X, sizes=(8, 9), mode="nearest", axes=[2, 3], keep_aspect_ratio_policy="not_smaller"),
                *(rounded_up(mode) for mode in ("nearest", "linear", "cubic")),
                rounded_up("nearest", "floor", nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
                # Where the last element of the result is, ONNX Runtime and ONNX's evaluator see differently.
                rounded_up("linear", "corners", coordinate_transformation_mode="align_corners", runtime=False),
                rounded_up("cubic", "exclude", exclude_outside=1),
                rounded_up("linear", "symmetric", coordinate_transformation_mode="half_pixel_symmetric"),
                resize(
                    normal(1, 1, 5, 9),
                    **{"sizes": (3, 5), "mode": "linear", "antialias": 1, "axes": [2, 3]},
                    keep_aspect_ratio_policy="not_smaller",
                    label="rounded-up-antialias",
                ),
                resize(
                    normal(1, 2, 5, 6),
                    **{"sizes": (10, 11), "mode": "nearest", "axes": [2, 3]},
                    keep_aspect_ratio_policy="not_larger",
                    label="rounded-up-to-twice",
                ),
                resize(
                    normal(1, 2, 5, 6),
                    **{"sizes": (9, 11), "mode": "linear", "axes": [2, 3]},
                    roi=(0.1, 0.2, 0.8, 1.3),
                    coordinate_transformation_mode="tf_crop_and_resize",
                    keep_aspect_ratio_policy="not_smaller",
                    label="rounded-up-crop",
                    runtime=False,
                ),
            ],
        )
    ),
]
