"""SSGD with blocks of weights: kernel, body and reference against an evaluation block by block."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from optimizer_reference import assert_close, draw, wide_ssgd
from optimizer_sessions import run, run_in_place

from onnxtrain.errors import OperatorError
from onnxtrain.lowering.optimizer_bodies import lower_optimizers
from onnxtrain.operators import ssgd

MEASURES = ("log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh")
CASES = [((10, 6), (4, 1)), ((6, 10), (1, 4)), ((9, 5, 3, 2), (4, 1, 1, 2)), ((7,), (3,)), ((130, 300), (16, 1))]
OPTIONS = [{}, {"alpha": 0.9, "regularization": 0.05, "norm_coefficient": 0.01, "max_scale": 1.5}]


def body(R, variable, attributes):
    """The outputs of the operator's body on stock ONNX Runtime."""
    inputs = [np.float32(R), np.int64(0), *variable]
    names = [f"i{index}" for index in range(len(inputs))]
    outputs = ["X_new", "V_new"][: len(variable) - 1]
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in map(np.asarray, inputs)]
    graph = helper.make_graph(
        [helper.make_node("SSGD", names, outputs, domain="onnxtrain", **attributes)],
        "ssgd",
        [
            helper.make_tensor_value_info(name, kind, np.shape(array))
            for name, kind, array in zip(names, kinds, inputs, strict=True)
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("onnxtrain", 1)], ir_version=8)
    lowered = ir.to_proto(lower_optimizers(ir.from_proto(model)))
    onnx.checker.check_model(lowered, full_check=True)
    session = onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = dict(zip(names, map(np.asarray, inputs), strict=True))
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


@pytest.mark.sampled("measure")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
@pytest.mark.parametrize("reweighting", ["l1", "l2"])
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(("shape", "block"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernel_body_and_reference(library_path, dtype, shape, block, measure, reweighting, options):
    attributes = {"measure": measure, "reweighting": reweighting, "epsilon": 2.0, "block": block, **options}
    variable = draw(np.random.default_rng(0), shape, dtype, 2)[: 3 if "alpha" in options else 2]
    variable[0][:4] = 0  # whole blocks of zeros
    wanted = wide_ssgd(np.float32(0.1), *variable, **attributes)
    R = np.float32(0.1)
    for actual in (
        run(library_path, "SSGD", R, np.int64(0), [variable], **attributes),
        run_in_place(library_path, "SSGD", R, np.int64(0), [variable], threads=2, **attributes),
        body(R, variable, attributes),
        ssgd(R, 0, *variable, **attributes),
    ):
        assert_close(actual, wanted, 4, 1e-13)


def test_blocks_of_one_weight_are_no_blocks(library_path):
    variable = draw(np.random.default_rng(1), (5, 7), np.float32, 0)
    plain, single = (
        run(library_path, "SSGD", np.float32(0.1), np.int64(0), [variable], **attributes)
        for attributes in ({}, {"block": (1, 1)})
    )
    np.testing.assert_allclose(plain, single, rtol=1e-6)


def test_a_block_needs_a_size_for_each_axis(library_path):
    variable = draw(np.random.default_rng(1), (5, 7), np.float32, 0)
    with pytest.raises(Exception, match="block has 1 sizes, and a variable has 2 axes: give one size for each axis"):
        run(library_path, "SSGD", np.float32(0.1), np.int64(0), [variable], block=(4,))
    with pytest.raises(Exception, match="block has the size 0: each must be 1 or more"):
        run(library_path, "SSGD", np.float32(0.1), np.int64(0), [variable], block=(4, 0))
    with pytest.raises(OperatorError, match=r"The block \(4,\) has 1 axes and the variable, of shape \(5, 7\), has 2"):
        ssgd(0.1, 0, *variable, block=(4,))
    with pytest.raises(OperatorError, match=r"SSGD: block is \(0, 1\), but each size must be 1 or more"):
        ssgd(0.1, 0, *variable, block=(0, 1))
    with pytest.raises(OperatorError, match="'block' is 'four', but must be a list of integers"):
        ssgd(0.1, 0, *variable, block="four")
