"""Regions of COCO files: equal to those of pycocotools, and to some that it wrote."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain.plugins.images.regions import region

WRITTEN = [
    ([[2.3, 1.2, 17.8, 3.4, 11.1, 12.9, 4.4, 9.7]], "o01>4L4MO01O001O001OO2N1O1N2O1N2Ol0"),
    ([[0, 0, 19, 0, 19, 14, 0, 14], [3, 3, 5, 9, 1, 7]], "0>100000000000000000000000000000000000?"),
    ([[-4, 2.5, 30, -3, 12, 22]], "2691O1N2O2N1O1O00V40iK1O1"),
]
"""Polygons in 15 x 20 pixels, and the run lengths that pycocotools 2.0.11 makes of them."""


@pytest.mark.parametrize(("polygons", "counts"), WRITTEN)
def test_regions_that_pycocotools_wrote(polygons, counts):
    found = region(polygons, 15, 20)
    np.testing.assert_array_equal(found, region({"size": [15, 20], "counts": counts}, 15, 20))
    assert found.any()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_equal_to_pycocotools():
    masks = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for case in range(300):
        height, width = (int(size) for size in rng.integers(1, 40, 2))
        points = rng.uniform(-5, 45, (rng.integers(3, 9), 2))
        points = np.round(points) if case % 3 == 0 else points
        points[1] = points[0] if case % 7 == 0 else points[1]
        polygon = points.ravel().tolist()
        runs = masks.merge(masks.frPyObjects([polygon], height, width))
        wanted = masks.decode(runs).astype(bool)
        np.testing.assert_array_equal(region([polygon], height, width), wanted)
        text = {"size": [height, width], "counts": runs["counts"].decode()}
        np.testing.assert_array_equal(region(text, height, width), wanted)


def test_runs_go_down_the_columns():
    found = region({"size": [2, 3], "counts": [1, 2, 3]}, 2, 3)
    np.testing.assert_array_equal(found, [[0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        (None, "it is neither"),
        ([], "it is neither"),
        ([[1, 2, 3, 4]], "a polygon needs three points"),
        ([[1, 2, 3, 4, 5, 1e9]], r"a point of a polygon is at 1e\+09"),
        ({"size": [2, 2], "counts": [6]}, r"its size is \[2, 2\]"),
        ({"size": [2, 3], "counts": [-1, 7]}, "its counts are not integers"),
        ({"size": [2, 3], "counts": "o" * 30}, "its counts are no run lengths"),
        ({"size": [2, 3]}, "it has no counts"),
    ],
)
def test_other_forms(segmentation, reason):
    with pytest.raises(ValueError, match=reason):
        region(segmentation, 2, 3)
