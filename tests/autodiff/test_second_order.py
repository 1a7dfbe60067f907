"""Gradients of gradients: what the rules emit is differentiated again by the same rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from case import Case
from onnx import compose

from onnxtrain.testing import _node_model, check_gradient, projected_gradient, with_float_type

FAMILIES = ("arithmetic", "elementwise", "activation", "reduction", "softmax", "cumulative", "loss")


def _first_row_per_operator() -> list[Case]:
    chosen: dict[str, Case] = {}
    for family in FAMILIES:
        path = Path(__file__).parent / f"cases_{family}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for row in module.CASES:
            if row.precision == "double" and row.runtime and isinstance(row.node, onnx.NodeProto):
                chosen.setdefault(row.node.op_type, row)
    return list(chosen.values())


ROWS = _first_row_per_operator()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("shapes", ["static", "unknown"])
def test_second_derivative_equals_central_differences_of_the_first(row: Case, shapes: str) -> None:
    model = with_float_type(_node_model(row.node, row.inputs, row.opset, row.precision), np.dtype(np.float64))
    arrays = [np.asarray(array) for array in row.inputs if array is not None]
    feeds = dict(zip((info.name for info in model.graph.input), arrays, strict=True))
    names = row.wrt or [name for name, array in feeds.items() if array.dtype.kind == "f"]
    outputs = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    rng = np.random.default_rng(7)
    projections = {
        info.name: rng.normal(size=np.shape(y))
        for info, y in zip(model.graph.output, outputs, strict=True)
        if np.asarray(y).dtype.kind == "f"
    }
    first = projected_gradient(model, names, projections)
    gradients = [info for info in first.graph.output if info.name.endswith("_grad")]
    del first.graph.output[:]
    first.graph.output.extend(gradients)
    first = compose.add_prefix(first, "first/", rename_inputs=False)
    check_gradient(first, feeds, wrt=names, shapes=shapes, tolerance=1e-5)


def test_rows_are_of_all_families() -> None:
    assert {"Add", "Log", "Relu", "ReduceProd", "Softmax", "CumProd", "SoftmaxCrossEntropyLoss"} <= {
        row.node.op_type for row in ROWS
    }
