"""States in 8 bits that no update of a kernel has inside are refused."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import OperatorError
from onnxtrain.passes.check_states import check_states


def trained(state_dtype):
    return onnxtrain.Trainer(
        onnxtrain.examples.mlp((64, 128, 3)),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(0.01),
        state_dtype=state_dtype,
    )


def test_graphs_for_any_runtime_have_none():
    model = trained("8bit").training_model()
    with pytest.raises(OperatorError, match=r"codeBlockwise: states in 8 bits .* take state_dtype='bfloat16'"):
        onnxtrain.lower(model)


def test_inside_an_update_they_are_taken():
    trained("8bit").train_step(np.ones((2, 64), np.float32), np.asarray([0, 1]))


@pytest.mark.parametrize("operator", ["EncodeBlockwise", "DecodeBlockwise"])
def test_either_operator_is_refused_where_it_stands_alone(operator):
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18, "onnxtrain" : 1]> g (float[4] x) => (float[4] y)'
        f"{{ y = onnxtrain.{operator}(x) }}"
    )
    with pytest.raises(OperatorError, match=f"{operator}: states in 8 bits"):
        check_states(ir.from_proto(model).graph)


def test_operators_of_others_with_such_names_are_left():
    graph = ir.from_proto(
        parser.parse_model(
            '<ir_version: 9, opset_import: ["" : 18, "theirs" : 1]> g (float[4] x) => (float[4] y)'
            "{ y = theirs.EncodeBlockwise(x) }"
        )
    ).graph
    before = ir.to_proto(graph)
    check_states(graph)
    assert ir.to_proto(graph) == before
