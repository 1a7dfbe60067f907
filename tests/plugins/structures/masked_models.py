"""Models without some structures, compared with the original whose structures are masked."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxtrain.editing.working import Working
from onnxtrain.plugins.pruning.choose_structures import STRUCTURES, removal_order
from onnxtrain.plugins.structures.axes import find_structures

TOLERANCE = 1e-4
"""Largest difference of an output, relative to its spread."""

VISIBLE = 1e-3
"""Difference that masking must make at least: a comparison that changes nothing would show nothing."""


def build(text, seed=0, **sizes):
    """A model from ONNX's text, with random weights for its inputs ``w1 [3, 4]`` and so on given as sizes."""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(seed)
    for name, shape in sizes.items():
        array = shape if isinstance(shape, np.ndarray) else rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def draw_anew(model, seed=0):
    """Draw parameters anew that are small or all equal, so that masking them changes the outputs."""
    rng = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < 2:
            continue
        if np.abs(array).max() < 1e-2 or np.ptp(array) == 0:
            drawn = 1 + 0.3 * rng.normal(size=array.shape)
            tensor.CopyFrom(onnx.numpy_helper.from_array(drawn.astype(np.float32), tensor.name))


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def masked(model, structures, removed):
    """The model with all weights of some structures at zero."""
    points = {str(value.name): zero for value, zero in structures.zero_points.items()}
    working = Working(model)
    find_structures(working.model)  # makes the same constants initializers
    for name, mask in structures.masks(removed).items():
        value = working.graph.initializers[name]
        array = value.const_value.numpy()
        value.const_value = ir.tensor(
            np.where(mask, array, np.asarray(points.get(name, 0)).astype(array.dtype)), name=name
        )
    return working.finish()


def without(model, removed, **options):
    working = Working(model)
    find_structures(working.model, **options).remove(removed)
    return working.finish()


def structures_of(model, **options):
    return find_structures(Working(model).model, **options)


def compare(model, feeds, removed, **options):
    """Assert that the smaller model computes what the masked one does, and that masking changed something."""
    structures = structures_of(model, **options)
    small = without(model, removed, **options)
    expected, found, given = run(masked(model, structures, removed), feeds), run(small, feeds), run(model, feeds)
    assert structures.size(structures.kept(removed)) < structures.size()
    changes = []
    for one, other, original in zip(expected, found, given, strict=True):
        assert one.shape == other.shape
        spread = max(float(np.std(original)), 1e-9)
        np.testing.assert_allclose(other / spread, one / spread, atol=TOLERANCE)
        changes.append(float(np.abs(one - original).max()) / spread)
    assert max(changes) > VISIBLE, "masking changes no output, so that the comparison shows nothing"
    return small


def shrink_by(model, feeds, fraction, kinds=STRUCTURES):
    """Remove the least important structures until this fraction of the weights is gone; return the smaller model."""
    structures = structures_of(model)
    order = removal_order(structures, kinds)
    assert order, list(structures.locked.values())[:5]
    removed = []
    for root in order:
        removed.append(root)
        if structures.size(structures.kept(removed)) <= (1 - fraction) * structures.size():
            break
    else:
        raise AssertionError(f"only {1 - structures.size(structures.kept(order)) / structures.size():.0%} can go")
    return compare(model, feeds, removed)


def shapes(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
