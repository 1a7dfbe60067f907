"""Linear layers with a mask: against dense products in float64, on all instruction sets, for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_case import Case
from kernel_session import run

SIZES = [(128, 96, 160), (200, 160, 84), (1030, 136, 104)]
"""Rows, inputs and outputs for which the kernels skip zeros at 95 %, also beside whole vectors and panels."""


def draw(sizes, block=1, *, transposed=False, zeros=0.95):
    """x, the result of a Relu, and w under its mask, b and dy."""
    rows, inputs, outputs = sizes
    rng = np.random.default_rng((*sizes, block))
    mask = np.repeat(rng.random((inputs, outputs // block)) >= zeros, block, axis=1)
    w = rng.standard_normal((inputs, outputs), np.float32) * mask
    turned = (lambda array: np.ascontiguousarray(array.T)) if transposed else np.asarray
    return {
        "x": np.maximum(rng.standard_normal((rows, inputs), np.float32), 0), "w": turned(w), "mask": turned(mask),
        "b": rng.standard_normal(outputs, np.float32), "dy": rng.standard_normal((rows, outputs), np.float32),
    }  # fmt: skip


def call(operator, feeds, path=None, threads=2, outputs=1, **attributes):
    names = {
        "Linear": ("x", "w", "b", "mask"), "LinearGradient": ("dy", "w", "x", "mask"),
        "LinearWeightGradient": ("dy", "x", "mask"),
    }[operator]  # fmt: skip
    given = {name: feeds.get(name) for name in names}
    kinds = (np.float32,) * outputs
    constants = ("mask",) if given["mask"] is not None else ()
    return run(Case(operator, given, attributes, outputs, types=kinds, constants=constants), path, threads)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_layer_and_gradients(library_path, sizes, block, transposed):
    feeds = draw(sizes, block, transposed=transposed)
    x, dy, b = (feeds[name].astype(np.float64) for name in ("x", "dy", "b"))
    w, mask = (feeds[name].T if transposed else feeds[name] for name in ("w", "mask"))
    attributes = {"transB": int(transposed)}
    (y,) = call("Linear", feeds, library_path, **attributes)
    close(y, x @ w + b)
    (y,) = call("Linear", feeds, library_path, **attributes, activation="Relu")
    close(y, np.maximum(x @ w + b, 0))
    (y,) = call("Linear", feeds | {"b": feeds["dy"]}, library_path, **attributes)  # a bias of its own for each row
    close(y, x @ w + dy)
    dw = np.where(mask, x.T @ dy, 0)
    dx, masked_dw, db = call("LinearGradient", feeds, library_path, outputs=3, **attributes)
    close(dx, dy @ w.T)
    close(masked_dw, dw.T if transposed else dw)
    close(db, dy.sum(0))
    (dz, _, _) = call("LinearGradient", feeds, library_path, outputs=3, **attributes, activation="Relu")
    close(dz, (dy @ w.T) * (x > 0))
    masked_dw, db = call("LinearWeightGradient", feeds, library_path, outputs=2, **attributes)
    close(masked_dw, dw.T if transposed else dw)
    close(db, dy.sum(0))


@pytest.mark.parametrize("block", [1, 4, 16])
def test_the_same_bits_with_any_number_of_threads(block):
    feeds = draw((600, 512, 512), block)
    for operator, outputs in (("Linear", 1), ("LinearGradient", 3), ("LinearWeightGradient", 2)):
        found = [call(operator, feeds, None, threads, outputs) for threads in (1, 2, 3)]
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)


def test_zeros_are_skipped_where_the_mask_is_sparse():
    feeds = draw((256, 256, 256))
    feeds["x"][:, 7] = np.nan
    (y,) = call("Linear", feeds)
    np.testing.assert_array_equal(np.isnan(y).all(axis=0), feeds["mask"][7])
    dense = draw((256, 256, 256), zeros=0.3)
    dense["x"][:, 7] = np.nan
    assert np.isnan(call("Linear", dense)[0]).all()
    dw, _ = call("LinearWeightGradient", dense, outputs=2)
    assert np.count_nonzero(dw[~dense["mask"]])  # which the update's own mask sets to zero


@pytest.mark.parametrize("stray", [1.0, np.nan])
def test_weights_that_are_not_zero_where_the_mask_is_false_are_multiplied(stray):
    feeds = draw((256, 256, 256))
    feeds["w"][np.unravel_index(np.argmin(feeds["mask"]), feeds["mask"].shape)] = stray
    (y,) = call("Linear", feeds)
    without = call("Linear", {name: array for name, array in feeds.items() if name != "mask"})[0]
    np.testing.assert_array_equal(y, without)


@pytest.mark.parametrize("kind", [np.float64, np.float16])
def test_other_types_are_multiplied_densely(kind):
    feeds = draw((256, 256, 256))
    x, w = feeds["x"].astype(np.float64 if kind == np.float64 else np.float32), feeds["w"].astype(kind)
    case = Case("Linear", {"x": x, "w": w, "b": None, "mask": feeds["mask"]}, {}, types=(x.dtype,), constants=("mask",))
    close(run(case)[0], x.astype(np.float64) @ w.astype(np.float64))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((256, 256), np.uint8), r"Type 'tensor\(uint8\)' of input parameter \(mask\)"),
        (np.ones(256, bool), r"the mask has type bool and shape \[256\]: it must be bool with two axes"),
        (np.ones((0, 256), bool), r"shape \[0, 256\]: it must be bool with two axes and 1 to 2147483647 elements"),
        (np.ones((128, 256), bool), r"input 3 \(mask\) has shape \[128, 256\], and must have shape \[256, 256\]"),
    ],
)
def test_other_masks_are_refused(mask, message):
    with pytest.raises(Exception, match=message):
        call("Linear", draw((256, 256, 256)) | {"mask": mask})


def test_a_computed_mask_is_refused():
    feeds = draw((64, 64, 64))
    given = {name: feeds[name] for name in ("x", "w", "b", "mask")}
    with pytest.raises(Exception, match=r"Linear: input 3 \(mask\) is computed: it must be an initializer"):
        run(Case("Linear", given, {}))
