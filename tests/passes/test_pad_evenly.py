"""Transposed convolutions with unequal padding become ones with equal padding and a slice."""

import numpy as np
import onnx
import onnxruntime
import pytest
from ways import passed

from onnxtrain.lowering.rules.convolutions import pad_evenly

CASES = [
    ("pads = [1, 1, 0, 0], strides = [2, 2]", True),
    ("pads = [0, 1, 2, 1], strides = [2, 1], dilations = [2, 2]", True),
    ("pads = [2, 0, 1, 1], strides = [3, 3], output_padding = [1, 2]", True),
    ("pads = [1, 1, 1, 1], strides = [2, 2], output_padding = [1, 1]", False),
    ("strides = [2, 2]", False),
    ('strides = [2, 2], auto_pad = "SAME_UPPER"', False),
]


@pytest.mark.parametrize(("attributes", "changes"), CASES)
def test_results_are_equal(attributes, changes):
    before = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2,4,5,6] x, float[4,2,3,3] w, float[2] b) => (float[2,2,h,v] y)
        {{ y = ConvTranspose <{attributes}> (x, w, b) }}""")
    after = passed(before, pad_evenly)
    assert ("Slice" in [node.op_type for node in after.graph.node]) is changes
    for node in after.graph.node:
        pads = next((list(a.ints) for a in node.attribute if a.name == "pads"), [])
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.normal(size=[d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in before.graph.input
    }
    found, wanted = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for each in (after, before)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
