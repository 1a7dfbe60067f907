"""Indices, sizes and axes stay integers, also on the path of a gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnxtrain
from autodiff.case import Case, all_rows
from onnxtrain.autodiff.path import kind_at, kinds_of
from onnxtrain.runtime.testing import _node_model

ROUTES = {
    "GatherElements": "GatherElements<axis=1>(x, i)",
    "ScatterElements": "ScatterElements<axis=1>(zeros, i, v)",
    "ScatterElements-add": 'ScatterElements<axis=1, reduction="add">(zeros, i, v)',
    "ScatterElements-mul": 'ScatterElements<axis=1, reduction="mul">(x, i, v)',
    "ScatterElements-max": 'ScatterElements<axis=1, reduction="max">(x, i, v)',
    "Gather": "Gather<axis=1>(x, i)",
}


def _index_inputs(row: Case) -> list[str]:
    """The inputs of a case that are integers by the schema of its operator and not numeric data."""
    assert isinstance(row.node, onnx.NodeProto)
    kinds = kinds_of(row.node.op_type, row.node.domain, row.opset)
    assert kinds is not None
    return [
        name
        for place, (name, array) in enumerate(zip(row.node.input, row.inputs, strict=False))
        if array is not None
        and array.dtype in (np.int64, np.int32, np.bool_)
        and np.array_equal(array.astype(np.float32).astype(np.float64), array.astype(np.float64))
        and np.abs(array.astype(np.float64)).max(initial=0) < 1 << 24  # the ends of slices may be larger
        and (kind_at(kinds.inputs, place) in kinds.indices or row.node.op_type == "OneHot")
    ]


ROWS = [
    row
    for row in all_rows()
    if isinstance(row.node, onnx.NodeProto)
    and row.runtime
    and not row.node.domain
    and kinds_of(row.node.op_type, "", row.opset) is not None
    and _index_inputs(row)
]


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(names, feeds)
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_an_index_on_the_way_of_a_gradient_stays_an_index(row: Case) -> None:
    """Indices cast from floats, through which gradients pass straight, give the same as integer indices."""
    model = _node_model(row.node, row.inputs, row.opset, "float")
    feeds = {
        info.name: np.asarray(array, np.float32) if array.dtype.kind == "f" else array
        for info, array in zip(model.graph.input, [array for array in row.inputs if array is not None], strict=True)
    }
    wanted = [name for name, array in feeds.items() if array.dtype.kind == "f" and name in (row.wrt or feeds)]
    if not wanted:
        pytest.skip("nothing to differentiate")
    output = next(o.name for o in model.graph.output if o.type.tensor_type.elem_type in (0, TensorProto.FLOAT))
    gradients = [f"{name}_grad" for name in wanted]
    expected = _run(onnxtrain.gradient(model, output, wanted, straight_through=True), feeds, gradients)

    indices = _index_inputs(row)
    for info in model.graph.input:
        if info.name in indices:
            kind = info.type.tensor_type.elem_type
            info.type.tensor_type.elem_type = TensorProto.FLOAT
            name, info.name = info.name, f"{info.name}_float"
            model.graph.node.insert(0, helper.make_node("Cast", [info.name], [name], to=kind))
            feeds[info.name] = np.asarray(feeds.pop(name), np.float32)
    derivative = onnxtrain.gradient(
        model, output, [*wanted, *(f"{name}_float" for name in indices)], straight_through=True
    )
    found = _run(derivative, feeds, gradients)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("number", [1, 2])
def test_chosen_places_lead_a_gradient(route: str, number: int, straight_through: bool) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        router (float[n, 4] x) => (float y) <int64[1] k = {{{number}}}> {{
            shape = Shape(x)  zeros = ConstantOfShape(shape)
            v, i = TopK(x, k)  routed = {ROUTES[route]}
            squares = Mul(routed, routed)  y = ReduceSum<keepdims=0>(squares)
        }}"""
    )
    derivative = onnxtrain.gradient(model, "y", "x", straight_through=straight_through)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    (found,) = _run(derivative, {"x": x}, ["x_grad"])
    step = 1e-2
    for place in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * step
            ends.append(_run(derivative, {"x": moved}, ["y"])[0])
        np.testing.assert_allclose(found[place], (ends[0] - ends[1]) / (2 * step), rtol=0.02, atol=0.02)
