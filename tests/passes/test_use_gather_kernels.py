"""Rows of large tables are taken by this project's kernel; others stay with ONNX Runtime's."""

import numpy as np
import pytest
from onnx import helper, parser
from ways import passed

import onnxtrain
from onnxtrain.errors import StepError
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.passes.kernels.use_gather_kernels import LEAST_ELEMENTS, use_gather_kernels

ROWS = LEAST_ELEMENTS // 8


def domain(text):
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    return passed(proto, use_gather_kernels).graph.node[0].domain


@pytest.mark.parametrize(
    ("data", "indices", "attributes", "own"),
    [
        (f"float[{ROWS}, 8]", "int64", "", True),
        (f"double[{ROWS}, 2, 4]", "int64", "<axis=0>", True),
        ("float[n, 8]", "int64", "", True),
        (f"float[{ROWS - 1}, 8]", "int64", "", False),
        (f"float[{ROWS}, 8]", "int32", "", False),
        (f"float16[{ROWS}, 8]", "int64", "", False),
        (f"float[{ROWS}, 8]", "int64", "<axis=1>", False),
    ],
    ids=["large", "double", "of any size", "small", "int32", "float16", "another axis"],
)
def test_rows_of_large_tables_are_taken_by_the_own_kernel(data, indices, attributes, own):
    kind = data.split("[")[0]
    text = f"f ({data} x, {indices}[2] i) => ({kind}[a, b] y) {{ z = Gather{attributes}(x, i) y = Identity(z) }}"
    text = text.replace("[a, b]", "[a, b, c]") if "2, 4" in data else text
    assert domain(text) == (ONNXTRAIN_DOMAIN if own else "")


def test_an_index_outside_of_a_large_table_is_one_clear_sentence():
    table = helper.make_tensor("table", 1, [ROWS, 8], np.zeros((ROWS, 8), np.float32).tobytes(), raw=True)
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (int64[n, 2] tokens, float[n, 2, 8] x) => (float[n, 2, 8] y) '
        "{ twice = Add(tokens, tokens) rows = Gather(table, twice) y = Mul(rows, x) }"
    )
    proto.graph.initializer.append(table)
    trainer = onnxtrain.Trainer(proto, loss="mean_squared_error", train=["table"])
    inputs = {"tokens": np.full((3, 2), ROWS // 2), "x": np.ones((3, 2, 8), np.float32)}
    with pytest.raises(StepError, match=f"an index is {ROWS}, and must be from -{ROWS} to {ROWS - 1}"):
        trainer.train_step(inputs, np.ones((3, 2, 8), np.float32))
