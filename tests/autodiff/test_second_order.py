"""Gradients of gradients: the same rules differentiate the nodes that they emit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from autodiff.case import Case, gradients_alone, rows
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.runtime.testing import _node_model, check_gradient, projected_gradient, with_float_type

FAMILIES = ("arithmetic", "elementwise", "activation", "reduction", "loss")
LOOPS = ("control_flow", "sequence_loops")
FIRST_ORDER_ONLY = ("Loop-shorter",)
"""The gradient of Slice does not show that it makes a state of the backward loop longer."""


def _first_row_per_operator() -> list[Case]:
    chosen: dict[str, Case] = {}
    for row in (row for family in FAMILIES for row in rows(family)):
        if row.precision == "double" and row.runtime and isinstance(row.node, onnx.NodeProto):
            chosen.setdefault(row.node.op_type, row)
    return list(chosen.values())


ROWS = _first_row_per_operator()


@pytest.mark.sampled("shapes")
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("shapes", ["static", "unknown"])
def test_second_derivative_equals_central_differences_of_the_first(row: Case, shapes: str) -> None:
    _check_twice(_node_model(row.node, row.inputs, row.opset, row.precision), row, shapes)


LOOP_ROWS = [row for family in LOOPS for row in rows(family) if row.name not in FIRST_ORDER_ONLY]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", LOOP_ROWS, ids=[row.name for row in LOOP_ROWS])
def test_second_derivative_through_bodies(row: Case) -> None:
    _check_twice(row.node, row, "static")


def _check_twice(model: onnx.ModelProto, row: Case, shapes: str) -> None:
    model = with_float_type(model, np.dtype(np.float64))
    arrays = [np.asarray(array) for array in row.inputs if array is not None]
    feeds = dict(zip((info.name for info in model.graph.input), arrays, strict=True))
    names = row.wrt or [name for name, array in feeds.items() if array.dtype.kind == "f"]
    outputs = evaluator(model).run(None, feeds)
    rng = np.random.default_rng(7)
    projections = {
        info.name: rng.normal(size=np.shape(y))
        for info, y in zip(model.graph.output, outputs, strict=True)
        if np.asarray(y).dtype.kind == "f"
    }
    first = gradients_alone(projected_gradient(model, names, projections))
    check_gradient(first, feeds, wrt=names, shapes=shapes, tolerance=1e-5)


def test_rows_are_of_all_families() -> None:
    assert {"Add", "Log", "Relu", "ReduceProd", "Softmax", "CumProd", "SoftmaxCrossEntropyLoss"} <= {
        row.node.op_type for row in ROWS
    }
