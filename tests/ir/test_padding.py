"""A Pad that the builder writes has no axes, which ONNX Runtime's transpose optimizer loses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain.graph import Builder, Value


@pytest.mark.parametrize("axes_are_known", [True, False])
@pytest.mark.parametrize("rank_is_known", [True, False])
@pytest.mark.parametrize("axis", [3, -1])
def test_padding_of_some_axes_between_transpositions(axis, rank_is_known, axes_are_known):
    source = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[2, 3, 4, 5] x, int64[4] sizes, int64[1] axes, int64[2] pads) => (float[a, b, c, d] y) {{
            r = {"Identity(x)" if rank_is_known else "Reshape(x, sizes)"}
            t = Transpose <perm = [0, 2, 3, 1]> (r)
            y = Transpose <perm = [0, 3, 1, 2]> (t) }}""")
    if not rank_is_known:
        source.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "rank"
    model = ir.serde.deserialize_model(source)
    graph = model.graph
    last = graph.outputs[0].producer()
    op = Builder(graph, 18, before=last)
    turned, pads, axes = (Value(value, op) for value in (last.inputs[0], graph.inputs[3], graph.inputs[2]))
    if not rank_is_known:
        turned.ir.shape = None
    padded = op.Pad(turned, pads, None, axes if not axes_are_known else op.ints(axis))
    last.replace_input_with(0, padded.ir)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    feeds = {"x": x, "sizes": np.array(x.shape), "axes": np.array([axis]), "pads": np.array([1, 2])}
    given = {info.name for info in session.get_inputs()}
    (found,) = session.run(None, {name: array for name, array in feeds.items() if name in given})
    np.testing.assert_array_equal(found, np.pad(x, [(0, 0), (1, 2), (0, 0), (0, 0)]))
