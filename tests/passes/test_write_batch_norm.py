"""Batch normalization in training mode, in operators that providers without it have."""

import numpy as np
import onnx
import pytest
from ways import operators, passed

from onnxtrain.lowering.rules.batch_norm import write_batch_norm
from sentences import raises_sentence


def model(shape, attributes=""):
    declared = "float[]" if shape is None else f"float[{shape}]"
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({declared} x, float[3] scale, float[3] bias, float[3] mean, float[3] variance)
            => ({declared} y, float[3] m, float[3] v)
        {{ y, m, v = BatchNormalization <training_mode = 1{attributes}> (x, scale, bias, mean, variance) }}""")


@pytest.mark.parametrize("attributes", ["", ", epsilon = 0.1", ", momentum = 0.25"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 2)], ids=str)
def test_results_are_those_of_the_operator(shape, attributes):
    import onnxruntime

    before = model(",".join(map(str, shape)), attributes)
    after = passed(before, write_batch_norm)
    assert "BatchNormalization" not in operators(after)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(2.0, 3.0, shape).astype(np.float32)}
    feeds |= {name: rng.random(3).astype(np.float32) for name in ("scale", "bias", "mean", "variance")}
    found, wanted = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for each in (after, before)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_batch_normalization_of_an_evaluation_stays():
    before = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[N,3] y)
        { y = BatchNormalization (x, s, b, m, v) }""")
    assert operators(passed(before, write_batch_norm)) == ["BatchNormalization"]


def test_an_unknown_rank_is_refused():
    with raises_sentence("rank_unknown", value="'x'"):
        passed(model(None), write_batch_norm)
